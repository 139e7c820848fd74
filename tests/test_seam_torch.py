"""torch's tensors at the seam: what is refused, what a torch without the exchange table needs, and
describe()."""

import contextlib

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fastdp import _C

pytestmark = pytest.mark.seam


def fake():
    with FakeTensorMode():
        return torch.empty(3)


class Wrapper(torch.Tensor):
    """A tensor subclass that answers operators itself, with no memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        raise AssertionError("no operator is to run")


class Plain(torch.Tensor):
    """A subclass that only has a name of its own."""


def complex_ones():
    return torch.ones(2, 3, dtype=torch.complex64)


def freed():
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


NO_STRIDES = {
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "a nested tensor",
    ),
    "coo": (lambda: torch.eye(3).to_sparse(), "a sparse tensor"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "a sparse tensor"),
    "csc": (lambda: torch.eye(3).to_sparse_csc(), None),
    "meta": (lambda: torch.empty(3, device="meta"), "a tensor on the meta device"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "a quantized tensor",
    ),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), "an MKLDNN tensor"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NO_STRIDES)
def test_tensors_without_strided_memory(way, name):
    make, kind = NO_STRIDES[name]
    with pytest.raises((TypeError, BufferError)) as caught:
        _C.borrow((torch.ones(1), make()))
    assert str(caught.value).startswith("tensors[1]: ")
    assert kind is None or str(caught.value) == f"tensors[1]: {kind} cannot be borrowed"


@pytest.mark.parametrize("make", [fake, lambda: Wrapper(torch.ones(3))], ids=["fake", "wrapper"])
def test_subclasses_with_their_own_dispatch(way, make):
    with pytest.raises(TypeError, match=r"^source: a tensor subclass with its own __torch"):
        _C.broadcast(make(), (torch.empty(3),))


def test_plain_subclasses_are_tensors(way):
    tensor = torch.ones(3).as_subclass(Plain)
    assert _C.layout(tensor)[0] == (3,)


@pytest.mark.parametrize(
    "make", [torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer], ids=str
)
def test_uninitialized(way, make):
    with pytest.raises(TypeError, match=r"^tensor: an uninitialized parameter or buffer cannot be"):
        _C.layout(make())


def test_lazy_module_after_its_first_run(way):
    module = torch.nn.LazyLinear(2)
    with pytest.raises(TypeError, match=r"tensors\[0\]: an uninitialized"):
        _C.borrow(tuple(module.parameters()))
    module(torch.ones(1, 3))
    assert _C.borrow(tuple(module.parameters())) == 8


def test_freed_storage(way):
    # An older torch exports no such tensor.
    text = r"^tensors\[0\]: (data is NULL, but there are 3 elements|cannot be borrowed: setStorage)"
    with pytest.raises((ValueError, TypeError), match=text):
        _C.borrow((freed(),))


def test_vmap_tensors(way):
    def inner(x):
        with pytest.raises((TypeError, BufferError), match="^tensor: "):
            _C.layout(x)
        return x

    torch.func.vmap(inner)(torch.ones(2, 3))


# The two bits that DLPack cannot tell.

BITS = [
    (lambda: complex_ones().conj(), r"the conjugate bit is set: call resolve_conj\(\) first"),
    (lambda: complex_ones().conj().imag, r"the negative bit is set: call resolve_neg\(\) first"),
    (lambda: torch._neg_view(complex_ones()), r"the negative bit is set: call resolve_neg\(\)"),
]


@pytest.mark.parametrize("make, words", BITS, ids=["conj", "neg", "neg complex"])
def test_bits_are_refused_by_every_verb(way, make, words):
    bad, good = make(), make().clone()
    half = (good[:1].clone(), good[1:].clone())
    with pytest.raises(ValueError, match="^source: " + words):
        _C.scatter(bad, half, 0)
    with pytest.raises(ValueError, match=r"^targets\[1\]: " + words):
        _C.broadcast(good, (good.clone(), bad))
    with pytest.raises(ValueError, match=r"^sources\[0\]: " + words):
        _C.reduce((bad,), good)
    with pytest.raises(ValueError, match="^target: " + words):
        _C.gather(half, bad, 0)
    with pytest.raises(ValueError, match="^tensor: " + words):
        _C.layout(bad)


def test_the_hot_path_asks_complex_tensors():
    for make, words in (BITS[0], BITS[2]):
        with pytest.raises(ValueError, match=r"^tensors\[0\]: " + words):
            _C.borrow((make(),))
        with pytest.raises(ValueError, match=r"^tensors\[0\]: " + words):
            _C.describe((make(),))


def test_resolved_bits(way):
    for make, _ in BITS:
        bad = make()
        target = torch.empty(bad.shape, dtype=bad.dtype)
        _C.broadcast(bad.resolve_conj().resolve_neg(), (target,))
        assert torch.equal(target, bad)


def test_a_subclass_that_raises_from_its_methods():
    class Broken(torch.Tensor):
        def is_neg(self):
            raise LookupError("no bit")

    with pytest.raises(LookupError, match="no bit"):
        _C.layout(torch.ones(2).as_subclass(Broken))


# A torch without the table on CUDA. There is no GPU here, so a subclass says that it is on one.


class OnCuda(torch.Tensor):
    log = []

    def __dlpack_device__(self):
        return (2, 1)

    def __dlpack__(self, **keywords):
        self.log.append(("dlpack", keywords))
        if self.log[0] == "fail":
            raise BufferError("device trouble")
        return torch.utils.dlpack.to_dlpack(self.as_subclass(torch.Tensor))


@pytest.fixture
def pretended_cuda(monkeypatch):
    log = OnCuda.log
    del log[:]

    class Stream:
        cuda_stream = 0xABC0

    @contextlib.contextmanager
    def device(index):
        log.append(("enter", index))
        yield
        log.append(("exit", index))

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda index: log.append(("stream", index)) or Stream
    )
    former = _C._use_exchange_table(False)
    yield log
    _C._use_exchange_table(former)


def test_without_table_on_cuda(pretended_cuda):
    # The capsule says host: only what __dlpack__ is asked for is looked at.
    _C.borrow((torch.ones(2).as_subclass(OnCuda), torch.ones(2).as_subclass(OnCuda)))
    one = [("enter", 1), ("dlpack", {"max_version": (1, 3), "stream": 0xABC0}), ("exit", 1)]
    assert pretended_cuda == [("stream", 1), *one, *one]


def test_the_device_is_left_after_an_error(pretended_cuda):
    pretended_cuda.append("fail")
    with pytest.raises(BufferError, match=r"^tensors\[0\]: cannot be borrowed: device trouble"):
        _C.borrow((torch.ones(2).as_subclass(OnCuda),))
    assert pretended_cuda[-1] == ("exit", 1)


# describe


def test_describe_tells_apart(way):
    base = torch.ones(4, 6)
    different = [
        (base,),
        (base, base),
        (base.t(),),
        (base[:, :3],),
        (base.double(),),
        (base.int(),),
        (torch.ones(4, 6, requires_grad=True),),
        (torch.ones(6, 4),),
        (torch.ones(24),),
        (torch.ones(1, 24),),
        (torch.ones(()),),
        (),
    ]
    texts = [_C.describe(tensors) for tensors in different]
    assert len(set(texts)) == len(texts)
    assert texts == [_C.describe(tensors) for tensors in different]


def test_describe_does_not_look_at_addresses_or_classes(way):
    a, b = torch.ones(3, 2), torch.zeros(3, 2)
    assert _C.describe((a,)) == _C.describe((b,))
    leaf = torch.ones(3, 2, requires_grad=True)
    assert _C.describe((leaf,)) == _C.describe((torch.nn.Parameter(a),))
    many = tuple(torch.ones([1] * 60) for _ in range(50))
    assert _C.describe(many) == _C.describe(many[:25]) + _C.describe(many[25:])


def test_describe_refuses():
    with pytest.raises(TypeError, match="^tensors: expected a tuple, got list"):
        _C.describe([torch.ones(1)])
    with pytest.raises(TypeError, match=r"^tensors\[0\]: expected a tensor"):
        _C.describe((1,))


def test_requires_grad_is_no_hindrance_and_no_graph_is_made(way):
    leaf = torch.arange(3.0, requires_grad=True)
    target = torch.empty(3)
    version = leaf._version
    _C.broadcast(leaf, (target,))
    assert target.grad_fn is None and not target.requires_grad and leaf._version == version
