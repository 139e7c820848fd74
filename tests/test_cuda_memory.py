"""What a wrapper holds on GPUs: the same after a thousand steps as after a hundred, nothing when it
is gone, and nothing at all on a GPU that it was not given.

What a process takes past torch's allocator is counted by the core, in its scratch pools. What else
it may take of the driver shows in what a GPU has free, but so does what other processes take: it is
judged where no other worker of the run (pytest-xdist) shares the GPUs. That steady steps take
nothing of the driver at all is for test_cuda_nosync.py, which sees their calls.
"""

import gc
import os
import threading
import time

import cuda_child
import pytest
import torch
from conftest import no_cuda_reason
from cuda_steps import STEPS, Steps
from gpu_lists import EIGHT, need
from torch import nn

import fastdp
from fastdp.memory import scratch_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(no_cuda_reason() is not None, reason=str(no_cuda_reason())),
]

# The driver hands memory out in pieces of 2 MiB; a leak of one buffer per step takes hundreds.
GRANULE_BYTES = 2 * 2**20

# torch takes its own in pieces of up to this, and which thread frees first is chance.
SEGMENT_BYTES = 20 * 2**20

# How many buffers the core's pools need depends on how far behind the GPUs are: chance, too. One
# bucket that is not given back at each of 900 steps takes more than 50 MiB.
POOLED_BYTES = 20 * 2**20

# How long a forward takes on its GPU is now and then measured between two events (pace.py).
PACE_EVENTS = 2


@pytest.fixture(params=[(0, 0), (0, 1), (3, 2, 1, 0), EIGHT[0]], ids=str)
def ids(request):
    return need(request.param)


def is_alone():
    """Whether this process has the GPUs for itself, as far as the run knows."""
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) == 1


def lent_bytes(devices):
    """Of each GPU what the core's pools hold once all work is done and what is idle is given back:
    what somebody has not returned."""
    for device in devices:
        torch.cuda.synchronize(device)
    held = scratch_bytes(trim=True)
    return [held.get(device, 0) for device in devices]


def soon(true):
    deadline = time.monotonic() + 5
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def live_events():
    return sum(issubclass(type(thing), torch.cuda.Event) for thing in gc.get_objects())


class Held:
    """What is held once all GPUs are idle. The last steps are always of the same kinds."""

    def __init__(self, steps):
        for name in STEPS:
            steps.take(name)
        steps.wait()
        gc.collect()
        self.allocated = [torch.cuda.memory_allocated(device) for device in steps.devices]
        self.reserved = [torch.cuda.memory_reserved(device) for device in steps.devices]
        self.pooled = scratch_bytes()  # of the host, too: pinned memory
        self.free = [torch.cuda.mem_get_info(device)[0] for device in steps.devices]
        self.threads = len(os.listdir("/proc/self/task"))
        self.events = live_events()


@pytest.mark.row("G3")
def test_a_thousand_steps_hold_no_more_than_a_hundred(ids):
    steps = Steps(ids, layers=4)
    lent = lent_bytes(steps.devices)

    def run(count):
        for k in range(count):
            steps.take(STEPS[k % len(STEPS)])
            if k % 50 == 0:
                steps.wait()  # how far Python runs ahead is no question of this test

    run(100)
    before = Held(steps)
    run(900)
    after = Held(steps)
    assert after.allocated == before.allocated
    assert after.threads <= before.threads  # those of earlier tests may end meanwhile
    assert after.events <= before.events + PACE_EVENTS
    for k, device in enumerate(steps.devices):
        grown = after.reserved[k] - before.reserved[k]
        assert grown <= SEGMENT_BYTES, f"{device}: torch reserves {grown} bytes more"
        beside = before.free[k] - after.free[k] - grown
        if is_alone():
            assert beside <= GRANULE_BYTES, f"{device}: {beside} bytes were taken past torch"
    for device, pooled_bytes in after.pooled.items():
        grown = pooled_bytes - before.pooled.get(device, 0)
        assert grown <= POOLED_BYTES, f"{device}: the core's pools hold {grown} bytes more"
    for device, old, new in zip(steps.devices, lent, lent_bytes(steps.devices)):
        assert new <= old, f"{device}: {new - old} bytes of scratch were not given back"


@pytest.mark.row("G3")
def test_a_wrapper_that_is_gone_holds_nothing(ids):
    def replicas():
        return [t for t in threading.enumerate() if t.name.startswith("fastdp-replica")]

    def allocated():
        return [torch.cuda.memory_allocated(device) for device in devices]

    gc.collect()
    threads = set(replicas())
    devices = [torch.device("cuda", index) for index in dict.fromkeys(ids)]
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(devices[0])
    x = torch.ones(4, 256, device=devices[0])
    module(x).sum().backward()  # cuBLAS takes its workspace
    module.zero_grad(set_to_none=True)
    torch.nn.Linear(256, 256).to(devices[-1])(x.to(devices[-1])).sum().backward()
    for warm in (True, False):
        for device in devices:
            torch.cuda.synchronize(device)
        before = allocated()
        dp = fastdp.DataParallel(module, device_ids=ids, bucket_bytes=300_000)
        for _ in range(3):
            dp(x).sum().backward()
        with torch.no_grad():
            dp(x)
        for device in devices:
            torch.cuda.synchronize(device)
        module.zero_grad(set_to_none=True)
        del dp  # no collection: it must not be in a cycle
        # Autograd's threads may still be letting go of the last gradients.
        assert soon(lambda: warm or allocated() == before), (allocated(), before)
        # A thread's cuBLAS handle, and its workspace, go to the next thread once it has ended.
        assert soon(lambda: not set(replicas()) - threads)


@pytest.mark.row("G1")
def test_peak_on_the_first_gpu():
    """The bare module's, one set of buckets, and what DistributedDataParallel takes besides."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    module = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16))).to("cuda:0")
    set_bytes = sum(parameter.nbytes for parameter in module.parameters())
    x = torch.ones(8, 1024, device="cuda:0")

    def peak(call):
        for _ in range(3):
            torch.cuda.synchronize(0)
            torch.cuda.reset_peak_memory_stats(0)
            call(x).sum().backward()
            module.zero_grad(set_to_none=True)
        torch.cuda.synchronize(0)
        return torch.cuda.max_memory_allocated(0)

    bare = peak(module)
    first = torch.device("cuda", 0)
    free = torch.cuda.mem_get_info(0)[0]
    reserved = torch.cuda.memory_reserved(0)
    scratch = scratch_bytes().get(first, 0)
    wrapped = peak(fastdp.DataParallel(module, device_ids=[0, 1], bucket_bytes=2**22))
    assert wrapped - bare <= 2 * set_bytes
    # What the core takes from the driver itself; and torch's contexts of peers, once.
    beside = free - torch.cuda.mem_get_info(0)[0] - (torch.cuda.memory_reserved(0) - reserved)
    counted = scratch_bytes().get(first, 0) - scratch
    for taken in (counted, beside) if is_alone() else (counted,):
        assert wrapped - bare + taken <= 2 * set_bytes + 256 * 2**20


@pytest.fixture(scope="module")
def children():
    started = {(0, 0): cuda_child.start("contexts", [0, 0])}
    if torch.cuda.device_count() > 1:
        started[1, 1] = cuda_child.start("contexts", [1, 1])
    yield started
    cuda_child.stop(started.values())


@pytest.mark.row("G2")
@pytest.mark.parametrize("pair", [(0, 0), (1, 1)], ids=str)
def test_only_listed_gpus_get_a_context(children, pair):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: one of them not listed")
    found = cuda_child.answer(children[pair])
    assert found["wrong"] == []
    assert pair[0] in found["bare"], "the context that must be seen is not seen"
    assert found["wrapped"] == found["bare"]  # a torch that touches others by itself may
