"""Whether replicas on the host launch their forwards at once, or take turns.

Python code of two threads that both run operators hands the GIL to and fro at each of them, and now
and then waits for a whole switch interval (5 ms): for a forward of few milliseconds on the host
that costs more than the operators. So short forwards there take turns: a replica starts when the
one before has finished. On GPUs all start at once: an operator's launch, outside the GIL, takes
longer than its Python, and taking turns was measured to be slower (two H200, ResNet-18,
2026-11-29).
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Iterator, Optional, Sequence

import torch

# Forwards that take longer run at once, seconds.
_SHORT_S = 0.015
# A replica starts anyway after this many usual durations, and not before this many seconds.
_PATIENCE = 4.0
_LEAST_PATIENCE_S = 0.02
# A duration that says: a replica that may compile first is waited for, some minutes at most.
_UNHURRIED_S = 60.0


class Pace:
    """What the forwards of one wrapper took so far, and what follows from it.

    Replicas may wait for each other inside their forwards (batch norm that synchronises by queues
    does); then taking turns would be a deadlock. So a turn is waited for only as long as a few
    forwards usually take, and once that was not enough all run at once for good.
    """

    def __init__(self) -> None:
        self._usual_s: Optional[float] = None
        self._gave_up = False

    @classmethod
    def unhurried(cls) -> Pace:
        """For replicas that may compile first, which takes its time."""
        pace = cls()
        pace._usual_s = _UNHURRIED_S
        return pace

    def takes_turns(self, devices: Sequence[torch.device]) -> bool:
        short = self._usual_s is not None and self._usual_s <= _SHORT_S
        return short and not self._gave_up and devices[0].type == "cpu"

    def await_turn(self, turn: Any) -> None:
        try:
            turn.take(max(_PATIENCE * self._usual_s, _LEAST_PATIENCE_S))
        except TimeoutError:
            self._gave_up = True

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Around the first replica's forward."""
        start_s = time.perf_counter()
        yield
        taken_s = time.perf_counter() - start_s
        usual_s = self._usual_s
        self._usual_s = taken_s if usual_s is None else 0.8 * usual_s + 0.2 * taken_s
