"""How tensors come in: the three ways, every dtype, every layout, and refusals by their words."""

import re

import numpy as np
import pytest
import torch
from seam_producers import (
    READ_ONLY,
    OldProducer,
    Producer,
    capsule_name,
    made_up_cuda_device,
)
from torch_features import exports

from fastdp import _C

pytestmark = pytest.mark.seam

EXPECTED = "expected a tensor (torch.Tensor, numpy.ndarray or any object with __dlpack__), got "

# All of torch's dtypes but the quantized ones and those of fewer than 8 bits.
DTYPES = {
    value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and not re.fullmatch(r"q.*|bit.*|u?int[1-7]", name)
}

CODES = {
    torch.bool: (6, 8, 1),
    torch.uint8: (1, 8, 1),
    torch.uint16: (1, 16, 1),
    torch.uint32: (1, 32, 1),
    torch.uint64: (1, 64, 1),
    torch.int8: (0, 8, 1),
    torch.int16: (0, 16, 1),
    torch.int32: (0, 32, 1),
    torch.int64: (0, 64, 1),
    torch.float16: (2, 16, 1),
    torch.float32: (2, 32, 1),
    torch.float64: (2, 64, 1),
    torch.bfloat16: (4, 16, 1),
    torch.complex32: (5, 32, 1),
    torch.complex64: (5, 64, 1),
    torch.complex128: (5, 128, 1),
    torch.float8_e4m3fn: (10, 8, 1),
    torch.float8_e4m3fnuz: (11, 8, 1),
    torch.float8_e5m2: (12, 8, 1),
    torch.float8_e5m2fnuz: (13, 8, 1),
}
NEWER = {"float8_e8m0fnu": (14, 8, 1), "float4_e2m1fn_x2": (17, 4, 2)}
CODES |= {getattr(torch, name): code for name, code in NEWER.items() if hasattr(torch, name)}


def random_bytes(shape, dtype):
    """A tensor of any dtype, filled with bits; bools with bools."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape) > 0
    item = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * item), dtype=torch.uint8)
    return raw.view(dtype)


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_every_dtype_that_torch_has_is_known_here():
    # A dtype new in torch must be added to CODES, or shown to be refused.
    assert DTYPES == set(CODES)


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_dtypes(way, dtype):
    source = random_bytes((6, 4), dtype)
    if not exports(dtype):  # torch refuses, and fastdp passes it on
        with pytest.raises((TypeError, BufferError), match="cannot be borrowed: .* dlpack"):
            _C.layout(source)
        return
    assert _C.layout(source) == ((6, 4), (4, 1), CODES[dtype], (1, 0))
    targets = tuple(torch.empty((3, 4), dtype=dtype) for _ in range(2))
    _C.scatter(source, targets, 0)
    assert same_bits(torch.cat([t.view(torch.uint8) for t in targets]), source.view(torch.uint8))
    back = torch.empty_like(source)
    _C.gather(targets, back, 0)
    assert same_bits(back, source)


def test_complex_at_half_alignment(way):
    # Complex numbers are aligned as their parts.
    base = np.arange(9, dtype=np.float32)
    source = torch.from_numpy(base[1:].view(np.complex64))
    assert source.data_ptr() % 8 == 4
    target = torch.empty(4, dtype=torch.complex64)
    _C.broadcast(source, (target,))
    assert torch.equal(target, source)


def layouts():
    base = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).view(2, 3, 4, 5)
    return {
        "contiguous": base,
        "channels_last": base.to(memory_format=torch.channels_last),
        "transposed": base.transpose(0, 3),
        "sliced": base[:, ::2, 1:, ::3],
        "expanded": torch.arange(5.0).expand(3, 5),
        "zero_dim": torch.tensor(3.0),
        "empty": torch.empty(0),
        "empty_middle": torch.empty(3, 0, 2),
        "one": torch.ones(1, 1, 1),
        "offset": base.flatten()[7:],
        "many_dims": torch.arange(4.0).view([1] * 30 + [4] + [1] * 33),
        "requires_grad": torch.arange(4.0, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.arange(4.0)),
        "buffer": getattr(torch.nn, "Buffer", torch.Tensor)(torch.arange(4.0)),
        "non_leaf": torch.arange(4.0, requires_grad=True) * 2,
    }


@pytest.mark.parametrize("name", layouts())
def test_layouts(way, name):
    source = layouts()[name]
    shape, strides, dtype, device = _C.layout(source)
    assert (shape, dtype, device) == (tuple(source.shape), (2, 32, 1), (1, 0))
    for size, stride, own in zip(shape, strides, source.stride()):
        assert stride == own or size <= 1 or source.numel() == 0
    target = torch.full(source.shape, -1.0)
    _C.broadcast(source, (target,))
    assert torch.equal(target, source.detach())


def test_writing_into_strides(way):
    source = torch.arange(12.0).view(3, 4)
    whole = torch.full((4, 6), -1.0)
    target = whole.t()[:4, :3].t()
    _C.broadcast(source, (target,))
    assert torch.equal(target, source)
    assert (whole == -1).sum() == 24 - 12


def test_writing_into_a_parameter(way):
    parameter = torch.nn.Parameter(torch.zeros(3))
    _C.broadcast(torch.arange(3.0), (parameter,))
    assert torch.equal(parameter.detach(), torch.arange(3.0))


def test_reduce_adds_in_order(way):
    sources = tuple(torch.tensor([float(10**k)]) for k in range(4))
    target = torch.empty(1)
    _C.reduce(sources, target)
    assert target.item() == 1111.0
    a, b = torch.arange(4, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    _C.reduce((a, b), a)  # the target may be a source
    assert a.tolist() == [0, 2, 4, 6]


# Hand-made producers.


@pytest.mark.parametrize("kind", [Producer, OldProducer])
def test_capsules_are_consumed_and_given_back(kind):
    producer = kind((2, 3))
    target = torch.empty(2, 3)
    _C.broadcast(producer, (target,))
    assert target.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert producer.deleted == 1
    assert capsule_name(producer.capsules[0]).startswith(b"used_dltensor")
    assert producer.calls == [{"max_version": (1, 3)} if kind is Producer else {"stream": None}]


def test_a_producer_may_be_written():
    producer = Producer((2, 3))
    _C.broadcast(torch.full((2, 3), 7.0), (producer,))
    assert list(producer.values) == [7.0] * 6


def test_capsule_without_deleter_and_without_strides():
    assert _C.layout(Producer((2, 3, 4), has_deleter=False))[1] == (12, 4, 1)
    assert _C.layout(Producer((2, 3), strides=(1, 2)))[1] == (1, 2)
    assert _C.layout(Producer((2, 0, 4), null_data=True))[0] == (2, 0, 4)


def test_byte_offset():
    target = torch.empty(2)
    _C.broadcast(Producer((2,), offset_elems=3), (target,))
    assert target.tolist() == [3.0, 4.0]


@made_up_cuda_device
def test_streams_are_asked_for_on_cuda_only():
    _C.layout(torch.ones(1))  # brings torch's table, which is asked for streams
    # No framework here tells a stream for CUDA, so it is the legacy default one, written 1.
    producer = Producer(device=(2, 1))
    assert _C.layout(producer)[3] == (2, 1)
    assert producer.calls == [{"max_version": (1, 3), "stream": 1}]
    old = OldProducer(device=(2, 0))
    assert _C.layout(old)[3] == (2, 0)
    assert old.calls == [{"stream": 1}]
    pinned = Producer(device=(3, 0))
    assert _C.layout(pinned)[3] == (3, 0)
    assert pinned.calls == [{"max_version": (1, 3)}]


def failing(error):
    producer = Producer()
    producer.error = error
    return producer


class NoDevice(Producer):
    def __dlpack_device__(self):
        return [1, 0]


class NoCapsule(Producer):
    def __dlpack__(self, **keywords):
        return "capsule"


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: 3, TypeError, EXPECTED + "int"),
        (lambda: [1.0], TypeError, EXPECTED + "list"),
        (lambda: None, TypeError, EXPECTED + "NoneType"),
        (lambda: Producer(major=2), BufferError, "DLPack version 2, must be 1"),
        (lambda: Producer(ndim=65), ValueError, "65 dimensions, must be 0 to 64"),
        (lambda: Producer(ndim=-1), ValueError, "-1 dimensions, must be 0 to 64"),
        (lambda: Producer(null_data=True), ValueError, "data is NULL, but there are 6 elements"),
        (lambda: Producer((2, -3)), ValueError, "size of dimension 1 is -3, must not be negative"),
        (
            lambda: Producer((2,), strides=(1 << 62,)),
            ValueError,
            "address range overflows at dimension 0 of size 2",
        ),
        (lambda: Producer(dtype=(2, 4, 1)), TypeError, "are 4 bits, must fill whole bytes"),
        (
            lambda: Producer((1,), dtype=(2, 64, 1), offset_elems=1),
            ValueError,
            "is not aligned, must be a multiple of 8 bytes",
        ),
        (
            lambda: Producer(device=(8, 0)),
            ValueError,
            "on a device of DLPack kind 8, must be 1 (host), 2 (CUDA) or 3 (pinned host)",
        ),
        (lambda: NoDevice(), TypeError, "__dlpack_device__() gave [1, 0], not (kind, ordinal)"),
        (lambda: Producer(device=(1 << 40, 0)), ValueError, r"must be two numbers from 0"),
        (lambda: NoCapsule(), TypeError, "__dlpack__() gave 'capsule', not an unused DLPack"),
        (lambda: failing(BufferError("busy")), BufferError, "cannot be borrowed: busy"),
        (lambda: failing(RuntimeError("odd")), TypeError, "cannot be borrowed: odd"),
        (lambda: failing(MemoryError("none")), MemoryError, "none"),
        (lambda: failing(KeyboardInterrupt("stop")), KeyboardInterrupt, "stop"),
    ],
)
def test_refusals(make, error, words):
    producer = make()
    with pytest.raises(error) as caught:
        _C.borrow((torch.ones(2), producer))
    assert words in str(caught.value)
    own = error in (OverflowError, MemoryError, KeyboardInterrupt)  # nobody's argument
    assert own or str(caught.value).startswith("tensors[1]: ")
    assert type(caught.value) is error
    if isinstance(producer, Producer) and producer.capsules:
        assert producer.deleted == 1


def test_a_used_capsule_is_refused():
    producer = Producer()
    capsule = producer.capsule()
    producer.capsule = lambda: capsule
    _C.layout(producer)
    with pytest.raises(TypeError, match="not an unused DLPack capsule"):
        _C.layout(producer)


def test_read_only_is_refused_for_writing_only():
    producer = Producer((2,), flags=READ_ONLY)
    target = torch.empty(2)
    _C.broadcast(producer, (target,))
    assert target.tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match=r"^targets\[1\]: read-only, cannot be written$"):
        _C.broadcast(target, (torch.empty(2), producer))
    assert producer.deleted == 2


def test_the_stream_of_a_scatters_source(way):
    """On the host there is one, whatever the handle."""
    source, targets = torch.arange(6.0), (torch.empty(3), torch.empty(3))
    for stream in (None, 0, 7):
        for target in targets:
            target.zero_()
        _C.scatter(source, targets, 0, stream)
        assert torch.equal(torch.cat(targets), source)
    for wrong in ("7", 7.0):
        with pytest.raises(TypeError):
            _C.scatter(source, targets, 0, wrong)
    with pytest.raises(OverflowError):
        _C.scatter(source, targets, 0, 2**70)
    with pytest.raises(TypeError, match="scatter"):
        _C.scatter(source, targets, 0, None, None)
    _C.scatter(source, targets, 0)
