"""What an engine knows of one signature."""

from __future__ import annotations

from typing import Any, Dict, Hashable, NamedTuple, Optional, Tuple

from .asked import Asked
from .recordings import Recording
from .trials import Trial


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
        self.reason = ""  # why it is eager for good
        self.note = ""  # why the last eager step was, where a recorded one had been there
        self.snapshot: Any = None
        self.asked = Asked()
        self.recording: Optional[Recording] = None
        self.trial: Optional[Trial] = None
        self.times: Optional[Tuple[float, float]] = None

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
