"""BEHAVIOUR I: torch makes new threads at every forward, fastdp keeps its own. What a new thread
takes over, and what ends with a thread, is the same on kept ones."""

import _thread
import sys
import threading

import pytest
import torch
from child_interpreter import check
from engine_cases import steps
from nets import Apply, exact, ints, ranked, same
from torch import nn
from torch.utils._device import DeviceContext

row = pytest.mark.row

WAIT_S = 60.0  # at most: what is waited for comes at once, or never


@row("E3", "I6")
def test_what_a_forward_casts_is_not_taken_for_the_weights_of_the_next_step(impl):
    """A weight that is no replica's own, in an autocast of the forward's: the last replica to leave
    it clears the cast cache."""
    device, left = impl.home.type, threading.Event()
    weight = nn.Parameter(torch.eye(3, device=impl.home))

    def forward(self, x):
        first = x[0, 0] == 0
        with torch.autocast(device, dtype=torch.bfloat16):
            assert first or left.wait(WAIT_S)
            out = x @ weight.to(x.device)
        if first:
            left.set()
        return out.float()

    dp = impl.wrap(Apply(forward).float(), 2)
    x = ranked(2).float().to(impl.home)
    for _ in range(3):
        left.clear()
        out = dp(x)
        assert out.tolist() == (x @ weight).tolist()
        with torch.no_grad():
            weight.mul_(2)


def test_a_replayed_step_ends_what_the_caller_cast(means):
    """As an eager one does; with one device, as in torch, the module is called and nothing ends."""
    dp = means.wrap(exact(nn.Linear(3, 2)).float())
    head = nn.Linear(2, 2, bias=False).to(means.home)
    x = ints(6, 3).float().to(means.home)
    with torch.no_grad():
        head.weight.copy_(torch.eye(2))
    with torch.autocast(means.home.type, dtype=torch.bfloat16):
        for step in range(6):
            factor = 1.0 if means.replicas == 1 else 2.0**step
            out = dp(x)
            assert head(out.detach()).tolist() == (out.float() * factor).tolist()
            out.float().sum().backward()
            with torch.no_grad():
                head.weight.mul_(2)
    assert steps(dp)["graph"] > 2


one_in_another = pytest.mark.skipif(
    not hasattr(DeviceContext("cpu"), "prev_mode"),
    reason="needs torch with default devices inside each other",
)


@row("I6", why="a default device")
@pytest.mark.parametrize("before", [None, "cpu", pytest.param("meta", marks=one_in_another)])
def test_a_default_device_that_a_forward_sets_ends_with_it(impl, before):
    """Forwards do, so that what they make lies where their inputs do."""
    seen = []

    def forward(self, x, sets):
        if sets:
            torch.set_default_device(x.device if before == "meta" else "meta")
        seen.append(torch.empty(()).device.type)
        return x

    dp, x = impl.wrap(Apply(forward), 3), ints(3, 3).to(impl.home)
    torch.set_default_device(before)
    try:
        for sets in (False, True, False):
            seen.clear()
            dp(x, sets)
            default = "cpu" if impl.is_oracle or before is None else before
            own = impl.home.type if before == "meta" else "meta"
            assert seen == [own if sets else default] * 3
            assert torch.empty(()).device.type == (before or "cpu")
    finally:
        torch.set_default_device(None)
    assert torch.empty(()).device.type == "cpu"


@row("I6", why="a default device")
@one_in_another
def test_a_default_device_around_a_call_outlives_one_that_a_forward_sets(fast):
    def forward(self, x):
        torch.set_default_device(x.device)
        return x

    dp, x = fast.wrap(Apply(forward), 2), ints(2, 3).to(fast.home)
    with torch.device("meta"):
        for _ in range(2):
            dp(x)
            assert torch.empty(()).device.type == "meta"
    assert torch.empty(()).device.type == "cpu"


@row("I6", why="debuggers and profilers ask for new threads")
@pytest.mark.parametrize("kind", ["trace", "profile"])
def test_tracing_that_begins_after_the_threads_reaches_them_until_it_ends(impl, kind):
    seen = []

    def forward(self, x):
        if threading.current_thread() is not threading.main_thread():
            seen.append(getattr(sys, f"get{kind}")())
        return x

    def tracer(frame, event, argument):
        return None

    dp, set_hook = impl.wrap(Apply(forward), 3), getattr(threading, f"set{kind}")
    former = getattr(threading, f"get{kind}")()
    for hook in (former, tracer, tracer, former):
        seen.clear()
        set_hook(hook)
        try:
            dp(ints(3, 3))
        finally:
            set_hook(former)
        assert len(seen) >= 2 and set(seen) == {hook}


@row("I6", why="gevent, eventlet")
@pytest.mark.parametrize("module", ["gevent.thread", "eventlet.green.thread", "a_debugger"])
def test_where_threads_are_greenlets_no_replica_waits_for_one(fast, monkeypatch, module):
    """They replace what starts threads, before or after the first forward. What was started then
    runs only while the caller is in a wait of theirs."""
    seen = []

    def forward(self, x):
        seen.append(threading.current_thread())
        return self.lin(x)

    dp, x = fast.wrap(Apply(forward), 3), ints(6, 3)
    want = dp(x)
    assert set(seen) > {threading.current_thread()}
    start = _thread.start_new_thread

    def replaced(*arguments):
        return start(*arguments)

    replaced.__module__ = module
    monkeypatch.setattr(_thread, "start_new_thread", replaced)
    for wrapped in (dp, fast.wrap(dp.module, 3)):
        seen.clear()
        same(wrapped(x), want)
        assert (seen == [threading.current_thread()] * 3) == (module != "a_debugger")
    with pytest.raises(ValueError, match="Caught ValueError in replica 1"):
        dp.module.function = raising
        dp(ranked(3))


def raising(self, x):
    if x[0, 0] > 0:
        raise ValueError("as planned")
    return x


@row("I3", why="the end of a process")
@pytest.mark.parametrize("call", ["dp(x)", "fastdp.parallel_apply([m, m], [x, x])"])
def test_a_forward_in_a_destructor_when_python_ends_is_refused(call):
    """The kept threads were stopped before, and no other starts."""
    said = check(
        f"""
        dp, m = wrap(), nn.Linear(2, 2)
        {call}

        class Late:
            def __del__(self, os=os, fastdp=fastdp, dp=dp, m=m, x=x):
                try:
                    {call}
                except RuntimeError as error:
                    os.write(1, str(error).encode())

        late = Late()
        """
    )
    assert said == "DataParallel cannot run while Python ends: its threads were stopped"


@row("H7", why="mutant: fork")
def test_a_child_forked_in_a_forward_ends_with_that_forward():
    """As where the thread was new. A forward that forks and returns in both processes is a mistake;
    it must not leave children behind that wait for ever."""
    check(
        """
        class Forks(Timed):
            def forward(self, x):
                if x[0, 0] != 1:
                    forked.wait(60)  # a child has for ever what locks others held: none
                elif not children:
                    child = os.fork()
                    if child == 0:
                        return x
                    children.append(child)
                    forked.set()
                return self.lin(x)

        children, forked = [], threading.Event()
        dp = fastdp.DataParallel(Forks(), device_ids=IDS)
        dp(x)
        deadline = time.monotonic() + 60
        while os.waitpid(children[0], os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(children[0], signal.SIGKILL)
                sys.exit("the child waits for ever")
            time.sleep(0.01)
        assert dp(x).tolist() == dp.module.lin(x).tolist()
        """
    )
