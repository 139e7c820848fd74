"""The arguments of `fastdp.comm`, checked before anything is made or written. Each error names the
argument as the caller wrote it, its value and what it should have been.
"""

from __future__ import annotations

import operator
from typing import Any, List, Optional, Sequence, Tuple

import torch

from . import arrays as families
from .devices import HOST, parse_device, parse_devices
from .moves import chunk_lengths


def axis(dim: Any, shape: Tuple[int, ...], name: str) -> int:
    """`dim` counted from the front."""
    try:
        index = operator.index(dim)
    except TypeError:
        raise TypeError(f"dim must be an int, not {type(dim).__name__}") from None
    if not shape:
        raise ValueError(f"{name} has no dimensions to go along: give it one (unsqueeze, reshape)")
    if not -len(shape) <= index < len(shape):
        raise IndexError(
            f"dim is {index}, but {name} of shape {shape} takes {-len(shape)} to {len(shape) - 1}"
        )
    return index % len(shape)


def count(value: Any, name: str) -> int:
    """An int that is not negative."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, not {type(value).__name__}") from None
    if number < 0:
        raise ValueError(f"{name} is {number}, but must be 0 or more")
    return number


def devices_for(family: Any, devices: Any) -> Tuple[torch.device, ...]:
    parsed = parse_devices(devices, "devices")
    for i, device in enumerate(parsed):
        family.check_device(device, f"devices[{i}]")
    return parsed


def listed(value: Any, name: str, what: str) -> Tuple[Any, ...]:
    try:
        return tuple(value)
    except TypeError:
        raise TypeError(f"{name} must be a list of {what}, not {type(value).__name__}") from None


def destination_for(family: Any, destination: Any, sources: Sequence[Any]) -> torch.device:
    """None is where host arrays already are, else the current CUDA device."""
    if destination is None:
        places = [family.device(source) for source in sources]
        if all(place == HOST for place in places):
            return HOST
        for place in places:
            if place.type not in ("cpu", "cuda"):
                raise ValueError(f"an array lies on {place}: fastdp takes CUDA devices and 'cpu'")
        return torch.device("cuda", torch.cuda.current_device())
    device = parse_device(destination, "destination")
    family.check_device(device, "destination")
    return device


def root_for(family: Any, destination: Any, sources: Sequence[Any]) -> torch.device:
    """The destination of a sum: a device that one of the sources lies on."""
    device = destination_for(family, destination, sources)
    places = [family.device(source) for source in sources]
    if device not in places:
        raise ValueError(
            f"destination is {device}, but a sum is made where one of the inputs lies: "
            f"{', '.join(sorted({str(place) for place in places}))}"
        )
    return device


def chunk_sizes_for(sizes: Any, length: int, parts: int, dim: int) -> List[int]:
    """A size for each device, or for None what `torch.chunk` cuts: ceil(length / parts) each until
    nothing is left, so maybe fewer pieces than parts; `parts` empty ones for length 0."""
    if sizes is None:
        return chunk_lengths(length, parts) if length else [0] * parts
    try:
        sizes = list(sizes)
    except TypeError:
        raise TypeError(
            f"chunk_sizes must be a list of ints, not {type(sizes).__name__}"
        ) from None
    sizes = [count(size, f"chunk_sizes[{i}]") for i, size in enumerate(sizes)]
    if len(sizes) != parts:
        raise ValueError(f"chunk_sizes has {len(sizes)} entries, but devices has {parts}")
    if sum(sizes) != length:
        raise ValueError(
            f"chunk_sizes add up to {sum(sizes)}, but the size of dimension {dim} is {length}"
        )
    return sizes


def streams_for(
    family: Any, streams: Any, places: Sequence[torch.device], name: str
) -> List[Optional[torch.cuda.Stream]]:
    """One entry for each place; a list that is too short means None for the rest, as in torch."""
    given = [] if streams is None else list(listed(streams, "streams", "streams"))
    result = (given + [None] * len(places))[: len(places)]
    for i, (stream, place) in enumerate(zip(result, places)):
        if stream is None:
            continue
        if not isinstance(stream, torch.cuda.Stream):
            raise TypeError(
                f"streams[{i}] must be a torch.cuda.Stream or None, not {type(stream).__name__}"
            )
        if family is not families.TORCH:
            raise ValueError(f"streams[{i}] is given, but streams are for torch tensors only")
        if stream.device != place:
            raise ValueError(f"streams[{i}] is of {stream.device}, but {name}[{i}] is {place}")
    return result


def alike(
    family: Any, sources: Sequence[Any], names: Sequence[str], dim: Optional[int] = None
) -> None:
    """One dtype, and one shape (but for `dim`)."""
    first, dtype = family.shape(sources[0]), family.dtype(sources[0])
    for source, name in zip(sources, names):
        shape = family.shape(source)
        expected = first
        if dim is not None and len(shape) == len(first):
            expected = first[:dim] + (shape[dim],) + first[dim + 1 :]
        if shape != expected:
            but = "" if dim is None else f" in all but dimension {dim}"
            raise ValueError(
                f"{name} has shape {shape}, but must agree with {names[0]}, {first}{but}"
            )
        if family.dtype(source) != dtype:
            raise TypeError(f"{name} has dtype {family.dtype(source)}, but {names[0]} has {dtype}")


def one_family(lists: Sequence[Sequence[Any]]) -> Any:
    """The family of inputs[r][k], which are of one kind; there is at least one."""
    first = families.family_of(lists[0][0], "inputs[0][0]")
    for r, row in enumerate(lists):
        for k, array in enumerate(row):
            other = families.family_of(array, f"inputs[{r}][{k}]")
            if other is not first:
                raise TypeError(
                    f"inputs[{r}][{k}] is a {other.noun}, but inputs[0][0] is a {first.noun}: "
                    "one call takes one kind of array"
                )
    return first


class Outputs:
    """Arrays of the caller's to be written: of any family, mixed as they like."""

    def __init__(self, out: Any, dtype: str) -> None:
        try:
            families.family_of(out, "out")
        except TypeError:
            pass
        else:
            raise TypeError(f"out must be a list of arrays, not one {type(out).__name__}")
        try:
            self.arrays = tuple(out)
        except TypeError:
            raise TypeError(f"out must be a list of arrays, not {type(out).__name__}") from None
        if not self.arrays:
            raise ValueError("out is empty: at least one array is needed")
        names = [f"out[{i}]" for i in range(len(self.arrays))]
        self._take(names, dtype)

    def _take(self, names: Sequence[str], dtype: str) -> None:
        self.families = [families.family_of(a, n) for a, n in zip(self.arrays, names)]
        self.targets = tuple(
            f.target(a, n) for f, a, n in zip(self.families, self.arrays, names)
        )
        self.shapes = [f.shape(t) for f, t in zip(self.families, self.targets)]
        self.places = [f.device(t) for f, t in zip(self.families, self.targets)]
        for f, target, name in zip(self.families, self.targets, names):
            if f.dtype(target) != dtype:
                raise TypeError(f"{name} has dtype {f.dtype(target)}, but the source has {dtype}")

    def written(self) -> Tuple[Any, ...]:
        for family, array in zip(self.families, self.arrays):
            family.written(array)
        return self.arrays


class Output(Outputs):
    """One array of the caller's to be written."""

    def __init__(self, out: Any, dtype: str) -> None:
        self.arrays = (out,)
        self._take(["out"], dtype)
