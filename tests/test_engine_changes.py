"""What users change between steps: attributes, hooks, parameters, buffers. The
next step counts with it, as an eager one does, whichever engine runs it."""

import copy
import types

import pytest
import torch
from engine_cases import (
    SETTLED,
    WATCHED,
    Scaled,
    Twins,
    graph_steps,
    identical,
    reasons,
    recorded_twins,
    steps,
)
from engine_cases import rows_of_four as rows
from torch import nn

import fastdp
from fastdp import engines

AHEAD = WATCHED["graph"]


# Attributes.


def other_forward(module, x):
    return module.second(x) * 3


CHANGES = {
    "number": lambda m: setattr(m, "rate", m.rate + 1),
    "flag": lambda m: setattr(m, "deep", not m.deep),
    "deep in containers": lambda m: m.path["gain"].__setitem__(0, m.path["gain"][0] + 1),
    "forward": lambda m: setattr(m, "forward", types.MethodType(other_forward, m)),
    "submodule": lambda m: setattr(m, "second", copy.deepcopy(m.second)),
    "class": lambda m: setattr(m.second, "__class__", type("Linear", (nn.Linear,), {})),
    "buffer added": lambda m: m.register_buffer("extra", m.second.weight.new_zeros(2).detach()),
    "bias removed": lambda m: setattr(m.second, "bias", None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_attribute_is_changed_once(means, name):
    """The numbers are right at once, and the step is recorded anew."""
    twins = recorded_twins(means)
    before = graph_steps(twins)
    twins.each(CHANGES[name])
    for seed in range(SETTLED + 1):
        twins.step(rows(means, seed))
    twins.ran(eager=2 * (SETTLED - 2), graph=2 * before)


def test_a_rate_that_is_set_each_epoch(means):
    """Recorded anew a few times, then eager for good, and the reason names what changes."""
    twins = recorded_twins(means)
    for epoch in range(engines._MAX_RESTARTS + 2):
        twins.each(lambda module: setattr(module, "rate", 2.0 + epoch))
        for seed in range(SETTLED + 1):
            twins.step(rows(means, seed))
    (forward,) = twins.recorded.report()["forwards"]
    assert forward["engine"] == "eager"
    assert "rate" in forward["reason"] and forward["reason"].endswith("changes between forwards")
    assert forward["reason"] in reasons(twins.recorded)
    done = graph_steps(twins)
    assert done == (engines._MAX_RESTARTS + 1) * 3
    for seed in range(SETTLED):
        twins.step(rows(means, seed))
    assert graph_steps(twins) == done


def test_a_rate_that_is_set_each_step(means):
    twins = Twins(means, Scaled(), "auto")
    for step in range(SETTLED + 4):
        twins.each(lambda module: setattr(module, "rate", 1.0 + step))
        twins.step(rows(means, step))
    twins.ran(eager=SETTLED + 4)
    assert "Scaled.rate changed" in reasons(twins.recorded)


def test_a_rate_that_is_set_each_step_is_an_error_where_one_insists(means):
    dp = means.wrap(Scaled())
    with pytest.raises(fastdp.EngineError, match="rate"):
        for step in range(20):
            dp.module.rate = float(step)
            dp(rows(means))
    dp.engine = "eager"
    dp.module.rate = 3.0
    plain = means.wrap(copy.deepcopy(dp.module), "eager")
    identical(dp(rows(means)), plain(rows(means)))


@pytest.mark.parametrize("means", ["cpu", "gpu", "gpu-twice", "gpus"], indirect=True)
def test_a_buffer_that_forward_binds_anew(means):
    """On one device it stays, so the step is eager; in a replica it is lost, also in a recorded
    step."""

    class Counts(Scaled):
        def forward(self, x):
            self.shift = self.shift + 1
            return super().forward(x)

    twins = Twins(means, Counts(), "auto")
    for seed in range(SETTLED + 6):
        twins.step(rows(means, seed))
    if means.replicas == 1:
        taken = SETTLED + 6
        while not reasons(twins.recorded) and taken < 200:  # until its memory was the same twice
            twins.step(rows(means, taken))
            taken += 1
        assert graph_steps(twins) == 0
        assert twins.recorded.module.shift[0] == taken
        assert "it replaces parameters or buffers" in reasons(twins.recorded)
    else:
        assert graph_steps(twins) > 0
        assert twins.recorded.module.shift[0] == 0


def test_a_buffer_that_gets_other_memory_in_a_forward(means):
    """The first replica has the module's own buffer, so it stays, with any number of devices."""

    class Averages(Scaled):
        def forward(self, x):
            output = super().forward(x)
            self.shift.data = 0.5 * self.shift.data + output.detach().mean(0)
            return output

    twins = Twins(means, Averages(), "auto")
    for seed in range(3 * SETTLED):
        twins.step(rows(means, seed))
    twins.ran(eager=3 * SETTLED)
    assert "it replaces parameters or buffers" in reasons(twins.recorded)


def test_attributes_that_forward_never_reads_count_too(means):
    """Nobody can know; but only what is of this module."""
    twins = recorded_twins(means)
    before = graph_steps(twins)
    twins.recorded.note = "the wrapper's own attributes are not the module's"
    twins.step(rows(means))
    assert graph_steps(twins) == before + 1


# Hooks.


def test_a_hook_that_comes_later(means):
    """On a part: it runs at each step, so the step stays eager."""
    twins = recorded_twins(means)
    before = graph_steps(twins)
    calls = []
    for dp in twins.both:
        dp.module.first.register_forward_hook(
            lambda module, args, output: calls.append(len(args)) or 2 * output
        )
    for seed in range(3):
        twins.step(rows(means, seed))
    assert len(calls) == 2 * 3 * means.replicas
    assert graph_steps(twins) == before
    assert "forward hook" in reasons(twins.recorded) and "first" in reasons(twins.recorded)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_backward_hook_that_comes_later(means):
    twins = recorded_twins(means)
    before = graph_steps(twins)
    calls = []
    for dp in twins.both:
        dp.module.first.register_full_backward_hook(lambda *arguments: calls.append(1))
    for seed in range(3):
        twins.step(rows(means, seed))
    assert len(calls) == 2 * 3 * means.replicas and graph_steps(twins) == before


def test_hooks_of_parameters_and_of_the_wrapper(means):
    """They stand outside of what is recorded, and run at each step."""
    twins = recorded_twins(means)
    before = graph_steps(twins)
    counts = {"parameter": 0, "after": 0, "wrapper": 0, "pre": 0}

    def note(name, result=None):
        def hook(*arguments):
            counts[name] += 1
            return result(*arguments) if result else None

        return hook

    for dp in twins.both:
        weight = dp.module.first.weight
        weight.register_hook(note("parameter", lambda gradient: gradient * 3))
        weight.register_post_accumulate_grad_hook(note("after"))
        dp.register_forward_hook(note("wrapper", lambda module, args, output: output * 2))
        dp.register_forward_pre_hook(note("pre", lambda module, args: (args[0] + 1,)))
    for seed in range(4):
        twins.step(rows(means, seed))
    assert set(counts.values()) == {2 * 4}
    assert graph_steps(twins) == before + 4


def test_a_hook_of_an_output(means):
    twins = recorded_twins(means)
    before = graph_steps(twins)

    def loss(output):
        output.register_hook(lambda gradient: gradient * 5)
        output.retain_grad()
        return output.square().sum()

    output = twins.step(rows(means), loss=loss)
    assert output.grad is not None and graph_steps(twins) == before + 1


# Parameters and buffers.


def replaced(module):
    module.first.weight = nn.Parameter(module.first.weight.detach() * 2)


def same_memory(module):
    module.first.weight = nn.Parameter(module.first.weight.detach())


def pointed_elsewhere(module):
    module.first.weight.data = module.first.weight.data * 2


def frozen(module):
    module.first.weight.requires_grad_(not module.first.weight.requires_grad)


def buffer_registered(module):
    module.register_buffer("shift", module.shift + 1)


def buffer_pointed_elsewhere(module):
    module.shift.data = module.shift.data + 1


def tied(module):
    module.first.bias = nn.Parameter(module.first.bias.detach().clone())


@pytest.mark.parametrize(
    "change",
    [replaced, pointed_elsewhere, frozen, buffer_registered, buffer_pointed_elsewhere, tied],
)
def test_tensors_are_replaced(means, change):
    twins = recorded_twins(means, "graph", optimizer=False)
    before = graph_steps(twins)
    twins.each(lambda module: module.zero_grad())
    twins.each(change)
    for seed in range(AHEAD + 2):
        twins.each(lambda module: module.zero_grad())
        twins.step(rows(means, seed))
    assert graph_steps(twins) == before + 2


def test_a_new_parameter_in_the_old_memory(means):
    """The recording still fits, and the gradient goes to the new one."""
    twins = recorded_twins(means, "graph", optimizer=False)
    before = graph_steps(twins)
    olds = [dp.module.first.weight for dp in twins.both]
    twins.each(lambda module: module.zero_grad())
    twins.each(same_memory)
    twins.step(rows(means))
    assert olds[0].grad is None and twins.recorded.module.first.weight.grad is not None
    assert graph_steps(twins) == before + 1


def test_buffers_written_by_the_user(means):
    twins = recorded_twins(means)
    before = graph_steps(twins)
    for value in (1.0, 2.0):
        twins.each(lambda module: module.shift.fill_(value))
        twins.step(rows(means))
    assert graph_steps(twins) == before + 2


def test_freezing_back_and_forth(means):
    """As gradual unfreezing, or a GAN, does: the recordings of both come back."""
    twins = Twins(means, Scaled(), optimizer=False)
    for seed in range(2 * AHEAD + 4):
        twins.each(frozen)
        twins.each(lambda module: module.zero_grad())
        twins.step(rows(means, seed))
    twins.ran(eager=2 * AHEAD, graph=4)


def test_to_another_dtype_and_back(means):
    twins = recorded_twins(means, "graph", optimizer=False)
    for dtype in (torch.float32, torch.float64):
        twins.each(lambda module: module.to(dtype).zero_grad())
        for seed in range(AHEAD + 1):
            twins.each(lambda module: module.zero_grad())
            twins.step(rows(means, seed).to(dtype))
    assert steps(twins.recorded)["graph"] >= SETTLED + 1 - AHEAD + 2
