"""What a review found where threads, processes and destructors meet a forward."""

import gc
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from nets import Apply, Net, grads, ints, linear, same
from torch import nn

row = pytest.mark.row


class PartlyUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = linear(0), linear(1).float()

    def forward(self, x):
        return self.used(x)


@pytest.fixture
def _switching():
    """Threads change places at nearly every bytecode."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def on_threads(count, run, seconds=30):
    """Runs it on so many threads that start together; gives the results."""
    results, barrier = [], threading.Barrier(count)

    def go():
        barrier.wait(seconds)
        try:
            results.append(run())
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=go, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), "a deadlock"
    assert not [result for result in results if isinstance(result, BaseException)], results
    return results


@row("D1", "I7")
@pytest.mark.usefixtures("_switching")
def test_first_forward_from_two_threads(fast):
    """Both make the wrapper's runtime; a forward that ended in the other one lost its zeros."""
    x = ints(4, 3)
    for _ in range(200):
        module = PartlyUsed()
        dp = fast.wrap(module, 2)
        for out in on_threads(2, lambda dp=dp: dp(x)):
            dp.zero_grad(set_to_none=True)
            out.sum().backward()
            same(module.unused.weight.grad, torch.zeros(2, 3))
            same(out.detach(), linear()(x).detach())


@row("D1", "I7")
def test_threads_that_make_the_runtime_at_once_share_it(fast):
    """The same with the race forced: both have seen that there is no runtime before either makes
    one."""
    both_looked, looked, got = threading.Barrier(2), threading.local(), []

    class Slow(fast.api.DataParallel):
        def _fastdp_move_options(self):
            if not hasattr(looked, "already"):
                looked.already = True
                both_looked.wait(20)
            return super()._fastdp_move_options()

        def _fastdp_get_runtime(self):
            got.append(super()._fastdp_get_runtime())
            return got[-1]

    dp = fast.wrap_as(Slow, PartlyUsed(), 2)
    for out in on_threads(2, lambda: dp(ints(4, 3))):
        dp.zero_grad(set_to_none=True)
        out.sum().backward()
        same(dp.module.unused.weight.grad, torch.zeros(2, 3))
    assert len(got) > 2 and len(set(map(id, got))) == 1


@row("I7")
@pytest.mark.usefixtures("_switching")
def test_data_parallel_from_two_threads(fast):
    x, ids = ints(4, 3), fast.ids(2)
    for _ in range(50):
        module = PartlyUsed().to(fast.home)
        outs = on_threads(2, lambda m=module: fast.api.data_parallel(m, x.to(fast.home), ids))
        for out in outs:
            module.zero_grad(set_to_none=True)
            out.sum().backward()
            same(module.unused.weight.grad, torch.zeros(2, 3))


class Destructor:
    """Calls the function when it dies, once; what that raises goes to the list."""

    def __init__(self, act, errors):
        self.act, self.errors = act, errors

    def __del__(self):
        act, self.act = self.act, None
        if act is not None:
            try:
                self.errors.append(act())
            except BaseException as error:
                self.errors.append(error)


@row("I7", why="calls inside calls: from a destructor")
def test_a_destructor_that_starts_a_forward_is_told_so(fast):
    """What a forward left in a replica dies while replicas are emptied, with their tree held."""
    heard, armed = [], [True]

    def forward(self, x):
        if armed and x[0, 0] == 0:
            armed.clear()
            self.left = Destructor(lambda: dp(x), heard)
        return self.lin(x)

    module = Apply(forward)
    dp = fast.wrap(module, 2)
    x = torch.tensor([[0.0, 1, 2], [1, 1, 2]]).double()
    same(dp(x).detach(), linear()(x).detach())
    gc.collect()
    assert [type(error) for error in heard] == [RuntimeError]
    assert "started from inside the making of its replicas, by a destructor" in str(heard[0])
    for _ in range(2):
        dp.zero_grad()
        dp(x).sum().backward()
    want = linear()
    want(x).sum().backward()
    same(grads(module.lin), grads(want))
    assert dp._fastdp_runtime.leases() == []


@row("I7", why="calls inside calls: from a destructor")
def test_a_destructor_outside_the_making_may_start_a_forward(fast):
    heard, armed = [], [True]

    def forward(self, x):
        if armed:
            armed.clear()
            thing = Destructor(lambda: dp(ints(4, 3)).detach(), heard)
            del thing  # inside the forward of a replica: the replicas are made
        return self.lin(x)

    dp = fast.wrap(Apply(forward), 2)
    same(dp(ints(4, 3)).detach(), linear()(ints(4, 3)).detach())
    assert len(heard) == 1
    same(heard[0], linear()(ints(4, 3)).detach())


@row("D1", "B13", why="overriding gather")
@pytest.mark.parametrize("kept", [0, 1])
def test_two_gathers_in_one_forward_keep_the_zeros(fast, kept):
    """A subclass that gathers some outputs apart from others, one of them without a graph: which
    of the two is given on must not matter."""

    class Twice(fast.api.DataParallel):
        def gather(self, outputs, output_device):
            both = [outputs, [out.detach() for out in outputs]]
            order = both if kept == 0 else both[::-1]
            gathered = [super(Twice, self).gather(each, output_device) for each in order]
            return gathered[kept]

    module = PartlyUsed()
    dp = fast.wrap_as(Twice, module, 2)
    for _ in range(2):
        dp.zero_grad(set_to_none=True)
        dp(ints(4, 3)).sum().backward()
        same(module.unused.weight.grad, torch.zeros(2, 3))
        assert dp._fastdp_runtime.leases() == []


@row("D1", "B13", why="overriding gather")
def test_each_of_two_gathers_carries_the_zeros(fast):
    class Halves(fast.api.DataParallel):
        def gather(self, outputs, output_device):
            left = super().gather([out[:, :1] for out in outputs], output_device)
            return left, super().gather([out[:, 1:] for out in outputs], output_device)

    module = PartlyUsed()
    dp = fast.wrap_as(Halves, module, 2)
    for half in (0, 1):
        dp.zero_grad(set_to_none=True)
        dp(ints(4, 3))[half].sum().backward()
        same(module.unused.weight.grad, torch.zeros(2, 3))


FORK_SCRIPT = """
import os, signal, sys, threading, time, warnings
import torch
from torch import nn
import fastdp
from fastdp import replicas

warnings.simplefilter("ignore", DeprecationWarning)
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
x = torch.ones(4, 3)
want = net(x).detach()
dp = fastdp.DataParallel(net, ["cpu"] * 2)
if USED:
    dp(x)
inside, go_on = threading.Event(), threading.Event()
original = replicas.Plan.copies

def slow(self, *arguments):
    inside.set()
    go_on.wait()
    return original(self, *arguments)

replicas.Plan.copies = slow
outputs = []
thread = threading.Thread(target=lambda: outputs.append(dp(x).detach()), daemon=True)
thread.start()
assert inside.wait(60)
replicas.Plan.copies = original
child = os.fork()
if child == 0:
    signal.alarm(100)
    try:
        ok = all(torch.equal(dp(x), want) for _ in range(3))
        dp(x).sum().backward()
        ok = ok and all(p.grad is not None for p in net.parameters())
    except BaseException as error:
        print("in the child:", type(error).__name__, error, flush=True)
        ok = False
    os._exit(0 if ok else 3)
_, status = os.waitpid(child, 0)
go_on.set()
thread.join(60)
assert os.waitstatus_to_exitcode(status) == 0, status
assert torch.equal(outputs[0], want) and torch.equal(dp(x), want)
"""


@row("H7", why="mutant: fork")
@pytest.mark.parametrize("used", [True, False])
def test_fork_while_another_thread_makes_replicas(used):
    """The child has the lock, the mark and the held tree of a thread that it does not have."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORK_SCRIPT.replace("USED", str(used)))],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"


@row("I7", "D1", why="calls inside calls")
@pytest.mark.parametrize("depth", [1, 2, 10])
def test_a_wrapper_that_calls_itself_keeps_the_zeros(fast, depth):
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = linear(0), linear(1)

        def forward(self, x, depth):
            if depth:
                dp(x.detach(), depth - 1)
            return self.used(x)

    module = Recursive()
    dp = fast.wrap(module, 2)
    dp(ints(1, 3), depth).sum().backward()
    same(module.unused.weight.grad, torch.zeros(2, 3).double())
    assert dp._fastdp_runtime.leases() == []
    same(dp(ints(4, 3), 0).detach(), linear()(ints(4, 3)).detach())


@row("I7")
@pytest.mark.usefixtures("_switching")
def test_a_lease_left_open_by_a_thread_that_ended(fast):
    """Replicas by hand on short-lived threads: the wrapper goes on as before."""
    net = Net()
    dp = fast.wrap(net, 2)
    for _ in range(10):
        on_threads(2, lambda: len(dp.replicate(dp.module, dp.device_ids)))
    dp(ints(4, 3)).sum().backward()
    want = Net()
    want(ints(4, 3)).sum().backward()
    same(grads(net), grads(want))
