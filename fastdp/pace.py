"""Whether replicas launch their forwards at once, or take turns.

Python code of two threads that both launch operators hands the GIL to and fro at each of them, and
now and then waits for a whole switch interval (5 ms): for a forward of few milliseconds that costs
more than the operators. So short forwards take turns: a replica starts when the one before has
launched all of its own. Nothing is lost where the GPUs wait for Python anyway, or where the
replicas share one. Where a GPU computes for longer than Python launches, all start at once, so that
no GPU waits for its turn.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Iterator, Optional, Sequence, Tuple

import torch

# Forwards that launch for longer run at once, seconds.
_SHORT_S = 0.015
# A GPU that computes for so many times as long as Python launches is the slower of the two.
_COMPUTE_BOUND = 1.5
# The time that a forward takes on its GPU is looked at in one of so many calls.
_SAMPLE_EVERY = 16
# A replica starts anyway after this many usual durations, and not before this many seconds.
_PATIENCE = 4.0
_LEAST_PATIENCE_S = 0.02


class Pace:
    """What the forwards of one wrapper took so far, and what follows from it.

    Replicas may wait for each other inside their forwards (batch norm that synchronises by queues
    does); then taking turns would be a deadlock. So a turn is waited for only as long as a few
    forwards usually take, and once that was not enough all run at once for good.
    """

    def __init__(self) -> None:
        self._launch_s: Optional[float] = None
        self._compute_s: Optional[float] = None
        self._gave_up = False
        self._calls = 0
        self._sample: Optional[Tuple[torch.cuda.Event, torch.cuda.Event]] = None

    def takes_turns(self, devices: Sequence[torch.device]) -> bool:
        if self._gave_up or self._launch_s is None or self._launch_s > _SHORT_S:
            return False
        if len(set(devices)) == 1:
            return True
        self._read_sample()
        return self._compute_s is not None and self._compute_s < _COMPUTE_BOUND * self._launch_s

    def await_turn(self, turn: Any) -> None:
        try:
            turn.take(max(_PATIENCE * self._launch_s, _LEAST_PATIENCE_S))
        except TimeoutError:
            self._gave_up = True

    @contextlib.contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Around the first replica's forward."""
        self._calls += 1
        sampled = device.type == "cuda" and self._calls % _SAMPLE_EVERY == 2
        if sampled:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(torch.cuda.current_stream(device))
        start_s = time.perf_counter()
        yield
        taken_s = time.perf_counter() - start_s
        usual_s = self._launch_s
        self._launch_s = taken_s if usual_s is None else 0.8 * usual_s + 0.2 * taken_s
        if sampled:
            end.record(torch.cuda.current_stream(device))
            self._sample = begin, end

    def _read_sample(self) -> None:
        """Takes the time between two events once the GPU has passed them; never waits."""
        if self._sample is not None and self._sample[1].query():
            begin, end = self._sample
            self._compute_s = begin.elapsed_time(end) / 1e3
            self._sample = None
