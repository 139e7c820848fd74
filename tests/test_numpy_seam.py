"""NumPy arrays at the seam, through fastdp._numpy."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from fastdp import _C

pytestmark = pytest.mark.seam

DTYPES = {
    "bool": (6, 8, 1),
    "uint8": (1, 8, 1),
    "uint16": (1, 16, 1),
    "uint32": (1, 32, 1),
    "uint64": (1, 64, 1),
    "int8": (0, 8, 1),
    "int16": (0, 16, 1),
    "int32": (0, 32, 1),
    "int64": (0, 64, 1),
    "longlong": (0, 64, 1),
    "ulonglong": (1, 64, 1),
    "float16": (2, 16, 1),
    "float32": (2, 32, 1),
    "float64": (2, 64, 1),
    "longdouble": (2, 128, 1),
    "complex64": (5, 64, 1),
    "complex128": (5, 128, 1),
}


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(name):
    source = np.arange(24).reshape(6, 4).astype(name)
    assert _C.layout(source) == ((6, 4), (4, 1), DTYPES[name], (1, 0))
    targets = tuple(np.empty((3, 4), name) for _ in range(2))
    _C.scatter(source, targets, 0)
    assert np.array_equal(np.concatenate(targets), source)
    back = np.empty_like(source)
    _C.gather(targets, back, 0)
    assert np.array_equal(back, source)


BASE = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
LAYOUTS = {
    "contiguous": BASE,
    "fortran": np.asfortranarray(BASE),
    "transposed": BASE.transpose(2, 0, 3, 1),
    "reversed": BASE[::-1, :, ::-1],
    "reversed steps": BASE[:, ::-2, 1:, ::-3],
    "broadcast": np.broadcast_to(np.arange(5, dtype=np.float32), (3, 5)),
    "window": np.lib.stride_tricks.sliding_window_view(np.arange(9, dtype=np.float32), 4),
    "zero_dim": np.array(3, np.float32),
    "empty": np.empty(0, np.float32),
    "empty_middle": np.empty((3, 0, 2), np.float32),
    "one": np.ones((1, 1, 1), np.float32),
    "many_dims": np.ones((1,) * 31 + (2,), np.float32),
    "matrix": np.matrix([[1, 2], [3, 4]], np.float32),
    "subclass": BASE.view(type("Sub", (np.ndarray,), {})),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name):
    source = LAYOUTS[name]
    shape, strides, dtype, device = _C.layout(source)
    assert (shape, dtype, device) == (source.shape, (2, 32, 1), (1, 0))
    assert strides == tuple(stride // 4 for stride in source.strides)
    target = np.full(source.shape, -1, np.float32)
    _C.broadcast(source, (target,))
    assert np.array_equal(target, source)
    tensor = torch.full(source.shape, -1.0)
    _C.broadcast(source, (tensor,))
    assert np.array_equal(tensor.numpy(), source)


def test_writing_into_negative_strides():
    base = np.full((4, 6), -1, np.float32)
    _C.broadcast(np.arange(12, dtype=np.float32).reshape(4, 3), (base[::-1, ::-2],))
    assert base[::-1, ::-2].flatten().tolist() == list(range(12))
    assert (base == -1).sum() == 12


def test_sum_of_both_kinds():
    a, b = np.arange(6, dtype=np.float32), torch.arange(6.0)
    target = np.empty(6, np.float32)
    _C.reduce((a, b, a[::-1]), target)
    assert target.tolist() == [2 * k + (5 - k) for k in range(6)]


def test_memmap(tmp_path):
    path = tmp_path / "data"
    source = np.memmap(path, np.float32, "w+", shape=(5,))
    source[:] = range(5)
    target = torch.empty(5)
    _C.broadcast(source, (target,))
    assert target.tolist() == [0, 1, 2, 3, 4]
    frozen = np.memmap(path, np.float32, "r", shape=(5,))
    with pytest.raises(ValueError, match=r"^targets\[0\]: read-only, cannot be written$"):
        _C.broadcast(target, (frozen,))


def test_read_only():
    frozen = np.arange(4, dtype=np.float32)
    frozen.flags.writeable = False
    target = np.empty(4, np.float32)
    _C.broadcast(frozen, (target,))
    assert np.array_equal(target, frozen)
    for call in (
        lambda: _C.broadcast(target, (target.copy(), frozen)),
        lambda: _C.scatter(target, (np.empty(0, np.float32), frozen), 0),
    ):
        with pytest.raises(ValueError, match=r"^targets\[1\]: read-only, cannot be written$"):
            call()
    with pytest.raises(ValueError, match="^target: read-only, cannot be written$"):
        _C.gather((target,), frozen, 0)
    with pytest.raises(ValueError, match="^target: read-only, cannot be written$"):
        _C.reduce((target,), frozen)
    assert frozen.tolist() == [0, 1, 2, 3]


def swapped():
    return np.arange(3, dtype=np.dtype(np.float32).newbyteorder())


PAIRS = np.zeros(3, np.dtype([("a", np.int8), ("b", np.float32)]))
TRIPLES = np.zeros(3, np.dtype([("a", np.float32), ("b", np.int8, 2)]))
UNALIGNED = np.frombuffer(bytearray(17), np.uint8)[1:].view(np.float32)

REFUSED = {
    "object": (np.array([object()]), TypeError, "arrays of dtype object cannot be borrowed"),
    "text": (np.array(["a"]), TypeError, "arrays of dtype <U1 cannot be borrowed"),
    "bytes": (np.array([b"a"]), TypeError, "arrays of dtype |S1 cannot be borrowed"),
    "void": (np.zeros(2, "V3"), TypeError, "arrays of dtype |V3 cannot be borrowed"),
    "record": (PAIRS, TypeError, "arrays of dtype [('a', 'i1'), ('b', '<f4')] cannot be"),
    "dates": (np.zeros(2, "M8[s]"), TypeError, "arrays of dtype datetime64[s] cannot be borrowed"),
    "times": (np.zeros(2, "m8[s]"), TypeError, "arrays of dtype timedelta64[s] cannot be borrowed"),
    "clongdouble": (np.zeros(2, "G"), TypeError, "arrays of dtype complex256 cannot be borrowed"),
    "swapped": (swapped(), TypeError, "the array is byte-swapped"),
    "masked": (np.ma.ones(3), TypeError, "a masked array cannot be borrowed: its mask would"),
    "field": (
        TRIPLES["a"],
        TypeError,
        "stride of 6 bytes in dimension 0, must be a multiple of the element size of 4 bytes",
    ),
    "unaligned": (UNALIGNED, ValueError, "is not aligned, must be a multiple of 4 bytes"),
    "scalar": (np.float32(3), TypeError, "expected a tensor (torch.Tensor, numpy.ndarray or any"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    array, error, words = REFUSED[name]
    with pytest.raises(error) as caught:
        _C.borrow((np.ones(1), array))
    assert str(caught.value).startswith("tensors[1]: ")
    assert words in str(caught.value)


def test_overlapping_targets():
    base = np.zeros(6, np.float32)
    window = np.lib.stride_tricks.as_strided(base, (2, 3), (4, 4))
    with pytest.raises(ValueError, match=r"targets\[0\] overlaps itself"):
        _C.broadcast(np.ones((2, 3), np.float32), (window,))
    with pytest.raises(ValueError, match=r"targets\[1\] overlaps targets\[0\]"):
        _C.broadcast(np.ones(4, np.float32), (base[:4], base[2:]))
    assert not base.any()


def test_buckets_of_arrays():
    arrays = (np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.float32)[::-1])
    bucket = _C.Bucket(arrays)
    flat = np.zeros(bucket.size_elems, np.float32)
    bucket.broadcast(arrays, (flat,))
    offset = bucket.slots[1][0]
    assert flat[:6].tolist() == [0, 1, 2, 3, 4, 5]
    assert flat[offset : offset + 4].tolist() == [3, 2, 1, 0]
    bucket.reduce((arrays, (None, torch.ones(4))), flat)
    assert flat[offset : offset + 4].tolist() == [4, 3, 2, 1]


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_numpy_module_comes_with_the_first_array():
    code = """
import sys, torch
from fastdp import _C
_C.borrow((torch.ones(3),))
before = "fastdp._numpy" in sys.modules
import numpy
_C.borrow((numpy.ones(3),))
print(before, "fastdp._numpy" in sys.modules)
"""
    assert run(code) == "False True\n"


def test_without_numpy():
    code = """
import sys, warnings
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numpy":
            raise ModuleNotFoundError("numpy is absent")
sys.meta_path.insert(0, Absent())
warnings.simplefilter("ignore")
import torch
from fastdp import _C
target = torch.zeros(3)
_C.reduce((torch.ones(3), torch.ones(3)), target)
try:
    import fastdp._numpy
except ImportError:
    print(target.tolist(), "numpy" in sys.modules)
"""
    assert run(code) == "[2.0, 2.0, 2.0] False\n"
