"""A recorded step: every replica's forward and backward as graphs over fixed memory, and what is
done around them at every step.

Fixed memory ("static"): each replica's arguments; the parameters and buffers of every replica but
the first, which reads the module's own in place; each replica's outputs and their gradients; each
replica's parameter gradients, packed by bucket. What leaves a step (outputs, gradients) is always
new memory.

A step: arguments are copied in; buckets are broadcast on the communication streams, and each
replica's forward graph waits, inside, for the event of a bucket where it is first read; outputs are
joined. Backward: gradients are cut into the static ones; each backward graph packs a bucket as soon
as its gradients are complete and records an event; the communication streams wait for these and sum
the bucket into new memory.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, List, Optional, Sequence, Tuple

import torch

from . import _C, _torch_compat, moves, signatures, trees
from .arrays import TORCH
from .buckets import Bucket, resolved
from .functions import check_fit
from .graph_step import Call, GraphStep, behind_boundary
from .plans import Source
from .replica_sets import ReplicaSet
from .signatures import NotRecordable
from .streams import Snapshot

Tensors = Tuple[torch.Tensor, ...]

# Runs before a capture: libraries make their handles and choose their kernels in the first.
_WARM_UPS = 2


class _Column:
    """One tensor of the output tree: each replica's, and where its gradient is put."""

    def __init__(self, tensors: Sequence[torch.Tensor], path: str, grad: bool) -> None:
        self.live = list(tensors)
        self.path = path
        self.differentiable = grad and tensors[0].requires_grad
        if any(t.requires_grad != tensors[0].requires_grad for t in tensors):
            raise NotRecordable(f"{path} requires gradients on some replicas only")
        self.gradients = [torch.zeros_like(t) for t in tensors] if self.differentiable else []
        self.static: List[torch.Tensor] = []
        self.cut: List[torch.Tensor] = []

    def settle(self, joined: bool) -> None:
        """After the captures: what is read and written at every step, free of autograd."""
        self.static = [tensor.detach() for tensor in self.live]
        self.cut = self.gradients
        self.live = []
        if joined and all(tensor.dim() == 0 for tensor in self.static):
            # As gather joins numbers: into a vector.
            self.static = [tensor.view(1) for tensor in self.static]
            self.cut = [gradient.view(1) for gradient in self.gradients]


class _Tape:
    """One replica: its static memory, and the two acts that are recorded."""

    def __init__(self, source: Source, rank: int, pieces: Sequence[torch.Tensor]) -> None:
        self.rank = rank
        self.device = source.devices[rank]
        self.inputs = [torch.empty_like(piece, requires_grad=False) for piece in pieces]
        for static, piece in zip(self.inputs, pieces):
            static.copy_(piece.detach())
        self.wants = [source.grad and piece.requires_grad for piece in pieces]
        buckets = source.plan.buckets
        # Buckets of the module's own tensors have no memory here.
        self.flats = [None if rank == 0 else _zeros(b, self.device) for b in buckets]
        self.packed = [
            _zeros(b, self.device) if source.grad and b.requires_grad else None for b in buckets
        ]
        self.slots = [None if p is None else b.slots(p) for b, p in zip(buckets, self.packed)]
        # Which tensors of each bucket had a gradient in the recorded backward.
        self.present: List[Optional[List[bool]]] = [None] * len(buckets)
        self.ready: List[Any] = []
        self.module: Any = None
        self.arguments: Any = None
        self.leaves: List[torch.Tensor] = []
        self.anchors: List[torch.Tensor] = []
        self.output: Any = None
        self.leaf_gradients: Tuple[Optional[torch.Tensor], ...] = ()

    def begin(self, source: Source, row: Any, named: Any) -> Tuple[Tensors, Tensors]:
        """(parameters, buffers) of the replica, in the order of the source; new for every attempt,
        so that nothing of an earlier one's graph lives on."""
        places: List[Any] = [None] * len(source.tensors)
        self.anchors = []
        for k, bucket in enumerate(source.plan.buckets):
            for place, tensor in zip(bucket.places, self._tensors_of(source, k)):
                places[place] = tensor
        given = [
            static.detach().requires_grad_(wants) for static, wants in zip(self.inputs, self.wants)
        ]
        self.leaves = [leaf for leaf, wants in zip(given, self.wants) if wants]
        take = iter(given).__next__
        self.arguments = signatures.with_tensors(row, take), signatures.with_tensors(named, take)
        cut = source.plan.parameter_count
        return tuple(places[:cut]), tuple(places[cut:])

    def _tensors_of(self, source: Source, k: int) -> Sequence[torch.Tensor]:
        bucket = source.plan.buckets[k]
        own = [source.tensors[place] for place in bucket.places]

        def make() -> Sequence[torch.Tensor]:
            flat = self.flats[k]
            return bucket.named_home(own) if flat is None else bucket.named_slots(flat)

        if self.packed[k] is None:
            return make()
        anchor = torch.empty(0, device=self.device, requires_grad=True)
        self.anchors.append(anchor)
        return behind_boundary(make, lambda gradients: self._pack(k, gradients), anchor)

    def _pack(self, k: int, gradients: Sequence[Optional[torch.Tensor]]) -> None:
        self.present[k] = [gradient is not None for gradient in gradients]
        pairs = [(s, g) for s, g in zip(self.slots[k], gradients) if g is not None]
        if any(g.layout != torch.strided for _, g in pairs):
            raise NotRecordable("a parameter's gradient is sparse")
        if pairs:
            slots, present = zip(*pairs)
            torch._foreach_copy_(list(slots), list(present))
        if self.ready:
            self.ready[k].record()

    def forward(self) -> None:
        row, named = self.arguments
        self.output = self.module(*row, **named)

    def backward(self, columns: Sequence[_Column]) -> None:
        wanted = [column for column in columns if column.differentiable]
        gradients = torch.autograd.grad(
            [column.live[self.rank] for column in wanted],
            self.anchors + self.leaves,
            [column.gradients[self.rank] for column in wanted],
            allow_unused=True,
        )
        self.leaf_gradients = gradients[len(self.anchors) :]

    def end(self) -> None:
        """Drops what an attempt made, its graph above all."""
        self.module = self.arguments = self.output = None
        self.leaves, self.anchors, self.leaf_gradients = [], [], ()


class _Arrivals:
    """The events of a recording's buckets, as a replica's dictionaries wait for them."""

    def __init__(self, devices: Sequence[torch.device], recorder: Any, count: int) -> None:
        self.of_device = {device: recorder.events(count) for device in dict.fromkeys(devices)}

    def arrived(self, device: torch.device) -> List[Any]:
        return self.of_device[device]


class Recording:
    """Made by `record`; `run` is a step. One forward at a time: `busy` while its backward is still
    to come. Keeps the memory that it reads alive, but not the module."""

    def __init__(
        self, source: Source, rows: Any, named: Any, pieces: Sequence[Any], recorder: Any
    ) -> None:
        self.owner: Any = None
        self._plan, self._devices, self._dim = source.plan, source.devices, source.dim
        self._home = source.devices[0]
        self._communication = source.communication
        self._joined = len(source.devices) > 1
        self._tapes = [_Tape(source, rank, pieces[rank]) for rank in range(len(source.devices))]
        buckets = source.plan.buckets
        apart = len(buckets) if source.communication.apart else 0
        self._arrivals = _Arrivals(source.devices, recorder, apart)
        for tape in self._tapes:
            tape.ready = recorder.events(apart)
        self._grads = [k for k, bucket in enumerate(buckets) if self._tapes[0].packed[k] is not None]
        self._columns: List[_Column] = []
        self._forwards: List[Any] = []
        self._backwards: List[Any] = []
        self._outputs: List[Any] = []
        self._input_gradients: List[Any] = []
        self._capture(source, rows, named, recorder)
        self.differentiable = [column.differentiable for column in self._columns]

    def busy(self) -> bool:
        owner = self.owner
        return owner is not None and owner() is not None

    def _check_fit(self, tensors: Sequence[torch.Tensor], path: str) -> None:
        if any(tensor.dim() > 0 for tensor in tensors) or self._dim != 0:
            check_fit(tensors, self._dim, path)

    # Making it

    def _capture(self, source: Source, rows: Any, named: Any, recorder: Any) -> None:
        buffers = [t for t in source.tensors[source.plan.parameter_count :]]
        kept = [buffer.detach().clone() for buffer in buffers]
        self._send(source.tensors)
        try:
            with recorder.aside():
                for _ in range(_WARM_UPS):
                    self._attempt(source, rows, named, _at_once, recorder)
                with recorder.rehearsal():
                    self._attempt(source, rows, named, recorder.record, recorder)
                self._attempt(source, rows, named, recorder.record, recorder, True)
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, kept):
                    buffer.copy_(value)

    def _attempt(
        self, source: Source, rows: Any, named: Any, record: Any, recorder: Any, keep: bool = False
    ) -> None:
        """All forwards, then all backwards. Nothing of it is left afterwards unless it is kept."""
        tapes = self._tapes
        try:
            replicas = ReplicaSet(source.tree, source.root, source.devices)
            filled = [tape.begin(source, rows[tape.rank], named[tape.rank]) for tape in tapes]
            modules = source.held(
                lambda: replicas.refresh(source.root, filled, source.plan, self._arrivals)
            )
            pools = [recorder.pool() for _ in tapes]
            forwards, backwards = [], []
            for tape, module, pool in zip(tapes, modules, pools):
                tape.module = module
                forwards.append(record(tape.device, pool, tape.forward))
            columns = self._columns_of([tape.output for tape in tapes], source.grad)
            if any(column.differentiable for column in columns):
                for tape, pool in zip(tapes, pools):
                    act = functools.partial(tape.backward, columns)
                    backwards.append(record(tape.device, pool, act))
            if keep:
                self._keep(columns, forwards, backwards)
        finally:
            for tape in tapes:
                tape.end()

    def _columns_of(self, outputs: List[Any], grad: bool) -> List[_Column]:
        columns: List[_Column] = []

        def note(tensors: Sequence[torch.Tensor], path: str) -> torch.Tensor:
            for tensor, device in zip(tensors, self._devices):
                if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                    raise NotRecordable(f"{path} is a {type(tensor).__name__}, a class of its own")
                if tensor.device != device or tensor.layout != torch.strided:
                    raise NotRecordable(f"{path} is no ordinary tensor of its replica's device")
                if tensor.dtype != tensors[0].dtype:
                    raise NotRecordable(f"{path} has another dtype on some replicas")
            if self._joined:
                self._check_fit(tensors, path)
            columns.append(_Column(tensors, path, grad))
            return tensors[0]

        if self._joined:
            trees.join_trees(outputs, note)
        else:
            _map_output(outputs[0], note, "output")
        return columns

    def _keep(self, columns: List[_Column], forwards: List[Any], backwards: List[Any]) -> None:
        self._outputs = [_without_graph(t.output, columns, t.rank) for t in self._tapes]
        for column in columns:
            column.settle(self._joined)
        self._columns, self._forwards, self._backwards = columns, forwards, backwards
        self._input_gradients = [
            None if gradient is None else gradient.detach()
            for tape in self._tapes
            for gradient in tape.leaf_gradients
        ]

    # A step

    def run(self, pieces: List[List[torch.Tensor]], tensors: Tensors) -> Any:
        """The joined outputs for these arguments, in the tree that gather makes of them."""
        call = Call(self, pieces, tensors)
        if self._backwards and torch.is_grad_enabled():
            wanted = [
                piece
                for tape, row in zip(self._tapes, pieces)
                for piece, wants in zip(row, tape.wants)
                if wants
            ]
            places = [place for k in self._grads for place in self._plan.buckets[k].places]
            outputs = GraphStep.apply(call, *wanted, *[tensors[place] for place in places])
        else:
            outputs = self.forward(call)
            call.end()
        take = iter(outputs).__next__
        if self._joined:
            return trees.join_trees(self._outputs, lambda tensors, path: take())
        return _map_output(self._outputs[0], lambda tensors, path: take(), "output")

    def forward(self, call: Call) -> List[torch.Tensor]:
        communication = self._communication
        call.compute = Snapshot(self._devices)
        self._send(call.tensors)
        with torch.no_grad():
            for tape, row in zip(self._tapes, call.pieces):
                if row:
                    torch._foreach_copy_(tape.inputs, [piece.detach() for piece in row])
        call.pieces = []
        for graph in self._forwards:
            graph.replay()
        # The parameters may be written once this returns: after the copies out of them.
        communication.deliver()
        call.versions = tuple([t._version for t in call.tensors[: self._plan.parameter_count]])
        return [self._join(column) for column in self._columns]

    def _send(self, tensors: Tensors) -> None:
        """This step's parameters and buffers to all replicas but the first."""
        communication = self._communication
        communication.open()
        communication.begin()
        for k, bucket in enumerate(self._plan.buckets):
            flats = tuple(tape.flats[k] for tape in self._tapes[1:])
            with communication.current():
                if flats:
                    sources = tuple(resolved(tensors[place]) for place in bucket.places)
                    bucket.core.broadcast(sources, flats)
                for device, events in self._arrivals.of_device.items():
                    if events:
                        events[k].record(torch.cuda.current_stream(device))

    def _join(self, column: _Column) -> torch.Tensor:
        if not self._joined:
            return column.static[0].clone()
        dim = self._dim % column.static[0].dim()
        sources = [TORCH.source(tensor, "outputs") for tensor in column.static]
        return moves.gather(TORCH, sources, dim, self._home)

    def backward(self, call: Call, gradients: Sequence[Optional[torch.Tensor]]) -> List[Any]:
        """The gradients of what GraphStep was given."""
        self._check_versions(call)
        with call.compute.in_backward(self._home):
            for column, gradient in zip(self._columns, gradients):
                if column.differentiable:
                    self._cut(column, gradient)
            communication = self._communication
            with communication.current():
                flats = {k: self._plan.buckets[k].take_for_sums() for k in self._grads}
            communication.begin()
            for graph in self._backwards:
                graph.replay()
            result: List[Any] = [None if g is None else g.clone() for g in self._input_gradients]
            sums = {k: self._sum(k, flats[k]) for k in self._send_order()}
            communication.deliver()
        for k in self._grads:
            result.extend(sums[k])
        return result

    def _send_order(self) -> List[int]:
        """Buckets are complete in backward from the last to the first."""
        return self._grads[::-1]

    def _sum(self, k: int, flat: torch.Tensor) -> List[Optional[torch.Tensor]]:
        bucket, communication = self._plan.buckets[k], self._communication
        rows = [tape.present[k] or [False] * bucket.count for tape in self._tapes]
        with communication.current(), torch.no_grad():
            if communication.apart:
                for tape in self._tapes:
                    torch.cuda.current_stream(tape.device).wait_event(tape.ready[k])
            packed = tuple(tape.packed[k] for tape in self._tapes)
            _C.reduce(packed, flat[: packed[0].numel()])
        sums = bucket.slots(flat)
        if bucket.keeps_none:
            used = [any(column) for column in zip(*rows)]
            return [slot if there else None for slot, there in zip(sums, used)]
        return list(sums)

    def _cut(self, column: _Column, gradient: Optional[torch.Tensor]) -> None:
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

    def _check_versions(self, call: Call) -> None:
        parameters = call.tensors[: self._plan.parameter_count]
        for k, (tensor, version) in enumerate(zip(parameters, call.versions)):
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: parameter {k} of the module, of shape "
                    f"{list(tensor.shape)}, is at version {tensor._version}; expected version "
                    f"{version} instead. Call backward before the optimizer's step"
                )


def _at_once(device: torch.device, pool: Any, act: Any) -> None:
    """As a recorder's `record`: a warm-up."""
    with _torch_compat.on_device(device):
        act()


def _zeros(bucket: Bucket, device: torch.device) -> torch.Tensor:
    return torch.zeros(bucket.length, dtype=bucket.dtype, device=device)


def _map_output(output: Any, take: Any, path: str) -> Any:
    """One replica's output anew, each tensor replaced."""
    if isinstance(output, torch.Tensor):
        return take([output], path)
    if isinstance(output, dict):
        pairs = [(k, _map_output(v, take, f"{path}[{k!r}]")) for k, v in output.items()]
        return type(output)(pairs)
    if trees.is_namedtuple(output):
        items = [_map_output(v, take, f"{path}[{i}]") for i, v in enumerate(output)]
        return type(output)(*items)
    if type(output) in (tuple, list):
        items = [_map_output(v, take, f"{path}[{i}]") for i, v in enumerate(output)]
        return type(output)(items)
    if output is None or isinstance(output, (bool, int, float, str)):
        return output
    raise NotRecordable(f"{path} is a {type(output).__name__}: no container that can be made anew")


def _without_graph(output: Any, columns: Sequence[_Column], rank: int) -> Any:
    """The same tree with the tensors that a step reads; deepcopy keeps every type."""
    memo = {id(column.live[rank]): column.live[rank].detach() for column in columns}
    try:
        return copy.deepcopy(output, memo)
    except Exception as error:
        raise NotRecordable(f"the output cannot be copied: {error}") from error
