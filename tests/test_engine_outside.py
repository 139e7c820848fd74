"""Modules that a model holds without having registered them: what is changed in them counts at the
next step, as in those that are registered."""

import functools
import types

import pytest
import torch
from engine_cases import SETTLED, Twins, graph_steps, reasons
from engine_cases import rows_of_four as rows
from operator_recorder import OperatorRecorder
from torch import nn

from fastdp.outside import modules_outside


def teacher_of():
    torch.manual_seed(6)
    teacher = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double()
    teacher.rate = 1.0
    return teacher.requires_grad_(False).eval()


HOLDERS = {
    "list": lambda teacher: [teacher],
    "deep": lambda teacher: {"a": [0, (teacher,)]},
    "namespace": lambda teacher: types.SimpleNamespace(net=teacher),
    "partial": lambda teacher: functools.partial(torch.tanh, teacher),
    "method": lambda teacher: teacher.forward,
    "past setattr": lambda teacher: teacher,
}


class Student(nn.Module):
    """`teacher` is how the forward finds it: a property, so that no attribute tells."""

    def __init__(self, holder):
        super().__init__()
        torch.manual_seed(5)
        self.linear = nn.Linear(4, 4).double()
        self.__dict__["held"] = HOLDERS[holder](teacher_of())

    @property
    def teacher(self):
        held = self.held
        if isinstance(held, dict):
            return held["a"][1][0]
        if isinstance(held, functools.partial):
            return held.args[0]
        held = held[0] if isinstance(held, list) else held
        return getattr(held, "net", getattr(held, "__self__", held))

    def forward(self, x):
        return self.linear(x) * self.teacher(x) * self.teacher.rate


def recorded_twins(means, holder):
    twins = Twins(means, Student(holder), "auto")
    for dp in twins.both:
        dp.module.teacher.to(means.home)
    if means.on_host:
        twins.recorded._fastdp_get_runtime().recorder = OperatorRecorder()
    for seed in range(SETTLED + 1):
        twins.step(rows(means, seed))
    assert graph_steps(twins) > 0, reasons(twins.recorded)
    return twins


EDITS = {
    "in place": lambda teacher: teacher[0].weight.mul_(2),
    "data": lambda teacher: setattr(teacher[0].weight, "data", teacher[0].weight.data * 2),
    "turned": lambda teacher: setattr(teacher[0].weight, "data", teacher[0].weight.data.t()),
    "parameter": lambda teacher: setattr(
        teacher[0], "weight", nn.Parameter(2 * teacher[0].weight, requires_grad=False)
    ),
    "no bias": lambda teacher: setattr(teacher[0], "bias", None),
    "buffer": lambda teacher: setattr(teacher[1], "running_mean", teacher[1].running_mean + 1),
    "attribute": lambda teacher: setattr(teacher, "rate", 2.0),
    "eps": lambda teacher: setattr(teacher[1], "eps", 1.0),
    "part": lambda teacher: teacher.__setitem__(2, nn.Tanh()),
    "hook": lambda teacher: teacher[0].register_forward_hook(lambda module, args, out: 2 * out),
}


@pytest.mark.parametrize("means", ["cpu", "cpu-twice", "gpu", "gpu-twice"], indirect=True)
@pytest.mark.parametrize("edit", EDITS)
def test_what_is_changed(means, edit):
    twins = recorded_twins(means, "list")
    before = graph_steps(twins)
    for dp in twins.both:
        EDITS[edit](dp.module.teacher)
    for seed in range(SETTLED + 1):
        twins.step(rows(means, seed))
    if edit == "hook":
        assert "forward hook" in reasons(twins.recorded)
        assert "not registered" in reasons(twins.recorded) and graph_steps(twins) == before
    elif edit == "in place":
        assert graph_steps(twins) == before + SETTLED + 1


@pytest.mark.parametrize("means", ["cpu", "gpu"], indirect=True)
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("edit", ["attribute", "parameter"])
def test_where_it_is_held(means, holder, edit):
    twins = recorded_twins(means, holder)
    before = graph_steps(twins)
    for dp in twins.both:
        EDITS[edit](dp.module.teacher)
    for seed in range(SETTLED + 1):
        twins.step(rows(means, seed))
    assert graph_steps(twins) > before


@pytest.mark.parametrize("means", ["cpu", "gpu"], indirect=True)
def test_train_and_eval(means):
    """With several replicas all would write the statistics of the one teacher, in any order."""
    twins = recorded_twins(means, "list")
    before = graph_steps(twins)
    for training in (True, False):
        for dp in twins.both:
            dp.module.teacher[1].train(training)
        for seed in range(SETTLED + 1):
            twins.step(rows(means, seed))
    teachers = [dp.module.teacher for dp in twins.both]
    assert torch.equal(*[teacher[1].running_mean for teacher in teachers])
    assert graph_steps(twins) > before


def test_what_is_found():
    """Also in each other, and each once; none that is registered, and no end in circles."""
    outer, inner, registered = nn.ReLU(), nn.Tanh(), nn.Sequential(nn.Linear(2, 2))
    registered.held = {"deep": [(outer,)], "itself": [registered]}
    outer.held = [inner, outer, registered[0]]
    inner.held = [[outer]]
    assert modules_outside(registered.modules()) == [outer, inner]
    assert modules_outside(nn.Linear(2, 2).modules()) == []
