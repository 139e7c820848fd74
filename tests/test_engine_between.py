"""What is written between a recorded forward and its backward, and which hooks a backward calls: as
in an eager step. On the host the recorder is the one that freezes addresses."""

import gc

import pytest
import torch
from engine_cases import WATCHED, Twins, graph_steps, squares
from engine_cases import rows_of_four as rows
from operator_recorder import OperatorRecorder
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

AHEAD = WATCHED["graph"]


def twins_of(means, module, steps=AHEAD + 1, **options):
    """After so many steps, with which they are recorded ones."""
    twins = Twins(means, module.double(), **options)
    if means.on_host:
        twins.recorded._fastdp_get_runtime().recorder = OperatorRecorder()
    for seed in range(steps):
        twins.step(rows(means, seed))
    return twins


def layers():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3))


def test_parameters_that_get_other_memory_before_the_backward(means):
    """It reads what was there in the forward, and not whoever has that memory by now."""
    twins = twins_of(means, layers(), optimizer=False)
    before = graph_steps(twins)
    for dp in twins.both:
        dp.zero_grad()
        output = dp(rows(means, 20))
        for parameter in dp.parameters():
            parameter.data = parameter.data * 2
        gc.collect()
        others = [torch.full_like(p, torch.nan) for p in dp.parameters()]
        squares(output).backward()
        del others
    twins.check_gradients()
    assert graph_steps(twins) == before + 1


def test_former_memory_of_parameters_goes_with_the_next_forward(means):
    """Else code that binds new memory at each step would have it in ever new places, and be
    recorded over and over."""
    twins = twins_of(means, layers(), optimizer=False)
    before = graph_steps(twins)
    places = [[p.data for p in dp.parameters()] for dp in twins.both]
    others = [[p.data * 2 for p in dp.parameters()] for dp in twins.both]
    former = [StorageWeakRef(t.untyped_storage()) for t in places[0]]
    for step in range(2 * AHEAD + 4):
        for dp, *both in zip(twins.both, places, others):
            dp.zero_grad()
            for parameter, data in zip(dp.parameters(), both[step % 2 == 0]):
                parameter.data = data
        twins.step(rows(means, step))
    assert graph_steps(twins) > before + AHEAD + 2
    places.clear(), both.clear()
    del parameter, data
    assert not any(memory.expired() for memory in former)  # of the module, at the last step
    for dp, data in zip(twins.both, others):
        for parameter, other in zip(dp.parameters(), data):
            parameter.data = other
    assert not any(memory.expired() for memory in former)
    twins.step(rows(means))
    assert all(memory.expired() for memory in former)


class Masked(nn.Module):
    """A buffer that the backward needs, and one that it does not."""

    def __init__(self, writes=True):
        super().__init__()
        torch.manual_seed(4)
        self.linear, self.writes = nn.Linear(4, 3), writes
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 2.0]))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.count.add_(1)
            if self.writes:
                self.mask.neg_()
        return self.linear(x) * self.mask + self.count


def raised(twins, act):
    """Of each twin, whether a backward after act(wrapper) says that something was written."""
    found = []
    for dp in twins.both:
        dp.zero_grad()
        output = dp(rows(twins.means, 20))
        act(dp)
        try:
            squares(output).backward()
            found.append(False)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            found.append(True)
    return found


def looks(means):
    def look(dp):
        with torch.no_grad():
            dp(rows(means, 30))

    return look


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "eager"])
@pytest.mark.parametrize("writes", [True, False], ids=["needed", "not needed"])
def test_a_forward_in_between_writes_a_buffer(means, writes, recorded):
    """Whether that one is recorded or not: the first's backward would read what is there now."""
    twins = twins_of(means, Masked(writes), engine="auto", steps=9, optimizer=False)
    twins.means = means
    for seed in range(9 if recorded else 0):
        twins.look(rows(means, seed))
    before = graph_steps(twins)
    assert raised(twins, looks(means)) == [writes, writes]
    assert graph_steps(twins) == before + 1 + recorded
    twins.check_gradients()
    for dp in twins.both:
        dp.zero_grad()
    twins.step(rows(means, 40))
    assert graph_steps(twins) == before + 2 + recorded


def test_a_recorded_forward_writes_what_an_eager_backward_needs(means):
    twins = twins_of(means, Masked(), engine="auto", steps=0, optimizer=False)
    twins.means = means
    for seed in range(9):
        twins.look(rows(means, seed))
    before = graph_steps(twins)
    assert raised(twins, looks(means)) == [True, True]
    assert graph_steps(twins) == before + 1


@pytest.mark.parametrize("name", ["mask", "count"])
def test_a_buffer_is_written_by_the_user(means, name):
    twins = twins_of(means, Masked(), optimizer=False)
    twins.means = means
    write = raised(twins, lambda dp: getattr(dp.module, name).add_(1))
    assert write == [name == "mask"] * 2
    twins.check_gradients()


def test_statistics_that_are_written_before_the_backward(means):
    """Of a norm that is in eval() while the rest learns: its backward needs them."""
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3).eval())
    twins = twins_of(means, module, optimizer=False)
    twins.means = means
    assert raised(twins, lambda dp: dp.module[1].running_var.add_(1)) == [True, True]
    assert raised(twins, lambda dp: dp.module[1].num_batches_tracked.add_(1)) == [False, False]
    twins.check_gradients()


class Slopes(nn.Module):
    """A torch.func transform inside, which allows no hooks of saved tensors around it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.linear = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        slope = torch.func.grad(lambda y: torch.tanh(self.linear(y)).sum())(x)
        return self.linear(x + slope.detach()) * self.scale


def test_a_transform_inside_of_a_forward(means):
    twins = twins_of(means, Slopes(), optimizer=False)
    twins.means = means
    assert graph_steps(twins) == 1
    assert raised(twins, lambda dp: dp.module.scale.add_(1)) == [True, True]


class Partly(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("unused_grad", ["zero", "none"])
def test_hooks_of_parameters_that_no_backward_reaches(means, unused_grad):
    """They are called where an eager step calls them, which is with zeros or not at all."""
    twins = twins_of(means, Partly(), unused_grad=unused_grad, bucket_bytes=8)
    before = graph_steps(twins)
    calls = []
    for dp in twins.both:
        calls.append([])
        for parameter in dp.parameters():
            parameter.register_hook(lambda gradient: 2 * gradient)
            parameter.register_post_accumulate_grad_hook(
                lambda p, log=calls[-1]: log.append(p.shape)
            )
    twins.step(rows(means, 20))
    assert graph_steps(twins) == before + 1
    none = unused_grad == "none" or means.replicas == 1
    assert [len(log) for log in calls] == [2 if none else 4] * 2


def test_a_bucket_of_which_a_part_is_reached(means):
    """All in one bucket, of which one tensor is used: eager replicas' backward visits them all."""
    twins = twins_of(means, Partly(), unused_grad="none")
    before = graph_steps(twins)
    calls = []
    for dp in twins.both:
        calls.append([])
        for parameter in dp.parameters():
            parameter.register_hook(lambda gradient, log=calls[-1]: log.append(gradient is None))
    twins.step(rows(means, 20))
    assert graph_steps(twins) == before + 1
    assert sorted(calls[0]) == sorted(calls[1])
    assert all(p.grad is None for p in twins.recorded.module.unused.parameters())
