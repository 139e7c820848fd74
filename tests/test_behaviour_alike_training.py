"""BEHAVIOUR D, side by side with torch's own: derivatives, hooks and optimizers around a wrapper,
and edits of the module between its calls."""

import pytest
import torch
from alike import Table, check, trained
from nets import Apply, Net, exact, grads, ints, linear
from torch import nn
from torch.nn.utils import prune

row = pytest.mark.row


def weights(module):
    return [parameter.detach() for parameter in module.parameters()]


# Derivatives.

derivatives = Table()


@derivatives
def jacobian(wrap):
    return torch.autograd.functional.jacobian(wrap(Net()), ints(3, 3))


@derivatives
def hessian(wrap):
    dp = wrap(Net())
    return torch.autograd.functional.hessian(lambda x: dp(x).sum(), ints(2, 3))


@derivatives
def products_with_vectors(wrap):
    dp, x, v = wrap(Net()), ints(2, 3), ints(2, 3, seed=5)
    functional = torch.autograd.functional
    return functional.jvp(dp, x, v), functional.vhp(lambda x: dp(x).sum(), x, v)


@derivatives
def several_roots_at_once(wrap):
    module = Apply(lambda s, x: (s.lin(x), s.lin(x) ** 2))
    first, second = wrap(module)(ints(4, 3))
    torch.autograd.backward([first, second], [torch.ones_like(first), 2 * torch.ones_like(second)])
    return grads(module)


@derivatives
def a_graph_in_two_parts(wrap):
    module = Net()
    out = wrap(module)(ints(4, 3))
    middle = out.detach().clone().requires_grad_()
    (middle**2).sum().backward()
    out.backward(middle.grad)
    return grads(module)


@derivatives
def hooks_of_many_parameters(wrap):
    module, seen = Net(), []
    dp = wrap(module)  # before the hooks: what moves a module to a GPU leaves them behind
    torch.autograd.graph.register_multi_grad_hook(
        list(module.parameters()), lambda gs: seen.append([float(g.sum()) for g in gs])
    )
    dp(ints(4, 3)).sum().backward()
    return seen


@derivatives
def hooks_before_and_after_a_backward(wrap):
    module, seen = linear(), []
    module.register_full_backward_pre_hook(lambda m, go: (go[0] * 2,))
    module.register_full_backward_hook(lambda m, gi, go: seen.append(len(go)))
    wrap(module)(ints(4, 3)).sum().backward()
    return grads(module), seen


@derivatives
def a_loss_by_its_number(wrap):
    out = wrap(Apply(lambda s, x: s.lin(x).pow(2).mean()))(ints(4, 3))
    return out.mean().item(), out.sum().item()


@derivatives
def deterministic_algorithms(wrap):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        module = Net()
        return trained(module, wrap(module), ints(4, 3))
    finally:
        torch.use_deterministic_algorithms(False)


@row("D3", "D4", "D7", "A18")
@pytest.mark.filterwarnings("ignore:Deterministic behavior was enabled")
@pytest.mark.parametrize("case", derivatives.values(), ids=derivatives.keys())
def test_derivatives(case, fast):
    check(case, fast)


# Optimizers.

optimizers = Table()


def steps(wrap, module, make, *inputs):
    """Weights after three steps of an optimizer."""
    dp = wrap(module)
    opt = make(list(dp.parameters()))
    for step in range(3):
        opt.zero_grad(set_to_none=step != 1)
        dp(*(inputs or (ints(4, 3, seed=step),))).pow(2).mean().backward()
        opt.step()
    return weights(module)


@optimizers
def adam_fused(wrap):
    return steps(wrap, Net(), lambda p: torch.optim.Adam(p, 0.01, fused=True))


@optimizers
def sgd_over_lists(wrap):
    return steps(wrap, Net(), lambda p: torch.optim.SGD(p, 0.01, 0.9, nesterov=True, foreach=True))


@optimizers
def adam_of_sparse_gradients(wrap):
    module = nn.Embedding(6, 3, sparse=True).double()
    rows = torch.tensor([[0, 1], [1, 3]])
    return steps(wrap, module, lambda p: torch.optim.SparseAdam(p, 0.01), rows)


@optimizers
def lbfgs(wrap):
    module = Net()
    dp = wrap(module)
    opt = torch.optim.LBFGS(module.parameters(), 0.01, max_iter=5)

    def closure():
        opt.zero_grad()
        loss = dp(ints(4, 3)).pow(2).mean()
        loss.backward()
        return loss

    opt.step(closure)
    return weights(module)


@optimizers
def a_step_within_backward(wrap):
    """Each parameter is updated as soon as its gradient is there, which then goes."""

    def update(parameter):
        with torch.no_grad():
            parameter -= parameter.grad * 2**-6
        parameter.grad = None

    module = Net()
    dp = wrap(module)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for step in range(3):
        dp(ints(4, 3, seed=step)).sum().backward()
    return weights(module)


@optimizers
def gradients_that_were_there_before(wrap):
    module = linear()
    dp = wrap(module)
    module.weight.grad = torch.ones_like(module.weight)
    module.bias.grad = torch.ones_like(module.bias)
    dp(ints(4, 3)).sum().backward()
    return grads(module)


@row("D8", "D12", "D13", "D17")
@pytest.mark.parametrize("case", optimizers.values(), ids=optimizers.keys())
def test_optimizers(case, fast):
    check(case, fast)


# Edits between calls.

edits = Table()


@edits
def a_part_more_and_less(wrap):
    module = nn.Sequential(linear())
    dp = wrap(module)
    outs = [dp(ints(4, 3))]
    module.append(exact(nn.Linear(2, 2)).to(module[0].weight.device))
    outs.append(dp(ints(4, 3)))
    del module[1]
    return [*outs, dp(ints(4, 3))]


class Summed(nn.Module):
    def __init__(self):
        super().__init__()
        self.d = nn.ParameterDict({"a": nn.Parameter(torch.ones(3).double())})

    def forward(self, x):
        return sum(x * value for _, value in self.d.items())


@edits
def a_parameter_more_and_less(wrap):
    module = Summed()
    dp = wrap(module)
    outs = [dp(ints(4, 3))]
    module.d["b"] = nn.Parameter(module.d["a"].detach() * 4)
    outs.append(dp(ints(4, 3)))
    outs[-1].sum().backward()
    del module.d["a"]
    return [*outs, dp(ints(4, 3))], grads(module)


@edits
def pruning_made_permanent(wrap):
    module = linear()
    with torch.no_grad():  # no two alike: which of them is pruned would be the device's choice
        module.weight.copy_(torch.arange(1.0, 1 + module.weight.numel()).view_as(module.weight))
    dp = wrap(module)
    prune.l1_unstructured(module, "weight", 0.5)
    result = trained(module, dp, ints(4, 3))
    prune.remove(module, "weight")
    return result, dp(ints(4, 3)), sorted(dict(module.named_parameters()))


@edits
def a_norm_taken_off(wrap):
    module = linear()
    nn.utils.weight_norm(module)
    dp = wrap(module)
    outs = [dp(ints(4, 3))]
    nn.utils.remove_weight_norm(module)
    # torch's kernel for GPUs is right to 4e-8 only, in fp64 too.
    return [out.round(decimals=5) for out in (*outs, dp(ints(4, 3)))]


@edits
def a_module_that_keeps_no_trace(wrap):
    module = Net()
    dp = wrap(module)
    before = {name: sorted(part.__dict__) for name, part in module.named_modules()}
    dp(ints(4, 3)).sum().backward()
    return before == {name: sorted(part.__dict__) for name, part in module.named_modules()}


@row("D10", "A21", "X36")
@pytest.mark.parametrize("case", edits.values(), ids=edits.keys())
def test_edits_between_calls(case, fast):
    check(case, fast)
