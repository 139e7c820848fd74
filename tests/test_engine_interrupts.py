"""Ctrl-C at every point of a recorded step, and while one is recorded: the wrapper goes on with
recorded steps, with the numbers of an eager one, whoever keeps the traceback."""

import pytest
import torch
from engine_cases import WATCHED, Recorder, Scaled, identical, squares, steps
from interrupting import interrupt_at

import fastdp
from fastdp import reads

ENOUGH = 100  # points; fewer would mean that the profiler saw nothing
# Points behind the step, some in frames of torch's, whose traceback keeps the outputs themselves.
WAY_OUT = 3


def rows(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 4, generator=generator, dtype=torch.float64)


def wrapped(engine, seen=0, replicas=2):
    dp = fastdp.DataParallel(Scaled(), ["cpu"] * replicas, engine=engine)
    dp._fastdp_get_runtime().recorder = Recorder()
    trained(dp, range(seen))
    return dp


def trained(dp, seeds):
    results = []
    for seed in seeds:
        dp.zero_grad(set_to_none=True)
        output = dp(rows(seed))
        squares(output).backward()
        results.append([output.detach(), *[p.grad.clone() for p in dp.parameters()]])
    return results


def stop(act, point, kept):
    """Where `act` was interrupted at that point; the error with its frames is kept, as an
    interactive session keeps it."""
    try:
        with interrupt_at(point) as where:
            act()
    except KeyboardInterrupt as error:
        kept.append(error)
    return where


@pytest.mark.parametrize("engine", ["graph", "auto"])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("forwards", ["with gradients", "without"])
def test_an_interrupt_anywhere_in_a_recorded_forward(engine, replicas, forwards, monkeypatch):
    monkeypatch.setattr("fastdp.trials.TIMED", 2)
    grad = forwards == "with gradients"
    dp = wrapped(engine, 12, replicas)
    want = trained(wrapped("eager", 0, replicas), [50])
    point, where, missed, kept = 0, [None], [], []
    while where:
        point += 1
        before = steps(dp)["graph"]
        with torch.set_grad_enabled(grad):
            where = stop(lambda: dp(rows(7)), point, kept)
        dp.report()
        try:
            identical(trained(dp, [50]), want)
        except fastdp.EngineError:
            missed.append(where)
        if steps(dp)["graph"] == before:
            missed.append(where)
        kept.clear()
    assert len(missed) <= WAY_OUT, missed
    assert point > ENOUGH


def test_an_interrupt_anywhere_in_a_recorded_backward():
    dp = wrapped("graph", 4)
    want = trained(wrapped("eager"), [50])
    point, where, kept = 0, [None], []
    while where:
        point += 1
        output = dp(rows(7))
        where = stop(squares(output).backward, point, kept)
        del output
        kept.clear()
        identical(trained(dp, [50]), want)
    assert point > ENOUGH / 2
    assert steps(dp)["eager"] == WATCHED["graph"]


def test_an_interrupt_anywhere_while_a_step_is_recorded(request):
    """It is recorded at the next step, and nothing of the module has changed."""
    pace = 1 if request.config.getoption("--long") else 23
    want = trained(wrapped("eager"), range(50, 53))
    point, where, missed, kept = 0, [None], [], []
    while where:
        point += pace
        dp = wrapped("graph", WATCHED["graph"])
        where = stop(lambda: dp(rows(7)), point, kept)
        identical(dict(dp.module.state_dict()), dict(Scaled().state_dict()))
        try:
            identical(trained(dp, range(50, 53)), want)
            assert steps(dp)["graph"] >= 3, where
        except fastdp.EngineError:
            missed.append(where)
        kept.clear()
    assert len(missed) <= 3 * WAY_OUT, missed  # its way out leads past the GPUs' balance
    assert point > 10 * ENOUGH


def test_an_interrupt_behind_the_entry_of_a_mode(monkeypatch):
    """torch's mode is entered, and nobody has begun to leave it."""
    dp, want = wrapped("graph", WATCHED["graph"]), trained(wrapped("eager"), range(50, 53))
    enter = reads.Reads.__enter__

    def entered(mode):
        enter(mode)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(reads.Reads, "__enter__", entered)
        dp(rows(7))
    identical(trained(dp, range(50, 53)), want)
    assert steps(dp)["graph"] == 3
