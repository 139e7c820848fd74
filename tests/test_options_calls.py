"""The options that say how a call is made: `sequential` and `call`."""

import threading

import pytest
import torch
from nets import Apply, Net, grads, ints, linear, ranked, same
from torch import nn

import fastdp

row = pytest.mark.row


class Model(nn.Module):
    """At module level, so that it can be pickled."""

    scale = 3

    def __init__(self):
        super().__init__()
        self.lin = linear()
        self.config = {"hidden": 2}
        self._private = "mine"
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        return self.lin(x)

    def generate(self, x, *, times=1, flag=None):
        self.count.add_(1)
        return {"out": self.lin(x) * times, "flag": flag}

    @property
    def width(self):
        return self.lin.out_features

    @property
    def broken(self):
        raise AttributeError("a property of the module's own")


# sequential.


@row("I7")
def test_replicas_run_in_order_on_the_callers_thread(fast):
    seen = []

    def forward(s, x):
        seen.append((int(x[0, 0]), threading.get_ident(), x.device))
        return s.lin(x)

    before = threading.active_count()
    dp = fast.wrap(Apply(forward), 4, sequential=True)
    same(dp(ranked(4)), linear()(ranked(4)))
    here = threading.get_ident()
    assert seen == [(rank, here, fast.device(rank)) for rank in range(4)]
    assert threading.active_count() <= before


@row("I7", "D3")
def test_in_order_trains_as_the_plain_module(fast):
    module, plain = Net(), Net()
    x, y = ints(5, 3, grad=True), ints(5, 3, grad=True)
    out, want = fast.wrap(module, 3, sequential=True)(x), plain(y)
    same(out, want)
    out.square().sum().backward()
    want.square().sum().backward()
    same(grads(module), grads(plain))
    same(x.grad, y.grad)


@row("I4", "I5", "I7")
@pytest.mark.parametrize("draw", [lambda x: torch.rand_like(x), lambda x: nn.functional.dropout(x)])
def test_random_numbers_are_those_of_one_after_the_other(fast, draw):
    """Exactly what the same chunks draw by hand, one after the other."""
    dp = fast.wrap(Apply(lambda s, x: draw(x)), 3, sequential=True)
    x = torch.ones(6, 5)
    for seed in (1, 2):
        torch.manual_seed(seed)
        got = [dp(x), dp(x)]
        torch.manual_seed(seed)
        for output in got:
            pieces = [draw(piece.to(fast.device(rank))) for rank, piece in enumerate(x.chunk(3))]
            same(output, torch.cat([piece.cpu() for piece in pieces]))


@row("I1", "I7")
def test_all_replicas_run_before_the_first_error_is_raised(fast):
    ran = []

    def forward(s, x):
        ran.append(int(x[0, 0]))
        if ran[-1] in (1, 2):
            raise KeyError(f"replica {ran[-1]}")
        return s.lin(x)

    dp = fast.wrap(Apply(forward), 4, sequential=True)
    with pytest.raises(KeyError, match=f"Caught KeyError in replica 1 on device {fast.device(1)}"):
        dp(ranked(4))
    assert ran == [0, 1, 2, 3]
    same(dp(ranked(1)), linear()(ranked(1)))


@row("I3", "I7")
def test_an_interrupt_goes_through_at_once(fast):
    ran = []

    def forward(s, x):
        ran.append(int(x[0, 0]))
        if len(ran) == 2:
            raise KeyboardInterrupt
        return s.lin(x)

    dp = fast.wrap(Apply(forward), 3, sequential=True)
    with pytest.raises(KeyboardInterrupt):
        dp(ranked(3))
    assert ran == [0, 1]
    same(dp(ranked(3)), linear()(ranked(3)))


@row("I6", "I7")
def test_a_grad_mode_set_in_a_replica_reaches_neither_the_next_nor_the_caller(fast):
    seen = []

    def forward(s, x):
        seen.append(torch.is_grad_enabled())
        torch.set_grad_enabled(False)
        return x

    fast.wrap(Apply(forward), 3, sequential=True)(ints(3, 3))
    assert seen == [True] * 3 and torch.is_grad_enabled()


@row("I7")
def test_order_can_be_switched_between_calls(fast):
    threads = set()

    def forward(s, x):
        threads.add(threading.get_ident())
        return s.lin(x)

    dp = fast.wrap(Apply(forward), 2)
    dp(ints(4, 3))
    assert len(threads) == 2
    dp.sequential = True
    threads.clear()
    dp(ints(4, 3))
    assert threads == {threading.get_ident()}


# call.


@row("F3")
@pytest.mark.parametrize("batch, n", [(4, 2), (5, 2), (5, 4), (1, 3), (0, 2), (4, 1)])
def test_another_method_runs_on_cut_arguments(fast, batch, n):
    x = ints(batch, 3)
    dp = fast.wrap(Model(), n)
    out = dp.call("generate", x, times=2)
    same(out["out"], linear()(x) * 2)
    assert out["flag"] is None
    assert dp.module.count.item() == 1  # replica 0's change alone


@row("F3", "D3")
def test_another_method_trains(fast):
    module, plain = Model(), Model()
    x, y = ints(5, 3, grad=True), ints(5, 3, grad=True)
    out = fast.wrap(module, 2).call("generate", x=x, times=3)["out"]
    want = plain.generate(y, times=3)["out"]
    out.square().sum().backward()
    want.square().sum().backward()
    same(grads(module), grads(plain))
    same(x.grad, y.grad)


@row("F3")
def test_a_call_has_the_options_and_the_errors_of_a_forward(fast):
    def generate(s, x, method):
        if x[0, 0] == 1:
            raise KeyError("by replica 1")
        return x + method

    class Own(Apply):
        def generate(self, x, method=0):
            return generate(self, x, method)

    dp = fast.wrap(Own(None), 2, chunk_sizes=[1, 3], gather_outputs=False)
    # A keyword may have any name, that of call's own parameter included.
    outputs = dp.call("generate", ints(4, 3) * 8, method=1)
    for output, piece in zip(outputs, (ints(4, 3) * 8).split([1, 3])):
        same(output, piece + 1)
    dp.chunk_sizes = [1, 1]
    with pytest.raises(KeyError, match=f"Caught KeyError in replica 1 on device {fast.device(1)}"):
        dp.call("generate", ranked(2))
    dp.chunk_sizes = None
    same(torch.cat([o.cpu() for o in dp.call("generate", 3 * ranked(2))]), 3 * ranked(2))


@row("F3")
@pytest.mark.parametrize("sequential", [False, True])
def test_methods_run_at_once_or_in_order(fast, sequential):
    threads = set()

    class Own(Apply):
        def work(self, x):
            threads.add(threading.get_ident())
            return self.lin(x)

    dp = fast.wrap(Own(None), 3, sequential=sequential)
    same(dp.call("work", ints(3, 3)), linear()(ints(3, 3)))
    assert len(threads) == (1 if sequential else 3)


@row("F3")
def test_a_method_of_a_part_and_one_set_on_the_instance(fast):
    module = Model()
    module.part = Model()
    module.own = lambda x: x + 1
    dp = fast.wrap(module, 2)
    same(dp.call("part.generate", ints(4, 3))["out"], linear()(ints(4, 3)))
    same(dp.call("own", ints(4, 3)), ints(4, 3) + 1)
    same(dp.call("forward", ints(4, 3)), linear()(ints(4, 3)))


@row("F3", "A16")
def test_hooks_are_for_forward(fast):
    module, ran = Model(), []
    dp = fast.wrap(module, 2)
    module.register_forward_hook(lambda *a: ran.append("module"))
    module.lin.register_forward_hook(lambda *a: ran.append("part"))
    dp.register_forward_hook(lambda *a: ran.append("wrapper"))
    dp.call("generate", ints(4, 3))
    assert ran == ["part", "part"]


@row("F3", "F9", "F11")
def test_without_replicas_the_modules_own_method_runs(fast):
    direct = fastdp.DataParallel(Model())
    direct.device_ids = []  # as on a machine without GPUs
    data = [1]
    direct.module.generate = lambda x: x
    assert direct.call("generate", data) is data
    assert direct.call("generate", fastdp.Replicated(data)) is data

    inner = fast.wrap(Model(), 2)
    outer = fast.wrap(Apply(lambda s, x: s.inner.call("generate", x)["out"]), 2)
    outer.module.inner = inner
    same(outer(ints(4, 3)), linear()(ints(4, 3)))


@row("F3", "L3")
def test_a_call_takes_the_steps_of_a_subclass(fast):
    taken = []

    class Steps(fastdp.DataParallel):
        def scatter(self, *args):
            taken.append("scatter")
            return super().scatter(*args)

        def replicate(self, *args):
            taken.append("replicate")
            return super().replicate(*args)

        def parallel_apply(self, replicas, inputs, kwargs):
            taken.append("parallel_apply")
            return [r(*i, **k) for r, i, k in zip(replicas, inputs, kwargs)]

        def gather(self, *args):
            taken.append("gather")
            return super().gather(*args)

    dp = fast.wrap_as(Steps, Model(), 2)
    same(dp.call("generate", ints(4, 3))["out"], linear()(ints(4, 3)))
    assert taken == ["scatter", "replicate", "parallel_apply", "gather"]


@row("F3", "E8")
def test_a_call_inside_a_compiled_function(fast):
    dp = fast.wrap(Model(), 2)

    @torch.compile(backend="eager")
    def step(x):
        return dp.call("generate", x + 1)["out"] * 2

    same(step(ints(4, 3)), linear()(ints(4, 3) + 1) * 2)


@row("F3", "G3")
def test_a_call_holds_no_replica(fast):
    dp = fast.wrap(Model(), 2)
    for _ in range(3):
        dp.call("generate", ints(4, 3))
        assert dp._fastdp_get_runtime().replicator._lent == []
    assert len(dp._fastdp_get_runtime().replicator._idle) == 1


@row("F3")
@pytest.mark.parametrize(
    "method, error, words",
    [
        (3, TypeError, "method is 3: it must be the name of a method"),
        ("missing", AttributeError, "'Model' object has no attribute 'missing'"),
        ("lin.missing", AttributeError, "'Linear' object has no attribute 'missing'"),
        ("config", TypeError, "method is 'config', an attribute of Model that cannot be called"),
    ],
)
def test_what_cannot_be_called_is_refused(fast, method, error, words):
    dp = fast.wrap(Model(), 2)
    with pytest.raises(error, match=words):
        dp.call(method, ints(4, 3))
    same(dp.call("generate", ints(4, 3))["out"], linear()(ints(4, 3)))
