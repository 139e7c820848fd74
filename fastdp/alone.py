"""Acts that run one at a time. One that meets another does something else instead: it never waits.

An interrupt (Ctrl-C, a signal handler that raises) strikes as a call returns: behind
`lock.acquire()`, and before anybody knows that the lock is taken. So who acts is one attribute,
which is set and cleared without a call, inside a `try` that clears it.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, Optional

# How long `between` sleeps between two looks.
_PAUSE_S = 0.001


class Alone:
    """Any thread; an act may be interrupted, or come back here."""

    __slots__ = ("_lock", "_acting", "_thread")

    def __init__(self) -> None:
        self._lock = threading.RLock()  # held for moments, never while an act runs
        self._acting: Optional[object] = None
        self._thread = 0

    def run(self, act: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """act(), or otherwise() where an act is under way, on whichever thread."""
        mine, thread = object(), threading.get_ident()
        try:
            with self._lock:
                if self._acting is None:
                    self._acting, self._thread = mine, thread
            if self._acting is mine:
                return act()
        finally:
            if self._acting is mine:
                self._acting = None
        return otherwise()

    def between(self, look: Callable[[], Any]) -> Any:
        """look(), while no other thread acts: waits until then."""
        while True:
            with self._lock:
                if self._acting is None or self._thread == threading.get_ident():
                    return look()
            time.sleep(_PAUSE_S)
