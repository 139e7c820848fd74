"""Who writes to the terminal, or makes a log record, while somebody listens.

While there is a listener, `write` of the objects that are sys.stdout and sys.stderr is replaced on
the objects themselves, so a writer that took them earlier is heard too; and so is logging's record
factory. Both pass everything on. When the last listener stops they are put back; where somebody
has put a replacement of his own over ours since, it is left, and ours goes on passing things on.

Heard are the listener's own thread and the threads of fastdp's replicas, and no other: a progress
bar elsewhere is nobody's business. Not heard: warnings (by default each is shown once) whether
they come by `warnings` or by logging, fastdp's own log records, records below their logger's level,
and what goes past these objects (`os.write`, `sys.stdout.buffer`, C++).
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import threading
from typing import Any, Callable, Iterable, List, Optional, Tuple

__all__ = ["Listener"]

# Names of the threads of replicas begin so (workers.py).
_WORKER = "fastdp-replica-"
# Modules whose writes are not a forward's own: a log record is heard where it is made.
_UNHEARD_WRITERS = {"warnings", "_py_warnings", "logging"}
_UNHEARD_LOGGERS = {"fastdp", "py.warnings"}
_SHOWN_CHARACTERS = 40

# Lets its own thread in again: a signal handler or a destructor may start or stop a listener.
_lock = threading.RLock()
_listeners: Tuple["Listener", ...] = ()
_taps: List[Any] = []


class Listener:
    """Hears from start() to stop(). `heard` is then the first thing, as a clause, or None."""

    __slots__ = ("heard", "_thread")

    def __init__(self) -> None:
        self.heard: Optional[str] = None
        self._thread = threading.get_ident()

    def start(self) -> None:
        global _listeners
        with _lock:
            # First: a destructor that runs in here may stop another listener, and the last one to
            # stop takes all taps away.
            _listeners = (*_listeners, self)
            if not any(isinstance(tap, _RecordTap) for tap in _taps):
                _tap(_RecordTap())
            for name in ("stdout", "stderr"):
                stream = getattr(sys, name)
                tapped = [tap for tap in _taps if tap.taps(stream)]
                if stream is not None and not tapped:
                    _tap(_StreamTap(stream, f"sys.{name}"))

    def stop(self) -> None:
        """Any number of times, and again after one that was interrupted."""
        try:
            self._stop()
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        global _listeners
        with _lock:
            _listeners = tuple(each for each in _listeners if each is not self)
            while _taps and not _listeners:
                _taps[-1].remove()
                _taps.pop()

    def concerns_this_thread(self) -> bool:
        if threading.get_ident() == self._thread:
            return True
        return threading.current_thread().name.startswith(_WORKER)


def _tell(what: Callable[[], str]) -> None:
    for listener in _listeners:
        if listener.heard is None and listener.concerns_this_thread():
            listener.heard = what()


def _tap(tap: Any) -> None:
    _taps.append(tap)  # first: what an interrupt leaves is removed by the last listener
    tap.put()


class _StreamTap:
    """`write` of one stream object."""

    __slots__ = ("_stream", "_name", "_had", "_former", "_write")

    def __init__(self, stream: Any, name: str) -> None:
        self._stream = stream
        self._name = name
        self._had = "write" in getattr(stream, "__dict__", {})
        self._former = stream.write
        self._write = self._made()

    def taps(self, stream: Any) -> bool:
        return self._stream is stream

    def _made(self) -> Callable[..., Any]:
        former, name = self._former, self._name

        def write(*args: Any, **kwargs: Any) -> Any:
            _tell_written(name, args, inspect.currentframe())
            return former(*args, **kwargs)

        return write

    def put(self) -> None:
        try:
            self._stream.write = self._write
        except (AttributeError, TypeError):
            pass  # an object without attributes of its own: it is not heard

    def remove(self) -> None:
        if getattr(self._stream, "__dict__", {}).get("write") is not self._write:
            return
        if self._had:
            self._stream.write = self._former
        else:
            del self._stream.write


def _tell_written(name: str, args: Iterable[Any], frame: Any) -> None:
    writer = None if frame is None or frame.f_back is None else frame.f_back.f_globals
    if writer is not None and writer.get("__name__") in _UNHEARD_WRITERS:
        return
    text = "".join(each for each in args if isinstance(each, str))
    if text:
        _tell(lambda: f"writes to {name}: {_short(text)}")


class _RecordTap:
    """logging's record factory."""

    __slots__ = ("_former", "_factory")

    def __init__(self) -> None:
        former = self._former = logging.getLogRecordFactory()

        def factory(*args: Any, **kwargs: Any) -> Any:
            record = former(*args, **kwargs)
            _tell_record(record)
            return record

        self._factory = factory

    def taps(self, stream: Any) -> bool:
        return False

    def put(self) -> None:
        logging.setLogRecordFactory(self._factory)

    def remove(self) -> None:
        if logging.getLogRecordFactory() is self._factory:
            logging.setLogRecordFactory(self._former)


def _tell_record(record: Any) -> None:
    name = getattr(record, "name", None)
    if not isinstance(name, str) or name in _UNHEARD_LOGGERS or name.startswith("fastdp."):
        return
    _tell(lambda: f"makes log records: {name}: {_short(str(getattr(record, 'msg', '')))}")


def _short(text: str) -> str:
    text = text.strip()
    cut = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
    return repr(cut)


def _forget_lock() -> None:
    """In a forked child: another thread of the parent may have held it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_lock)
