"""Which engine runs a forward: eager, or the recorded step of its signature.

A signature (signatures.py) is met, watched for some eager steps (watch.py), then recorded
(recordings.py). Under "auto" the recorded step is then timed against the eager one on real steps,
and the faster stays; under "graph" it is used at once, and what cannot be recorded raises. A
signature that went back to eager stays there, unless it lost a trial by little (engine_entries.py);
the reason is logged once and stands in the report.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from contextlib import nullcontext
from typing import (
    Any, Callable, ContextManager, Dict, Hashable, Iterable, List, Optional, Sequence, Tuple,
)  # fmt: skip

import torch

from . import _torch_autograd, captures, signatures
from .alone import Alone
from .engine_choice import NOTHING
from .engine_entries import Entry, Key, stays_busy
from .placement import tensors_of
from .plans import Source
from .recordings import Recording
from .signals import is_from_handler
from .signatures import EngineError, NotRecordable
from .trials import Trial
from .watch import Watch, global_state, snapshot_of

_log = logging.getLogger("fastdp")

# Eager steps before a signature is recorded. The first is not watched: it may never come back.
_WATCHED = {"auto": 3, "graph": 2}
# Signatures that are remembered, and recordings kept, the least recently used going first.
_MAX_SIGNATURES = 64
MAX_RECORDINGS = 4
# How often a module may change under its recording before that signature stays eager.
_MAX_RESTARTS = 3


class Engine:
    """The engine of one wrapper on one list of devices. Any thread: a forward that meets another
    thread's runs eagerly."""

    def __init__(self, kind: str, replicator: Any, recorder: Any = None) -> None:
        self.kind = kind
        self._replicator = replicator
        self._against = "" if recorder else captures.reason_against(replicator.devices)
        self._recorder = recorder
        self._entries: "OrderedDict[Key, Entry]" = OrderedDict()
        # Recorded signatures, by what can be known of them before arguments are cut.
        self._whole: Dict[Hashable, Entry] = {}
        self._last: Optional[Entry] = None
        self._made = 0
        self._alone = Alone()
        self._watching = threading.local()
        self._logged: List[str] = []
        self._unsaid: List[str] = []

    def watching(self, replicas: Sequence[torch.nn.Module]) -> ContextManager[Any]:
        """Around the replicas' forward: watches it if this step is one to watch."""
        watch = getattr(self._watching, "begin", None)
        return nullcontext() if watch is None else watch(replicas)

    def forward(
        self,
        root: torch.nn.Module,
        rows: Sequence[Any],
        named: Sequence[Any],
        dim: int,
        obstacle: str,
        eager: Callable[[], Any],
        whole: Optional[Tuple[Hashable, List[torch.Tensor]]] = None,
    ) -> Any:
        """The outputs of this step, by whichever engine. `obstacle` is what in the wrapper itself
        stands against recording, or ""; `whole` is from `whole_of`, if a step like this may be
        replayed by `shortcut`."""
        act: Any = None
        try:
            act = self._alone.run(
                lambda: self._choose(root, rows, named, dim, obstacle, eager, whole), lambda: eager
            )
            self._say()
            return act()
        finally:
            act = None  # it may have outputs, whose graph the traceback of an interrupt would keep
            self._say()

    def shortcut(self, whole: Tuple[Hashable, List[torch.Tensor]], dim: int) -> Any:
        """The outputs of a recorded step for arguments that are not cut yet (`whole_of`), or
        NOTHING: then `forward` decides, with cut ones."""
        return self._alone.run(lambda: self._replay_whole(whole, dim), lambda: NOTHING)

    def whole_of(
        self, root: torch.nn.Module, inputs: Any, kwargs: Any, dim: int
    ) -> Optional[Tuple[Hashable, List[torch.Tensor]]]:
        """What `shortcut` and `forward` know a recorded step by before its arguments are cut; None
        where nothing can be known."""
        if self._against or captures.under_way() or _torch_autograd.forward_mode_active():
            return None
        try:
            arguments, tensors = signatures.of_whole(inputs, kwargs)
        except NotRecordable:
            return None
        if any(tensor.requires_grad for tensor in tensors) and torch.is_grad_enabled():
            return None
        return (arguments, root.training, global_state(), dim), tensors

    def report(self) -> List[Dict[str, Any]]:
        """Every signature, in the order in which they were met: engine, steps by each, reason."""
        return self._alone.between(
            lambda: [e.description() for e in sorted(self._entries.values(), key=Entry.order)]
        )

    def recordings(self) -> List[Recording]:
        """Those that there are."""
        entries = self._alone.between(lambda: list(self._entries.values()))
        found = [entry.recording for entry in entries]
        return [recording for recording in found if recording is not None]

    def release(self, kept: Sequence[Recording], note: str) -> None:
        """Drops all recordings but these. Their signatures are watched anew if they come back."""

        def drop() -> None:
            for entry in self._entries.values():
                if entry.recording is not None and entry.recording not in kept:
                    entry.forget()
                    entry.note = note
            self._drop_recordings()

        self._alone.between(drop)

    def reasons(self) -> List[str]:
        """Why forwards were not recorded, each once."""
        return list(self._logged)

    # Choosing

    def _choose(
        self,
        root: Any,
        rows: Any,
        named: Any,
        dim: int,
        obstacle: str,
        eager: Callable[[], Any],
        whole: Any,
    ) -> Callable[[], Any]:
        against = self._against or obstacle
        if against:
            self._refuse(against)
            return eager
        if captures.under_way():
            return eager  # somebody else records this forward
        try:
            key, pieces, source = self._signature(root, rows, named, dim)
        except NotRecordable as reason:
            self._refuse(str(reason))
            return eager
        entry = self._entry(key)
        self._meet(entry)
        if entry.is_tried_again():
            self._logged = [reason for reason in self._logged if reason != entry.reason]
            entry.reason = ""
        if entry.reason:
            if self.kind == "graph":
                raise EngineError(_sentence(entry.reason))
            return lambda: self._run_eager(entry, eager)
        if entry.recording is not None:
            self._check_attributes(entry)
        if entry.recording is None and entry.watched >= _WATCHED[self.kind]:
            self._record(entry, source, rows, named, pieces)
        if entry.reason:
            return lambda: self._run_eager(entry, eager)
        if entry.recording is None:
            return lambda: self._run_watched(entry, root, eager)
        if self._eager_for_once(entry):
            return lambda: self._run_eager(entry, eager)
        if whole is not None and entry.trial is None and entry.recording.covers(whole[1]):
            if len(self._whole) >= _MAX_SIGNATURES:
                self._whole.clear()
            self._whole[whole[0]] = entry
        return self._replay(entry, pieces, source)

    def _signature(
        self, root: Any, rows: Any, named: Any, dim: int
    ) -> Tuple[Key, Any, Source]:
        devices = self._replicator.devices[: len(rows)]
        if _torch_autograd.forward_mode_active():
            raise NotRecordable("forward-mode differentiation is active")
        arguments, pieces = signatures.of_arguments(rows, named, devices)
        source = self._replicator.source(len(rows), _wants_gradients(), dim)
        key = Key(arguments, _place_of(source), root.training, global_state(), dim)
        return key, pieces, source

    def _entry(self, key: Key) -> Entry:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry(self._made, key)
            self._made += 1
            while len(self._entries) > _MAX_SIGNATURES:
                self._entries.popitem(last=False)[1].forget()
        return entry

    def _meet(self, entry: Entry) -> None:
        """Notes that this step is of that signature."""
        last = self._last
        if last is not entry:
            if last is not None and last.trial is not None:
                last.trial.interrupt()
            if last is not None and last.recording is not None:
                if last.key.place != entry.key.place:
                    last.recording.let_go()
            self._last = entry
            self._entries.move_to_end(entry.key)

    def _check_attributes(self, entry: Entry) -> None:
        if entry.recording.outdated():
            entry.forget()
            entry.note = "a broken capture changed the random generator since it was recorded"
            return
        changed = entry.snapshot.differs()
        if changed is None:
            return
        entry.forget()
        entry.restarts += 1
        entry.note = f"{changed} changed since it was recorded"
        if entry.restarts > _MAX_RESTARTS:
            self._give_up(entry, f"{changed} changes between forwards")

    def _eager_for_once(self, entry: Entry) -> bool:
        """Whether this step alone has to be eager, or is, to be timed."""
        insists = self.kind == "graph"
        if stays_busy(entry.recording) if insists else entry.recording.busy():
            entry.note = "an earlier forward's backward was still to come"
            if insists:
                raise EngineError(
                    "a recorded forward was called again while the backward of the one before was "
                    "still to come (its output is kept, perhaps by the traceback of an error): "
                    'call backward first, use engine="auto", or torch.no_grad() where no gradient '
                    "is wanted"
                )
            if entry.trial is not None:
                entry.trial.interrupt()
            return True
        if entry.trial is None:
            return False
        recorded = entry.trial.recorded_next()
        entry.times = entry.trial.times()
        if entry.times is None:
            return not recorded
        entry.trial = None
        graph_ms, eager_ms = entry.times
        if eager_ms < graph_ms:
            self._give_up(entry, entry.lose(graph_ms, eager_ms))
            return True
        return False

    # Running

    def _run_eager(self, entry: Entry, eager: Callable[[], Any]) -> Any:
        entry.steps["eager"] += 1
        return eager()

    def _replay(self, entry: Entry, pieces: Any, source: Source) -> Callable[[], Any]:
        entry.steps["graph"] += 1
        outputs = entry.recording.run(pieces, source.tensors)
        return lambda: outputs

    def _replay_whole(self, whole: Tuple[Hashable, List[torch.Tensor]], dim: int) -> Any:
        key, tensors = whole
        entry = self._whole.get(key)
        if entry is None or entry.recording is None or entry.trial is not None:
            return NOTHING
        if entry.recording.busy() or entry.recording.outdated():
            return NOTHING
        if entry.snapshot.differs() is not None:
            return NOTHING
        source = self._replicator.source(entry.recording.ranks, _wants_gradients(), dim)
        if _place_of(source) != entry.key.place:
            return NOTHING
        self._meet(entry)
        entry.steps["graph"] += 1
        return entry.recording.run_whole(tensors, source.tensors)

    def _run_watched(self, entry: Entry, root: Any, eager: Callable[[], Any]) -> Any:
        entry.steps["eager"] += 1
        if entry.steps["eager"] == 1:
            entry.watched += 1
            return eager()
        if entry.snapshot is None:
            entry.snapshot = snapshot_of((root,))
        changed = entry.snapshot.differs()
        if changed is not None:
            entry.forget()
            entry.restarts += 1
            if entry.restarts > _MAX_RESTARTS:
                self._give_up(entry, f"{changed} changes between forwards")
            return eager()
        watches: List[Watch] = []

        def begin(replicas: Sequence[torch.nn.Module]) -> Watch:
            watches.append(Watch(replicas))
            return watches[-1]

        tensors = list(tensors_of(root))
        before = _identity_of(tensors)
        compiled = self._replicator.compiled
        compilations = compiled.count if compiled is not None else 0
        self._watching.begin = begin
        try:
            outputs = eager()
        finally:
            self._watching.begin = None
        entry.asked.watch(outputs)
        if compiled is not None and compiled.count > compilations:
            return outputs  # the compiler's doings are not the model's: another step tells
        entry.watched += 1
        if before != _identity_of(tensors_of(root)):
            # A module that is called directly keeps that, and so do the first replica's buffers.
            self._give_up(entry, "it replaces parameters or buffers of its modules")
            return outputs
        found = [watch for watch in watches if watch.reason]
        if found:
            entry.restarts += 1
            if found[0].passing and entry.restarts <= _MAX_RESTARTS:
                entry.watched = 0  # a model may say something once
            else:
                self._give_up(entry, found[0].reason)
        return outputs

    def _record(self, entry: Entry, source: Source, rows: Any, named: Any, pieces: Any) -> None:
        recorder = self._recorder or captures.CudaRecorder(source.devices)
        if entry.snapshot.differs() is not None:
            entry.forget()
            return
        try:
            asked = entry.asked.places()
            recording = Recording(source, rows, named, pieces, recorder, asked)
        except NotRecordable as reason:
            self._give_up(entry, str(reason))
        except Exception as error:
            if is_from_handler(error):
                raise
            self._give_up(entry, f"{type(error).__name__}: {error}")
        else:
            if self.kind == "auto":
                entry.trial = Trial(recorder)
            entry.recording = recording  # last: an interrupt before leaves none, not half of one
            self._drop_recordings()

    def _drop_recordings(self) -> None:
        self._whole = {key: e for key, e in self._whole.items() if e.recording is not None}
        kept = 0
        for entry in reversed(self._entries.values()):
            if entry.recording is not None:
                kept += 1
                if kept > MAX_RECORDINGS:
                    entry.forget()
                    entry.note = f"more than {MAX_RECORDINGS} signatures were recorded since"

    def _give_up(self, entry: Entry, reason: str) -> None:
        entry.forget()
        entry.reason = reason
        self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        if self.kind == "graph":
            raise EngineError(_sentence(reason))
        if reason not in self._logged:
            self._logged.append(reason)
            self._unsaid.append(reason)

    def _say(self) -> None:
        """Out of the lock: a handler may ask for the report."""
        while self._unsaid:
            _log.info("engine: %s", _sentence(self._unsaid.pop(0)))


def _wants_gradients() -> bool:
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def _place_of(source: Source) -> Hashable:
    return signatures.of_tensors(source.tensors), source.plan.description


def _identity_of(tensors: Iterable[torch.Tensor]) -> List[Tuple[int, int]]:
    return [(id(tensor), tensor.data_ptr()) for tensor in tensors]


def _sentence(reason: str) -> str:
    return f"the forward is not recorded: {reason}"
