"""BEHAVIOUR B, C and F, side by side with torch's own: arguments and results of rarer kinds, and
what the owner of a wrapper does to it."""

import collections
import dataclasses

import oracle
import pytest
import torch
from alike import Table, alike, check, trained
from nets import Apply, Net, grads, ints
from torch import nn
from torch.ao import quantization

import fastdp

row = pytest.mark.row


# Arguments and results of other kinds.

kinds = Table()


class MyList(list):
    pass


class MyTuple(tuple):
    pass


class MyTensor(torch.Tensor):
    pass


@dataclasses.dataclass
class Fields:
    x: object


def seen_as(wrap, argument, look):
    seen = []
    wrap(Apply(lambda s, x, a: (seen.append(look(a)), s.lin(x))[1]))(ints(4, 3), argument)
    return sorted(seen)


@kinds
def a_size(wrap):
    return seen_as(wrap, torch.Size([2, 3]), lambda a: (type(a).__name__, tuple(a)))


@kinds
def subclasses_of_lists_and_tuples(wrap):
    names = [seen_as(wrap, kind([ints(4, 1)]), lambda a: type(a).__name__)
             for kind in (MyList, MyTuple)]  # fmt: skip
    outs = [
        wrap(Apply(lambda s, x, kind=kind: kind([x])))(ints(4, 3)) for kind in (MyList, MyTuple)
    ]
    return names, [type(out).__name__ for out in outs], [out[0] for out in outs]


@kinds
def a_dataclass_and_a_set(wrap):
    fields, members = Fields(ints(4, 3)), {1, 2}
    return (
        seen_as(wrap, fields, lambda a: a is fields),
        seen_as(wrap, members, lambda a: a is members),
    )


@kinds
def a_subclass_of_tensors(wrap):
    seen = []
    out = wrap(Apply(lambda s, x: (seen.append(type(x).__name__), x * 2)[1]))(
        ints(4, 3).as_subclass(MyTensor)
    )
    return seen, type(out).__name__, out.as_subclass(torch.Tensor)


@kinds
def a_parameter(wrap):
    seen, weight = [], nn.Parameter(ints(4, 3))
    dp = wrap(Apply(lambda s, x: (seen.append(type(x).__name__), s.lin(x))[1]))
    dp(weight).sum().backward()
    return seen, weight.grad


@kinds
def one_tensor_twice(wrap):
    x = ints(4, 3, grad=True)
    module = Apply(lambda s, a, b: s.lin(a) * s.lin(b))
    return trained(module, wrap(module), x, x), x.grad


@kinds
def an_input_changed_in_place(wrap):
    x = ints(4, 3, grad=True)
    module = Apply(lambda s, x: s.lin(x.add_(1)))
    return trained(module, wrap(module), x * 1), x.grad


@kinds
def results_changed_in_place(wrap):
    module = Apply(lambda s, x: (s.lin(x), x * 2))
    first, second = wrap(module)(ints(4, 3))
    first += 1
    first[0] = 0
    second.t().sub_(1)
    first.mul_(2).relu_().sum().backward()
    return first, second, grads(module)


@kinds
def an_input_returned_and_changed(wrap):
    x = ints(4, 3)
    out = wrap(nn.Identity())(x)
    out.add_(5)
    return out, x


@kinds
def a_result_that_retains_its_gradient(wrap):
    out = wrap(Net())(ints(4, 3))
    out.retain_grad()
    (out**2).sum().backward()
    return out.grad


@kinds
def inputs_made_under_inference_mode(wrap):
    with torch.inference_mode():
        x = ints(4, 3)
    with torch.no_grad():
        return wrap(Net())(x)


@kinds
def complex_inputs(wrap):
    x = torch.complex(ints(4, 3), ints(4, 3, seed=2)).requires_grad_()
    out = wrap(Apply(lambda s, x: x * x))(x)
    out.abs().pow(2).sum().backward()
    return out, x.grad


@kinds
def an_ordered_dictionary_subclass(wrap):
    class Named(collections.OrderedDict):
        pass

    out = wrap(Apply(lambda s, d: Named(y=s.lin(d["x"]), z=d)))(Named(x=ints(4, 3)))
    return type(out).__name__, type(out["z"]).__name__, out["y"], dict(out["z"])


@row("B8", "B11", "B12", "B19", "C11", "L13")
@pytest.mark.parametrize("case", kinds.values(), ids=kinds.keys())
def test_arguments_and_results(case, fast):
    check(case, fast)


# The wrapper, its hooks and its owner.

owners = Table()


@owners
def changes_the_devices(wrap):
    dp = wrap(Net(), 3)
    outs = [dp(ints(6, 3))]
    every = dp.device_ids
    for ids in (every[:2], every[:1], every, every[:1] + every[2:]):
        dp.device_ids = ids
        outs.append(dp(ints(6, 3)))
    return outs


@owners
def changes_the_dimension(wrap):
    dp = wrap(Apply(lambda s, x: x * x.size(1)))
    outs = [dp(ints(4, 4))]
    dp.dim = 1
    return [*outs, dp(ints(4, 4))]


@owners
def puts_hooks_with_keywords(wrap):
    seen, module = [], Apply(lambda s, x, k=1: s.lin(x) * k)
    module.register_forward_pre_hook(lambda m, a, k: (a, {**k, "k": 3}), with_kwargs=True)
    module.register_forward_hook(
        lambda m, a, k, out: (seen.append(sorted(k.items())), out + 1)[1], with_kwargs=True
    )
    module.lin.register_forward_hook(lambda *_: seen.append([]), always_call=True, prepend=True)
    return wrap(module)(ints(4, 3), k=2), sorted(seen)


@owners
def puts_hooks_on_all_modules(wrap):
    seen, dp = [], wrap(Net())
    modules = nn.modules.module
    handles = [
        modules.register_module_forward_hook(lambda m, a, out: seen.append(type(m).__name__)),
        modules.register_module_full_backward_hook(lambda m, gi, go: seen.append("back")),
    ]
    try:
        dp(ints(4, 3)).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    return sorted(seen)


@owners
def puts_a_backward_hook_on_the_wrapper(wrap):
    seen, module, x = [], Net(), ints(4, 3, grad=True)
    dp = wrap(module)
    dp.register_full_backward_hook(lambda m, gi, go: seen.append([t.shape for t in (*gi, *go)]))
    return trained(module, dp, x), x.grad, seen


@owners
def flattens_the_parameters(wrap):
    module = Net()
    dp = wrap(module)
    vector = nn.utils.parameters_to_vector(module.parameters()).detach() * 2
    nn.utils.vector_to_parameters(vector, module.parameters())
    result = trained(module, dp, ints(4, 3))
    vector.mul_(0)
    return result, dp(ints(4, 3))


@owners
def clips_and_steps(wrap):
    module = Net()
    dp = wrap(module)
    opt = torch.optim.AdamW(dp.parameters(), 0.01)
    for step in range(3):
        opt.zero_grad()
        dp(ints(5, 3, seed=step)).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(dp.parameters(), 1.0)
        opt.step()
    return [p.detach() for p in module.parameters()]


@owners
def draws_random_numbers_beside(wrap):
    """A forward without any leaves the generator alone."""
    torch.manual_seed(3)
    wrap(Net())(ints(4, 3)).sum().backward()
    return torch.rand(3)


@owners
def quantizes_for_training(wrap):
    module = nn.Sequential(quantization.FakeQuantize(), nn.Linear(3, 2))
    dp = wrap(module)
    out = [dp(ints(4, 3).float()) for _ in range(2)]
    return out, {name: value for name, value in module.state_dict().items() if name[0] == "0"}


@owners
def observes_ranges(wrap):
    module = nn.Sequential(quantization.MinMaxObserver(), quantization.HistogramObserver())
    wrap(module)(ints(4, 3).float())
    return [module[0].min_val, module[0].max_val, module[1].histogram.sum()]


@row("A16", "A18", "D9", "F5", "F7", "F11")
@pytest.mark.parametrize("case", owners.values(), ids=owners.keys())
def test_an_owner_who(case, fast):
    check(case, fast)


@row("F11")
@pytest.mark.parametrize("outer", ["torch's", "fastdp's"])
def test_wrappers_of_both_kinds_in_each_other(outer):
    """On the host, since torch's is played there: numbers and gradients are the plain module's."""
    module, plain = Net(), Net()

    def theirs(inner):
        return oracle.DataParallel(inner, device_ids=[0, 1])

    def ours(inner):
        return fastdp.DataParallel(inner, device_ids=["cpu"] * 2)

    around, within = (theirs, ours) if outer == "torch's" else (ours, theirs)
    inner = within(module)
    inner(ints(4, 3))
    dp = around(nn.Sequential(inner))
    for _ in range(2):
        got, want = trained(module, dp, ints(8, 3)), trained(plain, plain, ints(8, 3))
        alike(got[0], want[0])
    alike(grads(module), grads(plain))
