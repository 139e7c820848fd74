"""Streams: which one is current where, and what waits for what, on GPUs. On host replicas nothing
here does anything.

Rules. A forward runs on the streams that are current for its caller, one per device (the compute
streams). Moves of the parameters run on communication streams, one per device, made current around
the node's application, so that their backward runs there too; where all replicas share one GPU, or
moves take too short a time to be worth it (overlap.py), they run on the compute streams, as all
other moves do. A node that spans devices reads
after its own stream *and* after the compute streams of the forward, and what it makes is ready on
its own stream when its backward returns.

Memory. A flat buffer belongs to the communication stream's pool in torch's allocator. Compute that
read it was enqueued on a compute stream; a forward takes its flat buffers first, then its
communication streams wait for all these (`Communication.begin`), then they write: a block that the
allocator hands out anew is never written early. An allocator that would give it to others, or to
the system, is told who reads it (`Communication.readers`).
Gradients belong to the compute streams' pools and are read by a communication stream: they are held
until the compute stream has been told to wait for that read (`Communication.in_backward`).
"""

from __future__ import annotations

import contextlib
import threading
from typing import (
    Any,
    ContextManager,
    Dict,
    List,
    Optional,
    Sequence,
    Tuple,
)

import torch

from . import _torch_cuda
from .allocators import has_to_be_told
from .deadlines import own_deadline
from .peers import open_peers

_NOTHING: ContextManager[Any] = contextlib.nullcontext()

# Buckets whose gradients are held before their compute streams wait for the reads.
_MAX_RETIRING = 3


def distinct(devices: Sequence[torch.device]) -> List[torch.device]:
    """The GPUs among the devices, each once, in order."""
    return [device for device in dict.fromkeys(devices) if device.type == "cuda"]


# Streams that were current, by device and handle.
_known: Dict[Tuple[torch.device, int], torch.cuda.Stream] = {}
_MAX_KNOWN = 1024


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """`torch.cuda.current_stream(device)`, which makes a new object each time: that costs more than
    a launch."""
    key = device, _torch_cuda.raw_stream(device.index)
    stream = _known.get(key)
    if stream is None:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        stream = _known[key] = torch.cuda.current_stream(device)
    return stream


def _is_external(stream: torch.cuda.Stream) -> bool:
    """Whether another library made it: torch numbers its own, and calls others by their handles."""
    return 0 != stream.cuda_stream == stream.stream_id


class current:
    """Makes each of the streams the current one of its device; the current device stays what it
    is. To be entered once."""

    __slots__ = ("_streams", "_before", "_device")

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        self._streams = streams

    def __enter__(self) -> None:
        self._device = torch.cuda.current_device()
        self._before = [current_stream(stream.device) for stream in self._streams]
        try:
            self._set(self._streams)
        except BaseException:  # an interrupt: __exit__ will not be called
            self._set(self._before)
            raise

    def __exit__(self, *error: Any) -> None:
        self._set(self._before)

    def _set(self, streams: Sequence[torch.cuda.Stream]) -> None:
        for stream in reversed(streams):
            torch.cuda.set_stream(stream)  # its device becomes current, too
        if not streams or streams[0].device.index != self._device:
            torch.cuda.set_device(self._device)


class _Lent(current):
    """In a backward: streams that are current instead of those that the engine's thread has on
    these devices, which wait for them in the end. The engine orders whoever takes what was made on
    another device than its node's after these, and knows of no other stream there."""

    __slots__ = ()

    def __exit__(self, kind: Any, *error: Any) -> None:
        super().__exit__(kind, *error)
        if kind is None:
            for before, stream in zip(self._before, self._streams):
                wait_for(before, stream)


# An event for each thread and device. A wait keeps the record that it saw, so the event is free for
# another once the wait is enqueued. Not in a threading.local: in a forked child Python drops those
# of all other threads, and a CUDA event that is destroyed there ends the process.
_events: Dict[Tuple[int, torch.device], torch.cuda.Event] = {}


def wait_for(then: torch.cuda.Stream, first: torch.cuda.Stream) -> None:
    """What follows on `then` runs after all that was enqueued on `first` so far:
    `then.wait_stream(first)` without a new event."""
    if then is first or then == first:  # torch compares streams in Python
        return
    key = threading.get_ident(), first.device
    # Out of reach: what a destructor or signal handler enqueues in between would record it again.
    event = _events.pop(key, None) or torch.cuda.Event()
    event.record(first)
    then.wait_event(event)
    _events[key] = event


class Snapshot:
    """The streams that are current on some devices now: a forward's compute streams, kept for its
    backward."""

    __slots__ = ("streams", "deadline")

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.deadline = own_deadline()
        self.streams = [current_stream(device) for device in distinct(devices)]

    def in_backward(self, home: torch.device) -> ContextManager[Any]:
        """Around the move of a node's backward. `home` is the node's device, on which its stream is
        current. On the other devices the forward's streams become current; they wait for the node's
        stream, and for what this engine thread has there."""
        if self.deadline is None:
            return self._ordered(home)
        node = [current_stream(home)] if home.type == "cuda" else []
        streams = node + [stream for stream in self.streams if stream.device != home]
        return self.deadline.around(self._ordered(home), streams, "a node of a backward")

    def _ordered(self, home: torch.device) -> ContextManager[Any]:
        others = [stream for stream in self.streams if stream.device != home]
        if not others:
            return _NOTHING
        node = current_stream(home) if home.type == "cuda" else None
        elsewhere = []
        for stream in others:
            here = current_stream(stream.device)
            if here is not stream and here != stream:
                wait_for(stream, here)
                elsewhere.append(stream)
            if node is not None:
                wait_for(stream, node)
        return _Lent(elsewhere) if elsewhere else _NOTHING


# Of each communication stream who read its pool's memory: of torch's 32 wrappers share some.
_users: Dict[Tuple[torch.device, int], Dict[int, torch.cuda.Stream]] = {}


class Communication:
    """What the moves of one wrapper's parameters run on. Beside compute: communication streams of
    its own, and what is still being read on them. Else, and on one GPU or the host: the streams of
    compute, and nothing has to be waited for or kept."""

    witness: Any = None  # looks at gradients before they are summed (witness.py)

    def __init__(self, devices: Sequence[torch.device], beside: bool = True) -> None:
        self.devices = distinct(devices)
        self.home = devices[0]
        self.apart = beside and len(self.devices) > 1
        self._is_open = False
        self._tells = False  # torch's allocator, who reads memory
        self._streams: List[torch.cuda.Stream] = []
        self._arrived: List[List[torch.cuda.Event]] = [[] for _ in self.devices]
        self._used: List[Dict[int, torch.cuda.Stream]] = []
        self._retiring: List[Tuple[Any, Any]] = []
        self._spare: Dict[torch.device, List[torch.cuda.Event]] = {}  # whose waits are enqueued
        self._lock = threading.Lock()  # guards _retiring and _spare

    def open(self) -> None:
        """At the first use: makes the streams."""
        if self._is_open:
            return
        open_peers(self.devices)
        if self.apart:
            self._streams = [torch.cuda.Stream(device, priority=-1) for device in self.devices]
            self._used = [_users.setdefault((s.device, s.cuda_stream), {}) for s in self._streams]
            with current(self._streams):
                self._tells = has_to_be_told(self.devices)
        self._is_open = True

    def compute(self) -> Optional[Snapshot]:
        """The forward's compute streams: asked before the communication streams are current, and
        before memory is taken on these."""
        if len(self.devices) < 2:
            return None
        compute = Snapshot(self.devices)
        for stream, used in zip(compute.streams, self._used):
            used[stream.cuda_stream] = stream
        return compute

    def readers(self, device: torch.device) -> List[torch.cuda.Stream]:
        """Those whom the allocator has to be told of, as readers of memory that is taken on the
        device's communication stream."""
        return list(self._used[self.devices.index(device)].values()) if self._tells else []

    def begin(self, compute: Optional[Snapshot] = None) -> None:
        """Before a forward's broadcasts, after their flat buffers were taken: the communication
        streams wait for all compute that was enqueued so far, which may still write the parameters
        or read what the buffers' memory held before. `compute`: the forward's compute streams, by
        default those that are current now."""
        compute = compute or self.compute()
        if compute is None or not self.apart:
            return
        for then, used in zip(self._streams, self._used):
            for each in list(used.values()):
                wait_for(then, each)
        self.release_reads()

    def current(self) -> ContextManager[Any]:
        """Around a broadcast: the communication streams are current."""
        return current(self._streams) if self.apart else _NOTHING

    def mark(self, bucket: int) -> None:
        """After the broadcast of bucket 0, 1, ...: its copies have arrived once this has passed."""
        if not self.apart:
            return
        for stream, arrived in zip(self._streams, self._arrived):
            if bucket == len(arrived):
                arrived.append(torch.cuda.Event())
            # An event that an earlier forward still waits for is recorded behind its bucket, too.
            arrived[bucket].record(stream)

    def arrived(self, device: torch.device) -> List[torch.cuda.Event]:
        """For each bucket, what a reader on `device` has to wait for (awaited.py)."""
        return self._arrived[self.devices.index(device)]

    def deliver(self) -> None:
        """Compute waits for all copies: those into the replicas, and those out of the parameters,
        which may be written afterwards. A stream that is not torch's may be gone when the next
        forward would wait for it: that is done now."""
        for stream, used in zip(self._streams, self._used):
            compute = current_stream(stream.device)
            wait_for(compute, stream)
            if _is_external(compute):
                wait_for(stream, compute)
                used.pop(compute.cuda_stream, None)

    def in_backward(
        self, snapshot: Optional[Snapshot], gradients: Any, spreads: bool = False
    ) -> ContextManager[Any]:
        """Around the moves in a broadcast's backward, or in a reduction's, which `spreads` over all
        devices. Beside compute, the node's stream is home's communication stream; the others become
        current. All wait for the forward's compute streams, which made the gradients, and for
        whatever the engine has ordered before this node; in the end the node's stream waits for the
        others."""
        if snapshot is None:
            return _NOTHING
        if not self.apart:
            return snapshot.in_backward(self.home)
        if snapshot.deadline is None:
            return _Beside(self, snapshot, gradients, spreads)
        node = current_stream(self.home)
        streams = [node, *(s for s in self._streams if s.device != self.home)]
        return snapshot.deadline.around(
            _Beside(self, snapshot, gradients, spreads), streams, "a bucket in a backward"
        )

    def _wait_in_backward(
        self, node: torch.cuda.Stream, snapshot: Snapshot
    ) -> List[torch.cuda.Stream]:
        """All streams of a node's backward, home's the node's own. They wait for what comes before
        it."""
        streams = [node if s.device == self.home else s for s in self._streams]
        for stream, compute, used in zip(streams, snapshot.streams, self._used):
            wait_for(stream, compute)
            if len(used) > 1:  # by other forwards, whose memory may have gone back
                for each in list(used.values()):
                    wait_for(stream, each)
            if stream is not node:
                here = current_stream(stream.device)
                if here is not compute and here != compute:
                    wait_for(stream, here)
                wait_for(stream, node)
        return streams

    def _event(self, device: torch.device) -> torch.cuda.Event:
        with self._lock:
            spare = self._spare.get(device)
            if spare:
                return spare.pop()
        return torch.cuda.Event()

    def _retire(
        self, snapshot: Snapshot, node: torch.cuda.Stream, streams: Any, gradients: Any
    ) -> None:
        """The node's stream waits for the others. Holds the gradients of a few buckets; then their
        compute streams wait for the reads, long over by then, and the memory may go back."""
        reads = []
        for stream, compute in zip(streams, snapshot.streams):
            event = self._event(stream.device)
            event.record(stream)
            if stream is not node:
                node.wait_event(event)
            reads.append((compute, event))
        held = gradients
        if torch.is_grad_enabled():  # else they have no graph that they could keep
            held = [gradient.detach() for gradient in gradients if gradient is not None]
        with self._lock:
            self._retiring.append((reads, held))
        self.release_reads(_MAX_RETIRING)

    def release_reads(self, keep: int = 0) -> None:
        """Gradients that were read go back, but those of the last `keep` buckets. None is let go of
        before its waits are enqueued: an interrupt may come between any two lines."""
        if len(self._retiring) <= keep:
            return
        with self._lock:
            over = self._retiring[: max(0, len(self._retiring) - keep)]
        for reads, _ in over:
            for compute, event in reads:
                compute.wait_event(event)
        ours = set(map(id, over))
        with self._lock:  # of what others have let go of meanwhile the events are no more ours
            gone = [each for each in self._retiring if id(each) in ours]
            self._retiring = [each for each in self._retiring if id(each) not in ours]
            for reads, _ in gone:
                for compute, event in reads:
                    self._spare.setdefault(compute.device, []).append(event)


class _Beside:
    """Around the moves of a node's backward beside compute (`Communication.in_backward`). No
    generator: its context would cost each bucket as much as a wait does."""

    __slots__ = (
        "_communication", "_snapshot", "_gradients", "_spreads", "_node", "_streams", "_current",
    )  # fmt: skip

    def __init__(
        self, communication: Communication, snapshot: Snapshot, gradients: Any, spreads: bool
    ) -> None:
        self._communication = communication
        self._snapshot, self._gradients, self._spreads = snapshot, gradients, spreads

    def __enter__(self) -> None:
        self._node = current_stream(self._communication.home)
        self._streams = self._communication._wait_in_backward(self._node, self._snapshot)
        self._current = (_Lent if self._spreads else current)(self._streams)
        self._current.__enter__()

    def __exit__(self, kind: Any, *error: Any) -> None:
        self._current.__exit__(kind, *error)
        if kind is None:
            self._communication._retire(
                self._snapshot, self._node, self._streams, self._gradients
            )


_held: List[Tuple[List[torch.cuda.Event], torch.Tensor]] = []
_held_lock = threading.Lock()


def hold_pinned(tensor: torch.Tensor, devices: Sequence[torch.device]) -> None:
    """Keeps a pinned host tensor until the copies from it, just enqueued on the current streams,
    have run: torch's allocator of pinned memory knows nothing of them. What the caller's own CUDA
    graph reads is the caller's to keep: an event of a capture can never be asked."""
    global _held
    if tensor.device.type != "cpu":
        return
    targets = distinct(devices)
    if not targets or not tensor.is_pinned() or _torch_cuda.is_capturing():
        return
    events = []
    for device in targets:
        event = torch.cuda.Event()
        event.record(current_stream(device))
        events.append(event)
    with _held_lock:
        _held = [(e, t) for e, t in _held if not all(event.query() for event in e)]
        _held.append((events, tensor))
