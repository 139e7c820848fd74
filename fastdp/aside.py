"""Work on a thread of its own, while the caller waits, so that no signal strikes in it.

For what runs under torch's fake tensors: torch asks them for their device from C++ that cannot
raise, and Python answers. Ctrl-C there ends the process ("terminate called").
"""

from __future__ import annotations

import atexit
import threading
import weakref
from queue import SimpleQueue
from typing import Any, Callable

from .thread_state import ThreadState
from .workers import threads_are_green

# How long work that nobody waits for is waited for when Python ends.
_EXIT_S = 0.5


class Stopped(BaseException):
    """In work that nobody waits for any more."""


class Stop:
    """Tells the work, which looks now and then where it may raise, whether to go on."""

    def __init__(self) -> None:
        self.is_asked = False

    def look(self) -> None:
        if self.is_asked:
            raise Stopped


def run_aside(work: Callable[[Stop], Any]) -> Any:
    """work(stop) in the caller's state (thread_state.py), or what it raises. A caller who is
    interrupted goes on at once; the work ends where it looks next."""
    stop = Stop()
    if threads_are_green():
        return work(stop)
    state, answer = ThreadState(), SimpleQueue()  # type: ignore[var-annotated]

    def run() -> None:
        try:
            answer.put((state.run(lambda: work(stop)), None))
        except BaseException as error:
            answer.put((None, error))

    thread = threading.Thread(target=run, name="fastdp-aside", daemon=True)
    _running.add(thread)
    try:
        thread.start()
        result, error = answer.get()
    finally:
        stop.is_asked = True
    if error is None:
        return result
    try:
        raise error
    finally:
        del error  # a frame that names its own exception is a cycle


_running: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """A thread that comes back from C++ when there is no Python takes the process down."""
    for thread in list(_running):
        if thread.is_alive():
            thread.join(_EXIT_S)
