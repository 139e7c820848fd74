"""No step of training or evaluation makes the host wait for a GPU. Pageable host inputs do, by
nature."""

import cuda_child
import pytest
import torch
from conftest import no_cuda_reason
from cuda_calls import is_blocking
from cuda_steps import STEPS, Steps
from gpu_lists import EIGHT, FOUR, ON_ONE, need, on_way

SLEEP_MS = 400


def gpu_test(function):
    reason = no_cuda_reason()
    return pytest.mark.gpu(pytest.mark.skipif(reason is not None, reason=str(reason))(function))


WAYS = [("auto", 0, 0), ("always", 0, 1), ("always", 1, 0), ("never", 0, 1)]
WAYS += [("auto", *ON_ONE), ("always", 3, 1), ("always", *FOUR[1]), ("always", *EIGHT[2])]


@pytest.fixture(params=WAYS, ids=str)
def ids(request, monkeypatch):
    """Two replicas or more, moves of their parameters hidden or not."""
    return on_way(request.param, monkeypatch)


@pytest.fixture(scope="module")
def cycles_per_ms():
    """Of torch.cuda._sleep, on a GPU that is awake."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(50_000_000)
    begin.record()
    torch.cuda._sleep(50_000_000)
    end.record()
    end.synchronize()
    return 50_000_000 / begin.elapsed_time(end)


def put_to_sleep(devices, cycles):
    """Each GPU's current stream is held up; the events come behind."""
    events = []
    for device in devices:
        with torch.cuda.device(device):
            torch.cuda._sleep(cycles)
        events.append(torch.cuda.Event())
        events[-1].record(torch.cuda.current_stream(device))
    return events


@pytest.mark.row("J2")
@gpu_test
@pytest.mark.parametrize("name", STEPS)
def test_a_step_returns_while_the_gpus_are_held_up(ids, name, cycles_per_ms):
    steps = Steps(ids)
    cycles = int(SLEEP_MS * cycles_per_ms)
    for held_up in (False, True):  # memory for both is taken before it counts
        if held_up:
            put_to_sleep(steps.devices, cycles // 10)
        for _ in range(3):
            steps.take(name)
        steps.wait()
    events = put_to_sleep(steps.devices, cycles)
    # A GPU queues some 1,000 launches; with more the next one waits, whoever makes it.
    for k in range(3 if ids.count(ids[0]) <= 2 else 1):
        steps.take(name)
        for device, event in zip(steps.devices, events):
            assert not event.query(), f"step {k} returned after {device} was done"
    steps.wait()
    assert all(event.query() for event in events)


@pytest.mark.row("J2")
@gpu_test
@pytest.mark.parametrize("name", STEPS)
def test_torch_sees_no_synchronisation(ids, name):
    steps = Steps(ids)
    for _ in range(3):
        steps.take(name)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device=steps.devices[0]).item()  # the mode is on
        for _ in range(2):
            steps.take(name)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.fixture(scope="module")
def children():
    if no_cuda_reason():
        pytest.skip(no_cuda_reason())
    started = {("auto", 0, 0): cuda_child.start("blocking_calls", [0, 0])}
    if torch.cuda.device_count() > 1:
        for overlap in ("always", "never"):
            for transport in ("auto", "host"):
                started[transport, 0, 1, overlap] = cuda_child.start(
                    "blocking_calls", [0, 1], FASTDP_TRANSPORT=transport, FASTDP_OVERLAP=overlap
                )
    if torch.cuda.device_count() > 3:
        started[("auto", *FOUR[1], "always")] = cuda_child.start(
            "blocking_calls", FOUR[1], FASTDP_OVERLAP="always"
        )
    yield started
    cuda_child.stop(started.values())


@gpu_test
@pytest.mark.parametrize(
    "case",
    [
        ("auto", 0, 0),
        ("auto", 0, 1, "always"),
        ("host", 0, 1, "always"),
        ("auto", 0, 1, "never"),
        ("host", 0, 1, "never"),
        ("auto", *FOUR[1], "always"),
    ],
    ids=str,
)
def test_no_call_of_cuda_waits(children, case):
    """Of torch, of fastdp, of the libraries below them."""
    if case not in children:
        need([index for index in case if isinstance(index, int)])
    found = cuda_child.answer(children[case])
    if "skipped" in found:
        pytest.skip(found["skipped"])
    assert found.pop("synchronize")["blocking"], "the interception does not see a wait"
    for name in STEPS:
        assert found[name]["calls"] > 100, name
        assert found[name]["blocking"] == [], name


@pytest.mark.parametrize(
    "name, blocks",
    [
        ("cudaStreamSynchronize", True),
        ("cuEventSynchronize", True),
        ("cuCtxSynchronize_v2", True),
        ("cudaDeviceSynchronize", True),
        ("cudaMemcpy", True),
        ("cuMemcpyDtoH_v2", True),
        ("cudaMemcpyPeer", True),
        ("cudaFree", True),
        ("cuMemHostAlloc", True),
        ("cudaMemcpyAsync", False),
        ("cuMemcpyHtoDAsync_v2", False),
        ("cuMemcpyBatchAsync", False),
        ("cudaMemcpyPeerAsync", False),
        ("cudaMallocAsync", False),
        ("cudaEventQuery", False),
        ("cudaStreamWaitEvent", False),
        ("cuLaunchKernel", False),
    ],
)
def test_what_counts_as_a_wait(name, blocks):
    assert is_blocking(name) == blocks
