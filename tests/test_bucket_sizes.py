"""Which tensors share a bucket."""

import fastdp
import pytest
import torch
from fastdp.buckets import make_buckets
from fastdp.streams import Communication

HOST = torch.device("cpu")
F32, F16 = torch.float32, torch.float16


def places(sizes, limit_bytes, first_bytes=None, parameters=None):
    """Of each bucket, for tensors of (dtype, bytes)."""
    tensors = [torch.zeros(size // dtype.itemsize, dtype=dtype) for dtype, size in sizes]
    count = len(tensors) if parameters is None else parameters
    devices = [HOST] * 2
    more = {} if first_bytes is None else {"first_bytes": first_bytes}
    made = make_buckets(
        tensors, (), count, devices, Communication(devices), limit_bytes, "zero", **more
    )
    return [sorted(bucket.places) for bucket in made]


@pytest.mark.parametrize("first_bytes", [None, 48])
def test_the_first_may_be_smaller(first_bytes):
    sizes = [(F32, 16)] * 12
    full = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    small = [[0, 1, 2], [3, 4, 5, 6, 7, 8], [9, 10, 11]]
    assert places(sizes, 96, first_bytes) == (full if first_bytes is None else small)


def test_the_first_stays_small_beside_others():
    """Of another dtype: those have the whole limit."""
    sizes = [(F32, 16), (F16, 16)] * 6
    assert places(sizes, 64, 32) == [[0, 2], [1, 3, 5, 7], [4, 6, 8, 10], [9, 11]]


def test_a_large_first_tensor_is_the_first_bucket():
    assert places([(F32, 400), *[(F32, 16)] * 4], 64, 32) == [[0], [1, 2, 3, 4]]


def test_buffers_come_first_and_parameters_have_the_small_bucket():
    assert places([(F32, 16)] * 4 + [(F16, 16)] * 3, 64, 32, parameters=4) == [
        [4, 5, 6],
        [0, 1],
        [2, 3],
    ]


@pytest.mark.parametrize("value", [True, 1.5, "many", float("inf"), float("nan")])
def test_what_is_no_whole_number_of_bytes(value):
    with pytest.raises(ValueError, match=f"bucket_bytes is {value!r}: it must be a whole number"):
        fastdp.DataParallel(torch.nn.Linear(1, 1), ["cpu"] * 2, bucket_bytes=value)
