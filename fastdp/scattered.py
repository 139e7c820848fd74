"""`Scattered`: a tensor that lies in slices on the devices of the replicas already."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Iterator, NoReturn, Optional, Sequence, Tuple

import torch

from .containers import place
from .devices import parse_device
from .functions import gather_tensors
from .streams import current_stream

__all__ = ["Scattered"]


class Scattered:
    """A tensor in slices, one on the device of each replica that is to get one: what
    `fastdp.prefetch` yields in place of tensors. A wrapper hands each replica its slice as it is,
    and as many replicas run as there are slices; where it calls its module directly, the module
    gets the whole.

    Args:
        slices: the tensors, of one dtype, that differ in size along `dim` only.
        dim: the dimension along which the whole was cut.
        output_device: where `gathered` puts the whole unless told otherwise: int, str or
            torch.device. Default: the device of the first slice.
        arrived: for each GPU whose slices are still being written, the event behind that.

    Whoever reads `slices` on GPUs gets them in the order of the current streams: these wait for
    `arrived`, and the memory is kept for them. Reading them never blocks the host. Slices are
    shared, not copied: what a replica's forward writes into its own is there afterwards.

    It is no tensor, but has what training loops ask of an item of a batch: `shape`, `size`, `dim`,
    `ndim`, `numel`, `dtype`, `device` (of the first slice), `is_cuda`, `layout`, `requires_grad`,
    `element_size`, `nbytes`, `to`, `cuda`, `cpu`, `float` and the other names of dtypes, `type`,
    `detach`, `contiguous`, `pin_memory`. Else it says what to do instead: `gathered()` first.

    Raises:
        TypeError: no list of tensors.
        ValueError: no slices, or slices that do not fit together.

    >>> halves = Scattered([torch.zeros(2, 3), torch.zeros(1, 3)])
    >>> len(halves), halves.shape, halves.gathered().shape
    (3, torch.Size([3, 3]), torch.Size([3, 3]))
    """

    made = False  # whether there ever was one

    __slots__ = ("_slices", "_arrived", "cut_dim", "output_device", "shape")

    def __init__(
        self,
        slices: Sequence[torch.Tensor],
        dim: int = 0,
        output_device: Any = None,
        arrived: Optional[Dict[torch.device, torch.cuda.Event]] = None,
    ) -> None:
        if isinstance(slices, torch.Tensor) or not isinstance(slices, Sequence):
            raise TypeError(f"slices is a {type(slices).__name__}: it must be a list of tensors")
        self._slices = tuple(slices)
        self.cut_dim = _checked_dim(self._slices, dim)
        self._arrived = {} if arrived is None else arrived
        first = self._slices[0]
        output = first.device
        if output_device is not None:
            output = parse_device(output_device, "output_device")
        self.output_device = output
        whole = list(first.shape)
        whole[self.cut_dim] = sum(self.sizes)
        self.shape = torch.Size(whole)
        Scattered.made = True

    @property
    def slices(self) -> Tuple[torch.Tensor, ...]:
        """The slices, ready on the streams that are current for this thread."""
        if self._arrived:
            now = {device: current_stream(device) for device in self._arrived}
            for device, event in self._arrived.items():
                now[device].wait_event(event)
            for part in self._slices:
                if part.device in now:
                    # They belong to the stream that wrote them: theirs alone would be reused.
                    part.record_stream(now[part.device])
        return self._slices

    @property
    def devices(self) -> Tuple[torch.device, ...]:
        """Where the slices lie."""
        return tuple(part.device for part in self._slices)

    @property
    def sizes(self) -> Tuple[int, ...]:
        """The sizes of the slices along the dimension that was cut."""
        return tuple(part.size(self.cut_dim) for part in self._slices)

    @property
    def dtype(self) -> torch.dtype:
        return self._slices[0].dtype

    @property
    def device(self) -> torch.device:
        """That of the first slice, where code that moves batches wants them."""
        return self._slices[0].device

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def layout(self) -> torch.layout:
        return torch.strided

    @property
    def requires_grad(self) -> bool:
        return any(part.requires_grad for part in self._slices)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel() * self.element_size()

    def dim(self) -> int:
        """How many dimensions it has, as `torch.Tensor.dim`."""
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def element_size(self) -> int:
        return self._slices[0].element_size()

    def size(self, dim: Optional[int] = None) -> Any:
        """The shape of the whole, or its size along `dim`, as `torch.Tensor.size`."""
        if dim is None:
            return self.shape
        if not -self.ndim <= dim < self.ndim:
            raise IndexError(
                f"dim is {dim}: it must be from {-self.ndim} to {self.ndim - 1}, as the "
                f"fastdp.Scattered has {self.ndim} dimensions"
            )
        return self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As `torch.Tensor.to`, so that loops which move what they get run unchanged.

        To the device of the first slice, or to one of its type without a number ("cuda"): stays in
        slices, where the wrapper wants them. To any other device: the whole as a tensor there. With
        a dtype each slice is converted, in its place. `copy` makes copies, `non_blocking` changes
        nothing: copies between devices never block the host.
        """
        device, dtype, copy, memory_format = _target_of(*args, **kwargs)
        result: Any = self
        if dtype not in (None, self.dtype) or memory_format is not None or copy:
            keywords = {} if memory_format is None else {"memory_format": memory_format}
            result = self._each(lambda part: part.to(dtype or part.dtype, copy=copy, **keywords))
        if device is None or device == self.device:
            return result
        if device.index is None and device.type == self.device.type:
            return result
        return result.gathered(device)

    def cuda(self, device: Any = None, non_blocking: bool = False) -> Any:
        """As `to` with that GPU: slices that are on GPUs stay where they are, unless another than
        the first one's is asked for."""
        if device is None:
            return self if self.is_cuda else self.gathered("cuda")
        return self.to(parse_device(device, "device"))

    def cpu(self) -> torch.Tensor:
        """The whole as a tensor on the host, also where the slices are there."""
        return self.gathered("cpu")

    def type(self, dtype: Optional[torch.dtype] = None) -> Any:
        """Each slice converted, in its place; without a dtype the name of its type, as
        `torch.Tensor.type`."""
        return self._slices[0].type() if dtype is None else self.to(dtype=dtype)

    def detach(self) -> Scattered:
        return self._each(torch.Tensor.detach)

    def contiguous(self, memory_format: Any = torch.contiguous_format) -> Scattered:
        return self._each(lambda part: part.contiguous(memory_format=memory_format))

    def pin_memory(self, device: Any = None) -> Scattered:
        """Itself: it is where it is to go."""
        return self

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Scattered:
        return Scattered(
            [change(part) for part in self.slices], self.cut_dim, self.output_device
        )

    def __getattr__(self, name: str) -> Any:
        dtype = _CONVERSIONS.get(name)
        if dtype is not None:
            return functools.partial(self.to, dtype)
        if hasattr(torch.Tensor, name) and not name.startswith("__"):
            raise AttributeError(_advice(f"has no {name!r}"))
        raise AttributeError(f"'Scattered' object has no attribute {name!r}")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        name = getattr(function, "__name__", str(function))
        raise TypeError(_advice(f"cannot be given to {name}()"))

    def __getitem__(self, key: Any) -> NoReturn:
        raise TypeError(_advice("cannot be indexed"))

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(_advice("cannot be iterated over"))

    def _refuse(self, *others: Any) -> NoReturn:
        raise TypeError(_advice("cannot be computed with or compared"))

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __matmul__ = __rmatmul__ = __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse
    __mod__ = __rmod__ = __pow__ = __rpow__ = __pos__ = __neg__ = __abs__ = __invert__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __contains__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse

    def __eq__(self, other: Any) -> Any:
        """With a tensor it would be False, whatever is in both; anything else it is not."""
        if isinstance(other, torch.Tensor):
            self._refuse()
        return NotImplemented

    __hash__ = object.__hash__

    def gathered(self, device: Any = None) -> torch.Tensor:
        """The whole on one device: `device`, or `output_device`. New memory, unless there is but
        one slice, which lies there."""
        target = self.output_device if device is None else parse_device(device, "device")
        slices = self.slices
        if len(slices) == 1 and slices[0].device == target:
            return slices[0]
        return gather_tensors(slices, target, self.cut_dim, (), "slices")

    def check(self, devices: Sequence[torch.device], dim: int, path: Any) -> None:
        """Whether the replicas on `devices` can take it; ValueError else."""
        if self.devices != tuple(devices[: len(self._slices)]):
            raise ValueError(
                f"{place(path)} is a fastdp.Scattered on {_listed(self.devices)}, but the replicas "
                f"are on {_listed(devices)}: prefetch for the wrapper that is to take it"
            )
        if self.cut_dim != dim % self.dim():
            raise ValueError(
                f"{place(path)} is a fastdp.Scattered cut along dimension {self.cut_dim}, but the "
                f"wrapper cuts along {dim}: prefetch for the wrapper that is to take it"
            )

    def __repr__(self) -> str:
        return (
            f"Scattered(shape={tuple(self.shape)}, dtype={self.dtype}, sizes={self.sizes}, "
            f"devices=[{_listed(self.devices)}])"
        )


_CONVERSIONS = {
    "bfloat16": torch.bfloat16,
    "bool": torch.bool,
    "double": torch.float64,
    "float": torch.float32,
    "half": torch.float16,
    "int": torch.int32,
    "long": torch.int64,
}


def _advice(problem: str) -> str:
    return (
        f"a fastdp.Scattered {problem}: it lies in slices on the replicas' devices, for "
        "dp(...) to take. gathered() gives the whole as a tensor; prefetch(..., scatter=[...]) "
        "names the items of a batch that are to be cut"
    )


def _target_of(
    first: Any = None,
    second: Any = None,
    *flags: Any,
    device: Any = None,
    dtype: Optional[torch.dtype] = None,
    other: Optional[torch.Tensor] = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: Any = None,
) -> Tuple[Optional[torch.device], Optional[torch.dtype], bool, Any]:
    """(device, dtype, copy, memory_format) of the arguments of a `to`: to(dtype), to(other) or
    to(device, dtype), then non_blocking and copy."""
    other = first if isinstance(first, torch.Tensor) else other
    if other is not None:
        device, dtype, rest = other.device, other.dtype, (second, *flags)
    elif isinstance(first, torch.dtype):
        dtype, rest = first, (second, *flags)
    else:
        device = device if first is None else first
        dtype, rest = dtype if second is None else second, flags
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}: it must be a torch.dtype")
    if device is not None:
        any_gpu = str(device) == "cuda"  # whichever is the first slice's
        device = torch.device("cuda") if any_gpu else parse_device(device, "device")
    return device, dtype, copy or (len(rest) > 1 and bool(rest[1])), memory_format


def _listed(devices: Sequence[torch.device]) -> str:
    return ", ".join(map(str, devices))


def _checked_dim(slices: Sequence[torch.Tensor], dim: int) -> int:
    """`dim` counted from the front."""
    if not slices:
        raise ValueError("slices is empty: at least one tensor is needed")
    for i, part in enumerate(slices):
        if not isinstance(part, torch.Tensor):
            raise TypeError(f"slices[{i}] is a {type(part).__name__}: it must be a tensor")
    first = slices[0]
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise TypeError(f"dim is {dim!r}: it must be an int")
    if not -first.dim() <= dim < first.dim():
        raise ValueError(f"dim is {dim}: slices[0] has {first.dim()} dimensions")
    dim %= first.dim()
    for i, part in enumerate(slices):
        rest = part.shape[:dim] + part.shape[dim + 1 :]
        fits = part.dim() == first.dim() and rest == first.shape[:dim] + first.shape[dim + 1 :]
        if not fits or part.dtype != first.dtype:
            raise ValueError(
                f"slices[{i}] has shape {tuple(part.shape)} and {part.dtype}, but slices[0] has "
                f"{tuple(first.shape)} and {first.dtype}: they may differ along dimension {dim} "
                "only"
            )
    return dim
