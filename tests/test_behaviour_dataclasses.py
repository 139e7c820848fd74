"""BEHAVIOUR C: results that are dataclasses, or like the ModelOutput of transformers."""

import collections
import dataclasses
import typing

import pytest
import torch
from nets import Apply, gathered, ints, linear, same
from output_classes import Classified

row = pytest.mark.row


@dataclasses.dataclass
class Answer:
    y: torch.Tensor
    more: typing.Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    y: torch.Tensor
    rest: Answer


@dataclasses.dataclass
class Derived:
    y: torch.Tensor
    double: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        self.double = 2 * self.y


@row("C6")
def test_dataclasses_are_rebuilt_field_by_field(fast):
    x = ints(5, 3)
    out = gathered(fast, lambda s, x: Answer(s.lin(x), [x, {"k": None}]), 2, x)
    assert type(out) is Answer and out.y.requires_grad
    same(out.y, linear()(x))
    same(out.more, [x, {"k": None}])


@row("C6")
def test_frozen_and_nested_dataclasses(fast):
    x = ints(5, 3)
    out = gathered(fast, lambda s, x: Frozen(x, Answer(x + 1, "s")), 2, x)
    assert type(out) is Frozen and type(out.rest) is Answer and out.rest.more == ["s", "s"]
    same((out.y, out.rest.y), (x, x + 1))


@row("C6")
def test_dataclass_fields_outside_init_are_gathered(fast):
    def forward(self, x):
        answer = Derived(x)
        answer.double = answer.double + 1
        return answer

    x = ints(5, 3)
    out = gathered(fast, forward, 2, x)
    assert type(out) is Derived
    same((out.y, out.double), (x, 2 * x + 1))


@dataclasses.dataclass
class Sampled(collections.OrderedDict):
    """The shape of diffusers' outputs: items are made of fields, and not of an iterable."""

    sample: torch.Tensor
    more: typing.Any = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


@row("C6")
@pytest.mark.parametrize("more", [None, "text"])
def test_dictionaries_that_are_made_of_fields(fast, more):
    """nn.DataParallel gives a field that is a generator."""
    x = ints(5, 3)
    seen = []

    def forward(self, given):
        seen.append(type(given))
        return Sampled(self.lin(given.sample), more)

    out = fast.wrap(Apply(forward), 2)(Sampled(x))
    assert type(out) is Sampled and seen == [Sampled] * 2 and out.sample is out["sample"]
    assert list(out) == (["sample"] if more is None else ["sample", "more"])
    same(out.sample, linear()(x))


@row("C6")
def test_dataclasses_of_different_classes_are_refused(fast):
    """Also where one has the other's fields: what it has beside would be lost."""

    def first_is_smaller(s, x):
        y = s.lin(x)
        return Answer(y) if len(x) == 2 else Derived(y)

    with pytest.raises(ValueError, match="output is a Answer on replica 0 but a Derived on replic"):
        gathered(fast, first_is_smaller, 2, ints(3, 3))


@row("C6")
def test_model_output(fast):
    x = ints(4, 3)
    dp = fast.wrap(Apply(lambda s, x: Classified(s.lin(x).sum(), logits=x)), 2)
    with pytest.warns(UserWarning, match="scalars"):
        out = dp(x)
    assert type(out) is Classified and list(out) == ["loss", "logits"] and out.hidden is None
    same((out.logits, out["logits"]), (x, x))
    assert out.loss is out["loss"] and out.loss.shape == (2,)
    out.loss.mean().backward()
    same(dp.module.lin.bias.grad, torch.full((2,), 2.0).double())
