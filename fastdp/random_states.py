"""Random states that are put back while a CUDA graph is captured.

Activation checkpointing saves a GPU's random state in the forward and sets it again in the
backward, so that dropout draws the same numbers when it is recomputed. While a graph is captured,
torch gives and takes the position within that graph only. Within one graph that is right. In
another one it is not: a graph draws from where the generator was when a graph was last replayed,
which need not be the one where the state was saved. Such numbers would be wrong, without an error.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Iterator, List, Optional, Tuple

import torch

from .signatures import NotRecordable

_REASON = (
    "it draws random numbers from a state of a GPU's generator that was saved elsewhere, as "
    "dropout does when activation checkpointing computes it again"
)


class _Guard:
    """What happened to the states in one capture. The backward runs on autograd's own threads."""

    def __init__(self) -> None:
        self._saved: List[torch.Tensor] = []  # here
        self._foreign: Optional[Tuple[int, int]] = None  # (device index, position) that was set
        self._lock = threading.Lock()
        self.drawn = False

    def saved(self, state: torch.Tensor) -> None:
        with self._lock:
            self._saved.append(state)

    def set(self, state: torch.Tensor, index: int) -> None:
        with self._lock:
            self._look()
            here = any(state is each for each in self._saved)
            self._foreign = None if here else (index, _position(state))

    def finish(self) -> None:
        with self._lock:
            self._look()

    def _look(self) -> None:
        """Whether anything was drawn since a foreign state was set."""
        if self._foreign is not None:
            index, position = self._foreign
            now = _position(torch.cuda.default_generators[index].get_state())
            self.drawn = self.drawn or now != position


def _position(state: torch.Tensor) -> int:
    """The seed's eight bytes are followed by the position's."""
    return int(state[8:16].view(torch.int64).item())


def _index_of(device: Any) -> int:
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return torch.cuda.current_device() if place.index is None else place.index


@contextlib.contextmanager
def guarded_states() -> Iterator[None]:
    """Around what one capture records: raises NotRecordable if it draws from a state that was not
    saved in the same capture. `torch.cuda.get_rng_state` and `set_rng_state` are wrapped meanwhile;
    other threads, which capture nothing, pass through."""
    guard = _Guard()
    get, put = torch.cuda.get_rng_state, torch.cuda.set_rng_state

    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        state = get(device)
        if torch.cuda.is_current_stream_capturing():
            guard.saved(state)
        return state

    def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
        if torch.cuda.is_current_stream_capturing():
            guard.set(new_state, _index_of(device))
        put(new_state, device)

    torch.cuda.get_rng_state, torch.cuda.set_rng_state = get_rng_state, set_rng_state
    try:
        yield
        guard.finish()
    finally:
        torch.cuda.get_rng_state, torch.cuda.set_rng_state = get, put
    if guard.drawn:
        raise NotRecordable(_REASON)
