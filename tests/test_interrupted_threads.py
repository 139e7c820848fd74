"""Ctrl-C while a thread of fastdp's is started, or while a deadline is set for the caller's: none
is left behind that nobody ends, and none is taken for one that runs."""

import contextlib
import sys
import threading
import time

import pytest
import torch
from interrupting import interrupt_at
from nets import Net, ints, linear

import fastdp
from fastdp import _C, deadlines

ENOUGH = 100  # points; fewer would mean that the profiler saw nothing


@contextlib.contextmanager
def interrupt_behind(name):
    """A KeyboardInterrupt as a function of that name returns."""

    def watch(frame, event, argument):
        if event == "c_return" and getattr(argument, "__name__", "") == name:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)


def threads(name):
    return [thread for thread in threading.enumerate() if thread.name == name]


def end_of(name, seconds=30):
    ends = time.monotonic() + seconds
    while threads(name) and time.monotonic() < ends:
        time.sleep(0.001)
    return not threads(name)


def test_while_the_thread_of_prefetch_starts():
    """It is there, and does not yet know its own number."""
    dp = fastdp.DataParallel(linear(), ["cpu"] * 2)
    for _ in range(20):
        batches = iter(fastdp.prefetch([ints(4, 3)] * 9, dp))
        with pytest.raises(KeyboardInterrupt), interrupt_behind("start_new_thread"):
            next(batches)
        assert end_of("fastdp-prefetch"), "it waits for somebody who takes batches"


def test_an_iteration_of_prefetch_whose_end_is_interrupted(monkeypatch):
    def interrupted(feed):
        raise KeyboardInterrupt

    dp = fastdp.DataParallel(linear(), ["cpu"] * 2)
    batches = iter(fastdp.prefetch([ints(4, 3)] * 9, dp))
    next(batches)
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["fastdp.prefetch"]._Feed, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            batches.close()
    assert len(threads("fastdp-prefetch")) == 1
    del batches
    assert end_of("fastdp-prefetch")


def test_while_the_watchdog_starts(monkeypatch):
    """Before its thread is there: the next mark starts another, and Python ends without a word."""
    watchdog = deadlines._Watchdog()

    def interrupted(thread):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            watchdog.start()
    watchdog.add(deadlines.Deadline(60))
    watchdog.start()
    watchdog._thread.join(0.2)
    watchdog.stop()
    assert watchdog._thread is None or not watchdog._thread.is_alive()


def test_the_caller_has_no_deadline_behind_interrupted_steps():
    dp = fastdp.DataParallel(Net(), ["cpu"] * 2, timeout_s=60)
    x = ints(4, 3)
    point, where, wrong = 0, [None], []
    while where:
        point += 1
        try:
            with interrupt_at(point) as where:
                dp(x).sum().backward()
        except KeyboardInterrupt:
            pass
        dp(x)  # what was left in a backward, behind its last line, ends with the next forward
        if _C.set_deadline(0) or deadlines.own_deadline() is not None:
            wrong.append(where)
    assert not wrong
    assert point > ENOUGH
    assert torch.is_grad_enabled()
