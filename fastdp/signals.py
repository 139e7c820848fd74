"""Exceptions of signal handlers, such as a timeout's (signal.alarm): they are the caller's,
wherever they strike, and no failure of what they strike in."""

from __future__ import annotations

import inspect
from typing import Any, List


def is_from_handler(error: BaseException) -> bool:
    """Whether a handler raised it. Python gives a handler the frame that it interrupts, which is
    its caller's too; ordinary functions are not given that."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        interrupted, trace = trace.tb_frame, trace.tb_next
        if any(given is interrupted for given in _arguments(trace.tb_frame)):
            return True
    return False


def _arguments(frame: Any) -> List[Any]:
    """What a function was given by position. Not its other variables: to look up a caller's frame
    is what ordinary functions do."""
    code, found = frame.f_code, frame.f_locals
    given = [found.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        rest = found.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
        given += rest if isinstance(rest, tuple) else ()
    return given
