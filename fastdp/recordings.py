"""A recorded step: every replica's forward and backward as graphs over fixed memory, and what is
done around them at every step.

Fixed memory ("static"): each replica's arguments; the parameters and buffers of every replica but
the first, which reads the module's own in place; each replica's outputs and their gradients; each
replica's parameter gradients, where these are small packed by bucket. What leaves a step (outputs,
gradients) is always new memory.

A step: arguments are copied in; buckets are broadcast on the communication streams, and each
replica's forward graph waits, inside, for the event of a bucket where it is first read; outputs are
joined. Backward: gradients are cut into the static ones; each backward graph packs a bucket of
small gradients as soon as they are complete, and records an event; the communication streams wait
for these and sum the bucket into new memory.
"""

from __future__ import annotations

import functools
from typing import Any, Dict, FrozenSet, List, Optional, Sequence, Tuple

import torch

from . import _C, captures, trees
from .arrays import TORCH
from .awaited import waits
from .backwards import Backward, Sums, ways
from .buckets import resolved
from .functions import check_fit
from .graph_step import Call, apply_step
from .lending import Lender
from .outputs import map_output, without_graph
from .phases import bucket_phase, phase
from .plans import Source
from .readiness import as_compiled
from .replica_sets import ReplicaSet
from .signatures import NotRecordable
from .streams import Snapshot, current_stream, hold_pinned, wait_for
from .tapes import Column, Tape, at_once, noting_reads
from .thread_state import end_casts
from .versions import Versions, storages_of

Tensors = Tuple[torch.Tensor, ...]


class Recording:
    """Made by `record`; `run` is a step. One forward at a time: `busy` while its backward is still
    to come. Keeps the memory that it reads alive, but not the module."""

    def __init__(
        self,
        source: Source,
        rows: Any,
        named: Any,
        pieces: Sequence[Any],
        recorder: Any,
        asked: Optional[FrozenSet[int]] = None,
    ) -> None:
        self._asked = asked
        self.owner: Any = None
        self._recorder = recorder
        self._plan, self._devices, self._dim = source.plan, source.devices, source.dim
        self._home = source.devices[0]
        self._communication = source.communication
        self._joined = source.gathered
        self._tapes = [Tape(source, rank, pieces[rank]) for rank in range(len(source.devices))]
        buckets = source.plan.buckets
        apart = len(buckets) if source.communication.apart else 0
        # Of each device, for each bucket: recorded behind its copies.
        self._arrivals = {d: recorder.events(apart) for d in dict.fromkeys(source.devices)}
        self._lender = Lender(self._home if apart else None)
        for tape in self._tapes:
            tape.ready = recorder.events(apart)
        # Of each argument (its place, its pieces), the largest last: home waits until the others
        # have read what came before (lending.py).
        pieces_of = enumerate(zip(*[tape.inputs for tape in self._tapes]))
        self._slices = sorted(pieces_of, key=lambda pair: sum(piece.nbytes for piece in pair[1]))
        others = self._tapes[1:]
        self._flats = [tuple(tape.flats[k] for tape in others) for k in range(len(buckets))]
        self._complex = any(bucket.dtype.is_complex for bucket in buckets)
        # Of the buckets that get gradients, in the order in which a backward completes them. A
        # module that is called directly has nobody who makes zeros for what it does not use.
        self._sums = [
            Sums(bucket, self._tapes, bucket.keeps_none or not source.gathered)
            for bucket in reversed(buckets)
            if self._tapes[0].learns[bucket.number]
        ]
        self._learning: List[int] = []  # places of the tensors that get them
        self._streams: List[Any] = []  # of the last step
        self._columns: List[Column] = []
        self._forwards: List[Any] = []
        self._backwards: List[Backward] = []
        self._latest: Optional[Backward] = None
        self._pools: List[Any] = []
        self._outputs: List[Any] = []
        # The first replica's: its backward reads it also where the module has other memory by then.
        self._own = storages_of(source.tensors)
        self._versions = Versions(source.tensors, source.plan.parameter_count)
        self._renewals = captures.renewals()
        self._compiled = source.compiled  # whose kernels are launched
        self._capture(source, rows, named, recorder)
        self.differentiable = [column.differentiable for column in self._columns]

    def arrived(self, device: torch.device) -> List[Any]:
        """As a `Communication`: what the replicas' dictionaries wait for (awaited.py)."""
        arrivals = self._arrivals[device]
        return [arrivals[last] for last in waits(len(arrivals))]

    @property
    def ranks(self) -> int:
        return len(self._devices)

    def held_bytes(self) -> Dict[torch.device, Tuple[int, int]]:
        """The memory that this recording holds, by device: all of it, and what of it counts as
        allocated by torch. Slow."""
        static = [tensor for tape in self._tapes for tensor in tape.static()]
        static += [gradient for column in self._columns for gradient in column.gradients]
        held: Dict[torch.device, Tuple[int, int]] = dict(self._recorder.pool_bytes(self._pools))
        for tensor in static:
            size_bytes = tensor.numel() * tensor.element_size()
            whole, allocated = held.get(tensor.device, (0, 0))
            held[tensor.device] = whole + size_bytes, allocated + size_bytes
        return held

    def size_bytes(self) -> int:
        """The memory that this recording holds on all devices; slow."""
        return sum(whole for whole, _ in self.held_bytes().values())

    def outdated(self) -> bool:
        """Whether it draws random numbers from a generator's state that is gone."""
        return self._renewals != captures.renewals()

    def busy(self) -> bool:
        call = None if self.owner is None else self.owner()
        return call is not None and not call.over

    def let_go(self) -> None:
        """Of the module's memory, until it has that again."""
        if not self.busy():
            self._own = ()

    # Making it

    def _capture(self, source: Source, rows: Any, named: Any, recorder: Any) -> None:
        def record() -> None:
            with recorder.rehearsal():
                self._attempt(source, rows, named, recorder.record, recorder)
            self._attempt(source, rows, named, recorder.record, recorder, True)

        def warm_up_and_record() -> None:
            self._attempt(source, rows, named, noting_reads, recorder)
            self._versions.learn(source.tensors, self._tapes[0].saved)
            self._attempt(source, rows, named, at_once, recorder)
            as_compiled(record)

        buffers = source.tensors[source.plan.parameter_count :]
        kept = [(buffer, buffer.detach().clone()) for buffer in buffers]
        source.communication.open()
        source.communication.begin()
        self._send(source.tensors)
        try:
            recorder.aside(warm_up_and_record)
        finally:
            others = [pair for tape in self._tapes for pair in tape.kept]
            for tensor, value in kept + others[::-1]:
                # Not as a write that counts: an earlier forward's backward may be still to come.
                tensor.data.copy_(value)
            for tape in self._tapes:
                tape.kept = []

    def _attempt(
        self, source: Source, rows: Any, named: Any, record: Any, recorder: Any, keep: bool = False
    ) -> None:
        """All forwards, then all backwards. Nothing of it is left afterwards unless it is kept."""
        tapes = self._tapes
        try:
            replicas = ReplicaSet(source.tree, source.root, source.devices, source.compiled)
            filled = [tape.begin(source, rows[tape.rank], named[tape.rank]) for tape in tapes]
            modules = source.held(lambda: replicas.refresh(source.root, filled, source.plan, self))
            pools = [recorder.pool() for _ in tapes]
            forwards = []
            for tape, module, pool in zip(tapes, modules, pools):
                tape.module = module
                forwards.append(record(tape.device, pool, tape.forward))
            columns = self._columns_of([tape.output for tape in tapes], source.grad)
            counts = [bucket.count for bucket in self._plan.buckets]
            backwards = []
            every = ways(columns, self._asked)
            for places in every:
                act = [columns[place] for place in places], places is not every[-1]
                graphs = [
                    record(tape.device, pool, functools.partial(tape.backward, *act))
                    for tape, pool in zip(tapes, pools)
                ]
                backwards.append(Backward(places, graphs, tapes, counts))
            if keep:
                self._keep(columns, forwards, backwards)
                self._pools = pools
        finally:
            for tape in tapes:
                tape.end()

    def _columns_of(self, outputs: List[Any], grad: bool) -> List[Column]:
        columns: List[Column] = []

        def note(tensors: Sequence[torch.Tensor], path: str) -> torch.Tensor:
            for tensor, device in zip(tensors, self._devices):
                if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                    raise NotRecordable(f"{path} is a {type(tensor).__name__}, a class of its own")
                if tensor.device != device or tensor.layout != torch.strided:
                    raise NotRecordable(f"{path} is no ordinary tensor of its replica's device")
                if tensor.dtype != tensors[0].dtype:
                    raise NotRecordable(f"{path} has another dtype on some replicas")
            if self._joined and (self._dim != 0 or any(tensor.dim() > 0 for tensor in tensors)):
                check_fit(tensors, self._dim, path)
            columns.append(Column(tensors, path, grad))
            return tensors[0]

        if self._joined:
            trees.join_trees(outputs, note)
        else:
            map_output(outputs[0], note, "output")
        return columns

    def _keep(
        self, columns: List[Column], forwards: List[Any], backwards: List[Backward]
    ) -> None:
        self._outputs = [without_graph(t.output, columns, t.rank) for t in self._tapes]
        for column in columns:
            column.settle(self._joined)
        self._columns, self._forwards, self._backwards = columns, forwards, backwards
        self._narrow(backwards)

    def _narrow(self, backwards: List[Backward]) -> None:
        """To the parameters that a backward reaches, if it reaches any."""
        reached = [sums.reached(backwards, not self._joined) for sums in self._sums]
        if any(reached):
            for sums, slots in zip(self._sums, reached):
                sums.narrow(slots)
            self._sums = [sums for sums, slots in zip(self._sums, reached) if slots]
        self._learning = [place for sums in self._sums for place in sums.places]

    # A step

    def run(self, pieces: List[List[torch.Tensor]], tensors: Tensors) -> Any:
        """The joined outputs for each replica's arguments, in the tree that gather makes of them.
        `tensors` are the source's as they are now."""
        wanted = [
            piece
            for tape, row in zip(self._tapes, pieces)
            for piece, wants in zip(row, tape.wants)
            if wants
        ]
        return self._run(wanted, functools.partial(self._fill, pieces), tensors)

    def run_whole(self, arguments: Sequence[torch.Tensor], tensors: Tensors) -> Any:
        """As `run`, for arguments that are not cut yet and need no gradients: they are cut straight
        into the replicas' memory."""
        return self._run([], functools.partial(self._fill_whole, arguments), tensors)

    def _run(self, wanted: List[torch.Tensor], fill: Any, tensors: Tensors) -> Any:
        self._own = self._own or storages_of(tensors)
        call = Call(self, fill, tensors)
        return call.run(functools.partial(self._step, call, wanted))

    def _step(self, call: Call, wanted: List[torch.Tensor]) -> Any:
        if self._backwards and torch.is_grad_enabled():
            outputs = apply_step(call, wanted + [call.tensors[place] for place in self._learning])
        else:
            outputs = self.forward(call)
            call.end()
        take = iter(outputs).__next__
        if not self._joined:
            return map_output(self._outputs[0], lambda tensors, path: take(), "output")
        end_casts()  # as an eager step of several devices
        return trees.join_trees(self._outputs, lambda tensors, path: take())

    def forward(self, call: Call) -> List[torch.Tensor]:
        communication = self._communication
        call.compute = Snapshot(self._devices)
        for stream, last in zip(call.compute.streams, self._streams):
            wait_for(stream, last)  # the user may have changed streams: one step at a time
        self._streams = call.compute.streams
        communication.open()
        communication.begin()
        with self._lender.lending():
            # Arguments first: a copy engine does what it is given in order, and a small copy behind
            # all parameters would hold up the start of every replica.
            with torch.no_grad(), phase("scatter"):
                call.fill()
            call.fill = None
            self._send(call.tensors)
            with phase("replay of forwards"):
                for graph in self._forwards:
                    graph.replay()
        # The parameters may be written once this returns: after the copies out of them.
        communication.deliver()
        call.versions = self._versions.after_forward(call.tensors)
        with phase("gather"):
            return [self._join(column) for column in self._columns]

    def _fill(self, pieces: List[List[torch.Tensor]]) -> None:
        for tape, row in zip(self._tapes, pieces):
            if row:
                torch._foreach_copy_(tape.inputs, [piece.detach() for piece in row])

    def covers(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether the replicas get all of these: what is cut into too many pieces is dropped."""
        return not self._joined or all(
            arguments[place].size(self._dim) == sum(piece.size(self._dim) for piece in pieces)
            for place, pieces in self._slices
        )

    def _fill_whole(self, arguments: Sequence[torch.Tensor]) -> None:
        for place, pieces in self._slices:
            argument = arguments[place]
            if self._joined:
                lent = self._lender.of(argument)
                _C.scatter(argument.detach(), pieces, self._dim % argument.dim(), lent)
                hold_pinned(argument, self._devices)
            else:
                pieces[0].copy_(argument)

    def _send(self, tensors: Tensors) -> None:
        """This step's parameters and buffers to all replicas but the first."""
        with self._communication.current():
            streams = [(current_stream(d), e) for d, e in self._arrivals.items() if e]
            for k, bucket in enumerate(self._plan.buckets):
                if self._flats[k]:
                    sources = tuple([tensors[place] for place in bucket.places])
                    if self._complex:
                        sources = tuple(map(resolved, sources))
                    with bucket_phase("broadcast", k):
                        bucket.broadcast(sources, self._flats[k])
                for stream, events in streams:
                    events[k].record(stream)

    def _join(self, column: Column) -> torch.Tensor:
        if not self._joined:
            return column.static[0].clone()
        static = column.read()
        if column.joined is None:
            dim = self._dim % static[0].dim()
            shape = list(static[0].shape)
            shape[dim] = sum(tensor.size(dim) for tensor in static)
            result = TORCH.joined(static, tuple(shape), self._home)
            column.joined = tuple(shape), result.stride(), dim
        shape, strides, dim = column.joined
        result = torch.empty_strided(shape, strides, dtype=static[0].dtype, device=self._home)
        _C.gather(tuple(static), result, dim)
        return result

    def backward(self, call: Call, gradients: Sequence[Optional[torch.Tensor]]) -> List[Any]:
        """The gradients of what GraphStep was given."""
        self._versions.check(call.tensors, call.versions)
        with call.compute.in_backward(self._home):
            way = self._way(gradients)
            for place in way.places:
                self._cut(self._columns[place], gradients[place])
            communication = self._communication
            with communication.current():
                # New memory, before what follows is ordered behind whoever had it before.
                flats = [sums.bucket.take_for_sums() for sums in self._sums]
            communication.begin()
            with phase("replay of backwards"):
                for graph in way.graphs:
                    graph.replay()
            result: List[Any] = [None if g is None else g.clone() for g in way.input_gradients]
            with communication.current(), torch.no_grad():
                for sums, flat in zip(self._sums, flats):
                    with bucket_phase("reduce", sums.bucket.number):
                        result.extend(sums.into(flat, way))
            communication.deliver()
        return result

    def _way(self, gradients: Sequence[Optional[torch.Tensor]]) -> Backward:
        way = self._backwards[0]
        if len(self._backwards) == 1:
            return way
        if not way.serves(gradients):
            way = self._backwards[-1]
        if self._latest is not None and way is not self._latest:
            # What the other one packed, and this one may not.
            with torch.no_grad():
                for packed in [p for tape in self._tapes for p in tape.packed if p is not None]:
                    packed.zero_()
        self._latest = way
        return way

    def _cut(self, column: Column, gradient: Optional[torch.Tensor]) -> None:
        with torch.no_grad():
            if gradient is None:
                for static in column.cut:
                    static.zero_()
            elif not self._joined:
                column.cut[0].copy_(gradient)
            else:
                dim = self._dim % column.cut[0].dim()
                source = TORCH.source(resolved(gradient), "gradient")
                _C.scatter(source, tuple(column.cut), dim)
