"""BEHAVIOUR D: gradients taken inside forward, several times over, and of some of the outputs."""


import pytest
import torch
from nets import CLOSE, Apply, Net, by_hand, close, grads, ints, linear, same
from torch import nn

row = pytest.mark.row


@row("D5")
def test_backward_inside_forward(impl):
    """Each replica's part reaches the base at once; together they are the batch's."""

    def forward(self, x):
        (self.lin(x) ** 2).sum().backward()
        return x

    module, plain = Apply(forward), linear()
    dp = impl.wrap(module, 3)
    for _ in range(2):
        dp(ints(6, 3))
        (plain(ints(6, 3)) ** 2).sum().backward()
    same(module.lin.weight.grad, plain.weight.grad)
    same(module.lin.bias.grad, plain.bias.grad)


class InnerLoop(nn.Module):
    """One inner step per chunk, differentiated through (MAML)."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(ints(2, 3))
        self.b = nn.Parameter(ints(2))

    def forward(self, x):
        inner = (nn.functional.linear(x, self.w, self.b) ** 2).sum()
        dw, db = torch.autograd.grad(inner, (self.w, self.b), create_graph=True)
        return nn.functional.linear(x, self.w - 0.5 * dw, self.b - 0.25 * db)


@row("D4", why="inside forward gradients stop at the replica")
def test_an_inner_loop_inside_forward(impl):
    module = InnerLoop()
    want, want_grads, _ = by_hand(InnerLoop(), ints(5, 3), 2)
    same(out := impl.wrap(module, 2)(ints(5, 3)), want)
    out.sum().backward()
    same(grads(module), want_grads)


@row("D3", why="gradient penalty inside forward")
def test_penalty_inside_forward(impl):
    def forward(self, x):
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return (g**2).sum(1)

    module, plain = Apply(forward), Apply(forward)
    module.net, plain.net = Net(), Net()
    same(out := impl.wrap(module, 2)(ints(5, 3)), want := plain(ints(5, 3)))
    out.sum().backward()
    want.sum().backward()
    same(grads(module.net)["first.weight"], grads(plain.net)["first.weight"])
    same(grads(module.net)["second.weight"], grads(plain.net)["second.weight"])


@row("D3", why="third derivatives")
def test_third_derivative(impl):
    def run(module, m):
        x = torch.full((4, 3), 2.0).double().requires_grad_()
        y = module(x)
        for _ in range(2):
            (y,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
        y.sum().backward()
        return x.grad, grads(m)["first.weight"], grads(m)["second.weight"]

    module, plain = Net(), Net()
    for got, want in zip(run(impl.wrap(module, 2), module), run(plain, plain), strict=True):
        close(got, want, **CLOSE)


@row("D4", why="several outputs, each with its own gradient")
def test_grad_outputs_of_several_outputs(impl):
    module, plain = Net(), Net()

    def run(run, m):
        y, z = run(ints(4, 3)), run(ints(5, 3, seed=2))
        return torch.autograd.grad(
            [y, z], list(m.parameters()), [torch.ones_like(y), 2 * torch.ones_like(z)]
        )

    same(run(impl.wrap(module, 2), module), run(plain, plain))


@row("D1", why="gradients of a replica whose output needs none")
def test_output_detached_on_one_replica(impl):
    """Replica 1 returns a tensor outside the graph: it gets no gradient, the others theirs."""
    module = Apply(lambda s, x: s.lin(x).detach() if x[0, 0] == 1 else s.lin(x))
    x = torch.tensor([[0.0, 1, 2], [1.0, 1, 2], [2.0, 1, 2]]).double()
    out = impl.wrap(module, 3)(x)
    assert out.requires_grad
    out.sum().backward()
    same(module.lin.weight.grad, x[[0, 2]].sum(0).expand(2, 3))
