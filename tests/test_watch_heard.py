"""Watch hears what its own forward says, and nobody else; whatever it replaces is put back."""

import contextlib
import functools
import gc
import io
import logging
import os
import random
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from nets import Apply, ranked
from test_watch import (  # noqa: F401
    FACTORY,
    LOG,
    Watched,
    forward_of,
    nothing_is_left,
    untouched,
    watched,
)
from torch import nn

from fastdp import listeners
from fastdp.listeners import Listener
from fastdp.watch import Watch


def act_in_rank_1(act):
    def forward(self, x):
        if x[0, 0] == 1:
            act()
        return self.lin(x)

    return Apply(forward)


@pytest.mark.parametrize("act", [lambda: print("one"), lambda: LOG.error("one")])
def test_a_worker_thread_is_heard(act):
    assert "one" in watched(act_in_rank_1(act), ranked(2)).reason


def talk(stop, started):
    while not stop.is_set():
        print("elsewhere")
        print("elsewhere", file=sys.stderr)
        LOG.error("elsewhere")
        started.set()


def test_another_thread_is_not_heard():
    stop, started = threading.Event(), threading.Event()
    thread = threading.Thread(target=talk, args=(stop, started))
    thread.start()
    try:
        started.wait()
        for _ in range(20):
            assert watched(forward_of(lambda s: time.sleep(0.002)), steps=1).reason is None
    finally:
        stop.set()
        thread.join()


def test_a_progress_bar_of_another_thread_is_not_heard():
    tqdm = pytest.importorskip("tqdm")
    stop = threading.Event()

    def work():
        with tqdm.tqdm(total=10, mininterval=0) as bar:
            while not stop.is_set():
                bar.update(1)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(20):
            assert watched(forward_of(lambda s: time.sleep(0.002)), steps=1).reason is None
    finally:
        stop.set()
        thread.join()
    assert "writes to sys.stderr" in watched(forward_of(lambda s: list(tqdm.tqdm(range(3))))).reason


def test_a_stream_that_was_taken_earlier_is_heard():
    taken = sys.stderr
    handler = logging.StreamHandler(taken)
    assert "sys.stderr" in watched(forward_of(lambda s: taken.write("x"))).reason
    # A record is heard where it is made, and not where a handler writes it down.
    record = logging.LogRecord("fastdp", 40, "", 0, "text", None, None)
    assert watched(forward_of(lambda s: handler.emit(record))).reason is None


def test_everything_is_passed_on(capsys):
    with Watch([nn.Linear(1, 1)]) as watch:
        assert sys.stdout.write("abc") == 3
        print("def", file=sys.stderr)
        with pytest.raises(TypeError):
            sys.stdout.write(3)
    assert capsys.readouterr() == ("abc", "def\n")
    assert watch.reason == "it writes to sys.stdout: 'abc'"


def test_log_records_are_whole(caplog):
    with Watch([nn.Linear(1, 1)]) as watch:
        LOG.warning("%s and %s", 1, 2)
    assert [record.getMessage() for record in caplog.records] == ["1 and 2"]
    assert watch.reason == "it makes log records: a.user: '%s and %s'"


# What is put back, and when.


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_all_is_put_back_after_an_error(error):
    for _ in range(3):
        with pytest.raises(error), Watch([nn.Linear(1, 1)]):
            assert "write" in vars(sys.stdout)
            raise error
        assert untouched()


def test_nested_watches():
    module = nn.Linear(1, 1)
    with Watch([module]) as outer:
        with Watch([module]) as inner:
            pass
        assert inner.reason is None
        print("between")
        with Watch([module]) as second:
            pass
        assert second.reason is None
        assert listeners._listeners != ()
    assert outer.reason == "it writes to sys.stdout: 'between'"


def test_a_forward_that_watches_itself():
    inner = Watched(act_in_rank_1(lambda: print("one")), device_ids=["cpu", "cpu"])
    outer = Watched(Apply(lambda self, x: inner(x)), device_ids=["cpu", "cpu"])
    outer(ranked(4))
    assert "one" in outer.watch.reason


def test_concurrent_watches_hear_their_own():
    found, barrier, module = {}, threading.Barrier(4), nn.Linear(1, 1)

    def work(k):
        barrier.wait()
        for step in range(50):
            with Watch([module]) as watch:
                if k % 2:
                    print(f"thread {k}")
            found[k, step] = watch.reason

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = {k: f"it writes to sys.stdout: 'thread {k}'" if k % 2 else None for k in range(4)}
    assert found == {(k, step): want[k] for k in range(4) for step in range(50)}


def test_streams_that_change_between_watches(monkeypatch):
    module, first, second = nn.Linear(1, 1), io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", first)
    with Watch([module]) as outer:
        monkeypatch.setattr(sys, "stdout", second)
        with Watch([module]) as inner:
            print("to the second")
        assert inner.reason == "it writes to sys.stdout: 'to the second'"
        assert outer.reason is None
    assert outer.reason == inner.reason
    assert "write" not in vars(first) and "write" not in vars(second)
    assert second.getvalue() == "to the second\n"


class Slotted:
    __slots__ = ("text",)

    def write(self, text):
        self.text = text


@pytest.mark.parametrize("stream", [None, Slotted()])
def test_streams_that_cannot_be_listened_to(stream, monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream)
    with Watch([nn.Linear(1, 1)]) as watch:
        print("unheard")
    monkeypatch.undo()
    assert watch.reason is None


def test_one_object_as_both_streams(monkeypatch):
    both = io.StringIO()
    monkeypatch.setattr(sys, "stdout", both)
    monkeypatch.setattr(sys, "stderr", both)
    with Watch([nn.Linear(1, 1)]) as watch:
        print("x", file=sys.stderr)
    monkeypatch.undo()
    assert watch.reason == "it writes to sys.stdout: 'x'"
    assert "write" not in vars(both) and both.getvalue() == "x\n"


def test_replacements_of_others():
    """One that was there before comes back; one that was put over ours stays."""
    stream = io.StringIO()
    before = stream.write = lambda text: io.StringIO.write(stream, text.upper())
    with contextlib.redirect_stdout(stream), Watch([nn.Linear(1, 1)]) as watch:
        print("first")
    assert stream.write is before and watch.reason == "it writes to sys.stdout: 'first'"
    listener = Listener()
    with contextlib.redirect_stdout(stream):
        listener.start()
        ours, factory = stream.write, logging.getLogRecordFactory()
        over = stream.write = lambda text: ours(text * 2)
        record_over = functools.partial(factory)
        logging.setLogRecordFactory(record_over)
        listener.stop()
        print("ab", end="")
    assert stream.write is over and logging.getLogRecordFactory() is record_over
    assert stream.getvalue() == "FIRST\nABAB"
    for _ in range(2):
        with Watch([nn.Linear(1, 1)]):
            LOG.error("through both")
    logging.setLogRecordFactory(FACTORY)


def test_an_interrupt_while_it_puts_back(monkeypatch):
    remove, interrupts = listeners._StreamTap.remove, [KeyboardInterrupt, KeyboardInterrupt]

    def interrupted(self):
        if interrupts:
            raise interrupts.pop()
        remove(self)

    monkeypatch.setattr(listeners._StreamTap, "remove", interrupted)
    watch = Watch([nn.Linear(1, 1)])
    with pytest.raises(KeyboardInterrupt), watch:
        pass
    # The second try was interrupted too: the end of the watch itself is the third.
    assert listeners._taps
    del watch
    gc.collect()
    assert untouched()


def test_an_interrupt_while_it_starts(monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(listeners._StreamTap, "put", interrupted)
        with pytest.raises(KeyboardInterrupt), Watch([nn.Linear(1, 1)]):
            raise AssertionError("the block was entered")
    assert untouched()


def test_a_watch_that_is_never_left():
    watch = Watch([nn.Linear(1, 1)])
    watch.__enter__()
    assert listeners._listeners != ()
    del watch
    gc.collect()
    assert untouched()


@pytest.mark.parametrize("arguments", [(), (3,), (nn.Linear(1, 1),)])
@pytest.mark.filterwarnings("error")
def test_bad_arguments(arguments):
    with pytest.raises(TypeError):
        Watch(*arguments)
    gc.collect()


def test_it_keeps_no_module():
    module = nn.Linear(1, 1)
    alive = weakref.ref(module)
    with Watch([module]) as watch:
        pass
    del module
    gc.collect()
    assert alive() is None and watch.reason is None


def test_a_forked_child_may_watch():
    held, go = threading.Event(), threading.Event()

    def hold():
        with listeners._lock:
            held.set()
            go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with Watch([nn.Linear(1, 1)]) as watch:
                random.random()
            status = 0 if watch.reason == "it draws from Python's random" else 2
        finally:
            os._exit(status)
    go.set()
    thread.join()
    deadline = time.monotonic() + 60
    pid = 0
    while pid == 0 and time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if pid == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
        raise AssertionError("the child waits for a lock that nobody holds")
    assert os.waitstatus_to_exitcode(status) == 0


# Generators.


def test_numpy_is_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy.random")
    with Watch([nn.Linear(1, 1)]) as watch:
        assert "numpy.random" not in sys.modules
    assert "numpy.random" not in sys.modules and watch.reason is None


def test_another_bit_generator_of_numpys():
    former = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        with Watch([nn.Linear(1, 1)]) as watch:
            pass
        assert watch.reason is None
        with Watch([nn.Linear(1, 1)]) as watch:
            np.random.rand()
        assert watch.reason == "it draws from NumPy's global generator"
    finally:
        np.random.set_bit_generator(former)


def test_a_listener_that_stops_while_another_starts(monkeypatch):
    """A destructor may do that, at any allocation: the one that starts hears all the same."""
    first, second = Listener(), Listener()
    first.start()
    tap = listeners._tap

    def tap_in_between(made):
        tap(made)
        first.stop()

    first.stop()
    monkeypatch.setattr(listeners, "_tap", tap_in_between)
    second.start()
    try:
        logging.getLogger("model").warning("heard")
    finally:
        second.stop()
    assert "makes log records: model" in second.heard
