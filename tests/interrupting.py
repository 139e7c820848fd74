"""An interrupt at a chosen point of what fastdp does: what the tests of interrupts share."""

import contextlib
import os
import sys

import fastdp

ROOT = os.path.dirname(os.path.abspath(fastdp.__file__))


def is_ours(frame):
    return frame is not None and frame.f_code.co_filename.startswith(ROOT)


@contextlib.contextmanager
def interrupt_at(point):
    """Raises KeyboardInterrupt at the point-th call of a function of the package, or return to one
    from elsewhere; gives a list that then says where that was, and stays empty when there are
    fewer."""
    struck, count = [], 0

    def watch(frame, event, argument):
        nonlocal count
        inside = is_ours(frame)
        back = event == "return" and not inside and is_ours(frame.f_back)
        if not back and not (inside and event in ("call", "c_return")):
            return
        count += 1
        if count == point:
            name = getattr(argument, "__name__", frame.f_code.co_name)
            file = os.path.basename(frame.f_code.co_filename)
            struck.append(f"point {point}: {event} of {name}, {file}:{frame.f_lineno}")
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(watch)
    try:
        yield struck
    finally:
        sys.setprofile(None)
