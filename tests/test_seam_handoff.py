"""Handoff: items and their references between two threads, deadlines, closing, signals."""

import gc
import signal
import sys
import threading
import time
import weakref

import pytest

from fastdp import _C

pytestmark = pytest.mark.seam


class Item:
    pass


def test_an_item_goes_through():
    handoff, item = _C.Handoff(), Item()
    count = sys.getrefcount(item)
    handoff.put(item)
    assert sys.getrefcount(item) == count + 1
    assert handoff.take(0) is item
    assert sys.getrefcount(item) == count
    for value in (None, 0, handoff):
        handoff.put(value)
        assert handoff.take(-1) is value


def test_put_into_a_full_one():
    handoff = _C.Handoff()
    first, second = Item(), Item()
    handoff.put(first)
    count = sys.getrefcount(second)
    with pytest.raises(RuntimeError, match="an item is still in it") as caught:
        handoff.put(second)
    assert type(caught.value) is RuntimeError
    del caught
    assert sys.getrefcount(second) == count
    assert handoff.take(0) is first
    handoff.put(second)
    assert handoff.take(1) is second


@pytest.mark.parametrize("timeout", [0, 0.0, 0.05, 0.25])
def test_timeout(timeout):
    handoff = _C.Handoff()
    start = time.monotonic()
    with pytest.raises(_C.TimeoutError, match=f"^take: no item came within {timeout} s$"):
        handoff.take(timeout)
    assert time.monotonic() - start >= timeout
    handoff.put(1)  # still of use
    assert handoff.take(timeout) == 1


def test_timeout_on_another_thread():
    result = []

    def wait():
        start = time.monotonic()
        try:
            _C.Handoff().take(0.25)
        except TimeoutError:
            result.append(time.monotonic() - start)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert result[0] >= 0.25


@pytest.mark.parametrize(
    "timeout, error, words",
    [(float("nan"), ValueError, "timeout_s: must be a number, got nan"), ("1", TypeError, "")],
)
def test_timeout_refusals(timeout, error, words):
    with pytest.raises(error, match=words):
        _C.Handoff().take(timeout)


@pytest.mark.parametrize("timeout", [float("inf"), 1e300, -1, 60, 60.5])
def test_long_timeouts_end_with_the_item(timeout):
    handoff = _C.Handoff()
    timer = threading.Timer(0.02, handoff.put, ["late"])
    timer.start()
    assert handoff.take(timeout) == "late"
    timer.join()


def test_constructor_takes_nothing():
    with pytest.raises(TypeError, match=r"Handoff\(\) takes no arguments"):
        _C.Handoff(1)
    with pytest.raises(TypeError, match=r"Handoff\(\) takes no arguments"):
        _C.Handoff(size=1)


def test_ping_pong():
    there, back = _C.Handoff(), _C.Handoff()

    def work():
        try:
            while True:
                back.put(there.take(-1) + 1)
        except _C.AbortedError:
            back.put("closed")

    thread = threading.Thread(target=work)
    thread.start()
    for k in range(2000):
        there.put(k)
        assert back.take(30) == k + 1
    there.close()
    assert back.take(30) == "closed"
    thread.join()


def test_close():
    handoff = _C.Handoff()
    handoff.put("kept")
    handoff.close()
    handoff.close()
    assert handoff.take(0) == "kept"  # what is in it can still be taken
    for timeout in (0, 0.01, -1):
        with pytest.raises(_C.AbortedError, match="closed"):
            handoff.take(timeout)
    item = Item()
    count = sys.getrefcount(item)
    with pytest.raises(_C.AbortedError, match="closed"):
        handoff.put(item)
    assert sys.getrefcount(item) == count


@pytest.mark.parametrize("on_main", [True, False])
def test_close_wakes(on_main):
    handoff, outcome = _C.Handoff(), []

    def wait():
        try:
            handoff.take(-1)
        except _C.AbortedError:
            outcome.append("aborted")

    timer = threading.Timer(0.05, handoff.close)
    timer.start()
    if on_main:
        wait()
    else:
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(30)
    timer.join()
    assert outcome == ["aborted"]


def test_one_taker_at_a_time():
    handoff = _C.Handoff()
    thread = threading.Thread(target=lambda: handoff.take(30))
    thread.start()
    deadline = time.monotonic() + 30
    while True:
        try:
            handoff.take(0)
        except _C.TimeoutError:  # the thread has not come so far yet
            assert time.monotonic() < deadline
            time.sleep(0.001)
        except RuntimeError as error:
            assert str(error) == "take: another thread is waiting for an item"
            break
    handoff.put(1)
    thread.join()
    handoff.put(2)
    assert handoff.take(0) == 2


def test_item_left_inside_is_dropped():
    item = Item()
    alive = weakref.ref(item)
    handoff = _C.Handoff()
    handoff.put(item)
    del item
    gc.collect()
    assert alive() is not None
    del handoff
    assert alive() is None


def test_a_cycle_through_the_item_is_collected():
    item, handoff = Item(), _C.Handoff()
    item.handoff = handoff
    handoff.put(item)
    alive = weakref.ref(item)
    assert handoff in gc.get_referrers(item)
    del item, handoff
    gc.collect()
    assert alive() is None


def test_collector_sees_nothing_after_take():
    item, handoff = Item(), _C.Handoff()
    handoff.put(item)
    handoff.take(0)
    assert item not in gc.get_referents(handoff)


# Signals. The handlers run on the main thread, which is the one that waits.


class Raised(Exception):
    pass


@pytest.fixture
def alarm():
    def handler(number, frame):
        raise Raised

    former = signal.signal(signal.SIGALRM, handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, former)


@pytest.mark.parametrize("timeout", [-1, 600])
def test_a_signal_ends_the_wait(alarm, timeout):
    handoff = _C.Handoff()
    with pytest.raises(Raised):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        handoff.take(timeout)
    handoff.put("after")  # no sleeper is left behind
    assert handoff.take(0) == "after"


@pytest.mark.parametrize("timeout", [-1, 600])
def test_ctrl_c_raised_on_another_thread(timeout):
    handoff = _C.Handoff()
    timer = threading.Timer(0.05, signal.raise_signal, [signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        handoff.take(timeout)
    timer.join()


def test_a_handler_that_does_not_raise_does_not_end_the_wait():
    handoff, seen = _C.Handoff(), []

    def handle(number, frame):
        seen.append(number)
        if len(seen) == 3:
            handoff.put("the third")

    former = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.03, 0.03)
        assert handoff.take(600) == "the third"
        start = time.monotonic()
        with pytest.raises(_C.TimeoutError):
            handoff.take(0.1)
        assert time.monotonic() - start >= 0.1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def test_references_over_many_items():
    there, back = _C.Handoff(), _C.Handoff()
    item = Item()

    def work():
        while (got := there.take(-1)) is not None:
            back.put(got)

    thread = threading.Thread(target=work)
    thread.start()
    count = sys.getrefcount(item)
    for _ in range(3000):
        there.put(item)
        assert back.take(30) is item
    there.put(None)
    thread.join()
    assert sys.getrefcount(item) == count
