"""How one batch is staged for `prefetch.py`: which of its tensors are cut, into which slices, and
by which copies these come to their devices."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.nn.utils.rnn import PackedSequence

from . import moves
from .arrays import TORCH
from .containers import with_items
from .devices import HOST, parse_device
from .options import sizes_for
from .own_streams import own_stream
from .scattered import Scattered
from .streams import current, current_stream, distinct, wait_for

Events = Dict[torch.device, torch.cuda.Event]
Change = Callable[[torch.Tensor], Any]


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each GPU for good: the memory of slices belongs to it."""
    return own_stream("batches", device)


class Staged(NamedTuple):
    """A batch whose copies are on their way."""

    batch: Any
    whole: List[torch.Tensor]  # those that were moved to the output device, a GPU
    arrived: Events

    def received(self) -> Any:
        """The batch, for the thread and the streams that are to work with it."""
        for tensor in self.whole:
            stream = current_stream(tensor.device)
            stream.wait_event(self.arrived[tensor.device])
            tensor.record_stream(stream)
        return self.batch


def names_of(scatter: Any) -> Optional[Tuple[Any, ...]]:
    """The names of the items that are cut; None for all."""
    if scatter is None:
        return None
    if isinstance(scatter, (str, int)) and not isinstance(scatter, bool):
        return (scatter,)
    try:
        return tuple(scatter)
    except TypeError:
        raise TypeError(
            f"scatter is {scatter!r}: it must be a key or a position, or a list of them"
        ) from None


class Stager:
    """Stages the batches of one iteration, on one thread."""

    def __init__(
        self, dp: Any, devices: Tuple[torch.device, ...], names: Optional[Tuple[Any, ...]]
    ) -> None:
        self._devices = devices
        self._names = names
        self._dim: int = dp.dim if devices else 0  # torch's own, without GPUs, has none
        self._chunk_sizes = dp._fastdp_chunk_sizes
        self._split_lists: bool = dp._fastdp_split_lists
        self._output: Optional[torch.device] = None
        self._gpus: List[torch.device] = []
        if devices:
            self._output = parse_device(dp.output_device, "output_device")
            self._gpus = distinct((*devices, self._output))
        # What was copied from, until the copies have run.
        self._held: List[Tuple[List[torch.cuda.Event], List[torch.Tensor]]] = []

    def stage(self, batch: Any) -> Staged:
        """Enqueues the copies of a batch, and does not wait for them. What is cut or named comes in
        new memory: by the time the step reads it a loader may have written its next batch there."""
        self._held = [held for held in self._held if not all(e.query() for e in held[0])]
        cut: List[torch.Tensor] = []
        self._mapped(batch, _collector(cut), lambda tensor: tensor)
        sizes = self._sizes(cut)
        arrived: Events = {device: torch.cuda.Event() for device in self._gpus}
        sources: List[torch.Tensor] = []
        whole: List[torch.Tensor] = []

        def scattered(tensor: torch.Tensor) -> Any:
            if id(tensor) not in sizes:
                return tensor
            slices = self._slices(tensor, sizes[id(tensor)], sources)
            on = {part.device for part in slices}
            events = {device: event for device, event in arrived.items() if device in on}
            return Scattered(slices, self._dim, self._output, events)

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            if not _is_plain(tensor):
                return tensor
            if self._output is None:
                return tensor.clone()
            result = self._copied(tensor, self._output, sources)
            if result.is_cuda:
                whole.append(result)
            return result

        result = self._mapped(batch, scattered, moved)
        for device in distinct([source.device for source in sources]):
            # Likewise.
            wait_for(current_stream(device), _copy_stream(device))
        for device, event in arrived.items():
            event.record(_copy_stream(device))
        if sources:
            self._held.append((list(arrived.values()), sources))
        return Staged(result, whole, arrived)

    def finish(self) -> None:
        """Waits for the copies: their sources may go then."""
        for events, _ in self._held:
            for event in events:
                event.synchronize()
        self._held = []

    def _sizes(self, tensors: Sequence[torch.Tensor]) -> Dict[int, Sequence[int]]:
        """By id, how each tensor that can be cut here is: as `cuts.py` would cut it."""
        dim, ranks = self._dim, len(self._devices) or 1
        found = [t for t in tensors if _is_plain(t) and -t.dim() <= dim < t.dim()]
        if not found or not self._devices:
            return {id(tensor): (tensor.size(dim),) for tensor in found}
        if self._chunk_sizes is not None:
            batch = found[0].size(dim)
            pieces = sizes_for(self._chunk_sizes, batch, ranks) if batch else [0]
            # Those that are no part of the batch are left for the wrapper to refuse.
            return {id(tensor): pieces for tensor in found if tensor.size(dim) == batch}
        count = max(len(tensor.chunk(ranks, dim)) for tensor in found)
        if not any(tensor.size(dim) for tensor in found):
            count = 1
        return {
            id(tensor): [piece.size(dim) for piece in tensor.chunk(count, dim)] for tensor in found
        }

    def _slices(
        self, tensor: torch.Tensor, sizes: Sequence[int], sources: List[torch.Tensor]
    ) -> List[torch.Tensor]:
        if not self._devices:
            return [tensor.clone()]  # the module is called directly
        parts = tensor.detach().split(list(sizes), self._dim)
        return [
            self._copied(part, device, sources) for part, device in zip(parts, self._devices)
        ]

    def _copied(
        self, part: torch.Tensor, device: torch.device, sources: List[torch.Tensor]
    ) -> torch.Tensor:
        """A copy in new memory, laid out as a scatter lays it out."""
        if part.device == HOST and device.type == "cuda":
            return _from_host(part, device, sources)
        source = TORCH.source(part, "batch")
        gpus = distinct((part.device, device))
        if not gpus:
            return moves.broadcast(TORCH, source, (device,))[0]
        streams = [_copy_stream(gpu) for gpu in gpus]
        for stream in streams:
            wait_for(stream, current_stream(part.device))
        sources.append(source)
        with current(streams):
            return moves.broadcast(TORCH, source, (device,))[0]

    def _mapped(self, batch: Any, cut: Change, whole: Change) -> Any:
        """The batch with its tensors changed: by `cut` those that `scatter` names, else by
        `whole`."""
        if isinstance(batch, UserDict):
            dictionary = copy.copy(batch)
            dictionary.data = self._mapped(batch.data, cut, whole)
            return dictionary
        names, stop = self._names, self._split_lists
        if names is None:
            return _map(batch, cut, stop)
        if isinstance(batch, dict):
            chosen = _chosen(names, batch, f"a dictionary with the keys {list(batch)}")
            result = copy.copy(batch)
            for key, value in batch.items():
                result[key] = _map(value, cut, stop) if key in chosen else _map(value, whole)
            return result
        if not isinstance(batch, (tuple, list)):
            raise ValueError(
                f"scatter is {list(names)}, but the batch is a {type(batch).__name__}: only items "
                "of a dictionary, tuple or list have names"
            )
        count = len(batch)
        places: Dict[Any, int] = {name: i for i, name in enumerate(getattr(batch, "_fields", ()))}
        for i in range(count):
            places[i] = places[i - count] = i
        kind = f"a {type(batch).__name__} of {count} items"
        cut_places = [places[name] for name in _chosen(names, places, kind)]
        return with_items(
            batch,
            [
                _map(item, cut, stop) if i in cut_places else _map(item, whole)
                for i, item in enumerate(batch)
            ],
        )


def _collector(found: List[torch.Tensor]) -> Change:
    def collect(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    return collect


def _chosen(names: Sequence[Any], known: Any, kind: str) -> Sequence[Any]:
    for name in names:
        if name not in known:
            raise ValueError(f"scatter names {name!r}, but the batch is {kind}")
    return names


def _map(tree: Any, change: Change, stop_at_lists: bool = False) -> Any:
    """The tree with each tensor changed, but for what a scatter does not look into."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        result = copy.copy(tree)
        for key, value in tree.items():
            result[key] = _map(value, change, stop_at_lists)
        return result
    if isinstance(tree, PackedSequence) or (stop_at_lists and isinstance(tree, list)):
        return tree
    if isinstance(tree, (tuple, list)) and len(tree) > 0:
        items = [_map(item, change, stop_at_lists) for item in tree]
        if isinstance(tree, tuple):
            return with_items(tree, items)
        changed = copy.copy(tree)  # a kind of list may want more than its items
        changed[:] = items
        return changed
    return tree


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes are all that there is to it."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested)
    )


def _from_host(
    part: torch.Tensor, device: torch.device, sources: List[torch.Tensor]
) -> torch.Tensor:
    """By way of pinned memory, unless it is there and laid out so that one copy will do. torch
    keeps pinned memory of its own from being reused before a copy from it has run."""
    with torch.cuda.stream(_copy_stream(device)):
        target = TORCH.like(part, device)
        if part.is_pinned() and part.stride() == target.stride():
            sources.append(part)
            return target.copy_(part, non_blocking=True)
        pinned = torch.empty_like(target, device=HOST, pin_memory=True)
        return target.copy_(pinned.copy_(part), non_blocking=True)
