"""Outputs of recorded steps: the containers, numbers and tensors that eager steps give, in memory
of their own."""

import collections
import dataclasses
from typing import NamedTuple, Optional

import pytest
import torch
from engine_cases import SETTLED, SEVERAL, WATCHED, Twins, noise, reasons, squares, steps
from nets import Apply
from torch import nn

import fastdp

AHEAD = WATCHED["graph"]

pytestmark = pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0")


class Pair(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    extra: Optional[torch.Tensor] = None


@dataclasses.dataclass
class ModelOutput(collections.OrderedDict):
    """As transformers has it: a dataclass that is a dictionary of what is not None."""

    loss: Optional[torch.Tensor] = None
    logits: Optional[torch.Tensor] = None
    hidden: Optional[tuple] = None

    def __post_init__(self):
        first = self.loss
        if first is not None and not isinstance(first, torch.Tensor):
            pairs, self.loss = dict(first), None
            for name, value in pairs.items():
                setattr(self, name, value)
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        super().__setattr__(name, value)


def two(module, x):
    hidden = torch.tanh(module.lin(x))
    return hidden * 3, hidden


OUTPUTS = {
    "tuple": lambda m, x: two(m, x),
    "list": lambda m, x: list(two(m, x)),
    "dict": lambda m, x: dict(zip(("logits", "hidden"), two(m, x))),
    "ordered": lambda m, x: collections.OrderedDict(zip(("b", "a"), two(m, x))),
    "named tuple": lambda m, x: Pair(*two(m, x)),
    "dataclass": lambda m, x: Result(*two(m, x)),
    "dataclass with None": lambda m, x: Result(two(m, x)[0]),
    "model output": lambda m, x: ModelOutput(logits=two(m, x)[0], hidden=two(m, x)),
    "model output with loss": lambda m, x: ModelOutput(two(m, x)[0].sum(), two(m, x)[1]),
    "nested": lambda m, x: {"a": [two(m, x), {"b": two(m, x)[0]}], "c": ()},
    "the same tensor twice": lambda m, x: (two(m, x)[0],) * 2,
    "loss": lambda m, x: two(m, x)[0].square().mean(),
    "loss and logits": lambda m, x: (two(m, x)[0].square().mean(), two(m, x)[0]),
    "None and numbers": lambda m, x: (two(m, x)[0], None, 3, "a", True, 2.5),
    "integers": lambda m, x: (two(m, x)[0], two(m, x)[0].argmax(1), x > 0),
    "detached": lambda m, x: (two(m, x)[0], two(m, x)[1].detach()),
    "its input": lambda m, x: (two(m, x)[0], x),
    "not contiguous": lambda m, x: m.lin(x)[:, None].expand(-1, 3, -1).transpose(1, 2),
    "channels last": lambda m, x: (
        m.lin(x)[:, :, None, None]
        .expand(-1, -1, 3, 3)
        .contiguous(memory_format=torch.channels_last)
    ),
    "a parameter": lambda m, x: (m.lin(x), m.lin.weight * 1),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_trees(means, name):
    twins = Twins(means, Apply(OUTPUTS[name]))
    for seed in range(AHEAD + 3):
        twins.step(noise(means, 6, 3, seed=seed))
    twins.ran(eager=AHEAD, graph=3)


@pytest.mark.parametrize("name", OUTPUTS)
def test_trees_without_gradients(means, name):
    twins = Twins(means, Apply(OUTPUTS[name]))
    for seed in range(AHEAD + 2):
        twins.look(noise(means, 6, 3, seed=seed))
    twins.ran(eager=AHEAD, graph=2)


def test_no_tensor_in_the_output(means):
    """What a model keeps in a buffer counts."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

        def forward(self, x):
            self.seen += x.sum()
            return {"done": True, "n": None}

    twins = Twins(means, Counts(), optimizer=False)
    for seed in range(AHEAD + 3):
        twins.look(noise(means, 6, 3, seed=seed))
    twins.ran(eager=AHEAD, graph=3)
    assert twins.recorded.module.seen != 0


def test_losses_inside(means):
    """One number per replica; a mean outside."""

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3).double()

        def forward(self, x, target):
            return nn.functional.cross_entropy(self.layer(x), target)

    torch.manual_seed(0)
    twins = Twins(means, Loss())
    for seed in range(AHEAD + 4):
        target = torch.arange(6, device=means.home) % 3
        output = twins.step(noise(means, 6, 4, seed=seed), target, loss=lambda out: out.mean())
        assert output.shape == ((means.replicas,) if means.replicas > 1 else ())
    twins.ran(eager=AHEAD, graph=4)


class Heads(nn.Module):
    """Two layers that share nothing."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 3).double(), nn.Linear(4, 2).double()

    def forward(self, x):
        return self.one(x), self.other(x)


def train_one_head(means, unused_grad, used, **options):
    torch.manual_seed(0)
    twins = Twins(means, Heads(), unused_grad=unused_grad, **options)
    for seed in range(AHEAD + 3):
        twins.step(noise(means, 6, 4, seed=seed), loss=lambda out: squares(out[used]))
    twins.ran(eager=AHEAD, graph=3)


@pytest.mark.parametrize("means", SEVERAL, indirect=True)
@pytest.mark.parametrize("used", [0, 1])
def test_a_loss_of_one_of_two_outputs(means, used):
    train_one_head(means, "zero", used)


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 1])
@pytest.mark.parametrize("used", [0, 1])
def test_a_loss_of_one_of_two_outputs_leaves_none(means, used, bucket_bytes):
    train_one_head(means, "none", used, bucket_bytes=bucket_bytes)


def test_an_output_that_has_no_derivative_and_no_part_in_the_loss(means):
    def roots(module, x):
        hidden = module.lin(x)
        return hidden, (hidden - hidden).sqrt()

    twins = Twins(means, Apply(roots))
    for seed in range(AHEAD + 3):
        twins.step(noise(means, 6, 3, seed=seed), loss=lambda out: squares(out[0]))
    twins.ran(eager=AHEAD, graph=3)


@pytest.mark.parametrize("unused_grad", ["zero", "none"])
def test_an_output_that_joins_the_loss_later(means, unused_grad):
    """An auxiliary loss each third step, which no watched step had: all gradients are right, and
    nothing of it is in the steps that follow."""
    torch.manual_seed(0)
    twins = Twins(means, Heads(), unused_grad=unused_grad)
    for seed in range(AHEAD + 8):
        both = seed >= AHEAD and seed % 3 == 0
        twins.step(
            noise(means, 6, 4, seed=seed),
            loss=lambda out: squares(out) if both else squares(out[0]),
        )
    twins.ran(eager=AHEAD, graph=8)


def test_the_other_output_alone_later(means):
    """It was never seen to have a gradient; now it is the only one: zeros for the first."""
    torch.manual_seed(0)
    twins = Twins(means, Heads())
    for seed in range(AHEAD + 6):
        used = int(seed >= AHEAD and seed % 2)
        for dp in twins.both:
            dp.zero_grad()
            squares(dp(noise(means, 6, 4, seed=seed))[used]).backward()
        heads = twins.recorded.module.one, twins.recorded.module.other
        for head, other in zip(heads, (twins.eager.module.one, twins.eager.module.other)):
            for got, want in zip(head.parameters(), other.parameters()):
                zero = torch.zeros_like(got)
                got, want = [zero if p.grad is None else p.grad for p in (got, want)]
                assert torch.equal(got, want)
    twins.ran(eager=AHEAD, graph=6)


@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0")
def test_a_model_output_whose_loss_alone_is_used(means):
    """As transformers' models are trained, with the loss that they make."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 5).double()

        def forward(self, x, labels):
            logits = self.layer(x)
            return ModelOutput(nn.functional.cross_entropy(logits, labels), logits)

    torch.manual_seed(0)
    twins = Twins(means, Model())
    labels = torch.arange(6, device=means.home) % 5
    for seed in range(AHEAD + 4):
        twins.step(noise(means, 6, 4, seed=seed), labels, loss=lambda out: out.loss.mean())
    twins.ran(eager=AHEAD, graph=4)


def test_outputs_have_memory_of_their_own(means):
    twins = Twins(means, Apply(OUTPUTS["tuple"]))
    kept = []
    for seed in range(AHEAD + 4):
        output = twins.look(noise(means, 6, 3, seed=seed))
        kept.append((output, [t.clone() for t in output]))
    for output, values in kept:
        for tensor, value in zip(output, values):
            assert torch.equal(tensor, value)
        output[0].fill_(7)  # which is the user's to write
    twins.look(noise(means, 6, 3))
    twins.ran(eager=AHEAD, graph=5)


def test_outputs_can_be_written_in_place_before_backward(means):
    twins = Twins(means, Apply(lambda m, x: m.lin(x)))
    for seed in range(AHEAD + 3):
        twins.step(noise(means, 6, 3, seed=seed), loss=lambda out: squares(out.mul_(2).relu_()))
    twins.ran(eager=AHEAD, graph=3)


def test_gradients_of_outputs_of_any_layout(means):
    """Expanded ones, as of a sum; transposed ones; slices."""
    twins = Twins(means, Apply(lambda m, x: m.lin(x)))
    for loss in (
        lambda out: out.sum(),
        lambda out: (out.t() @ out).sum(),
        lambda out: out[::2, :1].exp().sum(),
        lambda out: out[0, 0] ** 2,
    ):
        for seed in range(AHEAD + 1):
            twins.step(noise(means, 6, 3, seed=seed), loss=loss)
    twins.ran(eager=AHEAD, graph=4 * (AHEAD + 1) - AHEAD)


class Wrapped:
    """No container that gather knows how to join."""

    def __init__(self, value):
        self.value = value


LAZY = {
    "conjugated": lambda h: h.conj(),
    "negated": lambda h: h.conj().imag,
    "both, among others": lambda h: (h, h.conj(), [h.conj().imag.detach(), h.sum().conj()]),
}


@pytest.mark.parametrize("name", LAZY)
def test_outputs_that_are_lazily_conjugated_or_negated(means, name):
    module = Apply(lambda m, x: LAZY[name](torch.complex(m.lin(x), m.lin(2 * x))))
    twins = Twins(means, module, lr=1e-4)
    for seed in range(AHEAD + 3):
        twins.step(noise(means, 6, 3, seed=seed))
        twins.look(noise(means, 6, 3, seed=seed))
    twins.ran(eager=2 * AHEAD, graph=6)


@pytest.mark.parametrize("means", ["cpu", "gpu"], indirect=True)
def test_an_output_of_a_class_of_its_own(means):
    """A module alone may return anything: eager steps give it as it is, recorded ones cannot."""
    module = Apply(lambda m, x: Wrapped(m.lin(x)))
    twins = Twins(means, module, "auto")
    for seed in range(SETTLED):
        x = noise(means, 6, 3, seed=seed)
        got, want = [dp(x).value for dp in twins.both]
        twins.check_outputs(got, want)
    twins.ran(eager=SETTLED)
    assert "output is a Wrapped: no container that can be made anew" in reasons(twins.recorded)
    insistent = means.wrap(module)
    for _ in range(AHEAD):
        insistent(x)
    with pytest.raises(fastdp.EngineError, match="output is a Wrapped"):
        insistent(x)
    insistent.engine = "eager"
    twins.check_outputs(insistent(x).value, want)


@pytest.mark.parametrize("means", SEVERAL, indirect=True)
def test_outputs_that_cannot_be_joined(means):
    """The error is that of an eager step, under either engine, also once steps were recorded."""

    def odd(module, x):
        return module.lin(x) if x.shape[1] == 3 else module.lin(x[:, :3]).t()

    dp = means.wrap(Apply(odd))
    for _ in range(AHEAD + 1):
        dp(noise(means, 6, 3))
    uneven = noise(means, 2 * means.replicas - 1, 4)
    for _ in range(AHEAD + 2):
        with pytest.raises(RuntimeError, match="output"):
            dp(uneven)
    assert steps(dp)["graph"] == 1


@pytest.mark.parametrize("means", SEVERAL, indirect=True)
def test_outputs_along_another_dimension(means):
    class Along(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3).double()

        def forward(self, x):  # (time, batch, 4)
            return self.layer(x), torch.tanh(self.layer(x))

    torch.manual_seed(0)
    for dim in (1, -2):
        twins = Twins(means, Along(), dim=dim)
        for seed in range(AHEAD + 3):
            twins.step(noise(means, 3, 6, 4, seed=seed))
        twins.ran(eager=AHEAD, graph=3)
