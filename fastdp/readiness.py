"""Whether a replica may be compiled now, on this thread. The compiler is not safe for several
threads, nor under a capture: replicas that run side by side only run what has been compiled before,
and say `NotReady` before they have done anything; then they run again, in turn, and may compile.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, ContextManager, Iterator

from .signatures import NotRecordable

_local = threading.local()


class NotReady(NotRecordable):
    """This forward would have to be compiled first. Nothing of it has run."""

    def __init__(self) -> None:
        super().__init__("what was compiled of it does not fit any more while it is recorded")


# Stands for the output of a replica that was not ready.
NOT_READY = object()


@contextlib.contextmanager
def _held(name: str, value: Any) -> Iterator[None]:
    """What this thread has by that name is `value` meanwhile."""
    before = getattr(_local, name, None)
    setattr(_local, name, value)
    try:
        yield
    finally:
        setattr(_local, name, before)


def only_ready() -> ContextManager[None]:
    """Around calls of replicas that must not compile."""
    return _held("may_not_compile", True)


def may_compile() -> bool:
    return not getattr(_local, "may_not_compile", False)


@contextlib.contextmanager
def as_compiled() -> Iterator[None]:
    """As `only_ready`, where a part that is not compiled is to run as it is: what is recorded."""
    with _held("as_compiled", True), only_ready():
        yield


def is_as_compiled() -> bool:
    return bool(getattr(_local, "as_compiled", False))


def compiling() -> ContextManager[None]:
    """Around a call that compiles what is missing."""
    return _held("compiling", True)


def is_compiling() -> bool:
    return bool(getattr(_local, "compiling", False))


def uncompiled() -> ContextManager[None]:
    """Around calls of replicas whose operators somebody wants to see."""
    return _held("uncompiled", True)


def is_uncompiled() -> bool:
    return bool(getattr(_local, "uncompiled", False))


def place(found: Any) -> ContextManager[None]:
    """Around the compiled forward of the replica at this place: its parts ask for it."""
    return _held("place", found)


def current_place() -> Any:
    return getattr(_local, "place", None)
