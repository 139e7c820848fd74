"""The watchdog of a wrapper with `timeout_s`: communication of a step that is not over by then is a
`CommunicationTimeoutError`, with the flight recorder's text.

What GPUs do is enqueued, and nobody here waits for it. So behind each forward, and behind each move
in a backward, events are recorded; one that has not passed `timeout_s` after it was recorded is
late. That is looked at

- when a forward starts and when a node of a backward begins to move: these raise;
- while a forward waits because communication of more than a few forwards before it is not over. A
  loop that never asks for a number would else fill the driver's queue, and never come back;
- by a thread, which can raise nothing in another one that is inside CUDA (`loss.item()`): it writes
  the error into the log, once.

What is late stays so until it has passed: each forward raises until then, and trains on afterwards.
Waits of the core on the host, on threads that move for the wrapper, have the same deadline.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from typing import Any, Callable, ContextManager, Deque, List, Optional, Sequence, Tuple

import torch

from . import _C, _torch_cuda, options

__all__ = ["CommunicationTimeoutError"]

_log = logging.getLogger("fastdp")

# Forwards whose communication may be under way when another starts.
_MAX_AHEAD = 3
# How long whoever waits for the oldest sleeps between two looks, and the thread between two of its.
_PAUSE_S = 0.0002
_LOOK_S = 0.1
# How long the thread is waited for when Python ends.
_EXIT_S = 0.5

_own = threading.local()


class CommunicationTimeoutError(_C.TimeoutError):
    """Communication of a step that was not over within the wrapper's `timeout_s`. A TimeoutError.
    The text says on which devices, and ends with the flight recorder's last operations."""

    __module__ = "fastdp"  # as EngineError's


def own_deadline() -> Optional[Deadline]:
    """That of the forward that this thread is inside of."""
    return getattr(_own, "deadline", None)


def _own_ms() -> int:
    """What the core has of it. Not asked of the core, which tells as it is set anew: an interrupt
    could strike in between, and nobody would know what to set again."""
    deadline = own_deadline()
    return 0 if deadline is None else deadline.timeout_ms()


class _Mark:
    """Events behind something that was enqueued."""

    __slots__ = ("what", "events", "recorded", "is_forward", "is_told")

    def __init__(self, what: str, streams: Sequence[Any], is_forward: bool) -> None:
        self.what = what
        self.is_forward = is_forward
        self.is_told = False
        self.events: List[Tuple[torch.device, Any]] = []
        for stream in streams:
            event = torch.cuda.Event()
            event.record(stream)
            self.events.append((stream.device, event))
        self.recorded = time.monotonic()

    def left(self) -> List[torch.device]:
        """The devices that are not there yet."""
        return [device for device, event in self.events if not event.query()]


class Deadline:
    """The deadline of one wrapper, and what of its communication may not be over."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._marks: Deque[_Mark] = deque()
        self._lock = threading.Lock()  # guards _marks
        _watchdog.add(self)

    def run(self, streams: Callable[[], Sequence[Any]], act: Callable[[], Any]) -> Any:
        """A forward: act(). `streams` gives those that come behind all that it enqueued."""
        if streams() and _torch_cuda.is_capturing():  # in a user's graph nothing can be asked
            return act()
        outer, before_ms = own_deadline(), _own_ms()
        try:
            _own.deadline = self
            _C.set_deadline(self.timeout_ms())
            self.check(_MAX_AHEAD)
            result = act()
            self.mark("a forward", streams(), True)
            return result
        except _C.TimeoutError as error:
            raise_told(error, self)
        finally:
            _own.deadline = outer
            _C.set_deadline(before_ms)

    def around(
        self, inner: ContextManager[Any], streams: Sequence[Any], what: str
    ) -> ContextManager[Any]:
        """`inner`, around a move of a backward that is enqueued on the streams."""
        return _Around(self, inner, streams, what)

    def timeout_ms(self) -> int:
        return max(1, int(self.timeout_s * 1000))

    def mark(self, what: str, streams: Sequence[Any], is_forward: bool = False) -> None:
        if not streams:
            return
        mark = _Mark(what, streams, is_forward)
        with self._lock:
            self._marks.append(mark)
        _watchdog.start()

    def check(self, ahead: Optional[int] = None) -> None:
        """Raises if something is late. With `ahead` it waits until no more forwards than that are
        under way."""
        while True:
            oldest = self._oldest()
            if oldest is None:
                return
            if self._is_late(oldest):
                raise CommunicationTimeoutError(self._text(oldest))
            if ahead is None or self._forwards() <= ahead:
                return
            time.sleep(_PAUSE_S)

    def tell(self) -> None:
        """What the thread does: into the log with what is late, once."""
        with self._lock:
            oldest = self._marks[0] if self._marks else None
        if oldest is None or oldest.is_told or not self._is_late(oldest):
            return  # devices are asked only then: nobody's capture is disturbed by this thread
        oldest = self._oldest()
        if oldest is not None and self._is_late(oldest) and not oldest.is_told:
            oldest.is_told = True
            _log.error("%s", self._text(oldest))

    def forget(self) -> None:
        """In a forked child, which must not destroy the parent's events."""
        _left_by_parent.append(self._marks)
        self._marks, self._lock = deque(), threading.Lock()

    def _oldest(self) -> Optional[_Mark]:
        """The first mark that has not passed; those before it are dropped."""
        while True:
            with self._lock:
                if not self._marks:
                    return None
                oldest = self._marks[0]
            if oldest.left():
                return oldest
            with self._lock:
                if self._marks and self._marks[0] is oldest:
                    self._marks.popleft()

    def _forwards(self) -> int:
        with self._lock:
            return sum(mark.is_forward for mark in self._marks)

    def _is_late(self, mark: _Mark) -> bool:
        return time.monotonic() - mark.recorded >= self.timeout_s

    def _text(self, mark: _Mark) -> str:
        devices = ", ".join(map(str, dict.fromkeys(mark.left()))) or "no device any more"
        seconds = time.monotonic() - mark.recorded
        return (
            f"the communication of a step was not over within {self.timeout_s:g} s (timeout_s): "
            f"{devices}: what {mark.what} enqueued {seconds:.1f} s ago has not finished. A device "
            "that never finishes is lost, and this process with it; if it does finish, the wrapper "
            f"trains on, and parameters are as this step found them.\n{_C.dump()}"
        )


def raise_told(error: _C.TimeoutError, deadline: Deadline) -> None:
    """Raises what a wait of the core ran into, as the named error with the recorder's text."""
    if isinstance(error, CommunicationTimeoutError):
        raise error
    raise CommunicationTimeoutError(
        f"the communication of a step was not over within {deadline.timeout_s:g} s (timeout_s): "
        f"{error}\n{_C.dump()}"
    ) from error


class _Around:
    __slots__ = ("_deadline", "_inner", "_streams", "_what", "_before_ms")

    def __init__(
        self, deadline: Deadline, inner: ContextManager[Any], streams: Sequence[Any], what: str
    ) -> None:
        self._deadline = deadline
        self._inner = inner
        self._streams = streams
        self._what = what

    def __enter__(self) -> None:
        self._deadline.check()
        self._before_ms = _own_ms()
        try:
            _C.set_deadline(self._deadline.timeout_ms())
            self._inner.__enter__()
        except BaseException:  # __exit__ will not be called
            _C.set_deadline(self._before_ms)
            raise

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self._inner.__exit__(kind, error, trace)
        finally:
            _C.set_deadline(self._before_ms)
        if isinstance(error, _C.TimeoutError):
            raise_told(error, self._deadline)
        if error is None:
            self._deadline.mark(self._what, self._streams)


class _Watchdog:
    """The thread that looks after all deadlines of the process; there while there are any."""

    def __init__(self) -> None:
        self._deadlines: weakref.WeakSet[Deadline] = weakref.WeakSet()
        self._lock = threading.Lock()  # guards _thread and _deadlines
        self._ends = threading.Event()
        self._thread: Optional[threading.Thread] = None

    def add(self, deadline: Deadline) -> None:
        with self._lock:
            self._deadlines.add(deadline)

    def start(self) -> None:
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name="fastdp-watchdog", daemon=True)
                thread.start()
                self._thread = thread  # last: one that an interrupt kept from starting is none

    def stop(self) -> None:
        thread = self._thread
        self._ends.set()
        if thread is not None:
            thread.join(_EXIT_S)

    def _serve(self) -> None:
        while not self._ends.wait(_LOOK_S):
            with self._lock:
                deadlines = list(self._deadlines)
                if not deadlines:
                    self._thread = None
                    return
            for deadline in deadlines:
                try:
                    deadline.tell()
                except Exception as error:  # of the device: whoever works with it will meet it too
                    _log.error("the watchdog cannot ask a device: %s", error)
            del deadlines, deadline


_watchdog = _Watchdog()
_left_by_parent: List[Any] = []


def _forget_all() -> None:
    global _watchdog
    deadlines = list(_watchdog._deadlines)  # its lock may be held by a thread that is not here
    _watchdog = _Watchdog()
    for deadline in deadlines:
        deadline.forget()
        _watchdog.add(deadline)


os.register_at_fork(after_in_child=_forget_all)
atexit.register(lambda: _watchdog.stop())


class Watched:
    """The part of `DataParallel` that keeps the deadline of its forwards."""

    def _fastdp_run(self, method: Optional[str], inputs: Any, kwargs: Any) -> Any:
        own: Any = self
        timeout_s = options.timeout_s(own._fastdp_timeout_s)
        if timeout_s is None or len(own.device_ids) < 2 or own.__dict__.get("_is_replica"):
            return own._fastdp_step(method, inputs, kwargs)
        runtime = own._fastdp_get_runtime()
        return runtime.deadline_of(timeout_s).run(
            runtime.current_streams, lambda: own._fastdp_step(method, inputs, kwargs)
        )
