"""Mistakes that slip through ordinary tests of a data-parallel wrapper, one test for each.

Those with replicas that outlive their forward are in test_mutants_kept_replicas.py. Those that
belong to a section of BEHAVIOUR have theirs there: RNN flat weights shared with the base
(test_behaviour_modules), buckets pooled under inference mode (wrapper), a tensor attribute moved
(replicas), scatter that returns views, constants that raise the number of replicas, 0-dim inputs
(inputs), zeros lost, gradients of buffers, backward with inputs= (gradients), cycles through ctx,
activations, the last job, frames of an exception (memory), fork (processes), SystemExit, grad mode
leaking (threads), a tangent dropped (precision).
"""

import copy

import pytest
import torch
from nets import Apply, Net, close, exact, grads, ints, linear, same
from torch import nn

row = pytest.mark.row


# Version counters and storage.


@row("D6", why="mutant: one version counter for all parameters of a bucket")
@pytest.mark.parametrize("n", [2, 3])
def test_in_place_change_of_one_parameter_leaves_the_others_valid(impl, n):
    def forward(self, x):
        y = self.lin(x) ** 2
        with torch.no_grad():
            self.other.weight.mul_(2)
        return y

    def make():
        module = Apply(forward)
        module.other = linear(seed=3)
        return module

    module, plain = make(), make()
    x, z = ints(6, 3, grad=True), ints(6, 3, grad=True)
    impl.wrap(module, n)(x).sum().backward()
    plain(z).sum().backward()
    same(x.grad, z.grad)
    same(module.lin.weight.grad, plain.lin.weight.grad)
    # Replica 0 shares storage with the base, so its change lasts, once.
    same(module.other.weight, 2 * linear(seed=3).weight)


@row("A12", why="mutant: one version counter for all buffers of a bucket")
def test_in_place_change_of_one_buffer_leaves_the_others_valid(impl):
    def forward(self, x):
        y = self.lin(x) * self.scale
        self.count.add_(1)
        return y

    module = Apply(forward)
    module.register_buffer("scale", torch.full((2,), 3.0).double())
    module.register_buffer("count", torch.zeros(2).double())
    impl.wrap(module, 3)(ints(6, 3)).sum().backward()
    same(module.lin.bias.grad, torch.full((2,), 18.0).double())
    same(module.count, torch.ones(2).double())


@row(
    "D6",
    why="mutant: p.data in replica 0: an older graph is silently wrong after an in-place update",
)
def test_graph_through_replica_0_is_refused_after_an_update(impl):
    caught = {}
    module = Apply(lambda s, x: caught.setdefault(int(x[0, 0]), s.lin(x) ** 2))
    x = torch.tensor([[0.0, 1, 1], [1.0, 1, 1]]).double().requires_grad_()
    impl.wrap(module, 2)(x)
    with torch.no_grad():
        module.lin.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified (by an )?inplace"):
        caught[0].sum().backward()


@row("D6", why="mutant: a copy shares memory with the base or with another replica")
@pytest.mark.distinct
def test_copies_share_no_memory(impl):
    seen = []
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()

    def hook(replica, args):
        tensors = (replica[0].weight, replica[1].running_mean, replica[2].bias)
        seen.append([t.data_ptr() for t in tensors])

    module.register_forward_pre_hook(hook)
    impl.wrap(module, 3)(ints(6, 3))
    base = [module[0].weight.data_ptr(), module[1].running_mean.data_ptr()]
    base.append(module[2].bias.data_ptr())
    assert sum(addresses == base for addresses in seen) == 1
    flat = [address for addresses in seen for address in addresses]
    assert len(set(flat)) == len(flat) == 9


@row("D6", why="mutant: a bucket overwritten while an older graph still reads it")
def test_graphs_of_several_steps_keep_their_copies(impl):
    """Only the copies' outputs are used; each graph has the weights of its own forward."""
    caught = []
    module = Apply(lambda s, x: caught.append((int(x[0, 0]), s.lin(x) ** 2)) or x)
    dp = impl.wrap(module, 3)
    x = torch.arange(3.0).double()[:, None].repeat(1, 3)
    wants = []
    for _ in range(6):
        dp(x)
        wants.append(copy.deepcopy(module.lin).cpu())
        with torch.no_grad():
            module.lin.weight.add_(1)
    for step in (5, 0, 3, 1, 4, 2):
        for rank, out in caught[3 * step : 3 * step + 3]:
            if rank == 0:
                continue
            (got,) = torch.autograd.grad(out.sum(), module.lin.weight)
            plain = wants[step]
            (want,) = torch.autograd.grad((plain(x[rank : rank + 1]) ** 2).sum(), plain.weight)
            same(got, want)


# Containers.


@row("B8", why="mutant: nested containers split twice")
def test_nested_tensors_are_split_once(impl):
    shapes = []

    def forward(self, box):
        (deep,) = box["k"][1]
        shapes.append([tuple(t.shape) for t in (box["x"], box["k"][0], deep["z"])])
        return {"out": [box["x"], (deep["z"], [deep["z"]])]}

    x = ints(8, 3)
    out = impl.wrap(Apply(forward), 2)({"x": x, "k": [x, ({"z": x},)]})
    assert shapes == [[(4, 3)] * 3] * 2
    same(out, {"out": [x, (x, [x])]})


@row("C1", why="mutant: 0-dim tensors")
def test_zero_dim_outputs_beside_others(impl):
    with pytest.warns(UserWarning, match="scalars"):
        out = impl.wrap(Apply(lambda s, x: (x.sum(), [x, x.max()], {"k": x.min()})), 2)(ints(4, 3))
    chunks = ints(4, 3).chunk(2)
    stack = lambda f: torch.stack([f(c) for c in chunks])  # noqa: E731
    same(out, (stack(torch.sum), [ints(4, 3), stack(torch.max)], {"k": stack(torch.min)}))


@row("C1", why="mutant: 0-dim on one replica only")
def test_zero_dim_output_of_one_replica_is_refused(impl):
    with pytest.raises((RuntimeError, IndexError)):
        impl.wrap(Apply(lambda s, x: x.sum() if x.size(0) == 1 else x[:, 0]), 2)(ints(3, 3))


# The tree.


class Negated(nn.Linear):
    def forward(self, x):
        return -super().forward(x)


@row("D10", why="mutant: type or tree changes unseen")
def test_class_edit_is_seen(impl):
    module = linear()
    dp = impl.wrap(module, 2)
    x = ints(4, 3)
    want = linear()(x)
    same(dp(x), want)
    module.__class__ = Negated
    same(dp(x), -want)
    module.__class__ = nn.Linear
    same(dp(x), want)


@row("D10", why="mutant: type or tree changes unseen")
def test_class_edit_of_a_child_is_seen(impl):
    module = Net()
    dp = impl.wrap(module, 2)
    x = ints(4, 3)
    want = Net()(x)
    same(dp(x), want)
    module.second.__class__ = Negated
    same(dp(x), -want)


@row("D10", why="mutant: type or tree changes unseen")
def test_renamed_swapped_and_removed_children_are_seen(impl):
    a, b = exact(nn.Linear(3, 3)), exact(nn.Linear(3, 3), seed=4)
    module = nn.Sequential(a, b)
    dp = impl.wrap(module, 2)
    x = ints(4, 3)

    def check():
        same(dp(x), module(x.to(impl.home)))

    check()
    module[0], module[1] = b, a
    check()
    module._modules = {"new": b, "names": a}
    check()
    del module.names
    check()
    module.add_module("again", b)
    check()
    module.again = None
    module._modules.pop("again")
    check()


@row("D10", why="mutant: type or tree changes unseen")
def test_parameter_names_that_change_are_seen(fast):
    module = Apply(lambda s, x: x * sum(p for name, p in s.named_parameters() if "." not in name))
    module.a = nn.Parameter(torch.ones(3).double())
    dp = fast.wrap(module, 2)
    x = ints(4, 3)
    same(dp(x), x)
    module.b = module.a
    del module.a
    same(dp(x), x)
    module.c = nn.Parameter(torch.ones(3, device=fast.home).double() * 2)
    same(dp(x), x * 3)


@row("A16", why="mutant: hooks, flags and methods of the base unseen after the first forward")
def test_instance_dict_edits_are_seen(impl):
    module = linear()
    dp = impl.wrap(module, 2)
    x = ints(4, 3)
    want = linear()(x)
    same(dp(x), want)
    handle = module.register_forward_hook(lambda m, a, out: out * 2)
    same(dp(x), want * 2)
    handle.remove()
    plain_forward = module.forward
    # It is the base's, wherever the replica is.
    module.forward = lambda x: plain_forward(x.to(impl.home)).to(x.device) + 1
    same(dp(x), want + 1)
    del module.forward
    same(dp(x), want)
    module.__dict__["extra"] = 1
    assert not hasattr(nn.Linear, "extra")
    same(dp(x), want)


# Gradients.


@row("D2", why="mutant: requires_grad of the wrapper's output without a parameter that needs it")
def test_outputs_of_a_frozen_net_need_no_grad(impl):
    module = Net().requires_grad_(False)
    out = impl.wrap(module, 2)(ints(4, 3))
    assert not out.requires_grad and out.grad_fn is None


@row("D3", why="mutant: zeros for unused parameters make a second derivative fail")
def test_second_derivative_beside_unused_parameters(impl):
    module, plain = Net(), Net()
    for m in (module, plain):
        m.idle = linear(seed=2)

    def run(run, m):
        x = ints(4, 3, grad=True)
        (g,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        (g**2).sum().backward()
        return x.grad

    same(run(impl.wrap(module, 2), module), run(plain, plain))
    for name in ("first.weight", "second.weight"):
        same(grads(module)[name], grads(plain)[name])
    idle = module.idle.weight.grad
    assert idle is None or not idle.any()


@row("D3", why="mutant: a missing gradient in the derivative of a reduction")
@pytest.mark.parametrize("unused_grad", ["zero", "none"])
def test_second_derivative_of_parameter_gradients_beside_unused_ones(fast, unused_grad):
    module, plain = Net(), Net()
    for m in (module, plain):
        m.idle = linear(seed=2)

    def run(run, m):
        used = [m.first.weight, m.first.bias, m.second.weight]
        gradients = torch.autograd.grad(run(ints(4, 3)).sum(), used, create_graph=True)
        sum((g**2).sum() for g in gradients).backward()
        return [p.grad for p in used]

    dp = fast.wrap(module, 2, unused_grad=unused_grad)
    same(run(dp, module), run(plain, plain))
    assert module.idle.weight.grad is None or not module.idle.weight.grad.any()


@row("D8", why="mutant: reduction order by arrival instead of by rank")
def test_sums_are_the_same_bits_every_time(fast):
    """fp32 values whose sum depends on order, replicas that finish in any order."""
    module = nn.Linear(3, 2)
    dp = fast.wrap(module, 4)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(3))
    x *= torch.logspace(-6, 6, 8)[:, None]
    results = []
    for _ in range(10):
        module.zero_grad()
        dp(x).sum().backward()
        results.append(module.weight.grad.clone())
    for other in results[1:]:
        same(other, results[0])
    parts = []
    for chunk in x.chunk(4):
        twin = copy.deepcopy(module)
        twin.zero_grad()
        twin(chunk.to(fast.home)).sum().backward()
        parts.append(twin.weight.grad)
    close(results[0], ((parts[0] + parts[1]) + parts[2]) + parts[3], rtol=0, atol=0)
