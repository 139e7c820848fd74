"""The flight recorder as Python sees it: `dump()`, in errors, and at SIGUSR1 while Python hangs."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from nets import Net, grads, ints, same

import fastdp
from fastdp import _C

LINE = re.compile(
    r"#(?P<number>\d+) (?P<verb>\w+)(?: of bucket (?P<bucket>\d+))?, (?P<bytes>\d+) bytes on "
    r"(?P<device>cpu|cuda):\d+ stream 0x[0-9a-f]+, others: (?P<others>\d+), \d+ ms ago: "
    r"(?P<state>running|enqueued|failed, [a-z ]+)"
)
MOST = 256


def records(text):
    first, *lines = text.splitlines()
    assert re.fullmatch(r"fastdp's last operations, of \d+:", first)
    found = [LINE.fullmatch(line) for line in lines]
    assert all(found), lines
    return [match.groupdict() for match in found]


def since(text, number):
    return [each for each in records(text) if int(each["number"]) > number]


def newest():
    return max((int(each["number"]) for each in records(_C.dump())), default=0)


def test_the_operations_of_a_step_in_order():
    dp = fastdp.DataParallel(Net(), ["cpu"] * 2)
    dp(ints(4, 3)).sum().backward()
    before = newest()
    dp(ints(4, 3)).sum().backward()
    step = since(dp.dump(), before)
    verbs = [each["verb"] for each in step]
    assert verbs == ["scatter", "bucket_broadcast", "gather", "scatter", "bucket_reduce"]
    assert {each["state"] for each in step} == {"enqueued"}
    # Replica 0 computes with the module's own parameters: one copy.
    assert [each["others"] for each in step] == ["2", "1", "2", "2", "2"]
    assert [each["bytes"] for each in step if each["verb"] == "gather"] == [str(4 * 2 * 8)]
    buckets = {each["bucket"] for each in step} - {None}
    assert len(buckets) == 1 and int(buckets.pop()) <= _C.Bucket((torch.ones(1),)).number
    assert [each["bucket"] is None for each in step] == [True, False, True, True, False]


def test_numbers_of_buckets_are_their_own():
    first, second = (_C.Bucket((torch.ones(2),)) for _ in range(2))
    assert second.number == first.number + 1
    before = newest()
    second.broadcast((torch.ones(2),), (torch.empty(2),))
    (record,) = since(_C.dump(), before)
    assert record["bucket"] == str(second.number)


def test_the_ring_keeps_the_newest():
    target = torch.empty(2)
    for _ in range(MOST + 20):
        _C.broadcast(torch.ones(2), (target,))
    numbers = [int(each["number"]) for each in records(_C.dump())]
    assert len(numbers) == MOST
    assert numbers == list(range(numbers[-1] - MOST + 1, numbers[-1] + 1))


def test_what_fails_is_kept_with_its_status():
    before = newest()
    _C.arm_fault("reduce", 1)
    with pytest.raises(_C.FaultInjected):
        _C.reduce((torch.ones(2),), torch.empty(2))
    with pytest.raises(ValueError):
        _C.reduce((torch.ones(3),), torch.empty(2))
    states = [each["state"] for each in since(_C.dump(), before)]
    assert states == ["failed, fault injected", "failed, invalid argument"]


@pytest.mark.parametrize("choice", ["", "off", "signal", "error", "both"])
def test_errors_of_the_core_tell_it_on_request(choice, monkeypatch):
    monkeypatch.setenv("FASTDP_DUMP", choice)
    dp = fastdp.DataParallel(Net(), ["cpu"] * 2)
    _C.arm_fault("bucket_broadcast", 1)
    with pytest.raises(_C.FaultInjected) as raised:
        dp(ints(4, 3))
    told, *ring = str(raised.value).split("\n", 1)
    assert told == "bucket_broadcast: this call was told to fail"
    assert bool(ring) == (choice in ("error", "both"))
    if ring:
        last = records(ring[0])[-1]
        assert (last["verb"], last["state"]) == ("bucket_broadcast", "failed, fault injected")
    # The caller's own mistakes are not the core's errors.
    with pytest.raises(ValueError) as raised:
        _C.reduce((torch.ones(3),), torch.empty(2))
    assert "last operations" not in str(raised.value)
    same(dp(ints(4, 3)), Net()(ints(4, 3)))


def run(script, **settings):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **settings}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


# A forward that never comes back to Python: no signal handler of Python's could run.
HANG = """
    import ctypes, os, torch, fastdp
    from torch import nn

    class Hang(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            os.write(1, b"hangs\\n")  # at once: the other replica may come between
            ctypes.PyDLL(None).sleep(600)  # keeps the GIL

    fastdp.DataParallel(Hang(), ["cpu"] * 2)(torch.ones(4, 3))
"""


def test_a_signal_tells_it_while_python_hangs():
    process = run(HANG, FASTDP_DUMP="signal")
    try:
        assert process.stdout.readline() == "hangs\n"
        lines = []
        os.kill(process.pid, signal.SIGUSR1)
        while not lines or "bucket_broadcast" not in lines[-1]:
            lines.append(process.stderr.readline())
            assert lines[-1], "the process ended"
    finally:
        process.kill()
        process.communicate()
    assert [each["verb"] for each in records("".join(lines))] == ["scatter", "bucket_broadcast"]


# What asks for no signal, or has its own handler of it, finds it untouched.
QUIET = """
    import os, signal, torch, fastdp
    heard = []
    if OWN:
        signal.signal(signal.SIGUSR1, lambda *rest: heard.append(1))
    fastdp.comm.broadcast(torch.ones(2), ["cpu"] * 2)
    os.kill(os.getpid(), signal.SIGUSR1)
    print("alive", heard)
"""


@pytest.mark.parametrize("choice", ["off", "error"])
def test_the_signal_is_left_alone(choice):
    process = run(QUIET.replace("OWN", "False"), FASTDP_DUMP=choice)
    assert process.communicate(timeout=300)[0] == ""
    assert process.returncode == -signal.SIGUSR1


def test_a_handler_of_the_users_is_kept_and_that_is_logged():
    process = run(QUIET.replace("OWN", "True"), FASTDP_DUMP="both")
    output, errors = process.communicate(timeout=300)
    assert output == "alive [1]\n"
    assert "FASTDP_DUMP has no effect: SIGUSR1: somebody else handles it already" in errors


def test_a_choice_that_makes_no_sense_is_refused():
    process = run("import torch, fastdp; fastdp.comm.broadcast(torch.ones(2), ['cpu'] * 2)",
                  FASTDP_DUMP="perhaps")
    assert "ValueError: FASTDP_DUMP is \"perhaps\"" in process.communicate(timeout=300)[1]


def test_a_dump_beside_running_steps_is_whole():
    """Read by one thread while replicas' threads write."""
    import threading

    dp = fastdp.DataParallel(Net(), ["cpu"] * 3)
    x, ends = ints(6, 3), time.monotonic() + 0.5
    errors = []

    def train():
        try:
            while time.monotonic() < ends:
                dp.zero_grad()
                dp(x).sum().backward()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    while time.monotonic() < ends:
        found = records(dp.dump())
        numbers = [int(each["number"]) for each in found]
        assert numbers == sorted(set(numbers))
    thread.join(30)
    assert not errors
    want = Net()
    want(x).sum().backward()
    same(grads(dp.module), grads(want))
