"""Gradients of buckets of large tensors are not packed in a recorded backward: they stay where its
graph made them until they are summed (tapes.py). Here all count as large: tests of other files
again, and what is special about such gradients. And what a recorded forward waits for at once."""

import pytest
import test_engine_backward as backward
import test_engine_outputs as outputs
import test_engine_training as training
import torch
from engine_cases import WATCHED, Twins, noise, reasons, steps
from fastdp import _C, awaited, tapes
from torch import nn

AHEAD = WATCHED["graph"]


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch):
    monkeypatch.setattr(tapes, "_LARGE_BYTES", 0)


test_training = training.test_training
test_accumulation = training.test_accumulation
test_gradients_are_new_memory_each_step = training.test_gradients_are_new_memory_each_step
test_what_loops_do_to_gradients = training.test_what_loops_do_to_gradients
test_models = training.test_models
test_recurrent_nets = training.test_recurrent_nets
test_two_precisions_in_one_module = training.test_two_precisions_in_one_module
test_autocast = training.test_autocast
test_unused_parameters = training.test_unused_parameters
test_checkpointing_inside = training.test_checkpointing_inside
test_two_forwards_before_a_backward = backward.test_two_forwards_before_a_backward
test_backward_of_some_inputs = backward.test_backward_of_some_inputs
test_autograd_grad = backward.test_autograd_grad
test_a_loss_of_one_of_two_outputs = outputs.test_a_loss_of_one_of_two_outputs
test_a_loss_of_one_of_two_outputs_leaves_none = (
    outputs.test_a_loss_of_one_of_two_outputs_leaves_none
)
test_an_output_that_joins_the_loss_later = outputs.test_an_output_that_joins_the_loss_later
test_the_other_output_alone_later = outputs.test_the_other_output_alone_later


class Formula(nn.Module):
    def __init__(self, formula, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            setattr(self, name, nn.Parameter(tensor))
        self.formula = formula

    def forward(self, x):
        return self.formula(self, x)


def values(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


class Given(torch.autograd.Function):
    """0 for what has as many elements as `gradient`, which is its gradient, whatever comes in."""

    @staticmethod
    def forward(ctx, x, gradient):
        ctx.save_for_backward(gradient)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return ctx.saved_tensors[0], None


FORMULAS = {
    # name: a module whose gradients are unlike their parameters in memory, or are other memory
    "its output's": lambda: Formula(lambda m, x: m.a + x.mean(), a=values(3, 4)),
    "an argument": lambda: Formula(lambda m, x: x + Given.apply(m.a, x[0]), a=values(4)),
    "itself": lambda: Formula(
        lambda m, x: x * m.a + Given.apply(m.b, m.b), a=values(4), b=values(5)
    ),
    "transposed": lambda: Formula(lambda m, x: x @ m.a.t(), a=values(3, 4)),
    "expanded": lambda: Formula(lambda m, x: x.sum(1, keepdim=True) + m.a.sum(), a=values(4, 3)),
    "one for two": lambda: Formula(lambda m, x: x + (m.a + m.b), a=values(4), b=values(4)),
    "strided": lambda: Formula(
        lambda m, x: x @ m.a, a=torch.empty_strided((4, 3), (1, 4)).double().copy_(values(4, 3))
    ),
    "no elements": lambda: Formula(lambda m, x: x * m.a + m.b.sum(), a=values(4), b=values(0)),
    "complex": lambda: Formula(
        lambda m, x: (x.to(torch.complex128) * m.a.conj()).real,
        a=values(4, dtype=torch.complex128),
    ),
    "imaginary": lambda: Formula(
        lambda m, x: (x * m.a.conj()).imag,
        a=values(4, dtype=torch.complex128) * (1 + 2j),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_gradients_of_any_layout(means, name):
    twins = Twins(means, FORMULAS[name]())
    for seed in range(AHEAD + 4):
        twins.step(noise(means, 6, 4, seed=seed))
    twins.ran(eager=AHEAD, graph=4)
    (recording,) = twins.recorded._fastdp_get_runtime().recordings()
    for way in recording._backwards:
        made = [gradient for rows in way.made for row in rows for gradient in row]
        assert not any(gradient.requires_grad for gradient in made if gradient is not None)


def test_a_sparse_gradient_is_not_recorded(means):
    words = nn.Embedding(5, 3, sparse=True).double()
    dp = means.wrap(words, "auto")
    for _ in range(AHEAD + 6):
        dp.zero_grad()
        dp(torch.arange(6, device=means.home) % 5).sum().backward()
    assert steps(dp)["graph"] == 0
    assert "a parameter's gradient is sparse" in reasons(dp)
    assert words.weight.grad.is_sparse


class Backwards(torch.autograd.Function):
    """As reversible nets do, it recomputes in its backward, with a backward of its own."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.layer(x)
        output.backward(gradient)
        return x.grad, None


def reversible(m, x):
    return Backwards.apply(Backwards.apply(m.first(x), m.second), m.second)


def greedy(m, x):
    if torch.is_grad_enabled():
        m.second(x).sum().backward()
    return m.first(x)


@pytest.mark.parametrize("large_bytes", [0, 2**40], ids=["where they are made", "packed"])
@pytest.mark.parametrize("formula", [reversible, greedy])
def test_a_backward_inside_is_not_recorded(means, monkeypatch, large_bytes, formula):
    """It reaches a bucket more than once in a step, or in a forward."""
    if len(set(means.ids)) > 1 or (formula is greedy and means.replicas > 1):
        pytest.skip("eager gradients are added in the order of threads")
    monkeypatch.setattr(tapes, "_LARGE_BYTES", large_bytes)
    module = Formula(formula)
    module.first, module.second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    twins = Twins(means, module, "auto")
    for seed in range(WATCHED["auto"] + 4):
        twins.step(noise(means, 6, 4, seed=seed))
    assert "it runs a backward of its own, which reaches parameters" in reasons(twins.recorded)
    twins.ran(eager=WATCHED["auto"] + 4)


def test_gradients_that_are_kept_do_not_change(means):
    """They are sums, in memory of their own, not what the graph made."""
    twins = Twins(means, training.seeded(training.layers), optimizer=False)
    kept = []
    for seed in range(AHEAD + 4):
        twins.step(noise(means, 6, 4, seed=seed))
        grads = [parameter.grad for parameter in twins.recorded.module.parameters()]
        kept.append((grads, [grad.clone() for grad in grads]))
        twins.each(lambda module: module.zero_grad(set_to_none=True))
    for grads, copies in kept:
        assert all(torch.equal(grad, copy) for grad, copy in zip(grads, copies))
    twins.ran(eager=AHEAD, graph=4)


def bucket(sizes, dtype=torch.float32):
    class Made:
        core = _C.Bucket(tuple(torch.empty(size, dtype=dtype) for size in sizes))
        count = len(sizes)

    Made.dtype = dtype
    return Made


def test_which_buckets_count_as_large(monkeypatch):
    monkeypatch.setattr(tapes, "_LARGE_BYTES", 256)
    assert not tapes._is_large(bucket([64]))
    assert tapes._is_large(bucket([128]))
    assert tapes._is_large(bucket([8, 256]))
    assert not tapes._is_large(bucket([128], torch.bfloat16))


def test_what_is_waited_for_at_once():
    assert awaited.waits(0) == []
    assert awaited.waits(3) == [0, 1, 2]
    assert awaited.waits(12) == [0, 1, 2, 4, 4, 8, 8, 8, 8, 11, 11, 11]
    for count in range(1, 70):
        lasts = awaited.waits(count)
        assert len(lasts) == count and lasts == sorted(lasts) and lasts[-1] == count - 1
        assert all(last >= bucket for bucket, last in enumerate(lasts))
