"""Loaders under fastdp.prefetch: order, errors, threads, and how iterations end."""

import gc
import logging
import subprocess
import sys
import threading
import time
import weakref

import fastdp
import pytest
import torch
from nets import ints, linear, same
from torch.utils.data import DataLoader, TensorDataset

fetch = fastdp.prefetch
NAME = "fastdp-prefetch"


def wrap(module, n=2, **options):
    return fastdp.DataParallel(module, ["cpu"] * n, **options)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == NAME]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    assert not threads()
    yield
    assert not threads()


# Loaders.


def test_batches_come_in_order_and_at_most_depth_ahead():
    taken, handed = [], []

    def loader():
        for k in range(20):
            taken.append(k)
            assert k <= len(handed) + 2
            yield torch.full((2, 1), k)

    for batch in fetch(loader(), wrap(linear()), depth=2):
        handed.append(batch.gathered()[0].item())
        time.sleep(0.002)
    assert handed == taken == list(range(20))


def test_the_next_batches_are_loaded_while_a_step_runs():
    loaded = [threading.Event() for _ in range(4)]

    def loader():
        for event in loaded:
            event.set()
            yield ints(2, 3)

    fed = iter(fetch(loader(), wrap(linear()), depth=2))
    next(fed)
    assert loaded[1].wait(30) and loaded[2].wait(30)
    assert not loaded[3].wait(0.05)
    next(fed)
    assert loaded[3].wait(30)
    fed.close()


@pytest.mark.filterwarnings("ignore::fastdp.DataParallelWarning")
def test_workers_and_many_epochs():
    loader = DataLoader(TensorDataset(ints(9, 3)), batch_size=4, num_workers=1)
    dp = wrap(linear())
    fed = fetch(loader, dp)
    for _ in range(2):
        same(torch.cat([dp(x) for (x,) in fed]), dp.module(ints(9, 3)))
    next(iter(fed))


def test_the_loader_runs_in_the_callers_modes():
    seen = []

    def loader():
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        seen.append((torch.is_autocast_enabled("cpu"), threading.current_thread().name))
        yield ints(2, 3)

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        list(fetch(loader(), wrap(linear())))
    assert seen == [(False, False), (True, NAME)]


class Broken(Exception):
    pass


@pytest.mark.parametrize("error", [Broken("here"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_error_of_the_loader_is_raised_where_it_belongs(at, error):
    def loader():
        for k in range(at):
            yield ints(2, 3, seed=k)
        raise error

    got = []
    fed = iter(fetch(loader(), wrap(linear()), depth=4))
    with pytest.raises(type(error)) as info:
        for batch in fed:
            got.append(batch.gathered())
    assert info.value is error
    assert any(entry.name == "loader" for entry in info.traceback)
    same(got, [ints(2, 3, seed=k) for k in range(at)])
    assert next(fed, "over") == "over"


def test_an_error_keeps_nothing_alive():
    class Loader:
        def __iter__(self):
            yield ints(2, 3)
            raise Broken

    gc.collect()
    gc.disable()
    try:
        loader = Loader()
        gone = weakref.ref(loader)
        fed = fetch(loader, wrap(linear()))
        with pytest.raises(Broken):
            list(fed)
        del fed, loader
        assert gone() is None
    finally:
        gc.enable()


def test_batches_are_not_kept_while_the_next_is_waited_for():
    dp = wrap(linear())
    gone = []
    for batch in fetch([ints(2, 3, seed=k) for k in range(3)], dp):
        assert all(ref() is None for ref in gone)
        gone.append(weakref.ref(batch.slices[0]))
        del batch


def test_an_early_end_ends_the_loader():
    ended = []

    def loader():
        try:
            for k in range(100):
                yield ints(2, 3, seed=k)
        finally:
            ended.append(True)

    def leave():
        for batch in fetch(loader(), wrap(linear())):
            return batch

    leave()
    assert ended == [True] and not threads()
    with pytest.raises(Broken):
        for _ in fetch(loader(), wrap(linear())):
            raise Broken
    assert ended == [True, True] and not threads()
    fed = iter(fetch(loader(), wrap(linear())))
    next(fed)
    del fed
    assert ended == [True] * 3 and not threads()
    never_started = iter(fetch(loader(), wrap(linear())))
    del never_started
    assert not threads()


def test_no_batch_is_loaded_after_an_early_end():
    loaded, waits = [], threading.Event()

    def loader():
        for k in range(100):
            loaded.append(k)
            if k == 3:
                feeds = sys.modules["fastdp.prefetch"]._feeds
                (work,) = [feed._work for feed in feeds if feed._work is not None]
                waits.set()
                while not work.stopped:
                    time.sleep(0.001)
            yield ints(2, 3)

    for _ in fetch(loader(), wrap(linear()), depth=8):
        assert waits.wait(30)
        break
    assert loaded == [0, 1, 2, 3] and not threads()


def test_a_loader_that_is_stuck_is_told_of(monkeypatch, caplog):
    monkeypatch.setattr(sys.modules["fastdp.prefetch"], "_JOIN_S", 0.05)
    stuck, free = threading.Event(), threading.Event()

    def loader():
        yield ints(2, 3)
        stuck.set()
        free.wait(30)

    with caplog.at_level(logging.WARNING, "fastdp"):
        for _ in fetch(loader(), wrap(linear())):
            assert stuck.wait(30)
            break
    assert "the loader has not returned a batch for 0.05 s" in caplog.text
    (thread,) = threads()
    free.set()
    thread.join(30)


INTERRUPTED = """
import os, signal, threading, time
import torch, fastdp

dp = fastdp.DataParallel(torch.nn.Linear(3, 2), ["cpu", "cpu"])

def loader():
    for k in range(1000):
        time.sleep({wait})
        yield torch.ones(4, 3)

timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
try:
    for k, batch in enumerate(fastdp.prefetch(loader(), dp)):
        if k == 0:
            timer.start()
        dp(batch)
        time.sleep({work})
except KeyboardInterrupt:
    print([t.name for t in threading.enumerate() if "prefetch" in t.name])
    print(k < 900)
"""

ENDINGS = {
    "in the step": INTERRUPTED.format(wait=0.0, work=0.05),
    "in the wait": INTERRUPTED.format(wait=0.3, work=0.0),
    "at exit": """
import torch, fastdp
dp = fastdp.DataParallel(torch.nn.Linear(3, 2), ["cpu", "cpu"])
left_open = iter(fastdp.prefetch([torch.ones(4, 3)] * 100, dp))
next(left_open)
print([])
print(True)
""",
    "in a fork": """
import os, sys, torch, fastdp
dp = fastdp.DataParallel(torch.nn.Linear(3, 2), ["cpu", "cpu"])
fed = iter(fastdp.prefetch([torch.ones(4, 3)] * 100, dp))
next(fed)
sys.modules["fastdp.prefetch"]._JOIN_S = 600
child = os.fork()
if child == 0:
    del fed
    os._exit(0)
print([])
print(os.waitpid(child, 0)[1] == 0)
""",
}


@pytest.mark.parametrize("name", ENDINGS)
def test_an_end_by_force_leaves_no_thread(name):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ENDINGS[name]],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "[]\nTrue\n"), done.stderr
    assert done.stderr == ""


# Mistakes.


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"loader": 5}, TypeError, "loader is a int: it must be iterable"),
        ({"dp": linear()}, TypeError, "dp is a Linear: it must be a fastdp.DataParallel"),
        ({"depth": 0}, ValueError, "depth is 0: it must be at least 1"),
        ({"depth": 1.5}, TypeError, "depth is 1.5: it must be a whole number"),
        ({"depth": True}, TypeError, "depth is True"),
        ({"scatter": 1.5}, TypeError, "scatter is 1.5: it must be a key or a position"),
        ({"scatter": True}, TypeError, "scatter is True: it must be a key or a position"),
    ],
)
def test_mistakes_are_told_at_once(change, error, text):
    arguments = {"loader": [ints(2, 3)], "dp": wrap(linear()), "depth": 2, "scatter": None}
    with pytest.raises(error, match=text):
        fetch(**{**arguments, **change})


def test_a_loader_without_length_has_none():
    with pytest.raises(TypeError, match="has no len"):
        len(fetch(iter([]), wrap(linear())))
