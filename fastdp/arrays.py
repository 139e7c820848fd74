"""What `fastdp.comm` must know of a family of arrays: torch tensors, NumPy arrays, and all other
producers of DLPack. A family reads shapes, prepares an array for the core to read or to write, and
makes results: torch in, torch out; NumPy in, NumPy out; others get `fastdp._C.Array`.

NumPy is never imported: an array can only come in if its owner has imported NumPy already.

Layout of results: a result has the strides of what it is made from where those are dense, else
dense strides in the same order of dimensions (torch's and NumPy's own `empty_like`). What several
arrays are joined into keeps the memory format that all of them have, else it is row-major.
"""

from __future__ import annotations

import sys
from typing import Any, Iterable, List, Sequence, Tuple

import torch

from . import _C
from .devices import HOST, device_of_pair, dlpack_pair

_DLPACK_NAMES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
_DLPACK_BOOL = 6
_NUMPY_MAX_BYTES = 16  # DLPack counts bits in one byte


class TorchArrays:
    """Strided tensors; sparse ones are taken apart by whoever supports them."""

    noun = "torch.Tensor"

    def shape(self, array: torch.Tensor) -> Tuple[int, ...]:
        return tuple(array.shape)

    def dtype(self, array: torch.Tensor) -> str:
        return str(array.dtype).split(".", 1)[1]

    def device(self, array: torch.Tensor) -> torch.device:
        return array.device

    def size_bytes(self, array: torch.Tensor) -> int:
        return array.numel() * array.element_size()

    def check_device(self, device: torch.device, name: str) -> None:
        """Any device that `parse_devices` lets through will do."""

    def source(self, array: torch.Tensor, name: str) -> torch.Tensor:
        """For reading: without autograd, and with lazy conjugation and negation carried out."""
        self._check_kind(array, name)
        if array.requires_grad or type(array) is not torch.Tensor:
            array = array.detach()
        if array.dtype.is_complex:
            array = array.resolve_conj()
        return array.resolve_neg()

    def target(self, array: torch.Tensor, name: str) -> torch.Tensor:
        """For writing, under the rules of torch's own in-place operations."""
        self._check_kind(array, name)
        if array.is_conj() or array.is_neg():
            raise ValueError(
                f"{name} is a lazily conjugated or negated view, which cannot be written: "
                "pass the tensor that it is a view of"
            )
        if array.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires grad and would be overwritten: detach it, or use torch.no_grad()"
            )
        if array.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"{name} was made under inference mode and may only be written under it"
            )
        return array.detach()

    def written(self, array: torch.Tensor) -> None:
        """The core wrote past torch: a graph that saved the old values must find out."""
        torch.autograd.graph.increment_version(array)

    def piece(
        self, source: torch.Tensor, dim: int, start: int, length: int, device: torch.device
    ) -> torch.Tensor:
        return self.like(source.narrow(dim, start, length), device)

    def like(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        return torch.empty_like(source, device=device, memory_format=torch.preserve_format)

    def joined(
        self, sources: Sequence[torch.Tensor], shape: Tuple[int, ...], device: torch.device
    ) -> torch.Tensor:
        formats = {_memory_format(source) for source in sources}
        memory_format = formats.pop() if len(formats) == 1 else torch.contiguous_format
        dtype = sources[0].dtype
        return torch.empty(shape, dtype=dtype, device=device, memory_format=memory_format)

    def flat(self, bucket: Any, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        return torch.empty(bucket.size_elems, dtype=source.dtype, device=device)

    def slots(self, bucket: Any, flat: torch.Tensor) -> List[torch.Tensor]:
        # `.data`: no view relation and a version counter each, so that an in-place change of one
        # result does not invalidate the graphs of the others.
        return [
            flat.as_strided(shape, strides, offset).data for offset, shape, strides in bucket.slots
        ]

    def _check_kind(self, array: torch.Tensor, name: str) -> None:
        if type(array) is not torch.Tensor and isinstance(
            array, torch.nn.parameter.UninitializedTensorMixin
        ):
            raise ValueError(
                f"{name} is an uninitialized {type(array).__name__}: run the lazy module once first"
            )
        if array.layout != torch.strided:
            raise TypeError(
                f"{name} has layout {array.layout}, but must be a strided tensor here"
            )


class NumpyArrays:
    """`numpy.ndarray` and its subclasses, which come out as plain `numpy.ndarray`."""

    noun = "numpy.ndarray"

    def shape(self, array: Any) -> Tuple[int, ...]:
        return tuple(array.shape)

    def dtype(self, array: Any) -> str:
        return str(array.dtype)

    def device(self, array: Any) -> torch.device:
        return HOST

    def size_bytes(self, array: Any) -> int:
        return int(array.nbytes)

    def check_device(self, device: torch.device, name: str) -> None:
        if device != HOST:
            raise ValueError(f"{name} is {device}, but a NumPy array can only lie on 'cpu'")

    def source(self, array: Any, name: str) -> Any:
        """For reading; what lies between elements, as a field of records does, is copied out."""
        self._check_kind(array, name)
        plain = sys.modules["numpy"].asarray(array)
        if not plain.flags.aligned or any(s % plain.itemsize for s in plain.strides):
            return plain.copy()
        return plain

    def target(self, array: Any, name: str) -> Any:
        self._check_kind(array, name)
        if not array.flags.writeable:
            raise ValueError(f"{name} is read-only")
        return sys.modules["numpy"].asarray(array)

    def written(self, array: Any) -> None:
        """NumPy counts no versions."""

    def piece(self, source: Any, dim: int, start: int, length: int, device: torch.device) -> Any:
        return self.like(source[(slice(None),) * dim + (slice(start, start + length),)], device)

    def like(self, source: Any, device: torch.device) -> Any:
        return sys.modules["numpy"].empty_like(source)

    def joined(self, sources: Sequence[Any], shape: Tuple[int, ...], device: torch.device) -> Any:
        columns_first = all(s.flags.f_contiguous and not s.flags.c_contiguous for s in sources)
        order = "F" if columns_first else "C"
        return sys.modules["numpy"].empty(shape, dtype=sources[0].dtype, order=order)

    def flat(self, bucket: Any, source: Any, device: torch.device) -> Any:
        return sys.modules["numpy"].empty(bucket.size_elems, dtype=source.dtype)

    def slots(self, bucket: Any, flat: Any) -> List[Any]:
        ndarray, item_bytes = sys.modules["numpy"].ndarray, flat.itemsize
        return [
            ndarray(
                shape,
                dtype=flat.dtype,
                buffer=flat,
                offset=offset * item_bytes,
                strides=[stride * item_bytes for stride in strides],
            )
            for offset, shape, strides in bucket.slots
        ]

    def _check_kind(self, array: Any, name: str) -> None:
        masked = sys.modules.get("numpy.ma")
        if masked is not None and isinstance(array, masked.MaskedArray):
            raise TypeError(f"{name} is a masked array, whose mask would be lost: pass its .data")
        dtype = array.dtype
        if dtype.kind not in "biufc" or dtype.itemsize > _NUMPY_MAX_BYTES or not dtype.isnative:
            raise TypeError(
                f"{name} has dtype {dtype}, but must be of numbers or bool in native byte order, "
                f"at most {_NUMPY_MAX_BYTES} bytes each"
            )


class DLPackArrays:
    """All else that has `__dlpack__`. Nothing can be viewed, so nothing is put in buckets."""

    noun = "DLPack producer"

    def shape(self, array: Any) -> Tuple[int, ...]:
        return tuple(_C.layout(array)[0])

    def dtype(self, array: Any) -> str:
        code, bits, lanes = _C.layout(array)[2]
        if (code, bits, lanes) == (_DLPACK_BOOL, 8, 1):
            return "bool"
        if lanes == 1 and code in _DLPACK_NAMES:
            return f"{_DLPACK_NAMES[code]}{bits}"
        return f"dtype({code},{bits},{lanes})"

    def device(self, array: Any) -> torch.device:
        return device_of_pair(*_C.layout(array)[3])

    def check_device(self, device: torch.device, name: str) -> None:
        """Any device that `parse_devices` lets through will do."""

    def source(self, array: Any, name: str) -> Any:
        return array

    target = source

    def written(self, array: Any) -> None:
        """Nothing is known of it."""

    def piece(
        self, source: Any, dim: int, start: int, length: int, device: torch.device
    ) -> _C.Array:
        shape = self.shape(source)
        return self.joined([source], shape[:dim] + (length,) + shape[dim + 1 :], device)

    def like(self, source: Any, device: torch.device) -> _C.Array:
        return self.joined([source], self.shape(source), device)

    def joined(
        self, sources: Sequence[Any], shape: Tuple[int, ...], device: torch.device
    ) -> _C.Array:
        return _C.Array(shape, _C.layout(sources[0])[2], dlpack_pair(device))


TORCH = TorchArrays()
NUMPY = NumpyArrays()
DLPACK = DLPackArrays()


def family_of(array: Any, name: str) -> Any:
    """The family of one array; TypeError naming it for anything else."""
    if isinstance(array, torch.Tensor):
        return TORCH
    ndarray = getattr(sys.modules.get("numpy"), "ndarray", None)
    if ndarray is not None and isinstance(array, ndarray):
        return NUMPY
    if hasattr(type(array), "__dlpack__") and hasattr(type(array), "__dlpack_device__"):
        return DLPACK
    raise TypeError(
        f"{name} must be a torch.Tensor, a numpy.ndarray or another producer of DLPack, "
        f"not {type(array).__name__}"
    )


def family_of_all(arrays: Iterable[Any], name: str) -> Tuple[Any, Tuple[Any, ...]]:
    """The one family of a list that is not empty, and the list as a tuple."""
    try:
        arrays = tuple(arrays)
    except TypeError:
        raise TypeError(f"{name} must be a list of arrays, not {type(arrays).__name__}") from None
    if not arrays:
        raise ValueError(f"{name} is empty: at least one array is needed")
    family = family_of(arrays[0], f"{name}[0]")
    for i, array in enumerate(arrays):
        other = family_of(array, f"{name}[{i}]")
        if other is not family:
            raise TypeError(
                f"{name}[{i}] is a {other.noun}, but {name}[0] is a {family.noun}: "
                "one call takes one kind of array"
            )
    return family, arrays


def _memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """The memory format that torch takes a tensor's strides for (not only dense ones: a slice of a
    channels_last tensor still counts as channels_last, and a shape that fits both does not)."""
    if tensor.dim() not in (4, 5) or tensor.numel() == 0 or tensor.stride(1) == 0:
        return torch.contiguous_format
    smallest = 0
    for dim in (1, *range(tensor.dim() - 1, 1, -1), 0):
        stride = tensor.stride(dim)
        if stride < smallest or (dim == 0 and smallest == tensor.stride(1)):
            return torch.contiguous_format
        smallest = stride * max(tensor.size(dim), 1)
    return torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
