"""Trials: which engine "auto" keeps, on clocks that the tests move."""

import pytest
import torch
from engine_cases import WATCHED, Recorder, StillMark, identical, noise, reasons, steps
from nets import Apply

from fastdp import trials
from fastdp.engine_entries import AGAIN_AFTER
from fastdp.trials import Trial

TIMED = 8  # as users have it

pytestmark = pytest.mark.parametrize("means", ["cpu", "cpu-twice"], indirect=True)


class Mark:
    def __init__(self, recorder):
        self.recorder, self.at = recorder, recorder.now_ms

    def query(self):
        return not self.recorder.behind

    def elapsed_time(self, other):
        return other.at - self.at


class Clocked(Recorder):
    """The device's clock moves when a test says so; `behind`: what was enqueued has not run yet."""

    def __init__(self):
        super().__init__()
        self.now_ms, self.behind, self.marks = 0.0, False, 0

    def mark(self):
        self.marks += 1
        return Mark(self)


@pytest.fixture(autouse=True)
def _full_trials(means, monkeypatch):
    monkeypatch.setattr(trials, "TIMED", TIMED)


def rows(means, seed=0, batch=6):
    return noise(means, batch, 3, seed=seed)


def clocked(means, function=lambda m, x: m.lin(x)):
    dp = means.wrap(Apply(function), "auto")
    dp._fastdp_get_runtime().recorder = Clocked()
    return dp, dp._fastdp_get_runtime().recorder


def step(dp, clock, graph_ms, eager_ms, x):
    """One training step, which takes the device as long as its engine's costs say."""
    before = steps(dp)["graph"]
    dp(x).square().sum().backward()
    clock.now_ms += graph_ms if steps(dp)["graph"] > before else eager_ms


WHOLE = WATCHED["auto"] + 2 * TIMED  # steps after which a trial has all its marks but the last


@pytest.mark.parametrize("graph_ms, eager_ms, kept", [(1.0, 4.0, "graph"), (4.0, 1.0, "eager")])
def test_the_faster_is_kept(means, graph_ms, eager_ms, kept):
    dp, clock = clocked(means)
    for seed in range(WHOLE):
        step(dp, clock, graph_ms, eager_ms, rows(means, seed))
    assert steps(dp) == {"eager": WATCHED["auto"] + TIMED, "graph": TIMED}
    assert "graph_ms" not in dp.report()["forwards"][0]
    for seed in range(5):
        step(dp, clock, graph_ms, eager_ms, rows(means, seed))
    (forward,) = dp.report()["forwards"]
    assert (forward["engine"], forward["graph_ms"], forward["eager_ms"]) == (
        kept,
        graph_ms,
        eager_ms,
    )
    assert steps(dp)[kept] == {"graph": TIMED, "eager": WATCHED["auto"] + TIMED}[kept] + 5
    said = "eager is faster: 1.00 ms against 4.00 ms"
    assert (said in reasons(dp)) == (kept == "eager") == (forward.get("reason") == said)
    text = str(dp.report())
    assert f"forward 0  {kept} (steps: " in text
    assert f"graph {graph_ms:.2f} ms, eager {eager_ms:.2f} ms per step" in text
    marks = clock.marks
    step(dp, clock, graph_ms, eager_ms, rows(means))
    assert clock.marks == marks, "a trial that is over costs nothing"


@pytest.mark.parametrize("then_ms, kept", [(1.0, "graph"), (4.0, "eager")])
def test_a_trial_that_was_lost_by_little_is_held_once_more(means, then_ms, kept):
    """As at the start of a run, when other processes still use the GPU or the host."""
    dp, clock = clocked(means)
    for seed in range(WHOLE + 1):
        step(dp, clock, 4.0, 3.0, rows(means, seed))
    said = "eager is faster: 3.00 ms against 4.00 ms; that was close, and is tried once more"
    assert said in reasons(dp) and dp.report()["forwards"][0]["engine"] == "eager"
    for seed in range(AGAIN_AFTER):
        step(dp, clock, then_ms, 3.0, rows(means, seed))
    assert steps(dp)["graph"] == TIMED
    for seed in range(WHOLE + 1):
        step(dp, clock, then_ms, 3.0, rows(means, seed))
    (forward,) = dp.report()["forwards"]
    assert (forward["engine"], forward["graph_ms"]) == (kept, then_ms)
    text = reasons(dp)
    assert said not in text and (text == "eager is faster: 3.00 ms against 4.00 ms") == (
        kept == "eager"
    )
    recorded = dp._fastdp_get_runtime().recorder.recorded
    for seed in range(2 * AGAIN_AFTER):
        step(dp, clock, 1.0, 3.0, rows(means, seed))
    assert dp.report()["forwards"][0]["engine"] == kept
    assert dp._fastdp_get_runtime().recorder.recorded == recorded, "the second trial decides"


def test_a_trial_that_was_lost_by_far_decides(means):
    dp, clock = clocked(means)
    for seed in range(WHOLE + 1 + 2 * AGAIN_AFTER):
        step(dp, clock, 4.0 if seed < WHOLE + 1 else 0.5, 2.0, rows(means, seed))
    assert reasons(dp) == "eager is faster: 2.00 ms against 4.00 ms"
    assert steps(dp)["graph"] == TIMED


@pytest.mark.parametrize("ms, kept", [(2.0, "graph"), (5.0, "eager")])
def test_single_slow_steps_decide_nothing(means, ms, kept):
    """A checkpoint is written, a cache is warmed: the median does not see it."""
    dp, clock = clocked(means)
    for seed in range(WHOLE + 2):
        slow = 1000.0 if seed % 5 == 0 else 0.0
        step(dp, clock, ms + slow, 3.0 + slow, rows(means, seed))
    assert dp.report()["forwards"][0]["engine"] == kept
    assert dp.report()["forwards"][0]["graph_ms"] == ms


def test_nobody_waits_for_the_clock(means):
    """Until the device has passed the marks, recorded steps go on."""
    dp, clock = clocked(means)
    clock.behind = True
    for seed in range(WHOLE + 5):
        step(dp, clock, 4.0, 1.0, rows(means, seed))
    assert steps(dp) == {"eager": WATCHED["auto"] + TIMED, "graph": TIMED + 5}
    clock.behind = False
    step(dp, clock, 4.0, 1.0, rows(means))
    assert dp.report()["forwards"][0]["engine"] == "eager"


@pytest.mark.parametrize("graph_ms, kept", [(1.0, "graph"), (4.0, "eager")])
def test_validation_after_each_step(means, graph_ms, kept):
    """Its time is not the training step's."""
    dp, clock = clocked(means)
    for seed in range(WHOLE + 2):
        step(dp, clock, graph_ms, 2.0, rows(means, seed))
        with torch.no_grad():
            dp(rows(means, seed))
        clock.now_ms += 50.0
    forward = dp.report()["forwards"][0]
    assert (forward["engine"], forward["graph_ms"], forward["eager_ms"]) == (kept, graph_ms, 2.0)


def test_validation_that_is_recorded_by_then(means):
    """It ends the training step's time also where it is known by its uncut arguments."""
    dp, clock = clocked(means)
    with torch.no_grad():
        for seed in range(WHOLE + 2):
            dp(rows(means, seed))
    assert dp.report()["forwards"][0]["engine"] == "graph"
    for seed in range(WHOLE + 2):
        step(dp, clock, 4.0, 2.0, rows(means, seed))
        with torch.no_grad():
            dp(rows(means, seed))
        clock.now_ms += 50.0
    forward = dp.report()["forwards"][1]
    assert (forward["engine"], forward["graph_ms"], forward["eager_ms"]) == ("eager", 4.0, 2.0)


def test_two_shapes_in_turn(means):
    """Each has its own trial."""
    dp, clock = clocked(means)
    for seed in range(WHOLE + 2):
        step(dp, clock, 1.0, 2.0, rows(means, seed))
        step(dp, clock, 9.0, 3.0, rows(means, seed, batch=4))
    first, second = dp.report()["forwards"]
    assert (first["engine"], first["graph_ms"], first["eager_ms"]) == ("graph", 1.0, 2.0)
    assert (second["engine"], second["graph_ms"], second["eager_ms"]) == ("eager", 9.0, 3.0)


def test_a_trial_has_no_more_marks_than_it_needs(means):
    clock = Clocked()
    trial = Trial(clock)
    wants = [trial.recorded_next() for _ in range(30)]
    assert wants == [True] * TIMED + [False] * TIMED + [True] * (30 - 2 * TIMED)
    assert clock.marks == 2 * TIMED + 1
    for _ in range(5):
        trial.interrupt()
    assert clock.marks == 2 * TIMED + 1


# What is remembered.


def test_the_tests_own_clock_stands_still(means):
    assert StillMark().elapsed_time(StillMark()) == 0.0
    dp = means.wrap(Apply(lambda m, x: m.lin(x)), "auto")
    for seed in range(WHOLE + 2):
        dp(rows(means, seed)).sum().backward()
    (forward,) = dp.report()["forwards"]
    assert (forward["engine"], forward["graph_ms"], forward["eager_ms"]) == ("graph", 0.0, 0.0)
    plain = means.wrap(Apply(lambda m, x: m.lin(x)), "eager")
    identical(dp(rows(means)), plain(rows(means)))
