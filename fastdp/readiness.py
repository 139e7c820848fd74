"""Whether a replica may be compiled now, on this thread. The compiler is not safe for several
threads, nor under a capture: replicas that run side by side only run what has been compiled before,
and say `NotReady` before they have done anything; then they run again, in turn, and may compile.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Iterator

from .signatures import NotRecordable

_local = threading.local()


class NotReady(NotRecordable):
    """This forward would have to be compiled first. Nothing of it has run."""

    def __init__(self) -> None:
        super().__init__("what was compiled of it does not fit any more while it is recorded")


# Stands for the output of a replica that was not ready.
NOT_READY = object()


@contextlib.contextmanager
def only_ready() -> Iterator[None]:
    """Around calls of replicas that must not compile."""
    before = may_compile()
    _local.may_compile = False
    try:
        yield
    finally:
        _local.may_compile = before


def may_compile() -> bool:
    return getattr(_local, "may_compile", True)


@contextlib.contextmanager
def as_compiled() -> Iterator[None]:
    """As `only_ready`, where a part that is not compiled is to run as it is: what is recorded."""
    before = is_as_compiled()
    _local.as_compiled = True
    try:
        with only_ready():
            yield
    finally:
        _local.as_compiled = before


def is_as_compiled() -> bool:
    return getattr(_local, "as_compiled", False)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Around a call that compiles what is missing."""
    before = is_compiling()
    _local.compiling = True
    try:
        yield
    finally:
        _local.compiling = before


def is_compiling() -> bool:
    return getattr(_local, "compiling", False)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Around calls of replicas whose operators somebody wants to see."""
    before = getattr(_local, "uncompiled", False)
    _local.uncompiled = True
    try:
        yield
    finally:
        _local.uncompiled = before


def is_uncompiled() -> bool:
    return getattr(_local, "uncompiled", False)


@contextlib.contextmanager
def place(found: Any) -> Iterator[None]:
    """Around the compiled forward of the replica at this place: its parts ask for it."""
    before = current_place()
    _local.place = found
    try:
        yield
    finally:
        _local.place = before


def current_place() -> Any:
    return getattr(_local, "place", None)
