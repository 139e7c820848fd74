"""BEHAVIOUR A: torch's own modules in replicas: norms, recurrent nets, hooks, parametrizations."""

import copy
import warnings

import pytest
import torch
from nets import (
    CLOSE,
    Apply,
    Net,
    by_hand,
    check_against_hand,
    close,
    exact,
    grads,
    ints,
    linear,
    same,
)
from torch import nn
from torch.nn.utils import parametrize, prune

row = pytest.mark.row


# Batch norm.


@row("A14")
@pytest.mark.parametrize("batch, n", [(8, 2), (8, 3)])
@pytest.mark.distinct
def test_batch_norm_follows_chunk_0(impl, batch, n):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    _, reference = check_against_hand(impl, module, ints(batch, 3), n, CLOSE)
    close(module[1].running_mean, reference[1].running_mean)
    close(module[1].running_var, reference[1].running_var)
    assert module[1].num_batches_tracked.item() == 1


@row("A14")
@pytest.mark.distinct
def test_batch_norm_statistics_are_exactly_the_first_chunk(impl):
    module = nn.BatchNorm1d(3, momentum=1.0).double()
    dp = impl.wrap(module, 2)
    x = ints(8, 3)
    for step in range(2):
        dp(x + step)
    same(module.running_mean, (x + 1)[:4].mean(0))
    assert module.num_batches_tracked.item() == 2
    dp.eval()
    before = module.running_mean.clone()
    dp(x)
    same(module.running_mean, before)


@row("A15")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.distinct
def test_sync_batch_norm_without_a_process_group_is_plain(impl, training):
    module = nn.SyncBatchNorm(3).double().train(training)
    plain = nn.BatchNorm1d(3).double().train(training).to(impl.home)
    want = torch.cat([plain(c) for c in ints(8, 3).to(impl.home).chunk(2)])
    # A GPU's kernels may cut their sums by where a chunk starts in memory.
    (same if impl.home.type == "cpu" else close)(impl.wrap(module, 2)(ints(8, 3)), want)
    assert module.num_batches_tracked.item() == int(training)


# Hooks.


@row("A16")
def test_forward_hooks_run_once_per_replica(impl):
    module = Net()
    dp = impl.wrap(module, 2)
    seen = []
    pre = module.first.register_forward_pre_hook(lambda m, a: seen.append(("pre", m, a[0])))
    post = module.first.register_forward_hook(lambda m, a, out: seen.append(("post", m, out)))
    x = ints(4, 3)
    dp(x)
    assert sorted(name for name, *_ in seen) == ["post", "post", "pre", "pre"]
    assert all(m is not module.first for _, m, _ in seen)
    chunks = {tuple(t.flatten().tolist()) for name, _, t in seen if name == "pre"}
    assert chunks == {tuple(c.flatten().tolist()) for c in x.chunk(2)}
    pre.remove()
    seen.clear()
    dp(x)
    assert [name for name, *_ in seen] == ["post", "post"]
    post.remove()
    seen.clear()
    dp(x)
    assert seen == []


@row("A16")
def test_forward_hook_may_change_the_output(impl):
    module = linear()
    module.register_forward_hook(lambda m, a, out: out + 1)
    module.register_forward_pre_hook(lambda m, a: (a[0] * 2,))
    same(impl.wrap(module, 2)(ints(4, 3)), linear()(2 * ints(4, 3)) + 1)


@row("A16")
def test_hooks_on_the_wrapper_run_once(impl):
    dp = impl.wrap(linear(), 2)
    seen = []
    dp.register_forward_hook(lambda m, a, out: seen.append(out.shape))
    dp(ints(4, 3))
    assert seen == [(4, 2)]


@row("A17")
def test_hooks_edited_inside_forward(fast):
    def forward(self, x):
        for _ in range(30):
            handle = self.lin.register_forward_hook(lambda m, a, out: out + 1)
            y = self.lin(x)
            handle.remove()
        return y

    module = Apply(forward)
    dp = fast.wrap(module, 3)
    for _ in range(5):
        same(dp(ints(6, 3)), linear()(ints(6, 3)) + 1)
    assert not module.lin._forward_hooks


@row("A18")
def test_module_backward_hooks_fire_per_replica(impl):
    module = Net()
    seen = []
    module.second.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].shape))
    impl.wrap(module, 2)(ints(5, 3)).sum().backward()
    assert sorted(seen) == [(2, 2), (3, 2)]


@row("A18")
def test_parameter_hooks_see_the_reduced_gradient_once(impl):
    module = linear()
    dp = impl.wrap(module, 3)
    seen, after = [], []
    module.weight.register_hook(lambda g: seen.append(g.clone()) or g * 0)
    module.weight.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    x = ints(6, 3)
    dp(x).sum().backward()
    assert len(seen) == 1 and len(after) == 1
    same(seen[0], x.sum(0).expand(2, 3))
    same(after[0], torch.zeros(2, 3).double())
    same(module.weight.grad, torch.zeros(2, 3).double())


# Weights recomputed in forward.


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


# Recurrent nets.


class Recurrent(nn.Module):
    def __init__(self, kind, flatten=True):
        super().__init__()
        self.rnn = kind(3, 4, 2, batch_first=True, bidirectional=True).double()
        self.flatten = flatten

    def forward(self, x):
        if self.flatten:
            self.rnn.flatten_parameters()
        return self.rnn(x)[0]


@row("A22")
@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_nets(impl, kind, flatten):
    with warnings.catch_warnings():
        # Of weights that are not in one chunk torch's own warns, on GPUs, for each replica.
        warnings.simplefilter("ignore" if impl.is_oracle else "error")
        check_against_hand(impl, Recurrent(kind, flatten), ints(5, 3, 3), 2, CLOSE)


@row("A22")
def test_recurrent_net_sees_weight_edits(impl):
    module = Recurrent(nn.LSTM)
    dp = impl.wrap(module, 2)
    x = ints(4, 3, 3)
    for step in range(3):
        close(dp(x), copy.deepcopy(module)(x.to(impl.home)))
        for parameter in module.parameters():
            parameter.data.mul_(0.5 + step)


@row("A22")
def test_flat_weights_of_a_replica_are_its_own(impl):
    seen = []
    module = Recurrent(nn.LSTM)
    base = list(module.rnn._flat_weights)

    def hook(rnn, args):
        for name, flat in zip(rnn._flat_weights_names, rnn._flat_weights, strict=True):
            assert flat is getattr(rnn, name)
        seen.append(rnn._flat_weights)

    module.rnn.register_forward_pre_hook(hook)
    impl.wrap(module, 2)(ints(4, 3, 3)).sum().backward()
    assert len(seen) == 2 and seen[0] is not seen[1]
    for flat in seen:
        assert all(f is not b for f, b in zip(flat, base, strict=True))
    for left, right in zip(module.rnn._flat_weights, base, strict=True):
        assert left is right


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


@row("A1", why="torch's transformer reads a child's weights from its parent")
def test_transformer_encoder_layer(impl):
    module = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
    check_against_hand(impl, module, ints(4, 3, 4), 2, CLOSE)
    dp = impl.wrap(module.eval(), 2)
    with torch.no_grad():
        close(dp(ints(4, 3, 4)), module(ints(4, 3, 4).to(impl.home)))


class Skipping(nn.Sequential):
    """Skips the children that are None, which nn.Sequential would call."""

    def forward(self, x):
        for child in self:
            x = x if child is None else child(x)
        return x


@row("D11", "X35")
def test_shared_child_and_holes(impl):
    seen = []
    first = nn.Linear(3, 3, bias=False)
    module = Skipping(first, nn.Linear(3, 3), first)
    module.register_module("hole", None)
    exact(module)
    plain = copy.deepcopy(module)
    module.register_forward_pre_hook(lambda m, a: seen.append((m[0] is m[2], m[0].bias, m.hole)))
    x = ints(4, 3)
    same(out := impl.wrap(module, 2)(x), want := plain(x))
    out.sum().backward()
    want.sum().backward()
    same(grads(module), grads(plain))
    assert seen == [(True, None, None)] * 2
