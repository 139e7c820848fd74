"""BEHAVIOUR A: weights that a forward makes of others: norms, parametrizations, weight drop."""

import warnings

import pytest
import torch
from nets import (
    CLOSE,
    Apply,
    by_hand,
    check_against_hand,
    close,
    grads,
    ints,
    linear,
    same,
)
from torch import nn
from torch.nn.utils import parametrize, prune

row = pytest.mark.row


NORMS = {
    "weight_norm": lambda m: nn.utils.weight_norm(m),
    "weight_norm 0-dim g": lambda m: nn.utils.weight_norm(m, dim=None),
    "weight_norm parametrized": lambda m: nn.utils.parametrizations.weight_norm(m),
    "spectral_norm": lambda m: nn.utils.spectral_norm(m),
    "spectral_norm parametrized": lambda m: nn.utils.parametrizations.spectral_norm(m),
    "orthogonal": lambda m: nn.utils.parametrizations.orthogonal(m),
    "prune": lambda m: prune.l1_unstructured(m, "weight", 0.5),
}


def normed(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        inner = NORMS[kind](nn.Linear(4, 4).double())
    return nn.Sequential(nn.Linear(3, 4).double(), inner, nn.Linear(4, 2).double())


def clone_normed(kind):
    """deepcopy refuses the weights that the older forms leave on a module."""

    def clone(module):
        other = normed(kind)
        other.load_state_dict(module.state_dict())
        return other

    return clone


@row("A19", "A20", "A21", "X30", "X31")
@pytest.mark.parametrize("kind", NORMS)
def test_recomputed_weights(impl, kind):
    """Outputs and every gradient, those of unrelated layers too."""
    module = normed(kind)
    _, reference = check_against_hand(impl, module, ints(6, 3), 2, CLOSE, clone_normed(kind))
    for got, want in zip(module.buffers(), reference.buffers(), strict=True):
        close(got, want)


@row("A20", "X31")
@pytest.mark.parametrize("kind", ["spectral_norm", "spectral_norm parametrized"])
def test_power_iteration_vectors_persist_in_place(impl, kind):
    module = normed(kind)
    dp = impl.wrap(module, 2)
    u = next(b for name, b in module.named_buffers() if name.endswith("_u"))
    before, address = u.clone(), u.data_ptr()
    dp(ints(4, 3))
    assert not torch.equal(u, before) and u.data_ptr() == address


@row("A20")
@pytest.mark.parametrize("kind", ["spectral_norm", "spectral_norm parametrized"])
def test_spectral_norm_two_forwards_one_backward(impl, kind):
    module = normed(kind)
    twin = clone_normed(kind)(module)
    dp = impl.wrap(module, 2)
    a, b = ints(4, 3, seed=1), ints(4, 3, seed=2)
    (dp(a) + dp(b)).sum().backward()
    # Power iteration does not look at the input, so the plain module walks the same vectors.
    (twin(a) + twin(b)).sum().backward()
    for name, gradient in grads(module).items():
        close(gradient, grads(twin)[name])


@row("A21")
def test_parametrize_cached(impl):
    """torch keys its cache by the base: on another GPU a replica may find a weight of the wrong
    device there, which torch refuses; no number is wrong."""
    module = normed("weight_norm parametrized")
    want, want_grads, _ = by_hand(module, ints(6, 3).to(impl.home), 2)
    dp = impl.wrap(module, 2)
    try:
        with parametrize.cached():
            out = dp(ints(6, 3))
            out.sum().backward()
    except RuntimeError as error:
        assert impl.gpus > 1
        assert str(impl.home) in str(error) and str(impl.device(1)) in str(error)
        return
    close(out, want)
    for name, gradient in grads(module).items():
        close(gradient, want_grads[name])


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight

    def right_inverse(self, weight):
        return weight / 2


@row("A21")
def test_parametrization_put_on_and_off_between_calls(impl):
    """Changes the module's type and tree; the values stay, by right_inverse."""
    module = linear()
    dp = impl.wrap(module, 2)
    x = ints(4, 3)
    want = linear()(x)
    same(dp(x), want)
    parametrize.register_parametrization(module, "weight", Doubled())
    same(out := dp(x), want)
    out.sum().backward()
    same(module.parametrizations.weight.original.grad, 2 * x.sum(0).expand(2, 3))
    with torch.no_grad():
        module.parametrizations.weight.original.zero_()
    same(dp(x), linear().bias.expand(4, 2))
    parametrize.remove_parametrizations(module, "weight")
    same(dp(x), linear().bias.expand(4, 2))


class Dropped(nn.Module):
    """The weight-drop pattern: the raw weight is a parameter, the RNN's is set in forward."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 4, batch_first=True).double()
        self.raw = nn.Parameter(self.rnn.weight_hh_l0.detach().clone())
        del self.rnn._parameters["weight_hh_l0"]
        self.rnn.weight_hh_l0 = self.raw.detach()

    def forward(self, x):
        self.rnn.weight_hh_l0 = self.raw * 0.5
        return self.rnn(x)[0]


@row("A23")
def test_weight_drop(impl):
    module = Dropped()
    plain = Dropped()
    plain.load_state_dict(module.state_dict())
    dp = impl.wrap(module, 2)
    x = ints(4, 3, 3)
    close(out := dp(x), want := plain(x))
    out.sum().backward()
    want.sum().backward()
    for name, gradient in grads(module).items():
        close(gradient, grads(plain)[name])
    same(module.rnn.weight_hh_l0, module.raw)


@row("A23")
def test_weight_deleted_and_set_in_forward_stays_local(impl):
    def forward(self, x):
        weight = self.lin.weight
        del self.lin.weight
        self.lin.weight = weight * 2
        return self.lin(x)

    module = Apply(forward)
    dp = impl.wrap(module, 2)
    x = ints(4, 3)
    want = torch.nn.functional.linear(x, 2 * linear().weight, linear().bias)
    for _ in range(2):
        module.zero_grad()
        same(out := dp(x), want)
        out.sum().backward()
        same(module.lin.weight.grad, 2 * x.sum(0).expand(2, 3))
    assert list(dict(module.named_parameters())) == ["lin.weight", "lin.bias"]
    same(module.lin.weight, linear().weight)
