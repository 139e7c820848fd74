"""`prefetch`: batches that lie on the replicas' devices before the step asks for them.

A thread of its own takes batches from the loader, up to `depth` ahead, and stages each: every
replica's slice is packed into pinned memory of torch's and copied on a copy stream, one per GPU.

Order. Copies wait for nothing but the current streams of this thread, on which the loader may have
made a batch; of a batch on GPUs these wait for the copies in turn, since the loader may write the
next one there. Whoever reads a slice waits for its batch's event on the device
(`Scattered.slices`).
Memory. Slices belong to the copy streams' pools in torch's allocator and are recorded for each
stream that reads them; pinned memory is torch's, which takes it back behind the copies from it;
what the loader gave is held until the copies from it have run. A batch is staged only once the GPUs
have finished the step before the one that is `depth` ahead of it: a host that runs ahead of its
GPUs thus has to wait, and no more than depth + 1 batches are on the GPUs besides the one in use.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from queue import SimpleQueue
from typing import Any, Iterable, Iterator, List, NamedTuple, Optional

import torch

from .attributes import is_wrapper
from .devices import parse_devices
from .options import whole_number
from .staging import Staged, Stager, names_of
from .streams import current, current_stream, distinct
from .thread_state import ThreadState
from .wrapper import DataParallel

__all__ = ["Prefetch", "prefetch"]

_log = logging.getLogger("fastdp")

# How long the end of an iteration waits for a loader that is at work on a batch nobody will see.
_JOIN_S = 5.0


def prefetch(
    loader: Iterable[Any], dp: DataParallel, depth: int = 2, scatter: Any = None
) -> Prefetch:
    """The batches of a loader, staged ahead: while a step computes, the next batches are loaded and
    each replica's slice is copied straight to its GPU, so that `dp(batch)` finds it there.

    Args:
        loader: any iterable of batches: a DataLoader, a list, a generator.
        dp: the wrapper that is to take them: its devices, `dim`, `chunk_sizes` and output device
            count, as they are when an iteration starts.
        depth: how many batches may be ready or in the making, at least 1.
        scatter: which items of a batch are cut: a key of a dictionary, a position in a tuple or
            list, a field of a named tuple, or a list of those. The others, such as targets for a
            loss outside, come whole on `dp.output_device`. Default: all tensors are cut.

    Returns:
        An iterable, as often as the loader is, with its `len`. Batches come in order and keep their
        structure (nested tuples, named tuples, lists, dictionaries; a UserDict outermost). A tensor
        that is cut comes as a `Scattered`. As they are come: tensors that require grad, 0-dim,
        sparse and subclassed ones, a PackedSequence, what is `Replicated`, lists if `dp` splits
        them, and all that is no tensor; `dp` then says what it says to these.

    Raises:
        TypeError: something else than a wrapper or an iterable, a depth that is no whole number.
        ValueError: a depth below 1; at a batch, a name in `scatter` that it has not.
        Whatever the loader raises, at the place of the batch that it would have been.

    `dp.call` takes what is yielded, too. A subclass of the wrapper with a `scatter` of its own gets
    the `Scattered` there, and has to hand each replica its slice.

    The loader runs on a thread of its own, with the grad mode, autocast and streams of the thread
    that iterates. Random numbers that it draws from torch's global generator are drawn at the same
    time as the steps': give it a generator of its own, or workers, to repeat a run. The thread ends
    with the iteration, also with one that is left early or by an exception; batches that were
    staged by then are lost. A loader that is not back after 5 s is told of in the log, and its
    thread ends once it is. With replicas on the host batches are cut ahead, and nothing is pinned.

    >>> dp = DataParallel(torch.nn.Linear(2, 1), ["cpu", "cpu"])
    >>> [len(dp(batch)) for batch in prefetch([torch.ones(4, 2), torch.ones(3, 2)], dp)]
    [4, 3]
    """
    return Prefetch(loader, dp, depth, scatter)


class Prefetch:
    """What `prefetch` returns. Each iteration has a thread of its own."""

    def __init__(self, loader: Iterable[Any], dp: DataParallel, depth: int, scatter: Any) -> None:
        if not is_wrapper(dp):
            raise TypeError(
                f"dp is a {type(dp).__name__}: it must be a fastdp.DataParallel, whose "
                "replicas the batches are for"
            )
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise TypeError(f"loader is a {type(loader).__name__}: it must be iterable")
        try:
            self.depth = whole_number(depth)
        except TypeError:
            raise TypeError(f"depth is {depth!r}: it must be a whole number of batches") from None
        if self.depth < 1:
            raise ValueError(f"depth is {self.depth}: it must be at least 1")
        self.loader = loader
        self.dp = dp
        self.scatter = names_of(scatter)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        devices = parse_devices(self.dp.device_ids) if self.dp.device_ids else ()
        feed = _Feed(distinct(devices), self.depth)
        return _batches(feed, iter(self.loader), Stager(self.dp, devices, self.scatter))


def _batches(feed: _Feed, loader: Iterator[Any], stager: Stager) -> Iterator[Any]:
    """A generator: whoever leaves its loop, in whichever way, ends it and so the thread."""
    try:
        feed.start(loader, stager)
        while feed.wait():
            # Not by a name of this frame, which would hold the batch while the next is waited for.
            yield feed.take()
    finally:
        feed.close()


class _End(NamedTuple):
    """Behind the last batch; with what the loader or the staging raised, if so it ended."""

    error: Optional[BaseException]


class _Feed:
    """The border between the thread that iterates and the one that stages."""

    _work: Optional[_Work] = None  # also of one whose making was interrupted

    def __init__(self, gpus: List[torch.device], depth: int) -> None:
        self._gpus = gpus
        self._permits: SimpleQueue[List[torch.cuda.Event]] = SimpleQueue()
        self._ready: SimpleQueue[Any] = SimpleQueue()
        self._next: Optional[Staged] = None
        self._thread: Optional[threading.Thread] = None
        self._process = os.getpid()
        for _ in range(depth):
            self._permits.put([])

    def start(self, loader: Iterator[Any], stager: Stager) -> None:
        streams = [current_stream(device) for device in self._gpus]
        self._work = _Work(loader, stager, streams, self._permits, self._ready)
        self._thread = threading.Thread(target=self._work.run, name="fastdp-prefetch", daemon=True)
        _feeds.add(self)
        self._thread.start()

    def wait(self) -> bool:
        """Waits for the next batch: False behind the last."""
        found = self._ready.get()
        if isinstance(found, _End):
            error = found.error
            if error is None:
                return False
            try:
                raise error
            finally:
                del error, found  # the traceback holds this frame
        self._next = found
        return True

    def take(self) -> Any:
        """The batch that was waited for; the GPUs have what was done with the one before."""
        staged, self._next = self._next, None
        assert staged is not None  # wait() was True
        events = []
        for device in self._gpus:
            event = torch.cuda.Event(blocking=True)
            event.record(current_stream(device))
            events.append(event)
        self._permits.put(events)
        return staged.received()

    def close(self) -> None:
        """Ends the thread. A second end does nothing."""
        self._dismiss()
        thread, self._thread = self._thread, None
        if thread is None or not thread.is_alive() or self._process != os.getpid():
            return  # not yet started, if ever, or of the process that this one was forked from
        thread.join(_JOIN_S)
        if thread.is_alive():
            _log.warning(
                "prefetch: the loader has not returned a batch for %g s; its thread ends once it "
                "does",
                _JOIN_S,
            )

    def _dismiss(self) -> None:
        """The thread ends, also one that an interrupt left while it was started."""
        work = self._work
        if work is not None and self._process == os.getpid():
            work.stopped = True
            self._permits.put([])
            self._work = None

    __del__ = _dismiss  # where an interrupt forestalled `close`


class _Work:
    """What the thread does. It knows no _Feed, so that one that nobody iterates any more ends."""

    def __init__(
        self,
        loader: Iterator[Any],
        stager: Stager,
        streams: List[torch.cuda.Stream],
        permits: SimpleQueue[List[torch.cuda.Event]],
        ready: SimpleQueue[Any],
    ) -> None:
        self.stopped = False
        self._loader = loader
        self._stager = stager
        self._streams = streams
        self._state = ThreadState()
        self._permits = permits
        self._ready = ready

    def run(self) -> None:
        try:
            self._state.run(self._run_here)
        except BaseException as error:  # whatever it is, it belongs to the thread that iterates
            self._ready.put(_End(error))
        else:
            self._ready.put(_End(None))

    def _run_here(self) -> None:
        if not self._streams:
            self._fill()
            return
        torch.cuda.set_device(self._streams[0].device)
        with current(self._streams):
            self._fill()

    def _fill(self) -> None:
        try:
            while True:
                permit = self._permits.get()
                if self.stopped:
                    return
                try:
                    batch = next(self._loader)
                except StopIteration:
                    return
                for event in permit:
                    event.synchronize()
                if self.stopped:
                    return
                self._ready.put(self._stager.stage(batch))
                del batch
        finally:
            self._stager.finish()


_feeds: weakref.WeakSet[_Feed] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Of iterations that the program's end leaves open: a thread that outlives the interpreter's
    end would be stopped in the middle of whatever it does."""
    for feed in list(_feeds):
        feed.close()
