"""BEHAVIOUR A and parity: what a module has beside parameters, buffers and registered children:
tensors, modules, generators, streams, functions; custom operators and Functions; hooks that raise.
"""

import functools

import pytest
import torch
from nets import Apply, Net, grads, ints, linear, ranked, same
from torch import nn

row = pytest.mark.row


def seen_by_replicas(impl, module_attributes, look, n=3):
    """look(replica) on each of n replicas of a module with these attributes."""
    seen = []
    module = Apply(lambda s, x: seen.append(look(s)) or s.lin(x))
    for name, value in module_attributes.items():
        setattr(module, name, value)
    impl.wrap(module, n)(ints(2 * n, 3))
    assert len(seen) == n
    return seen


# Shared, not moved.


@row("A7")
@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_hidden_modules_are_the_bases_own(impl, kind):
    hidden = linear(seed=4).to(impl.home)
    box = {"a": hidden} if kind is dict else kind([hidden])
    seen = seen_by_replicas(impl, {"box": box}, lambda s: (s.box, len(list(s.parameters()))))
    for found, _ in seen:
        assert found is box and (found["a"] if kind is dict else found[0]) is hidden
    if not impl.is_oracle:
        assert {count for _, count in seen} == {2}, "a hidden module must not be registered"


@row("A7")
def test_hidden_modules_compute_and_learn_on_their_device(impl):
    """As in nn.DataParallel: right where all replicas share a device, gradients and all."""
    module = Apply(lambda s, x: s.lin(x) + s.box[0](x))
    hidden = linear(seed=4).to(impl.home)
    module.box = [hidden]
    dp = impl.wrap(module, 2)
    if impl.gpus > 1:
        with pytest.raises(RuntimeError, match="(?s)replica 1 on device .*1.*device"):
            dp(ints(4, 3))
        return
    same(out := dp(ints(4, 3)), linear()(ints(4, 3)) + linear(seed=4)(ints(4, 3)))
    out.sum().backward()
    same(hidden.weight.grad, ints(4, 3).sum(0).expand(2, 3))


@row("A3")
def test_a_generator_is_shared(impl):
    generator = torch.Generator().manual_seed(3)
    assert all(g is generator for g in seen_by_replicas(impl, {"g": generator}, lambda s: s.g))
    assert generator.initial_seed() == 3


def on_meta():
    return torch.ones(2, device="meta")


MISPLACED = {
    "a tensor": (on_meta, lambda a: a, r"Not on \S+, .*: thing, a tensor on meta"),
    "in a list": (
        lambda: [nn.Linear(2, 2), on_meta()],
        lambda a: a[1],
        r"[:;] thing\[1\], a tensor on meta",  # on a GPU the first stayed behind as well
    ),
    "in a dict": (lambda: {"k": on_meta()}, lambda a: a["k"], r": thing\['k'\], a tensor on meta"),
    "a hidden module": (
        lambda: [nn.BatchNorm1d(2, device="meta")],
        lambda a: a[0].weight,
        r"thing\[0\], a BatchNorm1d that is not registered on meta.*nn\.ModuleList",
    ),
    "a bound method": (
        lambda: nn.BatchNorm1d(2, device="meta").forward,
        lambda a: a.__self__.weight,
        "thing, a method of a BatchNorm1d on meta",
    ),
}


def closure():
    held = on_meta()
    return lambda: held


MISPLACED["a closure"] = (
    closure, lambda a: a(), r"thing \(through its closure\), a tensor on meta"
)  # fmt: skip


@row("A6", "A7", "A8")
@pytest.mark.parametrize("kind", MISPLACED)
def test_an_error_of_devices_names_the_attribute(fast, kind):
    """The meta device stands in for another GPU: what lies there cannot meet the replica's."""
    make, read, text = MISPLACED[kind]
    module = Apply(lambda s, x: s.lin(x) + read(s.thing))
    # Past __setattr__, and unused ones beside it on the right device.
    module.__dict__.update(thing=make(), fine=[torch.ones(2, device=fast.home)], number=3)
    with pytest.raises(RuntimeError, match=f"(?s)in replica 0 on device .*{text}") as caught:
        fast.wrap(module, 2)(ints(4, 3))
    assert "Tensor on device" in str(caught.value.__cause__)
    assert "fine" not in str(caught.value).split("Not on")[1]


@row("A6")
def test_an_error_of_something_else_names_no_attribute(fast):
    def forward(self, x):
        raise RuntimeError("of shapes")

    module = Apply(forward)
    module.thing = on_meta()
    with pytest.raises(RuntimeError) as caught:
        fast.wrap(module, 2)(ints(4, 3))
    assert "Not on" not in str(caught.value)


@row("A6")
def test_the_hint_stops_at_five(fast):
    module = Apply(lambda s, x: s.lin(x) + s.t0)
    for k in range(8):
        setattr(module, f"t{k}", on_meta())
    with pytest.raises(RuntimeError, match="t4, a tensor on meta and 3 more"):
        fast.wrap(module, 2)(ints(4, 3))


@row("A3")
def test_streams_and_events_of_the_caller(fast):
    """On the replica's own device they work; a foreign one is torch's error, with a hint."""
    if fast.home.type == "cpu":
        stream = torch.Stream("cpu")  # a name only: the host's work is not in streams
        assert all(s is stream for s in seen_by_replicas(fast, {"s": stream}, lambda s: s.s))
        return

    def forward(self, x):
        self.stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self.stream):
            y = self.lin(x)
        torch.cuda.current_stream(x.device).wait_stream(self.stream)
        if self.record:
            self.event.record(torch.cuda.current_stream(x.device))
        return y

    module = Apply(forward)
    module.stream, module.event = torch.cuda.Stream(fast.home), torch.cuda.Event()
    module.record = False
    dp = fast.wrap(module, 2)
    for _ in range(3):
        same(dp(ints(4, 3)), linear()(ints(4, 3)))
    if fast.gpus > 1:
        module.record = True
        module.event.record(torch.cuda.current_stream(fast.home))
        words = f"(?s)replica 1.*Not on {fast.device(1)}.*event, a Event"
        with pytest.raises(RuntimeError, match=words):
            dp(ints(4, 3))


# Functions kept in __init__.


@row("A8")
def test_partials_and_lambdas_run_where_they_were_bound(impl):
    """They hold the base's own layer: the numbers and gradients are the base's, as in torch."""
    module = Apply(lambda s, x: s.f(x) + s.g(x))
    lin = module.lin
    module.f = lambda x: lin(x)
    module.g = functools.partial(nn.functional.linear, weight=lin.weight)
    dp = impl.wrap(module, 2)
    if impl.gpus > 1:
        with pytest.raises(RuntimeError, match="replica 1"):
            dp(ints(4, 3))
        return
    want = 2 * linear()(ints(4, 3)) - linear().bias
    same(out := dp(ints(4, 3)), want)
    out.sum().backward()
    same(module.lin.weight.grad, 2 * ints(4, 3).sum(0).expand(2, 3))


# Custom operators and Functions.


torch.library.define("fastdp_tests::twice", "(Tensor x) -> Tensor")


@torch.library.impl("fastdp_tests::twice", ("cpu", "cuda"))
def _twice(x):
    assert x.device.type == "cpu" or x.device.index == torch.cuda.current_device()
    return x * 2


@row("A3", "X52")
def test_a_custom_operator_runs_on_each_replicas_device(impl):
    """It asserts that its tensor's device is the current one, as a CUDA launch assumes."""
    module = Apply(lambda s, x: torch.ops.fastdp_tests.twice(s.lin(x.detach()).detach()))
    same(impl.wrap(module, 3)(ints(6, 3)), 2 * linear()(ints(6, 3)))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, owner):
        ctx.save_for_backward(x)
        ctx.owner = owner
        owner.forwards.append(chunk_of(x))
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        ctx.owner.last = gradient
        ctx.owner.backwards.append(chunk_of(x))
        return 3 * x**2 * gradient, None


def chunk_of(x):
    """A number that says which chunk."""
    return int(x.detach().sum().item())


@row("A27", "X52")
@pytest.mark.parametrize("n", [2, 3])
def test_what_a_functions_backward_stores_on_its_module(impl, n):
    """Rebound on a replica: lost. Put into a container of the base's: there."""
    module = Apply(lambda s, x: Cube.apply(s.lin(x), s))
    module.forwards, module.backwards = [], []
    out = impl.wrap(module, n)(ints(6, 3))
    out.sum().backward()
    assert sorted(module.forwards) == sorted(module.backwards) and len(module.backwards) == n
    assert not hasattr(module, "last")
    plain = linear()
    (plain(ints(6, 3)) ** 3).sum().backward()
    same(grads(module), {f"lin.{name}": g for name, g in grads(plain).items()})


@row("A27")
def test_per_sample_gradients_by_hooks_stay_per_replica(impl):
    """Opacus and BackPACK keep them on parameters: on a copy's they vanish with it."""
    kept = []

    def keep(replica, inputs, output):
        def store(gradient):
            replica.per_sample = gradient
            kept.append(len(gradient))

        output.register_hook(store)

    module = linear()
    module.register_forward_hook(keep)
    impl.wrap(module, 2)(ints(5, 3)).sum().backward()
    assert sorted(kept) == [2, 3] and not hasattr(module, "per_sample")


# State set on replicas, hooks that raise.


@row("X31")
def test_state_set_on_a_replica_is_used_there_and_dropped(impl):
    """The power-iteration pattern: a vector recomputed and set in forward, used in the same one."""

    def forward(self, x):
        self.u = nn.functional.normalize(self.lin.weight.detach().sum(1), dim=0)
        return self.lin(x) * (self.u * 0 + 2)

    module = Apply(forward)
    module.u = torch.zeros(2, dtype=torch.float64)
    dp = impl.wrap(module, 2)
    for _ in range(2):
        same(dp(ints(4, 3)), 2 * linear()(ints(4, 3)))
        assert not module.u.any()


@row("X53", "A16")
@pytest.mark.parametrize("where", ["pre", "post"])
def test_forward_hooks_that_raise(impl, where):
    module = Net()
    dp = impl.wrap(module, 2)

    def hook(m, args, *output):
        if int(args[0][0, 0]) == 1:
            raise KeyError("from a hook")

    register = module.register_forward_pre_hook if where == "pre" else module.register_forward_hook
    handle = register(hook)
    for _ in range(2):
        with pytest.raises(KeyError, match=r"(?s)in replica 1 on .*from a hook"):
            dp(ranked(2))
    handle.remove()
    same(dp(ints(4, 3)), Net()(ints(4, 3)))


@row("X53", "A18")
@pytest.mark.parametrize("where", ["parameter", "output", "module"])
def test_backward_hooks_that_raise(impl, where):
    """The error comes out as it is; the next step is right."""
    module, plain = Net(), Net()
    dp = impl.wrap(module, 2)
    fails = [True]

    def hook(*args):
        if fails[0]:
            raise KeyError("from a hook")

    if where == "parameter":
        module.first.weight.register_hook(hook)
    elif where == "module":
        module.second.register_full_backward_hook(hook)
    out = dp(ints(4, 3))
    if where == "output":
        out.register_hook(hook)
    with pytest.raises(KeyError, match="from a hook"):
        out.sum().backward()
    fails[0] = False
    module.zero_grad()
    dp(ints(4, 3)).sum().backward()
    plain(ints(4, 3)).sum().backward()
    same(grads(module), grads(plain))
