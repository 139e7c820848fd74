"""What users change between steps: attributes, hooks, parameters, buffers, the wrapper itself. The
next step counts with it, as an eager one does, whichever engine runs it."""

import copy
import gc
import pickle
import types
import weakref

import pytest
import torch
from engine_cases import (
    SETTLED,
    SEVERAL,
    WATCHED,
    Recorder,
    Twins,
    identical,
    noise,
    reasons,
    steps,
)
from nets import Apply
from torch import nn

import fastdp
from fastdp import engines

AHEAD = WATCHED["graph"]


class Scaled(nn.Module):
    """Reads what the user may change."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()
        self.register_buffer("shift", torch.zeros(3, dtype=torch.float64))
        self.rate, self.deep, self.path = 1.0, False, {"gain": [1.0]}

    def forward(self, x):
        x = torch.tanh(self.first(x)) if self.deep else self.first(x)
        return self.second(x) * self.rate * self.path["gain"][0] + self.shift


def rows(means, seed=0):
    return noise(means, 6, 4, seed=seed)


def recorded_twins(means, engine="auto", **options):
    """Twins whose steps are recorded ones by now."""
    twins = Twins(means, Scaled(), engine, **options)
    for seed in range(SETTLED + 1):
        twins.step(rows(means, seed))
    assert twins.recorded.report()["forwards"][0]["engine"] == "graph"
    return twins


def graph_steps(twins):
    return steps(twins.recorded)["graph"]


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
    "buffer added": lambda m: m.register_buffer("extra", torch.zeros(2, dtype=torch.float64)),
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


# The wrapper.


@pytest.mark.parametrize("means", SEVERAL, indirect=True)
@pytest.mark.parametrize(
    "name, value", [("dim", 0), ("sequential", True), ("unused_grad", "none"), ("bucket_bytes", 8)]
)
def test_options_of_the_wrapper(means, name, value):
    twins = recorded_twins(means, "graph")
    for dp in twins.both:
        setattr(dp, name, value)
    if means.on_host:
        twins.recorded._runtime().recorder = Recorder()
    for seed in range(AHEAD + 1):
        twins.step(rows(means, seed))
    assert twins.recorded.report()["forwards"][-1]["engine"] == "graph"


def test_the_engine_is_changed(means):
    twins = recorded_twins(means, "graph")
    before = graph_steps(twins)
    twins.recorded.engine = "eager"
    twins.step(rows(means))
    twins.recorded.engine = "graph"
    twins.step(rows(means))
    assert graph_steps(twins) == before + 1
    twins.recorded.engine = "auto"  # an engine of its own, which starts anew
    for seed in range(SETTLED + 1):
        twins.step(rows(means, seed))
    twins.ran(eager=SETTLED - 2, graph=3)
    twins.recorded.engine = "fast"
    with pytest.raises(ValueError, match="engine is 'fast': it must be one of eager, auto, graph"):
        twins.recorded(rows(means))


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_have_no_recordings(means, way):
    twins = recorded_twins(means)
    dp = twins.recorded
    made = copy.deepcopy(dp) if way == "deepcopy" else pickle.loads(pickle.dumps(dp))
    assert made.engine == "auto" and made.report()["forwards"] == []
    if means.on_host:
        made._runtime().recorder = Recorder()
    other = means.wrap(copy.deepcopy(twins.eager.module), "eager")
    for seed in range(SETTLED + 1):
        identical(made(rows(means, seed)), other(rows(means, seed)))
    assert steps(made)["graph"] == 3
    twins.step(rows(means))


def test_a_dropped_wrapper_takes_its_recordings_along(means):
    dp = means.wrap(Scaled())
    for seed in range(AHEAD + 1):
        dp(rows(means, seed)).sum().backward()
    (entry,) = dp._runtime()._engine._entries.values()
    references = [weakref.ref(entry.recording), weakref.ref(dp), weakref.ref(dp.module)]
    del dp, entry
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_a_backward_after_its_wrapper_is_gone(means):
    module = Scaled()
    dp = means.wrap(module)
    plain = means.wrap(copy.deepcopy(module), "eager")
    for seed in range(AHEAD + 1):
        output = dp(rows(means, seed))
    del dp
    gc.collect()
    output.square().sum().backward()
    plain(rows(means, AHEAD)).square().sum().backward()
    for got, want in zip(module.parameters(), plain.module.parameters()):
        identical(got.grad, want.grad)


def test_a_module_that_is_replaced(means):
    """dp.module = another: nothing of the first one's recording may run."""
    twins = recorded_twins(means, "graph")
    for dp in twins.both:
        torch.manual_seed(6)
        dp.module = Apply(lambda m, x: m.lin(x[:, :3])).to(means.home)
    if means.on_host:
        twins.recorded._runtime().recorder = Recorder()
    for seed in range(AHEAD + 2):
        identical(*[dp(rows(means, seed)) for dp in twins.both])
    twins.ran(eager=AHEAD, graph=2)
