"""The four moves below `fastdp.comm`: make the results, then one call of the core. Arguments have
been checked; arrays are sources of their family (`arrays.py`); nothing here knows of autograd.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import accumulate
from typing import Any, Iterable, List, Optional, Sequence, Tuple

import torch

from . import _C
from .peers import open_peers
from .streams import hold_pinned


def chunk_lengths(batch: int, count: int) -> List[int]:
    """The sizes of the pieces that `torch.chunk` makes of what has any rows."""
    if batch == 0:
        return [0]
    step = -(-batch // count)
    return [min(step, batch - start) for start in range(0, batch, step)]


def hold_sources(sources: Iterable[Any], devices: Sequence[torch.device]) -> None:
    """After copies to the devices, enqueued on their current streams: whoever made the sources may
    let go of them at once. (Sums read what lies on the host before they return.)"""
    for source in sources:
        if isinstance(source, torch.Tensor):
            hold_pinned(source, devices)


def is_acted_out(devices: Sequence[torch.device]) -> bool:
    """Whether nothing is to be moved, but told what would be made (fits.py)."""
    return devices[0].type == "meta"


def scatter(
    family: Any,
    source: Any,
    devices: Sequence[torch.device],
    sizes: Sequence[int],
    dim: int,
    stream: Optional[torch.cuda.Stream] = None,
) -> Tuple[Any, ...]:
    """Consecutive pieces of `sizes` along `dim`, piece i in new memory on devices[i]. A stream, if
    given, is the current one of its device while the pieces are made and written."""
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        starts = accumulate(sizes, initial=0)
        results = tuple(
            family.piece(source, dim, start, size, device)
            for start, size, device in zip(starts, sizes, devices)
        )
        if is_acted_out(devices):
            return results
        open_peers((family.device(source), *devices))
        _C.scatter(source, results, dim)
        hold_sources((source,), devices)
    return results


def gather(family: Any, sources: Sequence[Any], dim: int, device: torch.device) -> Any:
    shapes = [family.shape(source) for source in sources]
    length = sum(shape[dim] for shape in shapes)
    shape = shapes[0][:dim] + (length,) + shapes[0][dim + 1 :]
    result = family.joined(sources, shape, device)
    open_peers((device, *map(family.device, sources)))
    _C.gather(tuple(sources), result, dim)
    hold_sources(sources, (device,))
    return result


def broadcast(family: Any, source: Any, devices: Sequence[torch.device]) -> Tuple[Any, ...]:
    results = tuple(family.like(source, device) for device in devices)
    if results and not is_acted_out(devices):
        open_peers((family.device(source), *devices))
        _C.broadcast(source, results)
        hold_sources((source,), devices)
    return results


def reduce(family: Any, sources: Sequence[Any], device: torch.device) -> Any:
    """The sum in the order of `sources`, laid out like the first of them that lies on `device`."""
    on_device = [source for source in sources if family.device(source) == device]
    result = family.like(on_device[0] if on_device else sources[0], device)
    open_peers((device, *map(family.device, sources)))
    _C.reduce(tuple(sources), result)
    return result
