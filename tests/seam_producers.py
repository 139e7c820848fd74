"""Tensor producers made by hand with ctypes, so that the seam's tests reach what torch and NumPy
never do: legacy capsules, wrong versions, read-only flags, odd devices, exchange tables with holes.
"""

import ctypes
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_int32, c_int64, c_uint8
from ctypes import c_uint16, c_uint32, c_uint64, c_void_p, py_object

import pytest
import torch

# A torch built with CUDA asks the driver, and refuses devices that are made up.
made_up_cuda_device = pytest.mark.skipif(
    torch.version.cuda is not None, reason="this torch asks the driver for the stream of a device"
)

READ_ONLY = 1


class Tensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


DELETER = CFUNCTYPE(None, c_void_p)


class Legacy(Structure):
    _fields_ = [("dl_tensor", Tensor), ("manager_ctx", c_void_p), ("deleter", DELETER)]


class Versioned(Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager_ctx", c_void_p),
        ("deleter", DELETER),
        ("flags", c_uint64),
        ("dl_tensor", Tensor),
    ]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = py_object
_new_capsule.argtypes = [c_void_p, c_char_p, c_void_p]
_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype = c_char_p
_capsule_name.argtypes = [py_object]


def capsule_name(capsule):
    return _capsule_name(capsule)


class Producer:
    """Floats 0, 1, 2, ... of `shape`. `deleted` counts the calls of the deleter; `calls` holds the
    keywords of each __dlpack__."""

    def __init__(
        self,
        shape=(2, 3),
        *,
        versioned=True,
        major=1,
        flags=0,
        strides=None,
        device=(1, 0),
        ndim=None,
        dtype=(2, 32, 1),
        offset_elems=0,
        null_data=False,
        has_deleter=True,
    ):
        count = 1
        for size in shape:
            count *= max(size, 1)
        self.values = (ctypes.c_float * (count + offset_elems))(*range(count + offset_elems))
        self.versioned = versioned
        self.device = device
        self.calls = []
        self.deleted = 0
        self.capsules = []
        self.error = None
        self._shape = (c_int64 * max(len(shape), 1))(*shape)
        self._strides = None if strides is None else (c_int64 * max(len(strides), 1))(*strides)
        self._deleter = DELETER(self._delete) if has_deleter else DELETER()
        tensor = Tensor(
            data=None if null_data else ctypes.addressof(self.values),
            device_type=device[0],
            device_id=device[1],
            ndim=len(shape) if ndim is None else ndim,
            code=dtype[0],
            bits=dtype[1],
            lanes=dtype[2],
            shape=self._shape,
            strides=self._strides,
            byte_offset=4 * offset_elems,
        )
        self.managed = (
            Versioned(major, 0, None, self._deleter, flags, tensor)
            if versioned
            else Legacy(tensor, None, self._deleter)
        )

    def _delete(self, address):
        assert address == ctypes.addressof(self.managed)
        self.deleted += 1

    def capsule(self):
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        capsule = _new_capsule(ctypes.addressof(self.managed), name, None)
        self.capsules.append(capsule)
        return capsule

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **keywords):
        self.calls.append(keywords)
        if self.error is not None:
            raise self.error
        return self.capsule()


class OldProducer(Producer):
    """From before DLPack 1.0: knows no max_version."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, versioned=False, **keywords)

    def __dlpack__(self, stream=None):
        self.calls.append({"stream": stream})
        return self.capsule()


FROM_PY = CFUNCTYPE(c_int, py_object, POINTER(c_void_p))
BORROW = CFUNCTYPE(c_int, py_object, POINTER(Tensor))
STREAM = CFUNCTYPE(c_int, c_int32, c_int32, POINTER(c_void_p))


class Table(Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("previous", c_void_p),
        ("allocator", c_void_p),
        ("managed_from_py", FROM_PY),
        ("managed_to_py", c_void_p),
        ("borrow", BORROW),
        ("current_work_stream", STREAM),
    ]


def table_capsule(table):
    """`table` must live as long as the process may use it: as DLPack's tables do."""
    return _new_capsule(ctypes.addressof(table), b"dlpack_exchange_api", None)
