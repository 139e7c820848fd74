"""What recordings order on GPUs beside their kernels (captures.Branch, captures.Crossing) and
around them (lending.Lender): on streams that only note what they are behind of."""

import contextlib

import pytest
import torch
from engine_cases import WATCHED, Means
from fastdp import _C, captures, lending, own_streams, recordings
from fastdp.runtime import Runtime
from torch import nn

GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


class Stream:
    def __init__(self, name, device=GPU):
        self.device, self.cuda_stream = device, hash(name)
        self.seen = set()
        self.waits = []  # for events

    def wait_stream(self, stream):
        self.seen |= stream.seen

    def wait_event(self, event):
        self.waits.append(event)
        event.wait(self)

    def run(self, name):
        self.seen = self.seen | {name}


class Event:
    def __init__(self, name=None):
        self.seen = {name}
        self.recorded = []

    def wait(self, stream):
        stream.seen |= self.seen

    def record(self, stream):
        self.recorded.append(stream)
        self.seen = set(stream.seen)


@pytest.fixture
def side(monkeypatch):
    side = Stream("side")
    monkeypatch.setattr(captures, "own_stream", lambda use, device: side)
    return side


@pytest.fixture
def branch(side):
    return captures.Branch(GPU)


def test_a_wait_is_beside_what_was_launched_before(branch, side):
    main, first, second = Stream("main"), Event("first"), Event("second")
    main.run("early")
    branch.wait(first, main)
    assert side.seen == main.seen == {"early", "first"} and main.waits == []
    main.run("kernel")
    branch.wait(second, main)
    assert main.seen == {"early", "first", "kernel", "second"}
    assert "kernel" not in side.seen and side.waits == [first, second]


def test_a_wait_is_made_once_for_each_stream(branch, side):
    main, user, event = Stream("main"), Stream("user"), Event("event")
    for _ in range(2):
        branch.wait(event, main)
    assert side.waits == [event]
    branch.wait(event, user)
    assert "event" in user.seen


def test_a_record_is_behind_the_stream_which_does_not_wait_for_it(branch, side):
    main, wait, ready = Stream("main"), Event("wait"), [Event(), Event()]
    main.run("first")
    branch.record(ready[0], main)
    main.run("second")
    branch.record(ready[1], main)
    assert ready[0].seen == {"first"} and ready[1].seen == {"first", "second"}
    assert all(event.recorded == [side] for event in ready)
    side.run("record")
    assert "record" not in main.seen
    branch.wait(wait, main)
    assert "wait" in main.seen


def test_what_was_used_joins_the_capture(branch, side):
    main = Stream("main")
    side.run("of another capture")
    branch.join(main)
    assert main.seen == set()  # not part of it: that would break the capture
    branch.record(Event(), main)
    side.run("record")
    branch.join(main)
    assert "record" in main.seen


@pytest.mark.parametrize("capturing", [True, False])
@pytest.mark.parametrize("device", [GPU, OTHER], ids=str)
def test_only_a_capture_has_a_branch(monkeypatch, side, branch, capturing, device):
    class Current:
        def __init__(self, device):
            assert device == GPU

        __enter__ = __exit__ = lambda self, *error: None

    event = Event("event")
    monkeypatch.setattr(captures._torch_cuda, "external_event", lambda: event)
    monkeypatch.setattr(captures, "_branches", {GPU: branch})
    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    stream, crossing = Stream("main", device), captures.Crossing()
    stream.wait_event(crossing)
    assert "event" in stream.seen
    crossing.record(stream)
    beside = capturing and device == GPU
    assert event.recorded == [side if beside else stream]
    assert bool(side.waits) == beside


@pytest.fixture
def streams(monkeypatch):
    compute, made = Stream("compute"), []

    def make(device):
        assert device == GPU
        made.append(Stream("lender"))
        return made[-1]

    monkeypatch.setattr(own_streams, "_streams", {})
    monkeypatch.setattr(lending, "current_stream", lambda device: compute)
    monkeypatch.setattr(lending, "wait_for", lambda then, first: then.wait_stream(first))
    monkeypatch.setattr(own_streams, "_opened", make)
    return compute, made


def test_who_lends(streams):
    here, there = torch.empty(1, device="meta"), torch.empty(1)
    lender = lending.Lender(here.device)
    assert lender.of(here) is None
    lender.handle = 7
    assert lender.of(here) == 7 and lender.of(there) is None


@pytest.mark.parametrize("fails", [False, True], ids=["right", "raises"])
def test_compute_waits_in_the_end(streams, fails):
    compute, made = streams
    for step in range(2):
        lender = lending.Lender(GPU)  # all of a device have one stream
        compute.run(f"write {step}")
        outcome = pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext()
        with outcome, lender.lending():
            (stream,) = made
            assert lender.handle == stream.cuda_stream
            assert f"write {step}" in stream.seen
            stream.run(f"read {step}")
            compute.run(f"forward {step}")
            assert f"read {step}" not in compute.seen
            assert not fails or 1 / 0
        assert lender.handle is None
        assert f"read {step}" in compute.seen and f"forward {step}" not in stream.seen


def test_the_largest_argument_is_read_last(monkeypatch):
    """Home's stream waits behind each argument for the reads of those before."""

    class Sum(nn.Module):
        def forward(self, large, small):
            return large + small

    class Core:
        sizes = []

        def scatter(self, source, *rest):
            self.sizes.append(source.numel())
            _C.scatter(source, *rest)

        def __getattr__(self, name):
            return getattr(_C, name)

    monkeypatch.setattr(recordings, "_C", Core())
    means = Means(("cpu", "cpu"))
    dp = means.wrap(Sum())
    large, small = torch.arange(12.0).view(4, 3), torch.arange(4.0).view(4, 1)
    for _ in range(WATCHED["graph"] + 3):
        assert torch.equal(dp(large, small), large + small)
    assert Core.sizes[-4:] == [4, 12, 4, 12]


class Graph:
    """A capture on one stream; `interrupt`: where an exception comes from."""

    def __init__(self, interrupt):
        self.interrupt, self.capturing, self.ends = interrupt, False, 0

    def capture_begin(self, pool, capture_error_mode):
        if self.interrupt == "no begin":
            raise RuntimeError("another capture is under way")
        self.capturing = True
        if self.interrupt == "behind begin":
            raise KeyboardInterrupt

    def capture_end(self):
        self.ends += 1
        was, self.capturing = self.capturing, False
        if not was or self.interrupt == "end" and self.ends == 1:
            raise RuntimeError("it was broken")


@pytest.mark.parametrize("interrupt", ["no begin", "behind begin", "act", "end"])
def test_no_capture_is_left_open(monkeypatch, side, interrupt):
    def act():
        if interrupt == "act":
            raise KeyboardInterrupt

    graph, pools, renewed = Graph(interrupt), [], []
    for name, value in {
        "CUDAGraph": lambda: graph,
        "device": contextlib.nullcontext,
        "set_device": lambda device: None,
        "set_stream": lambda stream: None,
        "is_current_stream_capturing": lambda: graph.capturing,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(captures, "guarded_states", contextlib.nullcontext)
    monkeypatch.setattr(captures, "_renew_generators", renewed.append)
    monkeypatch.setattr(captures._torch_cuda, "end_pool", lambda *args: pools.append(args))
    with pytest.raises(RuntimeError if interrupt in ("no begin", "end") else KeyboardInterrupt):
        captures.CudaRecorder([GPU]).record(GPU, "pool", act)
    assert not graph.capturing and captures._branches == {}
    assert graph.ends == {"no begin": 0, "behind begin": 1, "act": 1, "end": 2}[interrupt]
    # A capture that could not be ended leaves its pool, and the generator that it counted on.
    assert len(pools) == len(renewed) == (interrupt == "end")


def test_what_pools_hold_is_asked_of_torchs_usual_allocator_alone(monkeypatch):
    """cudaMallocAsync raises."""

    def snapshot():
        if backend != "native":
            raise RuntimeError("Calling snapshot is not meaningful")
        sizes = {"total_size": 8, "allocated_size": 3}
        return [{"device": k, "segment_pool_id": (0, k), **sizes} for k in range(2)]

    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    backend = "native"
    assert captures.CudaRecorder([GPU]).pool_bytes([(0, 1)]) == {OTHER: (8, 3)}
    backend = "cudaMallocAsync"
    assert captures.CudaRecorder([GPU]).pool_bytes([(0, 1)]) == {}


@pytest.mark.parametrize("captured", [None, GPU, OTHER], ids=str)
def test_a_capture_on_another_gpu_than_the_current_one_is_seen(monkeypatch, captured):
    """Where the caller has changed the device inside of it."""
    now, asked = [GPU], []

    @contextlib.contextmanager
    def device(which):
        before, now[0] = now[0], which
        yield
        now[0] = before

    def is_capturing():
        asked.append(now[0])
        return now[0] == captured

    handles = {0: 0, 1: 7}
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_capturing)
    monkeypatch.setattr(captures._torch_cuda, "raw_stream", handles.__getitem__)
    runtime = Runtime(nn.Linear(2, 2), [GPU, OTHER], (1 << 20, "zero", None))
    refused = pytest.raises(RuntimeError, match="on 2 GPUs cannot run inside torch.cuda.graph")
    with contextlib.nullcontext() if captured is None else refused:
        runtime.check_capture()
    assert now == [GPU]
    handles[1], asked[:] = 0, []
    if captured != GPU:  # on a default stream there is no capture, and nobody asks
        runtime.check_capture()
        assert asked == [GPU]
