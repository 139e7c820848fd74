"""Between a recorded forward and its backward, and after: what autograd allows and what it refuses,
and that a recording is free again for the next step, whatever became of the last."""

import gc
import threading

import pytest
import torch
from engine_cases import (
    SETTLED,
    WATCHED,
    Recorder,
    Twins,
    graph_steps,
    identical,
    noise,
    squares,
    steps,
)
from torch import nn

import fastdp
from fastdp import engine_entries

AHEAD = WATCHED["graph"]
SAYS_EAGER = 'engine="eager"'


def layers():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def rows(means, seed=0):
    return noise(means, 6, 4, seed=seed)


def recorded_twins(means, engine="graph", **options):
    twins = Twins(means, layers(), engine, **options)
    for seed in range(SETTLED + 1):
        twins.step(rows(means, seed))
    assert twins.recorded.report()["forwards"][0]["engine"] == "graph"
    return twins


def still_fine(twins, means):
    """The next steps are recorded ones, and right."""
    before = graph_steps(twins)
    for dp in twins.both:
        dp.zero_grad()
    for seed in range(3):
        twins.step(rows(means, 30 + seed))
    assert graph_steps(twins) == before + 3


# Two forwards.


@pytest.mark.parametrize("first", [0, 1])
def test_two_forwards_before_a_backward(means, first):
    """Under auto the second is eager; their backwards come in either order."""
    twins = recorded_twins(means, "auto")
    before = steps(twins.recorded)
    for dp in twins.both:
        dp.zero_grad()
        losses = [squares(dp(rows(means, seed))) for seed in (20, 21)]
        losses[first].backward()
        losses[1 - first].backward()
    twins.check_gradients()
    assert steps(twins.recorded) == {"eager": before["eager"] + 1, "graph": before["graph"] + 1}
    assert "backward was still to come" in twins.recorded.report()["forwards"][0]["reason"]
    still_fine(twins, means)


def test_a_sum_of_two_forwards(means):
    """As siamese nets have it: always two, and one backward."""
    twins = Twins(means, layers(), "auto")
    for seed in range(SETTLED + 4):
        for dp, optimizer in zip(twins.both, twins.optimizers):
            optimizer.zero_grad()
            (dp(rows(means, seed)) - dp(rows(means, seed + 50))).square().sum().backward()
            optimizer.step()
        twins.check_gradients()
        twins.check_state()
    assert steps(twins.recorded)["eager"] >= SETTLED + 4


def test_the_output_of_one_is_the_input_of_the_next(means):
    torch.manual_seed(4)
    twins = Twins(means, nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double(), "auto")
    for seed in range(SETTLED + 4):
        for dp, optimizer in zip(twins.both, twins.optimizers):
            optimizer.zero_grad()
            squares(dp(dp(rows(means, seed)))).backward()
            optimizer.step()
        twins.check_gradients()


def test_a_second_forward_is_an_error_where_one_insists(means):
    twins = recorded_twins(means)
    kept = twins.recorded(rows(means, 20))
    with pytest.raises(fastdp.EngineError, match="called again while the backward.*still to come"):
        twins.recorded(rows(means, 21))
    for dp in twins.both:
        dp.zero_grad()
    squares(kept).backward()
    squares(twins.eager(rows(means, 20))).backward()
    twins.check_gradients()
    still_fine(twins, means)


def test_a_graph_that_another_thread_is_letting_go_is_waited_for(means, monkeypatch):
    """As autograd's threads do after an error."""
    monkeypatch.setattr(engine_entries, "_PATIENCE_S", 60.0)  # of a machine that is busy
    twins = recorded_twins(means)
    held = [twins.recorded(rows(means, 20))]
    thread = threading.Timer(0.02, held.clear)
    thread.start()
    twins.step(rows(means, 21))
    thread.join()
    still_fine(twins, means)


@pytest.mark.parametrize("kept", ["nothing", "a detached output", "a number", "the loss, twice"])
def test_forwards_without_a_backward(means, kept):
    """What is dropped, or used up, does not hold the recording."""
    twins = recorded_twins(means)
    before = graph_steps(twins)
    held = []
    for seed in range(4):
        output = twins.recorded(rows(means, seed))
        if kept == "a detached output":
            held.append(output.detach())
        elif kept == "a number":
            held.append(output.sum().item())
        elif kept == "the loss, twice":
            loss = squares(output)
            loss.backward()
            held.append((loss, output))
        del output
    assert graph_steps(twins) == before + 4
    for dp in twins.both:
        dp.zero_grad()
    still_fine(twins, means)


def test_an_error_between_forward_and_backward(means):
    twins = recorded_twins(means)

    def step():
        output = twins.recorded(rows(means))
        raise KeyError(output.shape)

    with pytest.raises(KeyError):
        step()
    gc.collect()  # the traceback holds the frame, and it the output
    still_fine(twins, means)


# What autograd refuses.


@pytest.mark.parametrize("engine", ["auto", "graph"])
def test_an_optimizer_step_before_the_backward(means, engine):
    """As an eager step does; then all goes on."""
    twins = recorded_twins(means, engine)
    before = graph_steps(twins)
    for dp, optimizer in zip(twins.both, twins.optimizers):
        output = dp(rows(means, 20))
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an\n? ?inplace operation"):
            squares(output).backward()
        del output
    assert graph_steps(twins) == before + 1
    still_fine(twins, means)


def test_a_write_of_one_parameter_before_the_backward(means):
    twins = recorded_twins(means)
    output = twins.recorded(rows(means, 20))
    with torch.no_grad():
        twins.recorded.module[2].weight.add_(1)
        twins.eager.module[2].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"parameter 2 of the module, of shape \[3, 6\]"):
        squares(output).backward()
    del output
    still_fine(twins, means)


@pytest.mark.parametrize("engine", ["auto", "graph"])
def test_retain_graph(means, engine):
    """The first backward is right; a second cannot be, and says what to do."""
    twins = recorded_twins(means, engine)
    losses = []
    for dp in twins.both:
        dp.zero_grad()
        losses.append(squares(dp(rows(means, 20))))
        losses[-1].backward(retain_graph=True)
    twins.check_gradients()
    with pytest.raises(RuntimeError, match="second backward.*" + SAYS_EAGER):
        losses[0].backward()
    twins.check_gradients()  # nothing was added
    still_fine(twins, means)


def test_a_second_backward_without_retain_graph(means):
    """Torch's own words."""
    twins = recorded_twins(means)
    loss = squares(twins.recorded(rows(means, 20)))
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    still_fine(twins, means)


@pytest.mark.parametrize("wanted", ["parameters", "inputs"])
def test_create_graph(means, wanted):
    twins = recorded_twins(means)
    x = rows(means, 20)
    if wanted == "inputs":
        x.requires_grad_()
        for _ in range(AHEAD + 1):
            squares(twins.recorded(x)).backward()
    before = graph_steps(twins)
    output = twins.recorded(x)
    asked = [x] if wanted == "inputs" else list(twins.recorded.parameters())
    with pytest.raises(RuntimeError, match="create_graph.*" + SAYS_EAGER):
        torch.autograd.grad(squares(output), asked, create_graph=True)
    assert graph_steps(twins) == before + 1
    del output
    still_fine(twins, means)


def test_a_penalty_on_the_gradient_as_the_error_says(means):
    """create_graph with the engine that the error names."""
    twins = recorded_twins(means)
    twins.recorded.engine = "eager"
    found = []
    for dp in twins.both:
        x = rows(means, 20).requires_grad_()
        (slope,) = torch.autograd.grad(dp(x).sum(), x, create_graph=True)
        dp.zero_grad()
        slope.square().sum().backward()
        found.append(x.grad)
    identical(*found)
    twins.check_gradients()
    twins.recorded.engine = "graph"
    still_fine(twins, means)


# What autograd allows.


def test_backward_of_some_inputs(means):
    twins = recorded_twins(means)
    for dp in twins.both:
        dp.zero_grad()
        squares(dp(rows(means, 20))).backward(inputs=[dp.module[0].weight])
    twins.check_gradients()
    assert twins.recorded.module[2].weight.grad is None
    still_fine(twins, means)


def test_autograd_grad(means):
    twins = recorded_twins(means)
    found = [
        torch.autograd.grad(squares(dp(rows(means, 20))), list(dp.parameters()))
        for dp in twins.both
    ]
    identical(*found)
    still_fine(twins, means)


def test_a_loss_that_reads_the_parameters_too(means):
    """A penalty on the weights: their gradients have two terms."""
    twins = recorded_twins(means)
    for seed in range(3):
        for dp, optimizer in zip(twins.both, twins.optimizers):
            optimizer.zero_grad()
            penalty = sum(p.square().sum() for p in dp.parameters())
            (squares(dp(rows(means, seed))) + penalty).backward()
            optimizer.step()
        twins.check_gradients()
    twins.ran(eager=AHEAD, graph=SETTLED + 1 - AHEAD + 3)


def test_the_step_as_a_part_of_something_larger(means):
    """Layers before and behind the wrapper, with parameters of their own."""
    twins = recorded_twins(means, optimizer=False)
    torch.manual_seed(6)
    before = nn.Linear(5, 4).double().to(means.home)
    behind = nn.Linear(3, 1).double().to(means.home)
    found = []
    for dp in twins.both:
        for seed in range(AHEAD + 2):
            for module in (before, behind, dp):
                module.zero_grad()
            behind(dp(before(noise(means, 6, 5, seed=seed)))).sum().backward()
        found.append([p.grad for m in (before, behind) for p in m.parameters()])
    identical(*found)
    twins.check_gradients()


def test_gradients_as_an_output_has_them_from_a_hook_of_the_user(means):
    twins = recorded_twins(means)
    for dp in twins.both:
        dp.zero_grad()
        output = dp(rows(means, 20))
        output.register_hook(lambda gradient: gradient.clamp(-1, 1))
        squares(output).backward()
        del output
    twins.check_gradients()
    still_fine(twins, means)


def test_a_backward_on_another_thread(means):
    twins = recorded_twins(means)
    for dp in twins.both:
        dp.zero_grad()
        loss = squares(dp(rows(means, 20)))
        worker = threading.Thread(target=loss.backward)
        worker.start()
        worker.join()
    twins.check_gradients()
    del loss
    still_fine(twins, means)


# Threads.


@pytest.mark.parametrize("means", ["cpu", "cpu-twice"], indirect=True)
def test_nobody_waits_for_a_recording_that_is_made(means):
    """Another thread's forward is an eager step meanwhile."""
    recording, over = threading.Event(), threading.Event()

    class Slow(Recorder):
        def record(self, device, pool, act):
            recording.set()
            assert over.wait(30)
            return super().record(device, pool, act)

    twins = Twins(means, layers(), sequential=True)
    dp = twins.recorded
    dp._fastdp_get_runtime().recorder = Slow()
    for seed in range(AHEAD):
        twins.look(rows(means, seed))

    def record():
        with torch.no_grad():
            dp(rows(means))

    maker = threading.Thread(target=record)
    maker.start()
    try:
        assert recording.wait(30)
        with torch.no_grad():
            identical(dp(rows(means, 9)), twins.eager(rows(means, 9)))
        assert maker.is_alive()
    finally:
        over.set()
        maker.join(60)
    assert graph_steps(twins) == 1


def test_two_threads_at_once(means):
    """One of them has the recording, the other an eager step; both have their own numbers."""
    twins = recorded_twins(means, "auto", sequential=True)
    for dp in twins.both:
        dp.module.requires_grad_(False)
    count, errors = 12, []
    inputs = {(name, k): rows(means, 100 * name + k) for name in range(2) for k in range(count)}
    wants = {}
    for place, x in inputs.items():
        leaf = x.clone().requires_grad_()
        output = twins.eager(leaf)
        squares(output).backward()
        wants[place] = output.detach(), leaf.grad
    barrier = threading.Barrier(2)

    def work(name):
        try:
            for k in range(count):
                barrier.wait(30)
                leaf = inputs[name, k].clone().requires_grad_()
                output = twins.recorded(leaf)
                squares(output).backward()
                want, slope = wants[name, k]
                torch.testing.assert_close(output.detach(), want, rtol=0, atol=0)
                torch.testing.assert_close(leaf.grad, slope, rtol=0, atol=0)
                with torch.no_grad():
                    output = twins.recorded(inputs[name, k])
                torch.testing.assert_close(output, want, rtol=0, atol=0)
        except BaseException as error:
            barrier.abort()
            errors.append(error)

    workers = [threading.Thread(target=work, args=(name,)) for name in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not errors, errors
    assert not any(worker.is_alive() for worker in workers)
    assert graph_steps(twins) > SETTLED
