"""Ctrl-C at every point where it can strike: a KeyboardInterrupt at each call that fastdp makes or
receives during a step on the caller's thread. Afterwards the same wrapper trains, with the right
numbers, from this thread and from another, and nothing is held."""

import gc
import sys
import threading
import time
import weakref

import pytest
import torch
from interrupting import interrupt_at
from nets import Net, grads, ints, same
from torch import nn

import fastdp

row = pytest.mark.row
ENOUGH = 100  # points of a step; fewer would mean that the profiler saw nothing


def model():
    net = Net()
    net.register_buffer("scale", torch.full((2,), 2.0).double())
    return net


def wrapper():
    return fastdp.DataParallel(model(), ["cpu"] * 2)


def trains(dp, x, want):
    dp.zero_grad(set_to_none=True)
    out = dp(x)
    out.sum().backward()
    same((out.detach(), grads(dp.module)), want)


def trains_elsewhere(dp, x, want, seconds=60):
    """On another thread, which a lock that was left taken would keep waiting."""
    errors = []

    def go():
        try:
            trains(dp, x, want)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "a lock is still taken"
    assert not errors, errors


def nothing_is_held(dp, x, seconds=60):
    runtime = dp._fastdp_runtime
    # A replica on a worker may still be at the end of the interrupted forward.
    deadline = time.monotonic() + seconds
    while runtime.replicator._lent and time.monotonic() < deadline:
        dp(x)
    assert runtime.leases() == []
    assert runtime._open.forwards == 0
    assert len(runtime.replicator._idle) > 0 and runtime.replicator._lent == []
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def errors_of_destructors(monkeypatch):
    """A list of what no caller hears of, but for the interrupt itself: it may strike in one."""
    errors = []

    def hook(details):
        if not issubclass(details.exc_type, KeyboardInterrupt):
            errors.append(f"{details.exc_type.__name__}: {details.exc_value}")

    monkeypatch.setattr(sys, "unraisablehook", hook)
    return errors


def workers():
    return sum(thread.name.startswith("fastdp-replica") for thread in threading.enumerate())


def ends_with(count, seconds=30.0):
    deadline = time.monotonic() + seconds
    while workers() > count and time.monotonic() < deadline:
        time.sleep(0.001)
    return workers() <= count


def expected(x):
    net = model()
    out = net(x)
    out.sum().backward()
    return out.detach(), grads(net)


@row("I3")
@pytest.mark.parametrize("step", ["first forward", "forward", "forward and backward"])
def test_a_wrapper_survives_an_interrupt_anywhere(step, monkeypatch):
    unraisable = errors_of_destructors(monkeypatch)
    x = ints(4, 3)
    want = expected(x)
    gc.collect()
    before = workers()
    dp = wrapper()
    if step != "first forward":
        trains(dp, x, want)
    point, where, refs, kept = 0, [None], [], []
    while where:
        point += 1
        if step == "first forward":
            dp = wrapper()
            refs.append(weakref.ref(dp.module))
        try:
            with interrupt_at(point) as where:
                out = dp(x)
                if step == "forward and backward":
                    out.sum().backward()
        except KeyboardInterrupt as error:
            kept.append(error)  # with its frames, as an interactive session keeps it
        out = None
        try:
            trains(dp, x, want)
            trains_elsewhere(dp, x, want)
            kept.clear()
            nothing_is_held(dp, x)
        except BaseException as error:
            raise AssertionError(f"broken after {where}") from error
        assert not unraisable, f"{where}: {unraisable}"
    assert point > ENOUGH
    del dp
    gc.collect()
    assert ends_with(before), "threads that nobody will ever dismiss"
    assert all(ref() is None for ref in refs)


@row("I3")
def test_data_parallel_survives_an_interrupt_anywhere(monkeypatch):
    """Its replicas stand in a table of the package's, not in a wrapper that could be dropped."""
    x = ints(4, 3)
    want, _ = expected(x)
    unraisable = errors_of_destructors(monkeypatch)
    net, point, where = model(), 0, [None]
    while where:
        point += 1
        try:
            with interrupt_at(point) as where:
                fastdp.data_parallel(net, x, ["cpu"] * 2)
        except KeyboardInterrupt:
            pass
        same(fastdp.data_parallel(net, x, ["cpu"] * 2).detach(), want)
        assert not unraisable, f"{where}: {unraisable}"
    assert point > ENOUGH


@row("I3")
def test_the_late_replica_of_an_interrupted_forward_writes_nowhere(fast):
    """Its forward goes on for a while after the caller has left; the next one gets other replicas
    and another thread."""
    release, started = threading.Event(), threading.Event()

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3).double())
            self.register_buffer("shift", torch.zeros(1).double())

        def forward(self, x):
            if not release.is_set():
                if x[0, 0] == 0:
                    started.wait(60)
                    raise KeyboardInterrupt
                started.set()
                release.wait(60)
                self.shift.fill_(99)
                self.scale.data.fill_(99)
            return x * self.scale + self.shift

    dp = fast.wrap(Late(), 2)
    x = torch.tensor([[0.0, 1, 2], [1, 1, 2]]).double()
    with pytest.raises(KeyboardInterrupt):
        dp(x)
    late = [t for t in threading.enumerate() if t.name.startswith("fastdp-replica")]
    release.set()
    for _ in range(3):
        same(dp(x).detach(), x)
    assert late, "no replica ran late: the test shows nothing"
    same(dp(x).detach(), x)
