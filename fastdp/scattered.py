"""`Scattered`: a tensor that lies in slices on the devices of the replicas already."""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence, Tuple

import torch

from .containers import place
from .devices import parse_device
from .functions import gather_tensors

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
            now = {device: torch.cuda.current_stream(device) for device in self._arrived}
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

    def dim(self) -> int:
        """How many dimensions it has, as `torch.Tensor.dim`."""
        return len(self.shape)

    def size(self, dim: Optional[int] = None) -> Any:
        """The shape of the whole, or its size along `dim`, as `torch.Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

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
