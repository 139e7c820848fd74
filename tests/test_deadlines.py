"""`timeout_s`, on GPUs that are pretended: one that never finishes what it was given is an
exception within the deadline, with the flight recorder's text, however the program goes on."""

import contextlib
import gc
import logging
import os
import pickle
import re
import threading
import time
import types
import weakref

import pytest
import torch
from engine_cases import Recorder
from nets import Net, ints
from pretended_gpus import GPUS, Gpus, can_pretend
from torch import nn

import fastdp
from fastdp import _C, deadlines
from fastdp.buckets import Bucket
from fastdp.recordings import Recording

pytestmark = can_pretend()

TIMEOUT_S = 0.15
DEADLINE_S = 5  # of everything here, as in test_faults.py


@pytest.fixture(params=[True, False], ids=["beside", "in line"])
def gpus(monkeypatch, request):
    return Gpus(monkeypatch, request.param)


@pytest.fixture
def clock(monkeypatch):
    """Deadlines see a time that stands still until the test moves it on, and may not be waited
    for."""

    class Clock:
        now_s = 0.0  # before whatever wrappers of earlier tests have marked

        def monotonic(self):
            return self.now_s

    monkeypatch.setattr(deadlines, "time", Clock())
    return deadlines.time


@contextlib.contextmanager
def in_time():
    started = time.monotonic()
    yield
    assert time.monotonic() - started < DEADLINE_S


def step(dp):
    dp.zero_grad()
    out = dp(ints(4, 3))
    out.sum().backward()
    return [out.detach(), *(p.grad.clone() for p in dp.module.parameters())]


def wanted():
    plain = Net()
    out = plain(ints(4, 3))
    out.sum().backward()
    return [out.detach(), *(p.grad for p in plain.parameters())]


def is_right(found):
    return all(map(torch.equal, found, wanted()))


def made(timeout_s=TIMEOUT_S, **options):
    return fastdp.DataParallel(Net(), ["cpu"] * 2, timeout_s=timeout_s, bucket_bytes=64, **options)


def census(dp):
    """What is there between steps: tensors, marks, threads."""
    dp.zero_grad()
    dp._fastdp_get_runtime()._deadline.check()
    gc.collect()
    tensors = sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
    marks = sum(type(each) is deadlines._Mark for each in gc.get_objects())
    return tensors, marks, threading.active_count()


def late(dp):
    """What a step raises when something is late."""
    with pytest.raises(fastdp.CommunicationTimeoutError) as caught, in_time():
        for _ in range(100):
            step(dp)
    return str(caught.value)


@pytest.mark.parametrize("value", [0, -1, 0.0009, 86401, float("inf"), float("nan")])
def test_a_number_out_of_bounds_is_refused(value):
    with pytest.raises(ValueError, match="timeout_s is .*: it must be from 0.001 to 86400 seconds"):
        fastdp.DataParallel(nn.Linear(2, 2), ["cpu"] * 2, timeout_s=value)


@pytest.mark.parametrize("value", ["5", True, [1], torch.ones(())], ids=str)
def test_what_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match="timeout_s is .*: it must be a number of seconds, or None"):
        fastdp.DataParallel(nn.Linear(2, 2), ["cpu"] * 2, timeout_s=value)


def test_a_bad_value_that_is_set_later_is_refused():
    dp = fastdp.DataParallel(nn.Linear(2, 2), ["cpu"] * 2)
    with pytest.raises(ValueError, match="timeout_s is -3"):
        dp.timeout_s = -3
    dp.timeout_s = 86400
    dp(torch.ones(2, 2))
    assert pickle.loads(pickle.dumps(dp)).timeout_s == 86400


def test_where_nothing_is_late_nothing_changes(gpus):
    dp = made()
    for _ in range(6):
        assert is_right(step(dp))
    deadline = dp._fastdp_get_runtime()._deadline
    deadline.check()
    assert not deadline._marks
    assert deadlines.own_deadline() is None and _C.set_deadline(0) == 0


@pytest.mark.parametrize("device", GPUS, ids=str)
def test_a_gpu_that_never_finishes_is_an_error_and_then_the_wrapper_trains_on(
    gpus, device, monkeypatch
):
    dp = made()
    step(dp)
    before = [p.detach().clone() for p in dp.module.parameters()]
    gpus.stall(device)
    text = late(dp)
    assert f"was not over within {TIMEOUT_S} s (timeout_s): " in text and str(device) in text
    assert "A device that never finishes is lost" in text
    assert "fastdp's last operations" in text and "bucket_broadcast of bucket" in text
    assert all(map(torch.equal, before, dp.module.parameters()))
    with monkeypatch.context() as patch:
        # As long as it is so it says so without a wait: it has nothing to sleep with.
        patch.setattr(deadlines, "time", types.SimpleNamespace(monotonic=time.monotonic))
        for _ in range(3):
            with pytest.raises(fastdp.CommunicationTimeoutError, match=str(device)):
                dp(ints(4, 3))
    gpus.resume()
    for _ in range(3):
        assert is_right(step(dp))
    assert dp._fastdp_runtime.leases() == [] and _C.set_deadline(0) == 0


def test_every_event_of_a_step_stalls_in_turn(gpus):
    """The never-finishing device of the fault sweep: from each record of a step on its GPU finishes
    nothing. Each time an error in time, parameters as before, and right numbers afterwards."""
    dp = made(0.05)
    step(dp)
    before = [p.detach().clone() for p in dp.module.parameters()]
    first = gpus.records
    step(dp)
    count = gpus.records - first
    assert count > 6
    kept = census(dp)
    for nth in range(1, count + 1):
        gpus.stalls_at = gpus.records + nth
        late(dp)
        assert gpus.stalled is not None
        assert all(map(torch.equal, before, dp.module.parameters()))
        gpus.resume()
        assert is_right(step(dp)) and is_right(step(dp))
        assert dp._fastdp_runtime.leases() == []
    found = census(dp)  # what earlier tests had left may have gone meanwhile
    assert all(now <= then for now, then in zip(found, kept, strict=True)), (found, kept)
    print(f"{count} events of a step stalled")


@can_pretend(4)
@pytest.mark.parametrize("places", [(2, 0, 3, 1), (0, 1, 0, 1)], ids=str)
def test_each_gpu_of_a_list_stalls_in_turn(monkeypatch, hidden, places, clock):
    gpus = Gpus(monkeypatch, hidden, 4, places)
    dp = fastdp.DataParallel(Net(), ["cpu"] * 4, timeout_s=TIMEOUT_S, bucket_bytes=64)
    step(dp)
    for device in dict.fromkeys(gpus.ranks):
        gpus.stall(device)
        step(dp)
        clock.now_s += 2 * TIMEOUT_S
        with pytest.raises(fastdp.CommunicationTimeoutError, match=str(device)):
            step(dp)
        gpus.resume()
        assert is_right(step(dp))


def test_forwards_do_not_run_ahead_of_a_gpu_for_ever(gpus):
    dp = made(1.0)
    gpus.stall(GPUS[1])
    forwards = 0
    started = time.monotonic()
    with pytest.raises(fastdp.CommunicationTimeoutError), torch.no_grad():
        for forwards in range(1000):
            dp(ints(4, 3))
    assert forwards == deadlines._MAX_AHEAD + 1
    assert 1.0 <= time.monotonic() - started < DEADLINE_S


def test_a_gpu_that_is_slow_is_waited_for(gpus):
    dp = made(DEADLINE_S)
    gpus.stall(GPUS[0])
    timer = threading.Timer(0.1, gpus.resume)
    timer.start()
    for _ in range(8):
        assert is_right(step(dp))
    timer.join()


def test_a_backward_raises_too(gpus, clock):
    dp = made()
    out = dp(ints(4, 3))
    gpus.stall(GPUS[1])
    with torch.no_grad():
        dp(ints(4, 3))
    clock.now_s += 2 * TIMEOUT_S
    with pytest.raises(fastdp.CommunicationTimeoutError):
        out.sum().backward()
    gpus.resume()
    assert is_right(step(dp))


def test_the_watchdog_writes_what_is_late_into_the_log_once(gpus, caplog, clock):
    dp = made()
    gpus.stall(GPUS[1])
    with caplog.at_level(logging.ERROR, "fastdp"):
        step(dp)
        clock.now_s += 2 * TIMEOUT_S
        ends = time.monotonic() + DEADLINE_S
        while not caplog.records and time.monotonic() < ends:
            time.sleep(0.01)  # as inside loss.item()
        time.sleep(3 * deadlines._LOOK_S)
    (record,) = caplog.records
    assert record.threadName == "fastdp-watchdog" and "cuda:1" in record.getMessage()
    assert "fastdp's last operations" in record.getMessage()


@pytest.mark.parametrize("device", GPUS, ids=str)
def test_a_gpu_that_stalls_in_a_backward_is_told_of_without_another_forward(
    gpus, device, caplog, clock
):
    dp = made()
    out = dp(ints(4, 3))
    dp._fastdp_get_runtime()._deadline.check()
    gpus.stall(device)
    with caplog.at_level(logging.ERROR, "fastdp"):
        out.sum().backward()
        clock.now_s += 2 * TIMEOUT_S
        ends = time.monotonic() + DEADLINE_S
        while not caplog.records and time.monotonic() < ends:
            time.sleep(0.01)
    assert re.search(f"{device}.*: what a .* a backward enqueued", caplog.records[0].getMessage())


def test_each_wrapper_has_its_own(gpus, monkeypatch):
    monkeypatch.setenv("FASTDP_TIMEOUT_MS", "1")
    patient, none, hasty = made(DEADLINE_S * 10), made(None), made()
    gpus.stall(GPUS[1])
    for dp in (patient, none):
        step(dp)
    late(hasty)
    step(patient)
    for _ in range(6):
        step(none)


def test_the_core_waits_as_long_as_the_wrapper_says_and_its_error_gets_the_name(gpus):
    seen = []

    class Waiting(fastdp.DataParallel):
        def gather(self, outputs, output_device):
            seen.append(_C.set_deadline(0))
            _C.set_deadline(seen[-1])
            if seen[-1]:
                raise _C.TimeoutError("cuda:1: event_synchronize: not done within 150 ms")
            return super().gather(outputs, output_device)

    dp = Waiting(Net(), ["cpu"] * 2, timeout_s=TIMEOUT_S)
    with pytest.raises(fastdp.CommunicationTimeoutError, match="event_synchronize") as caught:
        dp(ints(4, 3))
    assert isinstance(caught.value, TimeoutError)
    assert "fastdp's last operations" in str(caught.value)
    assert type(caught.value.__cause__) is _C.TimeoutError
    dp.timeout_s = None
    dp(ints(4, 3))
    assert seen == [150, 0]


def test_backwards_of_the_core_have_the_deadline_too(gpus, monkeypatch):
    seen = []
    move = Bucket._move

    def looked(bucket, *arguments):
        before = _C.set_deadline(0)
        _C.set_deadline(before)
        seen.append(before)
        return move(bucket, *arguments)

    monkeypatch.setattr(Bucket, "_move", looked)
    step(made())
    assert seen and set(seen) == {150}
    assert _C.set_deadline(0) == 0


def test_a_deadline_below_zero_is_refused_by_the_core():
    with pytest.raises(ValueError, match="timeout_ms: -1, must be 0 or more"):
        _C.set_deadline(-1)


def test_the_thread_ends_with_the_last_wrapper(gpus):
    def threads():
        return [t for t in threading.enumerate() if t.name == "fastdp-watchdog"]

    def one_there():
        ends = time.monotonic() + DEADLINE_S
        while len(threads()) > 1 and time.monotonic() < ends:
            time.sleep(0.001)  # the one before may be at its end
        return len(threads()) == 1

    dp = made()
    step(dp)
    assert one_there()
    gone = weakref.ref(dp._fastdp_runtime._deadline)
    del dp
    gc.collect()
    ends = time.monotonic() + DEADLINE_S
    while gone() is not None and time.monotonic() < ends:
        time.sleep(0.001)  # the thread may be looking at it
    assert gone() is None
    while threads() and time.monotonic() < ends:
        time.sleep(0.01)
    assert not threads()
    dp = made()
    step(dp)
    assert one_there()


@pytest.mark.skipif(
    torch.backends.cuda.is_built() and torch.cuda.is_available(),
    reason="needs a machine without a GPU: elsewhere torch's autograd refuses to run in a fork",
)
def test_a_forked_child_trains_with_a_deadline_of_its_own(gpus):
    dp = made(3.0)
    gpus.stall(GPUS[0])
    step(dp)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert any(len(marks) > 0 for marks in deadlines._left_by_parent)
            gpus.resume()
            code = 0 if is_right(step(dp)) and is_right(step(dp)) else 2
            gpus.stall(GPUS[0])
            late(dp)
        except BaseException:
            code = 3
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    gpus.resume()


@pytest.mark.parametrize("engine", ["auto", "graph"])
def test_recorded_steps_have_the_deadline_too(monkeypatch, engine):
    dp = fastdp.DataParallel(Net(), ["cpu"] * 2, timeout_s=DEADLINE_S, engine=engine)
    dp._fastdp_get_runtime().recorder = Recorder()
    seen = []
    plain = Recording.forward

    def forward(recording, *arguments):
        seen.append(deadlines.own_deadline())
        return plain(recording, *arguments)

    monkeypatch.setattr(Recording, "forward", forward)
    for _ in range(40):
        assert is_right(step(dp))
    assert seen and set(seen) == {dp._fastdp_runtime._deadline}


def test_replicas_on_the_host_and_on_one_device_have_no_marks():
    dp = fastdp.DataParallel(Net(), ["cpu"] * 2, timeout_s=0.001)
    for _ in range(5):
        assert is_right(step(dp))
        time.sleep(0.002)
    one = fastdp.DataParallel(Net(), ["cpu"], timeout_s=0.001)
    assert is_right(step(one))
