"""Bucket as the Python layer sees it: slots, moves, refusals, and views() made by the table."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from seam_producers import Producer, made_up_cuda_device
from torch_features import HAS_TABLE, needs_exchange_table

from fastdp import _C

pytestmark = pytest.mark.seam

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.complex64,
]


def prototypes(dtype=torch.float32):
    base = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    shapes = (base, base.to(memory_format=torch.channels_last), base[0, 0, 0], base[0, 0, 0, 0])
    shapes += (base[:0], base.transpose(1, 3), base[:, ::2, 1:, ::3])
    return tuple(tensor.to(dtype) for tensor in shapes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slots(way, dtype):
    tensors = prototypes(dtype)
    bucket = _C.Bucket(tensors)
    assert bucket.count == len(tensors) == len(bucket.slots)
    assert bucket.size_elems * tensors[0].element_size() == bucket.size_bytes
    end = 0
    for (offset, shape, strides), tensor in zip(bucket.slots, tensors):
        assert shape == tuple(tensor.shape)
        assert offset * tensor.element_size() % 64 == 0 and offset >= end
        dense = torch.empty(0, dtype=dtype).new_empty_strided(shape, strides)
        if tensor.is_contiguous(memory_format=torch.channels_last) and tensor.ndim == 4:
            assert dense.stride() == tensor.stride()
        end = offset + tensor.numel()
    assert end <= bucket.size_elems


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_there_and_back(way, dtype):
    tensors = prototypes(dtype)
    bucket = _C.Bucket(tensors)
    flats = tuple(torch.ones(bucket.size_elems, dtype=dtype) for _ in range(3))
    bucket.broadcast(tensors, flats)
    for flat in flats:
        for (offset, shape, strides), tensor in zip(bucket.slots, tensors):
            assert torch.equal(flat.as_strided(shape, strides, offset), tensor)


def test_reduce_with_holes(way):
    tensors = prototypes()
    bucket = _C.Bucket(tensors)
    flat = torch.full((bucket.size_elems,), float("nan"))
    second = tuple(None if k % 2 else tensor * 10 for k, tensor in enumerate(tensors))
    third = (None,) * (len(tensors) - 1) + (torch.ones(()).expand(tensors[-1].shape),)
    first = (*tensors[:-2], None, None)
    bucket.reduce((first, second, third), flat)
    for k, ((offset, shape, strides), tensor) in enumerate(zip(bucket.slots, tensors)):
        expected = torch.zeros(shape)
        for rank in (first, second, third):
            if rank[k] is not None:
                expected = expected + rank[k]
        assert torch.equal(flat.as_strided(shape, strides, offset), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slots_at_given_offsets(way, dtype):
    """One behind the other but for a hole of three elements: none is aligned to anything."""
    tensors = prototypes(dtype)
    offsets, end = [], 1
    for k, tensor in enumerate(tensors):
        offsets.append(end + (3 if k == 3 else 0))
        end = offsets[-1] + tensor.numel()
    bucket = _C.Bucket(tensors, tuple(offsets))
    assert [offset for offset, _, _ in bucket.slots] == offsets and bucket.size_elems == end
    flats = tuple(torch.ones(end, dtype=dtype) for _ in range(2))
    bucket.broadcast(tensors, flats)
    total = torch.ones(end, dtype=dtype)
    bucket.reduce((tensors, (None,) * len(tensors)), total)
    for flat in (*flats, total):
        for (offset, shape, strides), tensor in zip(bucket.slots, tensors):
            assert torch.equal(flat.as_strided(shape, strides, offset), tensor)
        views = bucket.views(flat)
        assert (views is None) == (way == "capsule" or not HAS_TABLE)
        for view, offset, tensor in zip(views or (), offsets, tensors):
            assert torch.equal(view, tensor)
            if tensor.numel():
                assert view.data_ptr() == flat.data_ptr() + offset * flat.element_size()
    assert flats[0][0] == 1  # before the first slot
    assert [o for o, _, _ in _C.Bucket(tensors, None).slots] == [
        o for o, _, _ in _C.Bucket(tensors).slots
    ]


def test_parameters_are_taken_as_they_are(way):
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    parameters = tuple(layers.parameters())
    bucket = _C.Bucket(parameters)
    flat = torch.empty(bucket.size_elems)
    bucket.broadcast(parameters, (flat,))
    for (offset, shape, strides), parameter in zip(bucket.slots, parameters):
        assert torch.equal(flat.as_strided(shape, strides, offset), parameter.detach())


def one():
    return _C.Bucket((torch.ones(4), torch.ones(2)))


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: _C.Bucket(), TypeError, "Bucket() takes 1 to 3 positional arguments, 0 given"),
        (lambda: _C.Bucket(prototypes=()), TypeError, "Bucket() takes no keyword arguments"),
        (lambda: _C.Bucket((), None, None, 1), TypeError, "1 to 3 positional arguments, 4 given"),
        (lambda: _C.Bucket([torch.ones(1)]), TypeError, "prototypes: expected a tuple, got list"),
        (
            lambda: _C.Bucket((torch.ones(1),), [0]),
            TypeError,
            "offsets: expected None or a tuple of 1 integers",
        ),
        (
            lambda: _C.Bucket((torch.ones(1),), (0, 1)),
            TypeError,
            "offsets: expected None or a tuple of 1 integers",
        ),
        (lambda: _C.Bucket((torch.ones(1),), ("a",)), TypeError, "integer"),
        (lambda: _C.Bucket((torch.ones(1),), (2**63,)), OverflowError, "too"),
        (
            lambda: _C.Bucket((torch.ones(4), torch.ones(2)), (0, 3)),
            ValueError,
            "offsets[1] is 3, must be at least 4, where the slots before it end",
        ),
        (lambda: _C.Bucket((1,)), TypeError, "prototypes[0]: expected a tensor"),
        (lambda: _C.Bucket(()), ValueError, "number of prototypes is 0, must be at least 1"),
        (
            lambda: _C.Bucket((torch.ones(1), torch.ones(1).double())),
            TypeError,
            "prototypes[1] is float64, must be float32 as prototypes[0]",
        ),
        (lambda: one().broadcast(()), TypeError, "Bucket.broadcast() takes 2 positional arguments"),
        (lambda: one().reduce(()), TypeError, "Bucket.reduce() takes 2 positional arguments, 1"),
        (
            lambda: one().broadcast((torch.ones(4),), ()),
            ValueError,
            "sources: 1 tensors, must be 2 as the bucket has slots",
        ),
        (
            lambda: one().broadcast((torch.ones(4), torch.ones(3)), (torch.ones(32),)),
            ValueError,
            "sources[1] has shape (3,)",
        ),
        (
            lambda: one().broadcast((torch.ones(4), torch.ones(2)), (torch.ones(8),)),
            ValueError,
            "flats[0] has 32 bytes",
        ),
        (
            lambda: one().broadcast((torch.ones(4), torch.ones(2)), (Producer((32,), flags=1),)),
            ValueError,
            "flats[0]: read-only, cannot be written",
        ),
        (lambda: one().reduce((), torch.ones(32)), ValueError, "gradients: 0 ranks, must be 1 to"),
        (lambda: one().reduce([], torch.ones(32)), TypeError, "gradients: expected a tuple of"),
        (
            lambda: one().reduce(((None, None),) * 65, torch.ones(32)),
            ValueError,
            "gradients: 65 ranks, must be 1 to 64",
        ),
        (
            lambda: one().reduce(((None, None), (None,)), torch.ones(32)),
            TypeError,
            "gradients[1]: expected a tuple of 2 gradients or None",
        ),
        (
            lambda: one().reduce(((None, None), [None, None]), torch.ones(32)),
            TypeError,
            "gradients[1]: expected a tuple of 2 gradients or None",
        ),
        (
            lambda: one().reduce(((None, None), (None, 3)), torch.ones(32)),
            TypeError,
            "gradients[1][1]: expected a tensor",
        ),
        (
            lambda: one().reduce(((None, torch.ones(3)),), torch.ones(32)),
            ValueError,
            "gradients[0][1] has shape (3,)",
        ),
        (lambda: one().reduce(((None, None),), 3), TypeError, "flat: expected a tensor"),
        (lambda: one().views(3), TypeError, "flat: expected a tensor"),
        (lambda: one().views(torch.ones(32).int()), TypeError, "flat is int32, must be float32"),
        (
            lambda: one().views(torch.ones(one().size_elems - 1)),
            ValueError,
            "flat has 68 bytes, must have at least 72",
        ),
        (lambda: one().views(torch.ones(64)[::2]), ValueError, "must be contiguous"),
        (lambda: one().views(torch.ones(32, 1)), ValueError, "must be contiguous"),
    ],
)
def test_refusals(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)


@made_up_cuda_device
def test_gradients_of_one_rank_lie_on_one_device():
    elsewhere = Producer((2,), device=(2, 0))
    with pytest.raises(ValueError, match=r"gradients\[0\]\[1\] lies on cuda:0, must lie on cpu"):
        one().reduce(((torch.ones(4), elsewhere),), torch.ones(32))
    assert elsewhere.deleted == 1
    with pytest.raises(ValueError, match=r"sources\[1\] lies on cuda:0, must lie on cpu"):
        one().broadcast((torch.ones(4), Producer((2,), device=(2, 0))), (torch.ones(32),))


def test_a_bucket_cannot_be_subclassed_or_changed():
    with pytest.raises(TypeError):
        type("Sub", (_C.Bucket,), {})
    with pytest.raises(AttributeError):
        one().count = 3
    with pytest.raises(AttributeError):
        one().other = 3


# views()


@needs_exchange_table
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_are_tensors_on_the_buffer(dtype):
    tensors = prototypes(dtype)
    bucket = _C.Bucket(tensors)
    flat = torch.zeros(bucket.size_elems, dtype=dtype)
    bucket.broadcast(tensors, (flat,))
    views = bucket.views(flat)
    assert isinstance(views, tuple) and len(views) == bucket.count
    for (offset, shape, strides), view, tensor in zip(bucket.slots, views, tensors):
        assert type(view) is torch.Tensor and torch.equal(view, tensor)
        assert view.dtype == dtype and tuple(view.shape) == shape
        if view.numel():
            assert view.stride() == strides
            assert view.data_ptr() == flat.data_ptr() + offset * flat.element_size()


@needs_exchange_table
def test_views_have_version_counters_of_their_own_and_no_view_relation():
    bucket, flat = one(), torch.zeros(32)
    a, b = bucket.views(flat)
    before = flat._version
    a.add_(1)
    assert (a._version, b._version, flat._version) == (1, 0, before)
    assert a._base is None and not a._is_view() and not a.requires_grad
    assert flat[:4].tolist() == [1, 1, 1, 1]
    leaf = a.requires_grad_()
    (leaf * 2).sum().backward()
    assert leaf.grad.tolist() == [2, 2, 2, 2]
    with pytest.raises(RuntimeError):
        b.resize_(1000)


@needs_exchange_table
def test_views_of_a_flat_that_requires_grad():
    flat = torch.zeros(32, requires_grad=True)
    views = one().views(flat)
    assert not any(view.requires_grad for view in views)


def test_no_views_where_the_table_makes_another_type():
    assert one().views(torch.nn.Parameter(torch.zeros(32))) is None
    assert one().views(np.zeros(32, np.float32)) is None
    assert one().views(Producer((32,))) is None
    former = _C._use_exchange_table(False)
    try:
        assert one().views(torch.zeros(32)) is None
    finally:
        _C._use_exchange_table(former)


@needs_exchange_table
def test_views_keep_the_memory_after_flat_is_deleted():
    bucket = one()
    array = np.arange(32, dtype=np.float32)
    alive = weakref.ref(array)
    flat = torch.from_numpy(array)
    del array
    a, b = bucket.views(flat)
    del flat
    gc.collect()
    assert alive() is not None
    del a
    gc.collect()
    assert alive() is not None and b.tolist() == [16.0, 17.0]
    del b
    gc.collect()
    assert alive() is None


@needs_exchange_table
def test_a_slice_of_a_view_keeps_the_memory():
    array = np.arange(32, dtype=np.float32)
    alive = weakref.ref(array)
    part = one().views(torch.from_numpy(array))[0][2:]
    del array
    gc.collect()
    assert alive() is not None and part.tolist() == [2.0, 3.0]
    del part
    gc.collect()
    assert alive() is None


@needs_exchange_table
def test_views_may_be_deleted_on_any_thread():
    bucket = _C.Bucket(tuple(torch.ones(3) for _ in range(64)))
    for _ in range(50):
        array = np.zeros(bucket.size_elems, np.float32)
        alive = weakref.ref(array)
        views = list(bucket.views(torch.from_numpy(array)))
        del array
        shares = [views[k::4] for k in range(4)]
        del views
        threads = [threading.Thread(target=share.clear) for share in shares]
        del shares
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        del threads, thread
        assert alive() is None


def test_one_bucket_from_many_threads():
    tensors = tuple(torch.full((5, 7), float(k)) for k in range(30))
    bucket = _C.Bucket(tensors)
    wrong = []

    def work(factor):
        for _ in range(40):
            flat = torch.empty(bucket.size_elems)
            bucket.reduce((tensors,) * factor, flat)
            for view, tensor in zip(bucket.views(flat), tensors):
                if not torch.equal(view, tensor * factor):
                    wrong.append(factor)

    threads = [threading.Thread(target=work, args=(k,)) for k in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
