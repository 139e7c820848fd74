"""Whether a replica may be compiled now, on this thread. The compiler is not safe for several
threads, nor under a capture: replicas that run side by side only run what has been compiled before,
and say `NotReady` before they have done anything; then they run again, in turn, and may compile.
"""

from __future__ import annotations

import threading
from typing import Any, Callable

from .signatures import NotRecordable


class _Local(threading.local):
    may_not_compile = as_compiled = is_compiling = is_uncompiled = False
    place: Any = None


_local = _Local()


class NotReady(NotRecordable):
    """This forward would have to be compiled first. Nothing of it has run."""

    def __init__(self) -> None:
        super().__init__("what was compiled of it does not fit any more while it is recorded")


# Stands for the output of a replica that was not ready.
NOT_READY = object()


def _held(name: str, value: Any, act: Callable[[], Any]) -> Any:
    """act(), while what this thread has by that name is `value`. No context manager, whose second
    half an interrupt may forestall: this thread would have the value for good."""
    before = getattr(_local, name)
    try:
        setattr(_local, name, value)
        return act()
    finally:
        setattr(_local, name, before)


def only_ready(act: Callable[[], Any]) -> Any:
    """act(), which calls replicas that must not compile."""
    return _held("may_not_compile", True, act)


def may_compile() -> bool:
    return not _local.may_not_compile


def as_compiled(act: Callable[[], Any]) -> Any:
    """As `only_ready`, where a part that is not compiled is to run as it is: what is recorded."""
    return _held("as_compiled", True, lambda: only_ready(act))


def is_as_compiled() -> bool:
    return _local.as_compiled


def compiling(act: Callable[[], Any]) -> Any:
    """act(), which compiles what is missing."""
    return _held("is_compiling", True, act)


def is_compiling() -> bool:
    return _local.is_compiling


def uncompiled(act: Callable[[], Any]) -> Any:
    """act(), which calls replicas whose operators somebody wants to see."""
    return _held("is_uncompiled", True, act)


def is_uncompiled() -> bool:
    return _local.is_uncompiled


def placed(place: Any, act: Callable[[], Any]) -> Any:
    """act(), the compiled forward of the replica at this place: its parts ask for it."""
    return _held("place", place, act)


def current_place() -> Any:
    return _local.place
