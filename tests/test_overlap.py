"""Which modules have the moves of their parameters hidden behind compute (overlap.py), decided from
how long they take; and the two ways of communication, with GPUs pretended."""

import pytest
import torch

from fastdp import _C, overlap, peers, replicas, streams
from fastdp.environment import DEFAULT_BUCKET_BYTES

HOST = torch.device("cpu")
GPUS = tuple(torch.device("cuda", index) for index in range(3))


def tensors(size_bytes):
    return [torch.empty(size_bytes // 2, dtype=torch.uint8, device="meta")] * 2


@pytest.fixture
def rates(monkeypatch):
    """What was measured, in bytes per second; asked for without a GPU."""
    monkeypatch.delenv("FASTDP_OVERLAP", raising=False)
    measured = {}
    monkeypatch.setattr(overlap, "_rates", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def measure(devices, transport):
        measured[devices, transport] = measured.get((devices, transport), 0) + 1
        return {None: 1e9, "host": 1e6}[transport]

    monkeypatch.setattr(overlap, "measured_bytes_per_s", measure)
    return measured


def test_what_takes_long_is_hidden(rates):
    limit = 200_000  # bytes in 200 us at 1 GB/s
    for size, hidden in ((0, False), (limit, False), (limit + 2, True), (10**9, True)):
        assert overlap.is_worth_hiding(tensors(size), GPUS[:2], None) is hidden
    assert overlap.is_worth_hiding(tensors(limit), GPUS[:2], "host")
    assert rates == {(GPUS[:2], None): 1, (GPUS[:2], "host"): 1}


def test_it_is_measured_once_for_some_gpus(rates):
    for devices in (GPUS, GPUS[:2], (*GPUS, *GPUS), GPUS[::-1]):
        overlap.is_worth_hiding(tensors(2), devices, None)
    assert rates == {(GPUS, None): 1, (GPUS[:2], None): 1, (GPUS[::-1], None): 1}


def test_nothing_is_measured_while_a_graph_is_captured(rates, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert overlap.is_worth_hiding(tensors(2), GPUS, None)
    assert rates == {} and overlap._rates == {}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not overlap.is_worth_hiding(tensors(2), GPUS, None)


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError, MemoryError])
def test_a_gpu_that_is_full_is_measured_later(rates, monkeypatch, error):
    plain = overlap.measured_bytes_per_s

    def full(devices, transport):
        raise error("no room for the probe")

    monkeypatch.setattr(overlap, "measured_bytes_per_s", full)
    assert overlap.is_worth_hiding(tensors(2), GPUS[:2], None)
    monkeypatch.setattr(overlap, "measured_bytes_per_s", plain)
    assert not overlap.is_worth_hiding(tensors(2), GPUS[:2], None)
    assert rates == {(GPUS[:2], None): 1}


@pytest.mark.parametrize("devices", [(HOST, HOST), (GPUS[0], GPUS[0]), GPUS[:1]], ids=str)
@pytest.mark.parametrize("wish", ["auto", "always", "never"])
def test_on_one_device_there_is_nothing_to_hide(rates, monkeypatch, devices, wish):
    monkeypatch.setenv("FASTDP_OVERLAP", wish)
    assert not overlap.is_worth_hiding(tensors(10**9), devices, None) and rates == {}


@pytest.mark.parametrize("wish, hidden", [("always", True), ("never", False)])
@pytest.mark.parametrize("size", [0, 10**12])
def test_the_variable_decides(rates, monkeypatch, wish, hidden, size):
    monkeypatch.setenv("FASTDP_OVERLAP", wish)
    assert overlap.is_worth_hiding(tensors(size), GPUS, None) is hidden and rates == {}


def test_an_unknown_word_is_refused(rates, monkeypatch):
    monkeypatch.setenv("FASTDP_OVERLAP", "sometimes")
    with pytest.raises(ValueError, match="FASTDP_OVERLAP is 'sometimes': it must be one of auto"):
        overlap.is_worth_hiding(tensors(2), GPUS, None)
    monkeypatch.setenv("FASTDP_OVERLAP", "")
    assert not overlap.is_worth_hiding(tensors(2), GPUS, None)


def test_the_fastest_probe_counts(monkeypatch):
    """The host may be late with any of them."""
    clock, given_back = [0.0], []
    taken_ms = iter([9.0, 3.0, 2.0, 4.0, 5.0, 6.0, 7.0])

    class Bucket:
        def __init__(self, tensors, offsets, transport):
            pass

        def broadcast(self, sources, flats):
            clock[0] += next(taken_ms)
            given_back.clear()

    class Event:
        def __init__(self, at_ms):
            self.at_ms = at_ms

        def query(self):
            return True

        def elapsed_time(self, other):
            return other.at_ms - self.at_ms

    monkeypatch.setattr(overlap, "open_peers", lambda devices: None)
    monkeypatch.setattr(overlap._C, "Bucket", Bucket)
    monkeypatch.setattr(overlap._C, "scratch", given_back.append)
    monkeypatch.setattr(
        overlap, "_timing_events", lambda devices: [Event(clock[0]) for _ in devices]
    )
    rate = overlap.measured_bytes_per_s((HOST, HOST), None)
    assert rate == pytest.approx(overlap._PROBE_BYTES / 2e-3) and given_back == [True]


def test_the_current_stream_is_looked_up_anew_and_made_once(monkeypatch):
    handles = {0: 0, 1: 0}
    made = []

    def make(device):
        made.append((device, handles[device.index]))
        return object()

    monkeypatch.setattr(streams._torch_cuda, "raw_stream", handles.__getitem__)
    monkeypatch.setattr(torch.cuda, "current_stream", make)
    monkeypatch.setattr(streams, "_known", {})
    first, other = streams.current_stream(GPUS[0]), streams.current_stream(GPUS[1])
    handles[0] = 7
    assert streams.current_stream(GPUS[0]) not in (first, other)
    handles[0] = 0
    assert streams.current_stream(GPUS[0]) is first
    assert streams.current_stream(GPUS[1]) is other
    assert made == [(GPUS[0], 0), (GPUS[1], 0), (GPUS[0], 7)]
    # Streams of other libraries come and go: those that were current are not kept for ever.
    monkeypatch.setattr(streams, "_MAX_KNOWN", 5)
    for handles[1] in range(100, 112):
        streams.current_stream(GPUS[1])
    assert len(made) == 3 + 12 and len(streams._known) <= 5


def test_the_table_of_the_core_knows_it():
    (row,) = (row for row in _C.env_table() if row[0] == "FASTDP_OVERLAP")
    assert row[1:3] == ("auto|always|never", "auto")


@pytest.mark.parametrize("limit", [DEFAULT_BUCKET_BYTES, 1000])
def test_the_way_of_a_plan(rates, monkeypatch, limit):
    """In line all travels in one bucket, or on one device in large ones; beside compute the first
    is small; unless somebody asked for another size."""
    module = torch.nn.Linear(1, 1)
    replicator = replicas.Replicator(module, GPUS[:2], limit, "zero")
    size = 3 * DEFAULT_BUCKET_BYTES
    first = 4 << 20 if limit == DEFAULT_BUCKET_BYTES else limit
    beside, in_line = (replicator._communication, first, limit), replicator._in_line
    assert beside[0].apart and not in_line.apart

    def way(wish, devices=GPUS[:2]):
        monkeypatch.setenv("FASTDP_OVERLAP", wish)
        return replicator._way(tensors(size), devices)

    one_bucket = size if limit == DEFAULT_BUCKET_BYTES else limit
    assert way("always") == beside and way("never") == (in_line, one_bucket, one_bucket)
    shared = 64 << 20 if limit == DEFAULT_BUCKET_BYTES else limit
    assert way("always", GPUS[:1]) == (in_line, shared, shared)


# Streams. torch without CUDA has no streams: these stand for them, and log what is asked of them.


class Stream:
    stream_id = -1  # torch's own number for it

    def __init__(self, name, device, log):
        self.name, self.device, self._log = name, device, log
        self.cuda_stream = id(self)

    def wait_event(self, event):
        self._log.append(f"{self.name} waits for {event.seen}")


@pytest.fixture
def cuda(monkeypatch):
    """The compute streams c0, c1, ... of pretended GPUs are current."""
    return PretendedCuda(monkeypatch)


class PretendedCuda:
    def __init__(self, monkeypatch):
        self.log = log = []
        self.current = {device: Stream(f"c{device.index}", device, log) for device in GPUS}
        self.device = 0
        made = self.made = []

        class Event:
            def __init__(self):
                made.append(self)

            def record(self, stream):
                self.seen = stream.name

        def make_stream(device, priority):
            return Stream(f"s{device.index}", device, log)

        class Empty:
            def to(self, device):
                log.append(f"opened {device.index}")

        def set_stream(stream):
            self.current[stream.device] = stream
            self.device = stream.device.index

        def set_device(device):
            self.device = device

        monkeypatch.setattr(streams, "current_stream", self.current.__getitem__)
        for name, value in {
            "Event": Event,
            "Stream": make_stream,
            "set_stream": set_stream,
            "current_device": lambda: self.device,
            "set_device": set_device,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(streams, "_events", {})
        monkeypatch.setattr(streams, "_users", {})
        monkeypatch.setattr(peers, "_open", set())
        monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: Empty())
        # A CUDA build of torch would be asked for blocks of memory that there are none of.
        monkeypatch.setattr(streams, "has_to_be_told", lambda devices: False)

    def names(self):
        return [self.current[device].name for device in GPUS[:2]]

    def taken(self):
        log = list(self.log)
        self.log.clear()
        return log


def test_beside_compute(cuda):
    communication = streams.Communication(GPUS[:2])
    assert communication.apart
    communication.open()
    assert cuda.taken() == ["opened 1", "opened 0"]
    communication.open()
    compute = communication.compute()
    communication.begin(compute)
    assert [stream.name for stream in compute.streams] == ["c0", "c1"]
    assert cuda.taken() == ["s0 waits for c0", "s1 waits for c1"]
    cuda.device = 2
    with communication.current():
        assert cuda.names() == ["s0", "s1"] and cuda.device == 2
        communication.mark(0)
        communication.mark(1)
    assert cuda.names() == ["c0", "c1"] and cuda.device == 2
    assert [event.seen for event in communication.arrived(GPUS[1])] == ["s1", "s1"]
    communication.deliver()
    assert cuda.taken() == ["c0 waits for s0", "c1 waits for s1"]
    cuda.current[GPUS[0]] = communication._streams[0]  # the engine's, for the node
    with communication.in_backward(compute, (None,)):
        assert cuda.names() == ["s0", "s1"]
        assert cuda.taken() == ["s0 waits for c0", "s1 waits for c1", "s1 waits for s0"]
    assert cuda.names() == ["s0", "c1"] and cuda.taken() == ["s0 waits for s1"]
    engines = cuda.current[GPUS[1]] = Stream("e1", GPUS[1], cuda.log)  # not that of the forward
    with communication.in_backward(compute, (None,)):
        expected = ["s0 waits for c0", "s1 waits for c1", "s1 waits for e1", "s1 waits for s0"]
        assert cuda.taken() == expected
    assert cuda.current[GPUS[1]] is engines and cuda.taken() == ["s0 waits for s1"]


def test_events_of_reads_come_back(cuda):
    communication = streams.Communication(GPUS[:2])
    communication.open()
    compute = communication.compute()
    communication.begin(compute)
    cuda.current[GPUS[0]] = communication._streams[0]
    counts = []
    for _ in range(8):
        with torch.no_grad(), communication.in_backward(compute, (None,)):
            pass
        counts.append(len(cuda.made))
        held = [event for reads, _ in communication._retiring for _, event in reads]
        spare = [event for events in communication._spare.values() for event in events]
        assert not {*map(id, held)} & {*map(id, spare)} and len(held) <= 6
    assert counts[3:] == counts[3:4] * 5


def test_gradients_are_held_until_their_streams_were_told_to_wait(cuda):
    communication = streams.Communication(GPUS[:2])
    communication.open()
    compute = communication.compute()
    communication.begin(compute)
    cuda.current[GPUS[0]] = communication._streams[0]
    kept = [object() for _ in range(5)]
    for k, thing in enumerate(kept):
        cuda.taken()
        with torch.no_grad(), communication.in_backward(compute, (thing, None)):
            pass
        told = [line for line in cuda.taken() if line.startswith("c")]
        assert told == ([] if k < 3 else ["c0 waits for s0", "c1 waits for s1"])
    assert [held[0] for _, held in communication._retiring] == kept[2:]


def test_in_line_with_compute(cuda):
    communication = streams.Communication(GPUS[:2], beside=False)
    assert not communication.apart
    for _ in range(2):
        communication.open()
    assert cuda.taken() == ["opened 1", "opened 0"]
    compute = communication.compute()
    communication.begin(compute)
    assert [stream.name for stream in compute.streams] == ["c0", "c1"]
    with communication.current():
        assert cuda.names() == ["c0", "c1"]
        communication.mark(0)
    assert communication.arrived(GPUS[0]) == communication.arrived(GPUS[1]) == []
    communication.deliver()
    assert cuda.taken() == [] and cuda.made == []
    with communication.in_backward(compute, (None,)):
        assert cuda.names() == ["c0", "c1"]
    assert cuda.taken() == ["c1 waits for c0"]


def test_in_line_on_an_engine_thread_with_streams_of_its_own(cuda):
    """The backward of a forward on other streams than those that are current for the engine."""
    communication = streams.Communication(GPUS[:2], beside=False)
    own = cuda.current[GPUS[1]]
    cuda.current[GPUS[1]] = Stream("user", GPUS[1], cuda.log)
    compute = communication.compute()
    communication.begin(compute)
    cuda.current[GPUS[1]] = own
    with communication.in_backward(compute, (None,)):
        assert cuda.names() == ["c0", "user"]
        assert cuda.taken() == ["user waits for c1", "user waits for c0"]
    # The engine knows of no other stream there.
    assert cuda.names() == ["c0", "c1"] and cuda.taken() == ["c1 waits for user"]


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("devices", [(HOST, HOST), (GPUS[0], GPUS[0])], ids=str)
def test_on_one_device_nothing_waits(cuda, devices, beside):
    communication = streams.Communication(devices, beside)
    communication.open()
    assert communication.begin() is None and not communication.apart
    with communication.current(), communication.in_backward(None, ()):
        communication.mark(0)
    communication.deliver()
    assert cuda.log == [] and cuda.made == []


def test_a_stream_does_not_wait_for_itself(cuda):
    stream = cuda.current[GPUS[0]]
    streams.wait_for(stream, stream)
    assert cuda.log == [] and cuda.made == []


def test_a_thread_uses_one_event_for_each_device(cuda):
    for _ in range(5):
        streams.wait_for(cuda.current[GPUS[0]], cuda.current[GPUS[1]])
        streams.wait_for(cuda.current[GPUS[1]], cuda.current[GPUS[0]])
    assert cuda.log == ["c0 waits for c1", "c1 waits for c0"] * 5 and len(cuda.made) == 2


@pytest.mark.parametrize("left_on", [0, 1, 2])
@pytest.mark.parametrize("device", [0, 1, 2])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1,), (0,), ()])
def test_the_current_device_stays_what_it_is(cuda, device, left_on, order):
    own = [Stream(f"s{index}", GPUS[index], cuda.log) for index in order]
    cuda.device = device
    with streams.current(own):
        assert cuda.device == device
        assert [cuda.current[stream.device] for stream in own] == own
        cuda.device = left_on  # what runs there may change it
    assert cuda.names() == ["c0", "c1"] and cuda.device == device


def test_streams_are_put_back_after_an_interrupt(cuda, monkeypatch):
    """One that comes between two streams, where no `with` would call __exit__."""
    s0, s1 = Stream("s0", GPUS[0], cuda.log), Stream("s1", GPUS[1], cuda.log)
    set_stream = torch.cuda.set_stream

    def interrupted(stream):
        if stream is s1:
            raise KeyboardInterrupt
        set_stream(stream)

    monkeypatch.setattr(torch.cuda, "set_stream", interrupted)
    with pytest.raises(KeyboardInterrupt), streams.current([s0, s1]):
        raise AssertionError("not reached")
    assert cuda.names() == ["c0", "c1"] and cuda.device == 0
