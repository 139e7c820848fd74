"""Which engine is faster for a signature: its own steps tell."""

from __future__ import annotations

import statistics
from typing import Any, Dict, List, Optional, Tuple

# Steps of each engine that are timed; the first of each is not counted.
TIMED = 8


class Trial:
    """Times a signature's steps, from a forward to the next of whichever signature, on the device's
    own clock and without waiting for it: first recorded ones, then eager ones."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._marks: List[Any] = []
        self._ends: Dict[int, Any] = {}  # of steps that another forward followed

    def interrupt(self) -> None:
        """Something else runs from now on."""
        step = len(self._marks) - 1
        if step < 2 * TIMED and step not in self._ends:
            self._ends[step] = self._recorder.mark()

    def recorded_next(self) -> bool:
        """Marks the start of a step and says which engine is to run it."""
        if len(self._marks) <= 2 * TIMED:
            self._marks.append(self._recorder.mark())
        return len(self._marks) <= TIMED or len(self._marks) > 2 * TIMED

    def times(self) -> Optional[Tuple[float, float]]:
        """Median ms of a recorded and of an eager step, once both are known."""
        if len(self._marks) <= 2 * TIMED or not self._marks[-1].query():
            return None
        steps = [
            start.elapsed_time(self._ends.get(i, end))
            for i, (start, end) in enumerate(zip(self._marks, self._marks[1:]))
        ]
        return statistics.median(steps[1:TIMED]), statistics.median(steps[TIMED + 1 :])
