"""Every call of a short training step fails once, in turn: each fault point of the core, each call
that the package makes or receives on any thread (hand-off, autograd nodes, gather, hooks, engine),
and each thing that user code is called for. Each time the step raises within the deadline what was
raised in it, parameters are as before, the same wrapper trains on with the right numbers, and
nothing is kept.

A step that survives the failure (an error in a destructor, or in a look that may fail) has to give
the right numbers. `--long` takes every point; else every few."""

import contextlib
import gc
import os
import re
import signal
import sys
import threading
import time

import pytest
import torch
from engine_cases import WATCHED, Recorder
from nets import Net, grads, ints, same
from torch import nn

import fastdp
from fastdp import _C, workers

ROOT = os.path.dirname(os.path.abspath(fastdp.__file__))
DEADLINE_S = 5
POINTS = [
    "scatter",
    "gather",
    "broadcast",
    "reduce",
    "bucket_broadcast",
    "bucket_reduce",
    "memory_take",
]
REPLICAS = 3


# What ends something and can fail in no way: of the core's hand-off and tree, of locks, of a tape.
SURE = {"close", "release", "acquire", "__enter__", "__exit__", "end"}


class Injected(Exception):
    """What fails in these tests."""


# What a step may raise then: the failure itself; what engine "graph" says where it cannot record;
# and where a thread failed before it could say anything, that.
KINDS = (Injected, fastdp.EngineError, RuntimeError)
NO_WORD = "the thread of replica [0-9] ended before the replica's forward"


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Whole(Net):
    """A buffer that is written, a layer that nobody uses, a Function of the user's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()).double())
        self.idle = nn.Linear(2, 2).double()

    def forward(self, x, scale=1):
        self.steps += 1
        return {"y": Doubled.apply(super().forward(x)) * scale, "none": None}


def loss_of(output):
    return output["y"].sum()


@contextlib.contextmanager
def deadline():
    """A step that hangs is a failure of the test, not of the run: Ctrl-C ends every wait of the
    main thread (test_interrupts.py)."""

    def expire(*_):
        raise AssertionError(f"no answer within {DEADLINE_S} s")

    former = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def is_ours(frame):
    return frame is not None and frame.f_code.co_filename.startswith(ROOT)


class Strike:
    """Raises Injected at the n-th call on any thread that the package makes, or user code makes
    into it. Threads that start while it is installed are watched too."""

    def __init__(self):
        self.left = 0
        self.where = None
        self.lock = threading.Lock()

    def arm(self, point):
        self.where, self.left = None, point

    def disarm(self):
        self.left = 0

    def watch(self, frame, event, argument):
        if self.left == 0 or event not in ("call", "c_call") or not is_ours(frame):
            return
        name = argument.__name__ if event == "c_call" else frame.f_code.co_name
        if name in SURE:
            return
        with self.lock:
            if self.left == 0:
                return
            self.left -= 1
            if self.left > 0:
                return
            file = os.path.basename(frame.f_code.co_filename)
            thread = threading.current_thread().name
            self.where = f"{event} of {name}, {file}:{frame.f_lineno}, {thread}"
        raise Injected(self.where)

    @contextlib.contextmanager
    def installed(self):
        threading.setprofile(self.watch)
        try:
            yield self
        finally:
            self.disarm()
            threading.setprofile(None)
            sys.setprofile(None)


class Step:
    """One wrapper that takes training steps, and what they have to give."""

    def __init__(self, engine, warm):
        self.module = Whole()
        self.dp = fastdp.DataParallel(self.module, ["cpu"] * REPLICAS, engine=engine)
        if engine != "eager":
            self.dp._fastdp_get_runtime().recorder = Recorder()
        self.x = ints(7, 3)
        self.count = 0
        for _ in range(warm):
            self.right()

    def take(self):
        self.module.zero_grad(set_to_none=True)
        output = self.dp(self.x)
        loss_of(output).backward()
        return output["y"].detach()

    def right(self):
        """A step, and its numbers."""
        got = self.take()
        plain = Net()
        want = 2 * plain(self.x)
        want.sum().backward()
        same(got, want)
        mine = {k: g for k, g in grads(self.module).items() if not k.startswith("idle")}
        same(mine, grads(plain))
        same(self.module.idle.weight.grad, torch.zeros(2, 2).double())

    def check_parameters(self, before):
        for name, parameter in self.module.named_parameters():
            assert torch.equal(parameter, before[name]), f"{name} was changed"

    def parameters(self):
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}


def fails_and_recovers(step, arm, disarm, kinds):
    """One step with a failure; gives whether it was noticed."""
    before, raised = step.parameters(), None
    started = time.monotonic()
    arm()
    try:
        with deadline():
            step.take()
    except kinds as error:
        raised = error.with_traceback(None)  # its frames hold the output, which is to go
    finally:
        disarm()
    assert time.monotonic() - started < DEADLINE_S
    if type(raised) is RuntimeError:
        assert re.fullmatch(NO_WORD, str(raised)), raised
    step.check_parameters(before)
    with deadline():
        if isinstance(raised, fastdp.EngineError):
            # Insists on recording, and says why it cannot, at every step; another engine can.
            with pytest.raises(fastdp.EngineError, match=re.escape(str(raised))):
                step.take()
            step.dp.engine = "eager"
        for _ in range(2):
            step.right()
    assert step.dp._fastdp_runtime.leases() == []
    assert torch.is_grad_enabled()
    return raised is not None


def census():
    gc.collect()
    tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
    return tensors, len(os.listdir("/proc/self/fd"))


def settled(count, seconds=30.0):
    """Threads that were dismissed need a moment to end."""
    ends = time.monotonic() + seconds
    while threading.active_count() > count and time.monotonic() < ends:
        time.sleep(0.001)
    return threading.active_count() <= count


@contextlib.contextmanager
def nothing_kept():
    Step("eager", 1)  # what the first one makes for good
    gc.collect()
    threads, before = threading.active_count(), census()
    yield
    gc.collect()
    assert settled(threads), [thread.name for thread in threading.enumerate()]
    # Fewer are what earlier tests had left.
    assert all(now <= then for now, then in zip(census(), before, strict=True)), (census(), before)


# How many good steps come before the one with the failure: of "graph", the last eager one, the one
# that records, and one that replays.
MOMENTS = {
    "eager, first": ("eager", 0),
    "eager": ("eager", 2),
    "graph, watched": ("graph", WATCHED["graph"] - 1),
    "graph, recording": ("graph", WATCHED["graph"]),
    "graph, replay": ("graph", WATCHED["graph"] + 2),
    "auto, recording": ("auto", WATCHED["auto"]),
}
# In the short form; the points of a step are some hundred to some thousand.
STRIDES = dict(zip(MOMENTS, (41, 29, 61, 151, 17, 151), strict=True))


@pytest.mark.parametrize("moment", [m for m in MOMENTS if m != "graph, watched"])
def test_every_fault_point_of_the_core(moment):
    engine, warm = MOMENTS[moment]
    counts = dict.fromkeys(POINTS, 0)
    with nothing_kept():
        for point in POINTS:
            step = Step(engine, warm)
            while fails_and_recovers(
                step,
                lambda at=point: _C.arm_fault(at, counts[at] + 1),
                lambda at=point: _C.arm_fault(at, 0),
                (_C.FaultInjected, fastdp.EngineError),
            ):
                counts[point] += 1
                step = Step(engine, warm)
        del step
    # What a step calls; reduce and broadcast it does not, and copies on the host need no scratch.
    if engine == "eager":
        least = {"scatter": 2, "gather": 1, "bucket_broadcast": 2, "bucket_reduce": 1}
        assert counts == {**dict.fromkeys(POINTS, 0), **least}
    print(f"{moment}: {counts}")


@pytest.mark.parametrize("moment", MOMENTS)
def test_every_call_of_the_package(moment, request, monkeypatch):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    monkeypatch.setattr(threading, "excepthook", unraisable.append)
    engine, warm = MOMENTS[moment]
    stride = 1 if request.config.getoption("--long") else STRIDES[moment]
    strike, point, noticed = Strike(), 1, 0
    with strike.installed(), nothing_kept():
        while True:
            step = Step(engine, warm)

            def arm(at=point):
                strike.arm(at)
                sys.setprofile(strike.watch)

            def disarm():
                strike.disarm()
                sys.setprofile(None)

            try:
                noticed += fails_and_recovers(step, arm, disarm, KINDS)
            except BaseException as error:
                raise AssertionError(f"broken by point {point}: {strike.where}") from error
            if strike.where is None:
                break
            point += stride
        del step, arm, disarm
        unraisable.clear()
    if engine != "auto":  # which stays eager where a recording fails
        assert noticed > 0.8 * (point // stride), f"{noticed} of {point // stride}"
    assert point > 300, point
    print(f"{moment}: {point // stride} of {point} points, {noticed} raised")


def test_whoever_waits_for_a_job_that_is_given_up_is_told_why():
    job = workers.Job(None, 1, torch.device("cpu"), None)
    job.thread = threading.Thread()  # which does not run
    failure = Injected("before the replica's forward")
    job.give_up(failure)
    job.wait()
    assert job.error is failure
