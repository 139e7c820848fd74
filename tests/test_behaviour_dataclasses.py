"""BEHAVIOUR C: results that are dataclasses, or like the ModelOutput of transformers."""

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
