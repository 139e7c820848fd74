"""Between a recorded forward and its backward, and after: what autograd allows and what it refuses,
and that a recording is free again for the next step, whatever became of the last."""

import gc

import engine_cases
import pytest
import torch
from engine_cases import (
    SETTLED,
    WATCHED,
    Twins,
    graph_steps,
    identical,
    noise,
    squares,
    steps,
    still_fine,
)
from engine_cases import rows_of_four as rows
from torch import nn

import fastdp

AHEAD = WATCHED["graph"]
SAYS_EAGER = 'engine="eager"'


def layers():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def recorded_twins(means, engine="graph", **options):
    return engine_cases.recorded_twins(means, engine, layers(), **options)


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
