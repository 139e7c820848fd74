"""Bucket.split, become and aliases: tensors of torch's own, made many at a time."""

import gc
import sys
import weakref

import pytest
import torch
from torch import nn

from fastdp import _C, _torch_tensors

pytestmark = pytest.mark.seam

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def prototypes(dtype=torch.float32):
    base = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    shapes = (base, base.to(memory_format=torch.channels_last), base[0, 0, 0], base[0, 0, 0, 0])
    shapes += (base[:0], base.transpose(1, 3), base[:, ::2, 1:, ::3], base[0, 0, 0, :0])
    shapes += (base.view(-1)[:16], base[0, 0, 0, :1], base[0, 0, :, :1])
    return tuple(tensor.to(dtype) for tensor in shapes)


def filled(bucket, tensors, length):
    flat = torch.zeros(length, dtype=tensors[0].dtype)
    bucket.broadcast(tensors, (flat,))
    return flat


def check_split(bucket, tensors, flat):
    slots = bucket.split(flat)
    assert type(slots) is tuple and len(slots) == bucket.count
    for (offset, shape, strides), slot, tensor in zip(bucket.slots, slots, tensors, strict=True):
        assert type(slot) is torch.Tensor and torch.equal(slot, tensor)
        assert slot.dtype == tensor.dtype and tuple(slot.shape) == shape
        assert slot.storage_offset() == flat.storage_offset() + offset
        assert slot.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        if slot.numel() and max(shape, default=1) > 1:
            assert slot.stride() == strides


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slots_are_tensors_of_the_buffer_s_storage(way, dtype):
    tensors = prototypes(dtype)
    bucket = _C.Bucket(tensors)
    for length in (bucket.size_elems, bucket.size_elems + 7, bucket.size_elems):
        check_split(bucket, tensors, filled(bucket, tensors, length))


@pytest.mark.parametrize("first", [0, 1, 5])
def test_given_offsets(way, first):
    """Gaps before the first slot, between two, and behind the last."""
    tensors = prototypes()
    offsets, end = [], first
    for k, tensor in enumerate(tensors):
        offsets.append(end + (3 if k in (3, 9) else 0))
        end = offsets[-1] + tensor.numel()
    bucket = _C.Bucket(tensors, tuple(offsets))
    for more in (0, 4):
        check_split(bucket, tensors, filled(bucket, tensors, end + more))


def rows(*shapes, channels_last=False):
    made = [torch.arange(torch.Size(shape).numel()).float().view(shape) for shape in shapes]
    if channels_last:
        made = [tensor.to(memory_format=torch.channels_last) for tensor in made]
    return tuple(made)


RUNS = {
    "rows of 64 bytes": rows((3, 16), (1, 16), (7, 16), (2, 16)),
    "aligned only now and then": rows((3, 5), (16, 5), (16, 5), (1, 5), (5, 5), (16, 5), (3, 5)),
    "two runs": rows((3, 16), (4, 16), (2, 2, 4), (3, 2, 4), (8, 2, 4)),
    "ends of runs": rows((16,), (4, 16), (4, 16), (16,), (4, 16), (4, 8), (), (4, 16), (4, 16)),
    "empty ones between": rows((4, 16), (0, 16), (4, 16), (4, 0), (4, 16)),
    "channels last": rows(
        (4, 8, 3, 3), (2, 8, 3, 3), (4, 4, 1, 1), (8, 4, 1, 1), channels_last=True
    ),
    "of other strides": (*rows((4, 16), (4, 16)), *(t.t() for t in rows((16, 4), (16, 4)))),
    "one column": (*rows((16, 1), (32, 1)), *(t.t() for t in rows((1, 16), (1, 16), (1, 32)))),
}


@pytest.mark.parametrize("way_of", ["aligned", "one behind the other"])
@pytest.mark.parametrize("name", RUNS)
def test_runs_of_slots_that_are_alike(name, way_of):
    tensors, offsets, end = RUNS[name], [], 3
    for tensor in tensors:
        offsets.append(end)
        end += tensor.numel()
    bucket = _C.Bucket(tensors, tuple(offsets) if way_of != "aligned" else None)
    check_split(bucket, tensors, filled(bucket, tensors, bucket.size_elems + 5))
    slots = bucket.split(torch.zeros(bucket.size_elems))
    before = [slot._version for slot in slots]
    for k, slot in enumerate(slots):
        assert not slot._is_view() and slot._base is None
        slot.add_(1)
        before[k] += 1
        assert [each._version for each in slots] == before


def test_a_buffer_that_does_not_begin_its_storage():
    tensors = prototypes()
    bucket = _C.Bucket(tensors)
    flat = torch.zeros(bucket.size_elems + 16)[16:]
    bucket.broadcast(tensors, (flat,))
    check_split(bucket, tensors, flat)


def test_version_counters_and_no_view_relation():
    bucket = _C.Bucket((torch.ones(4), torch.ones(2, 3), torch.ones(())))
    flat = torch.zeros(bucket.size_elems)
    slots = bucket.split(flat)
    before = [slot._version for slot in slots]
    for k, slot in enumerate(slots):
        assert not slot._is_view() and slot._base is None and slot.is_leaf
        assert not slot.requires_grad
        slot.add_(1)
        before[k] += 1
        assert [each._version for each in slots] == before and flat._version == 0
    slots[1].requires_grad_()
    (slots[1] * slots[1]).sum().backward()
    assert torch.equal(slots[1].grad, torch.full((2, 3), 2.0))


def test_slots_keep_the_memory():
    bucket = _C.Bucket((torch.ones(4), torch.ones(2, 3)))
    flat = filled(bucket, (torch.ones(4), torch.full((2, 3), 5.0)), bucket.size_elems)
    slot = bucket.split(flat)[1]
    del flat
    gc.collect()
    assert torch.equal(slot, torch.full((2, 3), 5.0))


def test_under_inference_mode_and_with_gradients():
    bucket = _C.Bucket((torch.ones(4), torch.ones(2, 3)))
    with torch.inference_mode():
        slots = bucket.split(torch.ones(bucket.size_elems))
        assert all(slot.is_inference() for slot in slots)
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode:
            assert not any(s.requires_grad for s in bucket.split(torch.ones(bucket.size_elems)))


def one():
    return _C.Bucket((torch.ones(4), torch.ones(2)))


class OddSplit(torch.Tensor):
    def unsafe_split_with_sizes(self, sizes):
        return sizes


class SplitMeanwhile(torch.Tensor):
    """Runs code in the middle of a split, as another thread may, since torch lets go of the GIL."""

    def unsafe_split_with_sizes(self, sizes):
        self.meanwhile(sizes)
        return self.as_subclass(torch.Tensor).unsafe_split_with_sizes(sizes)


def test_a_split_of_another_length_meanwhile():
    tensors = rows((3, 16), (4, 16), (2,), (16,))
    bucket = _C.Bucket(tensors)
    flat = filled(bucket, tensors, bucket.size_elems).as_subclass(SplitMeanwhile)
    longer = filled(bucket, tensors, bucket.size_elems + 9)
    flat.meanwhile = lambda sizes: check_split(bucket, tensors, longer)
    slots = bucket.split(flat)
    assert [tuple(slot.shape) for slot in slots] == [tuple(tensor.shape) for tensor in tensors]
    assert all(torch.equal(slot, t) for slot, t in zip(slots, tensors, strict=True))


def test_sizes_that_the_tensor_changes():
    bucket = one()
    flat = torch.ones(bucket.size_elems).as_subclass(SplitMeanwhile)
    flat.meanwhile = lambda sizes: sizes.append(0)
    with pytest.raises(TypeError, match="expected a tuple of 3 tensors, got "):
        bucket.split(flat)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: one().split(3), TypeError, "flat: expected a tensor"),
        (lambda: one().split(torch.ones(32).int()), TypeError, "flat is int32, must be float32"),
        (
            lambda: one().split(torch.ones(one().size_elems - 1)),
            ValueError,
            "flat has 68 bytes, must have at least 72",
        ),
        (lambda: one().split(torch.ones(64)[::2]), ValueError, "must be contiguous"),
        (
            lambda: one().split(torch.ones(32).as_subclass(OddSplit)),
            TypeError,
            "unsafe_split_with_sizes: expected a tuple of 4 tensors, got [4, 12, 2, 14]",
        ),
        (lambda: _C.become((1,)), TypeError, "become() takes 2"),
        (lambda: _C.become([1], (None,)), TypeError, "tensors: expected a tuple, got list"),
        (lambda: _C.become((1,), [None]), TypeError, "kinds: expected a tuple, got list"),
        (lambda: _C.become((1,), ()), ValueError, "kinds: 0 classes, must be 1 as there are"),
        (lambda: _C.become((torch.ones(1),), (int,)), TypeError, "__class__"),
        (lambda: _C.aliases((), 1), TypeError, "aliases() takes 3"),
        (lambda: _C.aliases([], nn.Parameter, len), TypeError, "tensors: expected a tuple"),
        (lambda: _C.aliases((3,), nn.Parameter, len), TypeError, "len"),
    ],
)
def test_refusals(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)


def test_become():
    tensors = torch.ones(1), torch.ones(2), torch.ones(3)
    assert _C.become(tensors, (nn.Parameter, None, nn.Parameter)) is None
    assert [type(t) for t in tensors] == [nn.Parameter, torch.Tensor, nn.Parameter]
    assert not any(tensor.requires_grad for tensor in tensors)
    assert _C.become((), ()) is None


class Own(nn.Parameter):
    def detach(self):
        raise AssertionError("not asked")


def test_aliases():
    plain = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2), requires_grad=False)
    special = Own(torch.ones(4))
    tensors = (*plain, special, torch.ones(5))
    aliases = _C.aliases(tensors, nn.Parameter, _torch_tensors.as_parameter)
    for alias, tensor in zip(aliases, tensors, strict=True):
        assert type(alias) is nn.Parameter and alias is not tensor
        assert not alias.requires_grad and alias.data_ptr() == tensor.data_ptr()
        with torch.no_grad():
            tensor.add_(1)
        assert alias._version == tensor._version == 1


def test_are_plain():
    real, complex_ = torch.ones(3), torch.ones(2, dtype=torch.complex64)
    negated, conjugated = torch.ones(2, dtype=torch.complex64).conj().imag, complex_.conj()
    assert negated.is_neg() and conjugated.is_conj()
    for plain in ((), (None,), (real, None, real[::2]), (complex_,), (nn.Parameter(real),)):
        assert _C.are_plain(plain, torch.strided, True) is True
        assert _C.are_plain(plain, torch.strided, False) is True
    for odd in (negated, real.to_sparse(), torch._neg_view(complex_), real.to_mkldnn()):
        for tensors in ((odd,), (real, None, odd), (odd, real)):
            assert _C.are_plain(tensors, torch.strided, True) is False
            assert _C.are_plain(tensors, torch.strided, False) is False
    assert _C.are_plain((conjugated,), torch.strided, True) is False
    with pytest.raises(TypeError, match="tensors: expected a tuple, got list"):
        _C.are_plain([], torch.strided, False)
    with pytest.raises(TypeError, match="are_plain"):
        _C.are_plain((), torch.strided)
    with pytest.raises(AttributeError, match="layout"):
        _C.are_plain((3,), torch.strided, False)


def test_references():
    tensors = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 3))
    bucket = _C.Bucket(tensors)
    flat = torch.ones(bucket.size_elems)
    held = (*tensors, flat, bucket, nn.Parameter, _C.Bucket)

    def run():
        slots = bucket.split(flat)
        _C.become(slots, (nn.Parameter, None))
        bucket.split(torch.ones(bucket.size_elems + 1))
        _C.aliases(tensors, nn.Parameter, len)
        _C.are_plain((flat, *tensors, None), torch.strided, True)
        return weakref.ref(slots[0]), weakref.ref(slots[1])

    def is_flat():
        before = [sys.getrefcount(each) for each in held]
        for _ in range(50):
            assert all(gone() is None for gone in run())
        return [sys.getrefcount(each) for each in held] == before

    assert all(gone() is None for gone in run())
    gc.collect()
    # Classes count their instances, and some that earlier tests had left may go meanwhile.
    assert any(is_flat() for _ in range(3))
