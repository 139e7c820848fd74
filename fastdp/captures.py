"""Recording what a function launches on a GPU, so that it can be launched again in one call.

A recording is a CUDA graph. Captures run one at a time, on streams of their own (one per device:
`torch.cuda.graph` has one for all, which fails on a second device), in "thread_local" error mode,
so that another thread's pinned memory does not break them. The garbage collector rests meanwhile: a
CUDA graph that it drops there breaks the capture.

A capture that is broken in the middle leaves torch's random generator believing that it is still
being captured, and torch has no way to tell it otherwise. So everything is captured twice: first on
a copy of the generator's state, which is then thrown away, and only what went well there is
captured on the real one. Should that break all the same, the generator gets a fresh state with the
same numbers, and recordings that know the former one are out of date.

Events that cross the edge of a recording (`Crossing`) are waited for, and recorded, on a branch
beside what the recording launches. Between two of its kernels such a node holds up the GPU for 10
to 30 us; beside them a record costs nothing, and a wait some 10 us (H200, a timeline of GPT-2).
"""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import torch

from . import _torch_cuda
from .own_streams import own_stream
from .random_states import guarded_states
from .streams import distinct

_lock = threading.RLock()
_branches: Dict[torch.device, Branch] = {}  # of the captures that are under way
_renewals = 0


def renewals() -> int:
    """How often a generator got a fresh state: a recording made before the last time draws numbers
    from one that is gone."""
    return _renewals


class Branch:
    """Of a capture on one device: a side stream, part of the capture from its first use on."""

    def __init__(self, device: torch.device) -> None:
        self._stream = own_stream("beside a capture", device)
        self._is_used = False
        self._waits: Set[Tuple[int, int]] = set()  # events and streams that waited for them

    def wait(self, event: Any, stream: Any) -> None:
        wait = id(event), stream.cuda_stream
        if wait in self._waits:
            return
        self._waits.add(wait)
        if not self._is_used:
            self._stream.wait_stream(stream)
            self._is_used = True
        self._stream.wait_event(event)
        stream.wait_stream(self._stream)

    def record(self, event: Any, stream: Any) -> None:
        self._is_used = True
        self._stream.wait_stream(stream)
        event.record(self._stream)

    def join(self, stream: Any) -> None:
        """Before the capture ends, on the stream where it began."""
        if self._is_used:
            stream.wait_stream(self._stream)


class Crossing:
    """An event that can be recorded and waited for across the edge of a recording; for
    `stream.wait_event`, as torch's own."""

    def __init__(self) -> None:
        self._event = _torch_cuda.external_event()

    def wait(self, stream: Any) -> None:
        branch = _branch_of(stream)
        if branch is None:
            stream.wait_event(self._event)
        else:
            branch.wait(self._event, stream)

    def record(self, stream: Any) -> None:
        branch = _branch_of(stream)
        if branch is None:
            self._event.record(stream)
        else:
            branch.record(self._event, stream)


def _branch_of(stream: Any) -> Optional[Branch]:
    """Of the capture that the stream, current on its device, is part of."""
    branch = _branches.get(stream.device) if _branches else None
    if branch is None:
        return None
    with torch.cuda.device(stream.device):
        return branch if torch.cuda.is_current_stream_capturing() else None


class CudaRecorder:
    """Records on the GPUs of `devices`."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = distinct(devices)
        self._rehearsing = False

    def events(self, count: int) -> List[Any]:
        """Events that can be recorded and waited for across the edge of a recording."""
        return [Crossing() for _ in range(count)]

    def aside(self, act: Callable[[], None]) -> None:
        """act(), which warms up and records: the recording streams are current on all devices,
        behind whatever was enqueued; afterwards all that ran there has run. Buffers, random numbers
        and autocast's cache are as before; one thread at a time. No context manager made of a
        generator: an interrupt behind its first half would leave the lock to whoever drops the
        traceback, and an interactive session keeps it."""
        with _lock, _no_collection(), torch.cuda.device(self.devices[0]):
            streams = [_stream(device) for device in self.devices]
            before = [torch.cuda.current_stream(device) for device in self.devices]
            generators = [torch.cuda.default_generators[d.index] for d in self.devices]
            states = [generator.get_state() for generator in generators]
            cached = torch.is_autocast_cache_enabled()
            try:
                self._synchronize()
                torch.set_autocast_cache_enabled(False)
                _set_streams(streams)
                act()
            finally:
                _set_streams(before)
                torch.set_autocast_cache_enabled(cached)
                self._synchronize()
                for generator, state in zip(generators, states):
                    generator.set_state(state)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Around captures that are thrown away."""
        generators = [torch.cuda.default_generators[d.index] for d in self.devices]
        states = [generator.graphsafe_get_state() for generator in generators]
        try:
            for generator, state in zip(generators, states):
                generator.graphsafe_set_state(state.clone_state())
            self._rehearsing = True
            yield
        finally:
            self._rehearsing = False
            for generator, state in zip(generators, states):
                generator.graphsafe_set_state(state)
            self._synchronize()
            torch.cuda.empty_cache()

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def pool_bytes(self, pools: Sequence[Any]) -> Dict[torch.device, Tuple[int, int]]:
        """What the pools hold now: activations, outputs, and whatever the libraries took. By
        device: all of it, and what of it counts as allocated. Nothing where the allocator is not
        torch's usual one, which alone tells of pools."""
        if torch.cuda.get_allocator_backend() != "native":
            return {}
        wanted = {tuple(pool) for pool in pools}
        held: Dict[torch.device, Tuple[int, int]] = {}
        for segment in torch.cuda.memory_snapshot():
            if tuple(segment.get("segment_pool_id", ())) in wanted:
                device = torch.device("cuda", segment["device"])
                whole, allocated = held.get(device, (0, 0))
                whole += segment["total_size"]
                held[device] = whole, allocated + segment["allocated_size"]
        return held

    def record(self, device: torch.device, pool: Any, act: Callable[[], None]) -> Any:
        """What `act` launches on `device`, to be launched by `.replay()` on the stream that is
        current there then. Nothing runs now. Raises NotRecordable where random numbers of a replay
        would not be those of an eager step."""
        graph, branch = torch.cuda.CUDAGraph(), Branch(device)
        has_begun = False
        with torch.cuda.device(device):
            try:
                graph.capture_begin(pool, capture_error_mode="thread_local")
                has_begun = True
                _branches[device] = branch
                with guarded_states():
                    act()
                branch.join(_stream(device))
                torch.cuda.set_device(device)
                graph.capture_end()
            except BaseException:  # an interrupt may come between the first two lines
                if has_begun or torch.cuda.is_current_stream_capturing():
                    self._abandon(graph, device, pool, branch)
                raise
            finally:
                _branches.pop(device, None)
        return graph

    def _abandon(self, graph: Any, device: torch.device, pool: Any, branch: Branch) -> None:
        """Ends a capture that will not be used. Where it was broken, ending it fails half-way: the
        allocator has to be told apart, and the generator of a capture in earnest renewed."""
        torch.cuda.set_stream(_stream(device))  # of this device, which becomes current too
        with contextlib.suppress(RuntimeError):
            branch.join(_stream(device))
        try:
            graph.capture_end()
            return
        except RuntimeError:
            pass
        _torch_cuda.end_pool(device, pool)
        if not self._rehearsing:
            _renew_generators(self.devices)

    def mark(self) -> Any:
        """A point in time of the first device's stream: an event with `query`, `elapsed_time`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.devices[0]))
        return event

    def _synchronize(self) -> None:
        for device in self.devices:
            torch.cuda.synchronize(device)


def _stream(device: torch.device) -> Any:
    return own_stream("captures", device)


def _set_streams(streams: Sequence[Any]) -> None:
    """Each becomes current on its device; the current device stays."""
    device = torch.cuda.current_device()
    for stream in streams:
        torch.cuda.set_stream(stream)
    torch.cuda.set_device(device)


def _renew_generators(devices: Sequence[torch.device]) -> None:
    global _renewals
    _renewals += 1
    for device in devices:
        generator = torch.cuda.default_generators[device.index]
        generator.graphsafe_set_state(generator.clone_state())


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def under_way(devices: Sequence[torch.device] = ()) -> bool:
    """Whether a current stream of the caller's is being captured, by whomever: that of the current
    device, or of one of these GPUs."""
    if not torch.cuda.is_initialized():
        return False
    return torch.cuda.is_current_stream_capturing() or any(map(_is_captured, devices))


def _is_captured(device: torch.device) -> bool:
    if _torch_cuda.raw_stream(device.index) == 0:  # a default stream cannot be
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def reason_against(devices: Sequence[torch.device]) -> str:
    """Why nothing can be recorded on these devices with this torch, or ""."""
    kinds: Tuple[str, ...] = tuple({device.type for device in devices})
    if kinds != ("cuda",):
        return "its replicas run on the host, where there is nothing to record"
    if not _torch_cuda.records_events_outside():
        return (
            f"torch {torch.__version__} has no external events (torch.cuda.Event(external=True) "
            "came with 2.8)"
        )
    return ""
