"""BEHAVIOUR D: gradients: which parameters get one, of what order and layout."""

import copy

import pytest
import torch
from nets import CLOSE, Apply, Net, check_against_hand, close, exact, grads, ints, linear, same
from torch import nn
from torch.utils.checkpoint import checkpoint

row = pytest.mark.row


# Which parameters get a gradient.


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(3, 2)
        self.idle = nn.Linear(3, 2)
        exact(self)

    def forward(self, x):
        return self.used(x)


@row("D1")
@pytest.mark.parametrize("n", [2, 3])
def test_unused_parameters_get_zeros(impl, n):
    module = Unused()
    impl.wrap(module, n)(ints(6, 3)).sum().backward()
    same(module.used.weight.grad, ints(6, 3).sum(0).expand(2, 3))
    same(module.idle.weight.grad, torch.zeros(2, 3).double())
    same(module.idle.bias.grad, torch.zeros(2).double())


@row("D1")
@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
@pytest.mark.parametrize("unused_grad", ["zero", "none"])
def test_unused_grad_option(fast, unused_grad, bucket_bytes):
    """In a bucket of its own and in one that others use."""
    module = Unused()
    dp = fast.wrap(module, 2, unused_grad=unused_grad, bucket_bytes=bucket_bytes)
    dp(ints(4, 3)).sum().backward()
    same(module.used.weight.grad, ints(4, 3).sum(0).expand(2, 3))
    if unused_grad == "none":
        assert module.idle.weight.grad is None and module.idle.bias.grad is None
    else:
        same(module.idle.weight.grad, torch.zeros(2, 3).double())


@row("D1")
@pytest.mark.parametrize("unused_grad", ["zero", "none"])
def test_parameter_used_by_one_replica_only(fast, unused_grad):
    module = Apply(lambda s, x: s.lin(x) if x[0, 0] > 0 else x[:, :2] * 1)
    x = torch.tensor([[1.0, 2, 3], [-1.0, 2, 3]]).double()
    out = fast.wrap(module, 2, unused_grad=unused_grad)(x)
    out.sum().backward()
    same(module.lin.weight.grad, x[:1].expand(2, 3))


@row("D1")
def test_unused_grad_value_is_checked(fast):
    with pytest.raises(ValueError, match="unused_grad.*zeros"):
        fast.wrap(linear(), 2, unused_grad="zeros")


@row("D2")
def test_frozen_and_thawed(impl):
    flags = []
    module = Net()
    module.register_forward_pre_hook(
        lambda m, a: flags.append((m.first.weight.requires_grad, m.second.weight.requires_grad))
    )
    dp = impl.wrap(module, 2)
    x = ints(4, 3)
    for frozen in (True, False, True):
        module.first.requires_grad_(not frozen)
        module.zero_grad()
        flags.clear()
        dp(x).sum().backward()
        assert flags == [(not frozen, True)] * 2
        assert (module.first.weight.grad is None) == frozen
        plain = Net()
        plain(x).sum().backward()
        same(module.second.weight.grad, plain.second.weight.grad)
        if not frozen:
            same(module.first.weight.grad, plain.first.weight.grad)


@row("D2")
def test_all_frozen_with_gradient_to_the_input(impl):
    module = linear().requires_grad_(False)
    dp = impl.wrap(module, 2)
    assert not dp(ints(4, 3)).requires_grad
    x = ints(4, 3, grad=True)
    dp(x).sum().backward()
    same(x.grad, module.weight.sum(0).expand(4, 3))
    assert module.weight.grad is None


# Derivatives of derivatives, and of parts.


@row("D3")
@pytest.mark.parametrize("batch, n", [(4, 2), (5, 3), (1, 2)])
def test_gradient_penalty(impl, batch, n):
    def run(module, parameters):
        x = ints(batch, 3, grad=True)
        (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        (gradient**2).sum().backward()
        return x.grad, grads(parameters)

    module, plain = Net(), Net()
    got, want = run(impl.wrap(module, n), module), run(plain, plain)
    same(got[0], want[0])
    for name in ("first.weight", "first.bias", "second.weight"):
        same(got[1][name], want[1][name])


@row("D3")
def test_second_derivative_in_the_parameters(impl):
    def run(module, parameters):
        gradients = torch.autograd.grad(
            module(ints(4, 3)).sum(), list(parameters.parameters()), create_graph=True
        )
        sum((g**2).sum() for g in gradients).backward()
        return grads(parameters)

    module, plain = Net(), Net()
    got, want = run(impl.wrap(module, 2), module), run(plain, plain)
    # The last bias has no second derivative: None alone, zeros through a bucket.
    assert want.pop("second.bias") is None and not got.pop("second.bias").any()
    same(got, want)


@row("D3")
@pytest.mark.parametrize("n", [2, 3])
def test_third_derivative_in_the_parameters(impl, n):
    """The gradients of gradients of squared gradients: every move is differentiated again."""

    def run(module, parameters):
        weights = [parameters.first.weight, parameters.second.weight]
        first = torch.autograd.grad(module(ints(6, 3)).sum(), weights, create_graph=True)
        second = torch.autograd.grad(
            sum(g.square().sum() for g in first), weights, create_graph=True
        )
        return torch.autograd.grad(sum(g.sum() for g in second), weights)

    module, plain = Net(), Net()
    same(run(impl.wrap(module, n), module), run(plain, plain))


@row("D3")
def test_gradgradcheck(impl):
    dp = impl.wrap(nn.Sequential(nn.Linear(2, 2), nn.Tanh()).double(), 2)
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: dp(x), (x, *dp.parameters()))
    assert torch.autograd.gradgradcheck(lambda x, *_: dp(x), (x, *dp.parameters()))


@row("D4")
def test_autograd_grad_leaves_the_base_alone(impl):
    module, plain = Unused(), Unused()
    x = ints(4, 3)
    got = torch.autograd.grad(impl.wrap(module, 2)(x).sum(), list(module.used.parameters()))
    want = torch.autograd.grad(plain(x).sum(), list(plain.used.parameters()))
    same(got, want)
    assert all(g is None for g in grads(module).values())


@row("D4")
def test_autograd_grad_of_an_unused_parameter(impl):
    module = Unused()
    (got,) = torch.autograd.grad(
        impl.wrap(module, 2)(ints(4, 3)).sum(), [module.idle.weight], allow_unused=True
    )
    assert got is None or not got.any()


@row("D4")
def test_autograd_grad_inside_forward(impl):
    """A derivative in the input taken inside forward, differentiable to the weights."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad((self.lin(x) ** 2).sum(), x, create_graph=True)
        return g

    module, plain = Apply(forward), Apply(forward)
    impl.wrap(module, 2)(ints(4, 3)).sum().backward()
    plain(ints(4, 3)).sum().backward()
    same(module.lin.weight.grad, plain.lin.weight.grad)


@row("D4", why="mutant: backward with inputs=, which visits only a part of the graph")
def test_backward_with_inputs(impl):
    module, plain = Net(), Net()
    impl.wrap(module, 2)(ints(4, 3)).sum().backward(inputs=[module.first.weight])
    plain(ints(4, 3)).sum().backward(inputs=[plain.first.weight])
    same(grads(module), grads(plain))


@row("D5", "K25")
def test_zero_grad_inside_forward_warns(impl):
    module = Apply(lambda s, x: s.zero_grad() or s.lin(x))
    dp = impl.wrap(module, 2)
    with pytest.warns(UserWarning, match=r"Calling \.zero_grad\(\) from a module created with"):
        dp(ints(4, 3)).sum().backward()
    with pytest.warns(UserWarning):
        dp(ints(4, 3)).sum().backward()
    same(module.lin.weight.grad, 2 * ints(4, 3).sum(0).expand(2, 3))


# Sparse, layouts, odd values.


@row("D13")
def test_sparse_embedding(impl):
    module = exact(nn.Embedding(10, 3, sparse=True))
    x = torch.tensor([[1, 2], [2, 9], [1, 1], [0, 2]])
    impl.wrap(module, 2)(x).sum().backward()
    assert module.weight.grad.is_sparse
    plain = exact(nn.Embedding(10, 3, sparse=True))
    plain(x).sum().backward()
    same(module.weight.grad.coalesce().to_dense(), plain.weight.grad.to_dense())
    assert module.weight.grad.coalesce().indices().cpu().tolist() == [[0, 1, 2, 9]]


@row("D13")
def test_sparse_and_dense_uses_mixed(impl):
    def forward(self, x):
        if x[0, 0] == 0:
            return torch.nn.functional.linear(x.double(), self.emb.weight[:, :2]).sum(1)
        return self.emb(x).sum((1, 2))

    module, plain = Apply(forward), Apply(forward)
    module.emb, plain.emb = (exact(nn.Embedding(5, 3, sparse=True)) for _ in range(2))
    x = torch.tensor([[0, 1], [2, 3]])
    impl.wrap(module, 2)(x).sum().backward()
    plain(x[:1]).sum().backward()
    dense = plain.emb.weight.grad.clone()
    plain.zero_grad()
    plain(x[1:]).sum().backward()
    got = module.emb.weight.grad
    same(got.to_dense() if got.is_sparse else got, dense + plain.emb.weight.grad.to_dense())


def strides(tensor):
    """Strides of the dimensions that have more than one element: the others are arbitrary."""
    return [s for s, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1]


@row("D15")
def test_gradients_keep_their_parameters_strides(impl):
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 2, 1)).double()
    module.to(memory_format=torch.channels_last)
    for step in range(2):
        module.zero_grad(set_to_none=step == 1)
        check_against_hand(impl, module, ints(4, 2, 5, 5), 2, CLOSE)
        for parameter in module.parameters():
            assert strides(parameter.grad) == strides(parameter)


@row("D15")
def test_transposed_and_padded_parameters(impl):
    module = linear()
    module.weight = nn.Parameter(ints(3, 2).t())
    module.bias = nn.Parameter(ints(4)[::2])
    plain = copy.deepcopy(module)
    same(out := impl.wrap(module, 2)(ints(4, 3)), want := plain(ints(4, 3)))
    out.sum().backward()
    want.sum().backward()
    same(grads(module), grads(plain))


@row("D16")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("place", ["inside", "outside", "both"])
def test_checkpointing(impl, reentrant, place):
    def block(x, net):
        return net.second(torch.nn.functional.dropout(net.first(x), 0.0) ** 2)

    def inner(self, x):
        if place == "outside":
            return block(x, self.net)
        return checkpoint(block, x, self.net, use_reentrant=reentrant)

    module, plain = Apply(inner), Net()
    module.net = Net()
    dp = impl.wrap(module, 2)
    x, z = ints(5, 3, grad=True), ints(5, 3, grad=True)
    outer = (lambda x: dp(x)) if place == "inside" else (  # noqa: E731
        lambda x: checkpoint(dp, x, use_reentrant=reentrant)
    )
    out = outer(x)
    with torch.no_grad():
        dp(ints(4, 3))  # a forward in between must not touch what the recompute will use
    out.sum().backward()
    plain(z).sum().backward()
    same(x.grad, z.grad)
    same(grads(module.net), grads(plain))


@row("D17")
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_inf_and_nan_pass_unchanged(impl, value):
    module, plain = linear(), linear()
    dp = impl.wrap(module, 2)
    for set_to_none in (True, False):
        (dp(ints(4, 3)) * value).sum().backward()
        (plain(ints(4, 3)) * value).sum().backward()
        assert torch.equal(module.weight.grad.cpu().isnan(), plain.weight.grad.isnan())
        assert torch.equal(module.weight.grad.cpu().isinf(), plain.weight.grad.isinf())
        for m in (module, plain):
            m.zero_grad(set_to_none=set_to_none)
        dp(ints(4, 3)).sum().backward()
        plain(ints(4, 3)).sum().backward()
        same(grads(module), grads(plain))
        module.zero_grad()
        plain.zero_grad()


@row("K1")
def test_buffer_that_requires_grad(impl):
    module = Apply(lambda s, x: s.lin(x) * s.scale)
    # Made at home: `to` moves a buffer under autograd, so what it gives is no leaf.
    scale = torch.tensor([2.0, 3.0], device=impl.home).double().requires_grad_()
    module.register_buffer("scale", scale)
    impl.wrap(module, 2)(ints(4, 3)).sum().backward()
    same(module.scale.grad, linear()(ints(4, 3)).sum(0))
    close(module.lin.bias.grad, torch.tensor([8.0, 12.0]).double())


@row("K1")
@pytest.mark.parametrize("frozen", [True, False])
def test_buffers_that_require_grad_alone(impl, frozen):
    """No parameter shares their bucket: none is there, or none of their dtype."""
    module = Apply(lambda s, x: s.lin(x) * s.scale + s.shift)
    scale, shift = torch.tensor([[2.0, 3.0], [1.0, 1.0]], device=impl.home)
    module.register_buffer("scale", scale.clone().requires_grad_())
    module.register_buffer("shift", shift.double().requires_grad_())
    module.lin.requires_grad_(not frozen)
    impl.wrap(module, 2)(ints(4, 3)).sum().backward()
    same(module.scale.grad, linear()(ints(4, 3)).sum(0).float())
    same(module.shift.grad, torch.full((2,), 4.0).double())
