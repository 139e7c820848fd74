"""Turns: short forwards one after the other, long ones at once, and no deadlock where replicas wait
for each other. The clock is the test's own."""

import threading

import pytest
import torch
from nets import Apply, ints, linear, ranked, same

from fastdp import DataParallel, _C, pace
from fastdp.pace import Pace
from fastdp.workers import Teams, run_jobs

row = pytest.mark.row
CPU = torch.device("cpu")
GPUS = [torch.device("cuda:0"), torch.device("cuda:1")]  # named, never used


class Clock:
    """Shows a time that only the test moves on."""

    def __init__(self):
        self.now_s = 100.0

    def perf_counter(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pace, "time", clock)
    return clock


def run(a_pace, clock, seconds):
    with a_pace.timed():
        clock.now_s += seconds


class Turn:
    """A hand-off that notes how long one is ready to wait for it."""

    def __init__(self, error=None):
        self.error, self.timeouts = error, []

    def take(self, timeout_s):
        self.timeouts.append(timeout_s)
        if self.error is not None:
            raise self.error


def test_the_first_forward_takes_no_turns(clock):
    a_pace = Pace()
    assert not a_pace.takes_turns([CPU, CPU])
    run(a_pace, clock, 0.001)
    assert a_pace.takes_turns([CPU, CPU])


@pytest.mark.parametrize("seconds, takes_turns", [(0.0149, True), (0.0151, False), (3.0, False)])
def test_only_short_forwards_take_turns(clock, seconds, takes_turns):
    a_pace = Pace()
    run(a_pace, clock, seconds)
    assert a_pace.takes_turns([CPU, CPU]) is takes_turns


def test_a_forward_that_grows_longer_is_noticed_and_one_slow_one_is_not(clock):
    a_pace = Pace()
    run(a_pace, clock, 0.001)
    run(a_pace, clock, 0.05)
    assert a_pace.takes_turns([CPU, CPU])  # 0.8 * 1 ms + 0.2 * 50 ms
    for _ in range(3):
        run(a_pace, clock, 0.05)
    assert not a_pace.takes_turns([CPU, CPU])
    for _ in range(12):
        run(a_pace, clock, 0.001)
    assert a_pace.takes_turns([CPU, CPU])


def test_a_failed_forward_is_no_measure(clock):
    a_pace = Pace()
    with pytest.raises(KeyboardInterrupt), a_pace.timed():
        clock.now_s += 0.001
        raise KeyboardInterrupt
    assert not a_pace.takes_turns([CPU, CPU])


@pytest.mark.parametrize("usual_s, patience_s", [(0.001, 0.02), (0.005, 0.02), (0.01, 0.04)])
def test_a_turn_is_awaited_for_a_few_forwards(clock, usual_s, patience_s):
    a_pace, turn = Pace(), Turn()
    run(a_pace, clock, usual_s)
    a_pace.await_turn(turn)
    assert turn.timeouts == [pytest.approx(patience_s)]
    assert a_pace.takes_turns([CPU, CPU])


def test_a_turn_that_does_not_come_ends_the_turns_for_good(clock):
    a_pace = Pace()
    run(a_pace, clock, 0.001)
    a_pace.await_turn(Turn(_C.TimeoutError("handoff: no item in 20 ms")))
    for _ in range(100):
        run(a_pace, clock, 0.001)
        assert not a_pace.takes_turns([CPU, CPU])


def test_an_abandoned_turn_says_so(clock):
    a_pace = Pace()
    run(a_pace, clock, 0.001)
    with pytest.raises(_C.AbortedError):
        a_pace.await_turn(Turn(_C.AbortedError("closed")))


@pytest.mark.parametrize("devices", [GPUS, GPUS[:1] * 2])
def test_gpus_take_no_turns(clock, devices):
    a_pace = Pace()
    run(a_pace, clock, 0.001)
    assert not a_pace.takes_turns(devices)


# Whole wrappers.


def on_host(module, n):
    return DataParallel(module, device_ids=["cpu"] * n)


@pytest.fixture
def patient(monkeypatch):
    """On a busy machine a turn may take long; it must not end the turns here."""
    monkeypatch.setattr(pace, "_LEAST_PATIENCE_S", 60.0)


def spans():
    """A forward that notes when each replica starts and ends, and the notes."""
    notes, lock = [], threading.Lock()

    def forward(self, x):
        rank = int(x[0, 0])
        with lock:
            notes.append(("start", rank))
        out = self.lin(x)
        with lock:
            notes.append(("end", rank))
        return out

    return forward, notes


@row("J2", why="threads; short forwards take turns")
@pytest.mark.usefixtures("patient")
def test_short_forwards_take_turns(clock):
    forward, notes = spans()
    dp = on_host(Apply(forward), 4)
    dp(ranked(4))
    for _ in range(20):
        notes.clear()
        same(dp(ranked(4)).detach(), linear()(ranked(4)).detach())
        assert notes == [(what, rank) for rank in range(4) for what in ("start", "end")]


@row("J2", why="threads; long forwards run at once")
@pytest.mark.usefixtures("patient")
def test_long_forwards_run_at_once(clock):
    """Each waits for all others; with turns they would wait for long, and the barrier breaks."""
    barrier = threading.Barrier(3)

    def forward(self, x):
        clock.now_s += 0.1
        barrier.wait(20)
        return self.lin(x)

    dp = on_host(Apply(forward), 3)
    for _ in range(5):
        same(dp(ranked(3)).detach(), linear()(ranked(3)).detach())
    assert not dp._fastdp_runtime.teams.pace._gave_up


@row("J2", why="threads; replicas that wait for each other")
def test_short_forwards_that_wait_for_each_other_do_not_hang(clock, monkeypatch):
    """The case of batch norm synchronised by queues. Taking turns is given up, for good: after
    the first such call nothing is waited for any more."""
    waiting, barrier = [], threading.Barrier(3)

    def forward(self, x):
        if waiting:
            barrier.wait(20)
        return self.lin(x)

    dp = on_host(Apply(forward), 3)
    dp(ranked(3))
    a_pace = dp._fastdp_runtime.teams.pace
    waiting.append(True)
    same(dp(ranked(3)).detach(), linear()(ranked(3)).detach())
    assert a_pace._gave_up
    monkeypatch.setattr(pace, "_LEAST_PATIENCE_S", 60.0)
    for _ in range(3):
        same(dp(ranked(3)).detach(), linear()(ranked(3)).detach())


@row("J2", why="threads; short forwards take turns: an error in one")
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.usefixtures("patient")
def test_an_error_passes_the_turn_on(clock, rank):
    failing = []

    def forward(self, x):
        if failing and int(x[0, 0]) == rank:
            raise ValueError("no")
        return self.lin(x)

    dp = on_host(Apply(forward), 3)
    dp(ranked(3))
    failing.append(True)
    with pytest.raises(ValueError, match=f"replica {rank}"):
        dp(ranked(3))
    failing.clear()
    same(dp(ranked(3)).detach(), linear()(ranked(3)).detach())


@row("I3", why="short forwards take turns")
@pytest.mark.usefixtures("patient")
def test_an_interrupt_ends_those_that_wait_for_their_turn(clock):
    interrupted, ran = [], []

    def forward(self, x):
        ran.append(int(x[0, 0]))
        if interrupted and x[0, 0] == 0:
            raise KeyboardInterrupt
        return self.lin(x)

    others = set(threading.enumerate())
    dp = on_host(Apply(forward), 3)
    dp(ranked(3))
    workers = set(threading.enumerate()) - others
    assert len(workers) == 2
    ran.clear()
    interrupted.append(True)
    with pytest.raises(KeyboardInterrupt):
        dp(ranked(3))
    for thread in workers:
        thread.join(20)
        assert not thread.is_alive(), "still waits for its turn"
    assert ran == [0]
    interrupted.clear()
    x = ints(6, 3)
    same(dp(x).detach(), linear()(x).detach())


@pytest.mark.usefixtures("patient")
def test_an_interrupted_call_starts_no_replica_that_still_waits_for_its_turn():
    teams, ran = Teams(), []
    others = set(threading.enumerate())
    teams.pace._usual_s = 0.001

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs(teams, [interrupted, lambda: ran.append(True)], [CPU, CPU])
    for thread in set(threading.enumerate()) - others:
        thread.join(20)
        assert not thread.is_alive(), "still waits for its turn"
    assert ran == []
    assert teams.pace.takes_turns([CPU, CPU])
