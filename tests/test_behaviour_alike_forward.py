"""BEHAVIOUR A, side by side with torch's own: what a forward does to its own module."""

import copy
import warnings

import oracle
import pytest
import torch
from alike import Table, alike, check, run, trained
from nets import Apply, ints, linear
from torch import nn

import fastdp

row = pytest.mark.row

inside = Table()


@inside
def edits_data(wrap):
    return run(wrap, lambda s, x: (s.lin.weight.data.add_(1), s.lin(x))[1])


@inside
def sets_data(wrap):
    def forward(s, x):
        s.lin.bias.data = torch.ones(2, device=x.device).double()
        return s.lin(x)

    return run(wrap, forward)


@inside
def moves_itself_to_where_it_is(wrap):
    return run(wrap, lambda s, x: s.to(x.device).double().lin(x))


@inside
def turns_to_evaluation(wrap):
    return run(wrap, lambda s, x: s.eval().lin(x))


@inside
def visits_its_parts(wrap):
    seen = []
    run(wrap, lambda s, x: s.apply(lambda m: seen.append(type(m).__name__)).lin(x))
    return sorted(seen)


@inside
def names_its_parts(wrap):
    seen = []
    run(wrap, lambda s, x: (seen.append([name for name, _ in s.named_modules()]), s.lin(x))[1])
    return seen


@inside
def prints_itself(wrap):
    seen = []
    run(wrap, lambda s, x: (seen.append(repr(s)), s.lin(x))[1])
    return seen


@inside
def returns_its_weight(wrap):
    return run(wrap, lambda s, x: s.lin.weight)


@inside
def returns_a_buffer(wrap):
    module = Apply(lambda s, x: s.b)
    module.register_buffer("b", torch.arange(3.0))
    return wrap(module)(ints(4, 3))


@inside
def returns_one_tensor_twice(wrap):
    return run(wrap, lambda s, x: (s.lin(x),) * 2)


@inside
def asks_for_gradients_of_its_input(wrap):
    def forward(s, x):
        x.requires_grad_()
        (gradient,) = torch.autograd.grad((s.lin(x) ** 2).sum(), x, create_graph=True)
        return gradient

    return run(wrap, forward)


@inside
def puts_a_weight_of_its_own(wrap):
    def forward(s, x):
        s.lin.weight = nn.Parameter(s.lin.weight.data * 2)
        return s.lin(x)

    return run(wrap, forward)


@inside
def hooks_its_weight(wrap):
    seen = []

    def forward(s, x):
        s.lin.weight.register_hook(lambda g: seen.append(float(g.sum())) or 2 * g)
        return s.lin(x)

    return run(wrap, forward), sorted(seen)


@inside
def retains_gradients(wrap):
    kept = []

    def forward(s, x):
        y = s.lin(x)
        y.retain_grad()
        s.lin.weight.retain_grad()
        kept.append((y, s.lin.weight))
        return y * 2

    run(wrap, forward)
    return sorted([y.grad.sum().item(), w.grad.sum().item()] for y, w in kept)


@inside
def keeps_an_average_in_a_buffer(wrap):
    def forward(s, x):
        s.b.mul_(0.5).add_(s.lin(x).detach().mean(0))
        return s.lin(x) - s.b

    return run(wrap, forward, b=torch.zeros(2).double())


@inside
def writes_a_buffer_with_a_graph(wrap):
    def forward(s, x):
        s.b.copy_(s.lin(x).mean(0))
        return s.b * x[:, :2]

    module = Apply(forward)
    module.register_buffer("b", torch.zeros(2).double())
    out, gradients, _ = trained(module, wrap(module), ints(4, 3))
    return out, gradients, module.b.detach()


@inside
def swaps_a_buffers_data(wrap):
    def forward(s, x):
        s.b.data = x[0].detach().clone()
        s.c.set_(x[0].detach().clone())
        return s.lin(x)

    return run(wrap, forward, b=torch.zeros(3).double(), c=torch.zeros(3).double())


@inside
def turns_gradients_on_under_no_grad(wrap):
    module = Apply(lambda s, x: torch.enable_grad()(lambda: s.lin(x))())
    with torch.no_grad():
        out = wrap(module)(ints(4, 3))
    return out


@inside
def copies_a_part_of_itself(wrap):
    return run(wrap, lambda s, x: copy.copy(s.lin)(x))


@inside
def looks_names_up_in_its_part(wrap):
    class Through(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = linear()

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.net, name)

        def forward(self, x):
            return nn.functional.linear(x, self.weight, self.bias)

    module = Through()
    return trained(module, wrap(module), ints(4, 3))


@inside
def is_called_by_a_call_of_its_own(wrap):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = linear()

        def __call__(self, *args):
            return super().__call__(*args) * 2

        def forward(self, x):
            return self.lin(x)

    module = Twice()
    return trained(module, wrap(module), ints(4, 3))


@row("A9", "A10", "A12", "A13", "D5")
@pytest.mark.parametrize("case", inside.values(), ids=inside.keys())
def test_a_forward_that(case, fast):
    check(case, fast)


def on_the_host(module, n=2):
    return fastdp.DataParallel(module, device_ids=["cpu"] * n)


@row("A12")
@pytest.mark.parametrize("size", [0, 1])
def test_a_forward_that_resizes_a_buffer(size):
    """As observers of quantization do at their first batch, channel by channel."""

    def forward(self, x):
        self.b.resize_(x.size(1)).copy_(x[0])
        return self.lin(x) + self.after

    def case(wrap):
        module = Apply(forward)
        module.register_buffer("b", torch.zeros(size).double())
        module.register_buffer("after", torch.ones(2).double())
        dp = wrap(module)
        return [dp(ints(4, 3)) for _ in range(2)], module.b, module.after

    alike(case(on_the_host), case(lambda m: oracle.DataParallel(m, device_ids=[0, 1])))


# What is not alike yet.


@row("E5")
@pytest.mark.xfail(strict=True, reason="Module._apply asks a replica's parameters for their .grad")
def test_a_forward_that_moves_itself_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_the_host(Apply(lambda s, x: s.to(x.device).lin(x)))(ints(4, 3))


@row("A1")
@pytest.mark.xfail(strict=True, reason="a cast in forward reaches the replica's parameters")
def test_a_forward_that_casts_itself_keeps_its_weights_and_their_gradients(fast):
    """torch's replicas have no parameters to cast: theirs stay as they are, with their graph."""

    def casts_itself(wrap):
        module = Apply(lambda s, x: s.float().lin(x))
        return trained(module, wrap(module), ints(4, 3))

    check(casts_itself, fast)
