"""Array: memory of the core's own, exported by the DLPack protocol in all its variants."""

import gc
import threading

import numpy as np
import pytest
import torch
from seam_producers import capsule_name
from torch_features import needs_dlpack_1

from fastdp import _C

pytestmark = pytest.mark.seam

HOST = (1, 0)
FLOAT32 = (2, 32, 1)


def filled(shape=(2, 3)):
    array = _C.Array(shape, FLOAT32, HOST)
    _C.broadcast(torch.arange(6.0).view(shape), (array,))
    return array


def test_what_it_says_of_itself():
    array = _C.Array((2, 3), (4, 16, 1), HOST)
    assert (array.shape, array.dtype) == ((2, 3), (4, 16, 1))
    assert array.__dlpack_device__() == HOST
    assert _C.layout(array) == ((2, 3), (3, 1), (4, 16, 1), HOST)
    with pytest.raises(AttributeError):
        array.shape = (1,)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4)])
def test_shapes(shape):
    array = _C.Array(shape, FLOAT32, HOST)
    assert torch.from_dlpack(array).shape == shape
    assert np.from_dlpack(array).shape == shape
    assert torch.from_dlpack(array).data_ptr() % 64 == 0


def test_torch_and_numpy_share_its_memory():
    array = filled()
    tensor = torch.from_dlpack(array)
    other = np.from_dlpack(array)
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    tensor[0, 0] = 9
    assert other[0, 0] == 9
    target = torch.empty(2, 3)
    _C.broadcast(array, (target,))
    assert torch.equal(target, tensor)


def test_memory_outlives_the_array():
    tensor = torch.from_dlpack(filled())
    other = np.from_dlpack(filled())
    gc.collect()
    junk = [_C.Array((2, 3), FLOAT32, HOST) for _ in range(50)]
    for array in junk:
        _C.broadcast(torch.full((2, 3), -1.0), (array,))
    assert tensor.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert other.flatten().tolist() == [0, 1, 2, 3, 4, 5]


@needs_dlpack_1
@pytest.mark.parametrize(
    "max_version, name",
    [
        (None, b"dltensor"),
        ((0, 8), b"dltensor"),
        ((1, 0), b"dltensor_versioned"),
        ((1, 3), b"dltensor_versioned"),
        ((2, 0), b"dltensor_versioned"),
    ],
)
def test_versions(max_version, name):
    assert capsule_name(filled().__dlpack__(max_version=max_version)) == name
    capsule = filled().__dlpack__(max_version=max_version)
    assert torch.utils.dlpack.from_dlpack(capsule).flatten().tolist() == [0, 1, 2, 3, 4, 5]


@needs_dlpack_1
def test_copy():
    array = filled()
    shared = torch.from_dlpack(array)
    copied = torch.from_dlpack(array, copy=True)
    assert torch.equal(copied, shared) and copied.data_ptr() != shared.data_ptr()
    shared[0, 0] = 7
    assert copied[0, 0] == 0
    for copy in (False, None):
        assert np.from_dlpack(array, copy=copy)[0, 0] == 7
    assert torch.from_dlpack(_C.Array((0,), FLOAT32, HOST), copy=True).shape == (0,)
    # The legacy form carries no flag, but copies as well.
    legacy = torch.utils.dlpack.from_dlpack(array.__dlpack__(copy=True))
    assert legacy.data_ptr() != shared.data_ptr() and torch.equal(legacy, shared)


def test_own_device_may_be_asked_for():
    capsule = filled().__dlpack__(dl_device=HOST, stream=None, max_version=(1, 0))
    assert capsule_name(capsule) == b"dltensor_versioned"
    filled().__dlpack__(stream=-1)


@pytest.mark.parametrize(
    "keywords, error, words",
    [
        ({"dl_device": (2, 0)}, BufferError, "dl_device: (2, 0), but the array is on (1, 0)"),
        ({"dl_device": (1,)}, TypeError, "dl_device: expected a tuple of 2 to 2 integers"),
        ({"dl_device": "cpu"}, TypeError, "dl_device: expected a tuple"),
        ({"stream": 1}, ValueError, "stream: 1, must be None or -1 on the host"),
        ({"stream": "a"}, TypeError, "integer"),
        ({"max_version": 1}, TypeError, "max_version: expected a tuple of 2 to 2 integers"),
        ({"max_version": (-1, 0)}, ValueError, "max_version[0]: -1, must be 0 to"),
        ({"max_version": ("1", 0)}, TypeError, "integer"),
        ({"other": 1}, TypeError, "unexpected keyword argument 'other'"),
    ],
)
def test_dlpack_refusals(keywords, error, words):
    with pytest.raises(error) as caught:
        filled().__dlpack__(**keywords)
    assert words in str(caught.value)


def test_dlpack_takes_keywords_only():
    with pytest.raises(TypeError, match=r"__dlpack__\(\) takes 0 positional arguments, 1 given"):
        filled().__dlpack__(None)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ((), TypeError, "Array() takes 3 positional arguments, 0 given"),
        (([2], FLOAT32, HOST), TypeError, "shape: expected a tuple of 0 to 64 integers, got [2]"),
        (((1,) * 65, FLOAT32, HOST), TypeError, "shape: expected a tuple of 0 to 64 integers"),
        (((2, -1), FLOAT32, HOST), ValueError, "shape[1]: -1, must be 0 to"),
        (((2.0,), FLOAT32, HOST), TypeError, "integer"),
        (((1 << 32, 1 << 32), FLOAT32, HOST), ValueError, "has too many elements"),
        (((1 << 62,), FLOAT32, HOST), ValueError, "shape: size of "),
        (((2,), (2, 32), HOST), TypeError, "dtype: expected a tuple of 3 to 3 integers"),
        (((2,), (2, 300, 1), HOST), ValueError, "dtype[1]: 300, must be 0 to 255"),
        (((2,), (2, 4, 1), HOST), TypeError, "must fill whole bytes"),
        (((2,), FLOAT32, (1,)), TypeError, "device: expected a tuple of 2 to 2 integers"),
        (((1 << 58,), FLOAT32, HOST), MemoryError, ""),
    ],
)
def test_constructor_refusals(arguments, error, words):
    with pytest.raises(error) as caught:
        _C.Array(*arguments)
    assert words in str(caught.value)


def test_no_keywords():
    with pytest.raises(TypeError, match=r"Array\(\) takes no keyword arguments"):
        _C.Array(shape=(2,))


@pytest.mark.skipif(_C.build_info()["cuda"], reason="this build has CUDA")
def test_cuda_memory_without_cuda():
    with pytest.raises(NotImplementedError):
        _C.Array((2,), FLOAT32, (2, 0))


@pytest.mark.skipif(
    not (_C.build_info()["cuda"] and torch.cuda.is_available()), reason="needs a GPU"
)
@pytest.mark.parametrize("stream", [0, -2, -(1 << 40)])
def test_cuda_numbers_that_are_no_stream(stream):
    with pytest.raises(ValueError, match=f"stream: {stream} is no stream, must be -1, 1, 2 or"):
        _C.Array((2,), FLOAT32, (2, 0)).__dlpack__(stream=stream)


def resident_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def test_memory_is_given_back():
    size = (1 << 20,)  # 4 MiB
    tensor = torch.ones(size)

    def touch(keep):
        array = _C.Array(size, FLOAT32, HOST)
        _C.broadcast(tensor, (array,))
        array.__dlpack__()  # a capsule that nobody takes
        array.__dlpack__(max_version=(1, 0), copy=True)
        keep.append(torch.from_dlpack(array))
        keep.append(np.from_dlpack(array))
        keep.clear()

    touch([])
    before = resident_kib()
    for _ in range(200):
        touch([])
    # 200 leaks would be 800 MiB and more; the address sanitizer keeps 256 MiB of what was freed.
    assert resident_kib() - before < 400 * 1024


def test_last_user_on_another_thread():
    for _ in range(200):
        array = filled()
        keep = [torch.from_dlpack(array), np.from_dlpack(array)]
        threads = [threading.Thread(target=keep.pop) for _ in range(2)]
        del array
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
