"""BEHAVIOUR D and A: several graphs alive at once, edits of the base between calls, weights put in
from outside."""

import copy

import pytest
import torch
from nets import Apply, Net, exact, grads, ints, linear, same
from torch import nn
from torch.func import functional_call

row = pytest.mark.row


# Several graphs alive.


@row("D6")
def test_two_forwards_one_backward(impl):
    module, plain = Net(), Net()
    dp = impl.wrap(module, 2)
    a, b = ints(4, 3, seed=1), ints(5, 3, seed=2)
    (dp(a).sum() + dp(b).sum()).backward()
    (plain(a).sum() + plain(b).sum()).backward()
    same(grads(module), grads(plain))


@row("D7")
def test_backward_in_any_order(impl):
    module, plain = Net(), Net()
    dp = impl.wrap(module, 2)
    xs = [ints(k + 2, 3, seed=k) for k in range(4)]
    outs, wants = [dp(x) for x in xs], [plain(x) for x in xs]
    for k in (2, 0, 3, 1):
        outs[k].sum().backward(retain_graph=k == 0)
        wants[k].sum().backward()
        same(grads(module), grads(plain))
    outs[0].sum().backward()
    plain(xs[0]).sum().backward()
    same(grads(module), grads(plain))


@row("D7")
def test_second_backward_without_retain_graph_raises(impl):
    out = impl.wrap(Net(), 2)(ints(4, 3)).sum()
    out.backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


@row("D6")
def test_backward_after_an_optimizer_step(impl):
    """Right by the weights of its forward, or refused; replica 0 reads the base in place."""
    module = Net()
    dp = impl.wrap(module, 2)
    opt = torch.optim.SGD(module.parameters(), 1)
    dp(ints(4, 3)).sum().backward()
    older = dp(ints(4, 3, seed=2))
    opt.step()
    with pytest.raises(RuntimeError, match="modified (by an )?inplace"):
        older.sum().backward()


@row("D6")
def test_older_graph_is_right_after_a_data_edit_of_other_replicas(impl):
    """A graph through the copies keeps its own weights, whatever the next forward copies."""
    seen = []

    def forward(self, x):
        y = self.lin(x) ** 2
        seen.append((x[0, 0].item(), y))
        return y

    module = Apply(forward)
    dp = impl.wrap(module, 2)
    x = torch.tensor([[1.0, 1, 1], [2.0, 2, 2]]).double()
    weight = module.lin.weight.detach().clone()
    dp(x)
    copy_output = next(y for first, y in seen if first == 2.0)
    with torch.no_grad():
        module.lin.weight.add_(5)
    dp(x)
    (gradient,) = torch.autograd.grad(copy_output.sum(), module.lin.weight)
    y = torch.nn.functional.linear(x[1:].to(weight.device), weight, module.lin.bias)
    same(gradient, 2 * y.T @ x[1:].to(weight.device))


@row("D8")
def test_accumulation_sums_exactly(impl):
    module, plain = Net(), Net()
    dp = impl.wrap(module, 3)
    for k in range(4):
        dp(ints(5, 3, seed=k)).sum().backward()
    plain(torch.cat([ints(5, 3, seed=k) for k in range(4)])).sum().backward()
    same(grads(module), grads(plain))


@row("D8", why="mutant: a reduced bucket reused while a .grad points into it")
def test_gradients_taken_away_keep_their_values(impl):
    module = Net()
    dp = impl.wrap(module, 2)
    kept = []
    for k in range(3):
        module.zero_grad()
        dp(ints(4, 3, seed=k)).sum().backward()
        kept.append([p.grad for p in module.parameters()])
    for k, gradients in enumerate(kept):
        plain = Net()
        plain(ints(4, 3, seed=k)).sum().backward()
        same(gradients, [p.grad for p in plain.parameters()])


# Edits of the base between calls.


@row("D9", "J3")
@pytest.mark.parametrize("inference", [False, True])
def test_every_write_is_seen(impl, inference):
    module = linear()
    dp = impl.wrap(module, 2)
    x = ints(4, 3)

    def check():
        with torch.inference_mode(inference):
            got = dp(x)
        same(got, copy.deepcopy(module).cpu()(x))

    check()
    module.weight.data.mul_(0)
    check()
    module.weight.data = torch.ones(2, 3, device=impl.home).double()
    check()
    module.weight.data.copy_(torch.full((2, 3), 2.0))
    check()
    with torch.no_grad():
        module.bias.fill_(7)
    check()
    dp.load_state_dict({f"module.{k}": v for k, v in linear(seed=9).state_dict().items()})
    check()
    if impl.home.type == "cpu":
        module.weight.detach().numpy()[:] = 3
        check()


@row("D10")
def test_replacements_are_seen(impl):
    module = Net()
    dp = impl.wrap(module, 2)
    x = ints(4, 3)

    def check():
        module.zero_grad()
        plain = copy.deepcopy(module).cpu()
        same(out := dp(x), want := plain(x))
        out.sum().backward()
        want.sum().backward()
        same(grads(module), grads(plain))

    check()
    module.first.weight = nn.Parameter(torch.ones(4, 3, device=impl.home).double())
    check()
    module.second = exact(nn.Linear(4, 5), seed=4).to(impl.home)
    check()
    module.second = exact(nn.Sequential(nn.Linear(4, 5), nn.ReLU()), seed=4).to(impl.home)
    check()
    module.second.append(exact(nn.Linear(5, 1)).to(impl.home))
    check()
    module.second[0].bias = None
    check()
    bias = nn.Parameter(torch.ones(5, device=impl.home).double())
    module.second[0].register_parameter("bias", bias)
    check()
    dp.module = module = exact(Net(), seed=7).to(impl.home)
    check()


@row("D10")
def test_dtype_changed_between_calls(impl):
    module = linear()
    dp = impl.wrap(module, 2)
    dp(ints(4, 3)).sum().backward()
    module.float()
    out = dp(ints(4, 3).float())
    assert out.dtype == torch.float32
    same(out, linear().float()(ints(4, 3).float()))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        exact(self)
        self.b.weight = self.a.weight

    def forward(self, x):
        assert self.a.weight is self.b.weight
        return self.b(self.a(x))


@row("D11")
def test_tied_weights_stay_tied_in_a_replica(impl):
    module, plain = Tied(), Tied()
    calls = []
    module.a.weight.register_hook(lambda g: calls.append(1))
    same(out := impl.wrap(module, 2)(ints(4, 3)), want := plain(ints(4, 3)))
    out.sum().backward()
    want.sum().backward()
    same(module.a.weight.grad, plain.a.weight.grad)
    assert calls == [1]


@row("D12")
def test_wrapping_and_running_keep_identity_storage_and_strides(impl):
    module = nn.Conv2d(2, 3, 3).double().to(memory_format=torch.channels_last).to(impl.home)
    before = [(id(p), p.data_ptr(), p.stride()) for p in module.parameters()]
    dp = impl.wrap(module, 2)
    dp(ints(4, 2, 5, 5)).sum().backward()
    assert [(id(p), p.data_ptr(), p.stride()) for p in module.parameters()] == before
    assert [id(p) for p in dp.parameters()] == [key for key, *_ in before]


# Weights put in from outside.


@row("A26")
def test_functional_call_through_a_parent(impl):
    module = Net()
    parent = nn.Sequential(impl.wrap(module, 2))
    x = ints(4, 3)
    swapped = exact(Net(), seed=5)
    weights = {f"0.module.{k}": v for k, v in swapped.to(impl.home).named_parameters()}
    same(out := functional_call(parent, weights, (x,)), exact(Net(), seed=5)(x))
    out.sum().backward()
    assert all(g is None for g in grads(module).values())
    plain = exact(Net(), seed=5)
    plain(x).sum().backward()
    same(grads(swapped), grads(plain))
    same(parent(x), Net()(x))


@row("A26")
def test_functional_call_with_non_leaf_weights(impl):
    module = linear()
    parent = nn.Sequential(impl.wrap(module, 2))
    x = ints(4, 3)
    leaf = torch.ones(2, 3, dtype=torch.float64, device=impl.home, requires_grad=True)
    functional_call(parent, {"0.module.weight": 2 * leaf}, (x,)).sum().backward()
    same(leaf.grad, 2 * x.sum(0).expand(2, 3))


@row("A26")
def test_functional_call_on_the_wrapper_is_refused_as_by_torch(fast):
    dp = fast.wrap(linear(), 2)
    with pytest.raises(RuntimeError, match="DataParallel"):
        functional_call(dp, {"module.weight": torch.ones(2, 3)}, (ints(4, 3),))


@row("A24", "K3")
def test_lazy_modules_are_refused(impl):
    with pytest.raises((RuntimeError, ValueError), match="uninitialized parameter"):
        impl.wrap(nn.LazyLinear(2), 2)(torch.ones(4, 3))


@row("A24")
def test_the_error_of_lazy_modules_says_what_to_do(fast):
    module = nn.Sequential(linear(), nn.LazyLinear(2))
    with pytest.raises(RuntimeError, match="Run a dummy forward pass"):
        fast.wrap(module, 2)(ints(4, 3))


@row("A24")
def test_lazy_modules_work_once_initialised(impl):
    lazy = nn.LazyLinear(2)
    dp = impl.wrap(lazy, 2)
    lazy(torch.ones(4, 3, device=impl.home))
    exact(lazy)
    same(dp(ints(4, 3)), linear()(ints(4, 3)))
