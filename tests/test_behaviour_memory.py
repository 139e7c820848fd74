"""BEHAVIOUR G: what is alive after a step: no cycle, no copy, no activation, no thread too many."""

import gc
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest
import torch
from nets import Apply, Net, grads, ints, linear, same
from torch import nn

row = pytest.mark.row


@pytest.fixture(autouse=True)
def _no_gc():
    """Cycles must not be cleaned up by luck."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def dies(refs, seconds=30.0):
    """Whether all weak references die; a worker may need a moment to let its last job go."""
    deadline = time.monotonic() + seconds
    while any(ref() is not None for ref in refs):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def leaves_a_cycle(step):
    """One that a step makes is made each time; what else is found may be of another thread."""
    step()
    gc.collect()
    for _ in range(3):
        step()
        if gc.collect() == 0:
            return False
    return True


@row("G3", "K10")
@pytest.mark.parametrize("kind", ["forward", "backward", "penalty", "no_grad"])
def test_a_step_leaves_no_cycle(impl, kind):
    dp = impl.wrap(Apply(lambda s, x: {"y": [s.lin(x) ** 2, (x,)]}), 2)
    x = ints(4, 3, grad=True)

    def step():
        with torch.set_grad_enabled(kind != "no_grad"):
            out = dp(x)["y"][0].sum()
        if kind == "backward":
            out.backward()
        elif kind == "penalty":
            (g,) = torch.autograd.grad(out, x, create_graph=True)
            (g**2).sum().backward()

    assert not leaves_a_cycle(step)


@row("G3")
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_leaves_no_cycle(fast, rank):
    """torch's own does: ExceptionWrapper.reraise holds its frame."""

    def forward(self, x):
        if x[0, 0] == rank:
            raise KeyError("x")
        return self.lin(x)

    dp = fast.wrap(Apply(forward), 2)

    def step():
        try:
            dp(torch.tensor([[0.0, 1, 1], [1.0, 2, 2]]).double())
        except KeyError:
            return
        raise AssertionError("no error was raised")

    assert not leaves_a_cycle(step)


def copies_of(impl, forward, n=2):
    """A wrapper whose replicas leave weak references to their copies of the weight."""
    refs = []

    def wrapped(self, x):
        refs.append(weakref.ref(self.lin.weight))
        return forward(self, x)

    return impl.wrap(Apply(wrapped), n), refs


@row("G3")
def test_copies_are_freed_by_backward(impl):
    dp, refs = copies_of(impl, lambda s, x: s.lin(x) ** 2)
    x = ints(4, 3, grad=True)
    loss = dp(x).sum()
    loss.backward()
    assert len(refs) == 2 and dies(refs), "copies outlive the backward, though loss is held"
    assert loss.item() == (linear()(ints(4, 3)) ** 2).sum().item()


@row("G3")
def test_copies_are_freed_with_an_unused_graph(impl):
    dp, refs = copies_of(impl, lambda s, x: s.lin(x) ** 2)
    out = dp(ints(4, 3, grad=True))
    del out
    assert dies(refs)


@row("G3")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_copies_are_freed_after_evaluation(fast, mode):
    """Replica 0 may hand out the base's own parameters there; its copies die as all do."""
    dp, refs = copies_of(fast, lambda s, x: s.lin(x))
    with mode():
        dp(ints(6, 3))
    assert dies([ref for ref in refs if ref() is not dp.module.lin.weight])


@row("G3")
def test_copies_live_as_long_as_their_graph(impl):
    """The counterpart: were they freed at once, the tests above would prove nothing."""
    dp, refs = copies_of(impl, lambda s, x: s.lin(s.lin(x) @ torch.ones(2, 3).to(x)))
    out = dp(ints(4, 3, grad=True))
    assert any(ref() is not None for ref in refs)
    out.sum().backward()


@row("G3", why="mutant: activations kept after backward")
def test_activations_are_freed_by_backward(impl):
    refs = []

    def forward(self, x):
        y = self.lin(x) ** 2
        refs.append(weakref.ref(y))
        return (y**2).sum(1)

    loss = impl.wrap(Apply(forward), 2)(ints(4, 3)).sum()
    assert len(refs) == 2 and all(ref() is not None for ref in refs)
    loss.backward()
    assert dies(refs)
    del loss


@row("G3", why="mutant: a cycle through ctx")
def test_an_unused_graph_is_freed_without_backward(impl):
    refs = []

    def forward(self, x):
        y = self.lin(x) ** 2
        refs.append(weakref.ref(y))
        return (y**2).sum(1)

    out = impl.wrap(Apply(forward), 2)(ints(4, 3))
    del out
    assert dies(refs)


class Thing:
    """Something that can be referenced weakly."""


@row("G3", why="mutant: a worker that keeps its last job")
def test_arguments_and_outputs_are_let_go(impl):
    refs = []
    dp = impl.wrap(Apply(lambda s, x, thing: (refs.append(weakref.ref(x)), x * 2)[1]), 3)
    thing, x = Thing(), ints(6, 3)
    refs += [weakref.ref(thing), weakref.ref(x)]
    out = dp(x, thing)
    refs.append(weakref.ref(out))
    del out, thing, x
    assert len(refs) == 6 and dies(refs)


@row("G3", why="mutant: a worker that keeps its last job")
def test_arguments_of_a_failed_call_are_let_go(fast):
    def forward(self, x, thing):
        refs.append(weakref.ref(x))
        raise ValueError("no")

    refs = []
    dp = fast.wrap(Apply(forward), 3)
    thing, x = Thing(), ints(6, 3)
    refs += [weakref.ref(thing), weakref.ref(x)]
    try:
        dp(x, thing)
    except ValueError:
        pass
    del thing, x
    assert len(refs) == 5 and dies(refs)


@row("G3", why="mutant: an exception that keeps frames alive")
def test_a_handled_error_keeps_no_activation(impl):
    refs = []

    def forward(self, x):
        local = self.lin(x)
        refs.append(weakref.ref(local))
        raise ValueError("no")

    with pytest.raises(ValueError) as caught:
        impl.wrap(Apply(forward), 2)(ints(4, 3))
    del caught
    assert len(refs) == 2 and dies(refs)


@row("G3")
def test_a_kept_error_keeps_no_activation(fast):
    """Programs log errors and keep them: the frames of the replica must not hang on them."""
    refs = []

    def forward(self, x):
        local = self.lin(x)
        refs.append(weakref.ref(local))
        raise ValueError("no")

    kept = None
    try:
        fast.wrap(Apply(forward), 2)(ints(4, 3))
    except ValueError as error:
        kept = error
    kept.__traceback__ = None
    assert dies(refs) and kept.__cause__ is not None


def threads_end(count, seconds=30.0):
    """Whether no more threads are left; one that is dismissed needs a moment."""
    deadline = time.monotonic() + seconds
    while threading.active_count() > count and time.monotonic() < deadline:
        time.sleep(0.001)
    return threading.active_count() <= count


@row("G3", why="del dp frees every device")
def test_deleting_the_wrapper_frees_replicas_and_threads(fast):
    refs = []
    module = Apply(lambda s, x: refs.append(weakref.ref(s)) or s.lin(x) ** 2)
    before = threading.active_count()
    dp = fast.wrap(module, 3)
    dp(ints(6, 3)).sum().backward()
    assert len(refs) == 3 and all(ref() is not module for ref in refs)
    wrapper = weakref.ref(dp)
    del dp
    assert dies([wrapper, *refs])
    assert threads_end(before)
    assert module.lin.weight.grad is not None


@row("G3", why="del dp frees every device")
def test_many_wrappers_do_not_pile_up_threads(fast):
    before = threading.active_count()
    for seed in range(15):
        fast.wrap(linear(seed), 3)(ints(6, 3)).sum().backward()
    assert threads_end(before + 2)


@row("G3", why="data_parallel keeps its replicas by module, weakly")
def test_functional_form_holds_no_module(fast):
    module = linear().to(fast.home)
    fast.api.data_parallel(module, ints(4, 3), fast.ids(2)).sum().backward()
    ref = weakref.ref(module)
    weight = weakref.ref(module.weight)
    del module
    assert dies([ref, weight])


@row("G2", why="no thread, no replica before the first forward")
def test_construction_starts_nothing(fast):
    before = threading.active_count()
    dp = fast.wrap(Net(), 4)
    assert threading.active_count() <= before
    dp(ints(8, 3))
    assert threading.active_count() <= before + 3


@row("G4")
@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
@pytest.mark.parametrize("rank", [0, 1])
def test_usable_after_out_of_memory(impl, kind, rank):
    def forward(self, x):
        if x[0, 0] == rank + 100:
            raise kind("tried to allocate 1 EiB")
        return self.lin(x)

    module = Apply(forward)
    dp = impl.wrap(module, 2)
    with pytest.raises(kind, match="1 EiB"):
        dp(torch.tensor([[100.0, 0, 0], [101.0, 0, 0]]).double())
    dp(ints(4, 3)).sum().backward()
    plain = linear()
    plain(ints(4, 3)).sum().backward()
    same(grads(module), {f"lin.{k}": g for k, g in grads(plain).items()})


@row("G4")
@pytest.mark.parametrize("dtype", [torch.float64])
def test_usable_after_a_real_failed_allocation(impl, dtype):
    def forward(self, x):
        if x.size(1) == 1:
            return torch.empty(1 << 60, dtype=dtype, device=x.device)
        return self.lin(x)

    dp = impl.wrap(Apply(forward), 2)
    with pytest.raises(RuntimeError, match="replica 0"):
        dp(ints(4, 1))
    same(dp(ints(4, 3)), linear()(ints(4, 3)))


@row("G1", why="host memory returns to where it was")
def test_resident_memory_is_flat():
    """In a process of its own: 40 steps of a model with 4 MiB of weights stay within 24 MiB."""
    script = """
        import os, sys, torch, fastdp
        from torch import nn
        torch.set_num_threads(1)
        page = os.sysconf("SC_PAGE_SIZE")
        rss = lambda: int(open("/proc/self/statm").read().split()[1]) * page
        dp = fastdp.DataParallel(nn.Linear(1024, 1024), device_ids=["cpu"] * 2)
        def step():
            dp.zero_grad()
            dp(torch.ones(4, 1024)).sum().backward()
        for _ in range(20): step()
        before = rss()
        for _ in range(40): step()
        sys.exit(0 if rss() - before < 24 << 20 else f"grew by {rss() - before} bytes")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=300)


@row("G3", why="module trees")
def test_a_replaced_module_is_let_go(impl):
    module = nn.Sequential(linear())
    dp = impl.wrap(module, 2)
    dp(ints(4, 3)).sum().backward()
    refs = [weakref.ref(module[0]), weakref.ref(module[0].weight)]
    module[0] = linear(seed=3).to(impl.home)
    dp(ints(4, 3))
    assert dies(refs)
