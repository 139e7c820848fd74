"""What an engine knows of one signature."""

from __future__ import annotations

import time
from typing import Any, Dict, Hashable, NamedTuple, Optional, Tuple

from .asked import Asked
from .recordings import Recording
from .trials import Trial

# A trial that eager won by less than this factor is held once more, after so many eager steps: at
# the start of a run much else may run beside it.
_CLOSE = 1.5
AGAIN_AFTER = 200

# How long a recording is waited for that has to be free, in seconds.
_PATIENCE_S = 0.1


class Key(NamedTuple):
    """A signature."""

    arguments: Hashable
    place: Hashable  # of the module's parameters and buffers
    training: bool
    state: Hashable
    dim: int


class Entry:
    """What is known of one signature."""

    def __init__(self, number: int, key: Key) -> None:
        self.number = number
        self.key = key
        self.steps: Dict[str, int] = {"eager": 0, "graph": 0}
        self.watched = 0
        self.restarts = 0
        self.reason = ""  # why it is eager, for good or until it is tried again
        self.note = ""  # why the last eager step was, where a recorded one had been there
        self.snapshot: Any = None
        self.asked = Asked()
        self.recording: Optional[Recording] = None
        self.trial: Optional[Trial] = None
        self.times: Optional[Tuple[float, float]] = None
        self._lost = 0  # trials
        self._again_at: Optional[int] = None  # as many eager steps

    def order(self) -> int:
        """That in which signatures were met."""
        return self.number

    def lose(self, graph_ms: float, eager_ms: float) -> str:
        """Its trial was won by eager: why it is eager now."""
        self._lost += 1
        said = f"eager is faster: {eager_ms:.2f} ms against {graph_ms:.2f} ms"
        if self._lost > 1 or graph_ms >= _CLOSE * eager_ms:
            return said
        self._again_at = self.steps["eager"] + AGAIN_AFTER
        return f"{said}; that was close, and is tried once more {AGAIN_AFTER} steps later"

    def is_tried_again(self) -> bool:
        """Whether a trial that was lost is to be held once more, from this step on."""
        if self._again_at is None or self.steps["eager"] < self._again_at:
            return False
        self._again_at = None
        return True

    def forget(self) -> None:
        self.snapshot = self.recording = self.trial = None
        self.asked = Asked()
        self.watched = 0

    def description(self) -> Dict[str, Any]:
        engine = "graph" if self.recording is not None else "eager"
        result: Dict[str, Any] = {"engine": engine, "steps": dict(self.steps)}
        if self.reason or self.note:
            result["reason"] = self.reason or self.note
        if self.recording is not None:
            result["bytes"] = self.recording.size_bytes()
        if self.times:
            result["graph_ms"], result["eager_ms"] = self.times
        return result


def stays_busy(recording: Recording) -> bool:
    """Whether somebody keeps the graph of its last forward. A backward that raised on one of
    autograd's threads is let go there a moment after its caller has the error, and that thread
    needs the GIL for it."""
    ends_s = time.monotonic() + _PATIENCE_S
    while recording.busy() and time.monotonic() < ends_s:
        time.sleep(1e-3)
    return recording.busy()
