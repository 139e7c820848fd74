"""BEHAVIOUR A: torch's own modules in replicas: batch norm, hooks, recurrent nets."""

import copy
import warnings

import pytest
import torch
from nets import (
    CLOSE,
    Apply,
    Net,
    check_against_hand,
    close,
    exact,
    grads,
    ints,
    linear,
    same,
)
from torch import nn

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
