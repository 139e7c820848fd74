"""What one replica brings to a recorded step (`Tape`), and one tensor of its output (`Column`)."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Set, Tuple

import torch

from . import _torch_cuda, signatures
from .buckets import Bucket, is_sparse, resolved
from .graph_step import Gradients, behind_boundary
from .plans import Source
from .readiness import uncompiled
from .reads import Reads
from .signatures import NotRecordable
from .streams import current_stream
from .versions import saved_below

Tensors = Tuple[torch.Tensor, ...]

# Gradients of a bucket whose tensors are larger than this on average stay where a recorded backward
# makes them until they are summed. To pack smaller ones costs the GPU less than it costs the host
# to name them one by one at every step.
_LARGE_BYTES = 256 * 2**10


class Column:
    """One tensor of the output tree: each replica's, and where its gradient is put."""

    def __init__(self, tensors: Sequence[torch.Tensor], path: str, grad: bool) -> None:
        self.live = list(tensors)
        self.differentiable = grad and tensors[0].requires_grad
        if any(t.requires_grad != tensors[0].requires_grad for t in tensors):
            raise NotRecordable(f"{path} requires gradients on some replicas only")
        self.gradients = [torch.zeros_like(t) for t in tensors] if self.differentiable else []
        self.static: List[torch.Tensor] = []
        self.joined: Any = None  # shape, strides and dimension of what they are joined into
        self.cut: List[torch.Tensor] = []
        self._is_lazy = False

    def settle(self, joined: bool) -> None:
        """After the captures: what is read and written at every step, free of autograd."""
        self.static = [tensor.detach() for tensor in self.live]
        self.cut = self.gradients
        self.live = []
        self._is_lazy = any(t.is_conj() or t.is_neg() for t in self.static)
        if joined and all(tensor.dim() == 0 for tensor in self.static):
            # As gather joins numbers: into a vector.
            self.static = [tensor.view(1) for tensor in self.static]
            self.cut = [gradient.view(1) for gradient in self.gradients]

    def read(self) -> List[torch.Tensor]:
        """The replicas' tensors, as the core reads them: it sees memory only."""
        if not self._is_lazy:
            return self.static
        return [tensor.resolve_conj().resolve_neg() for tensor in self.static]


class Tape:
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
        self.flats = [None if rank == 0 else _zeros(b, b.length, self.device) for b in buckets]
        self.learns = [source.grad and b.requires_grad for b in buckets]
        # Static memory for gradients, by bucket; None where they stay where they are made,
        self.packed = [
            _zeros(b, b.core.size_elems, self.device) if learns and not _is_large(b) else None
            for b, learns in zip(buckets, self.learns)
        ]
        self.slots = [None if p is None else b.slots(p) for b, p in zip(buckets, self.packed)]
        # which is here: of the backward that was recorded last.
        self.made: List[Optional[Gradients]] = [None] * len(buckets)
        # Which tensors of each bucket had a gradient in the recorded backward.
        self.present: List[Optional[List[bool]]] = [None] * len(buckets)
        self.awaited: Set[int] = set()  # buckets whose gradients are to come in this backward
        self.ready: List[Any] = []
        self.module: Any = None
        self.arguments: Any = None
        self.leaves: List[torch.Tensor] = []
        self.anchors: List[torch.Tensor] = []
        self.output: Any = None
        self.leaf_gradients: Tuple[Optional[torch.Tensor], ...] = ()
        self.held: List[torch.Tensor] = []
        self.reads: Optional[Reads] = None
        self.saved: Set[int] = set()  # addresses of what a forward saved for its backward
        self.kept: List[Tuple[torch.Tensor, torch.Tensor]] = []  # others' tensors that it wrote

    def static(self) -> List[torch.Tensor]:
        """What lies outside of the recorder's pool, for as long as the recording lives."""
        return [t for t in (*self.inputs, *self.flats, *self.packed) if t is not None]

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
            if flat is not None:
                return bucket.named_slots(flat)
            home = bucket.named_home(own)
            if not source.grad and not source.gathered:
                # Of a module that is called directly parameters say without gradients, too, that
                # they need some.
                for tensor, original in zip(home, own):
                    if original.requires_grad:
                        tensor.requires_grad_()
            return home

        if not self.learns[k]:
            return make()
        anchor = torch.empty(0, device=self.device, requires_grad=True)
        self.anchors.append(anchor)
        return behind_boundary(make, lambda gradients: self._take(k, gradients), anchor)

    def _take(self, k: int, gradients: Sequence[Optional[torch.Tensor]]) -> None:
        """The gradients of bucket k, in a backward, as soon as all of them are there."""
        if k not in self.awaited:
            # A second time, of which this would keep nothing but itself, or in a forward.
            raise NotRecordable("it runs a backward of its own, which reaches parameters")
        self.awaited.remove(k)
        self.present[k] = [gradient is not None for gradient in gradients]
        if any(is_sparse(gradient) for gradient in gradients):
            raise NotRecordable("a parameter's gradient is sparse")
        if self.packed[k] is None:
            # As long as somebody holds their memory, neither torch's allocator nor its engine
            # writes to it. What a backward gives as it was saved may have a graph: not to be held.
            held = [gradient if gradient is None else gradient.detach() for gradient in gradients]
            self.made[k] = tuple(map(resolved, held))
        else:
            pairs = [(s, g) for s, g in zip(self.slots[k], gradients) if g is not None]
            if pairs:
                slots, present = zip(*pairs)
                torch._foreach_copy_(list(slots), list(present))
        if self.ready:
            self.ready[k].record(current_stream(self.device))

    def forward(self) -> None:
        row, named = self.arguments
        self.output = self.module(*row, **named)

    def forward_noting_reads(self) -> None:
        """As `forward`, for a warm-up: what it reads of others is kept alive from now on."""
        known = [*self.inputs, *self.module.parameters(), *self.module.buffers()]
        # Of the module's own buffers the recording takes care, and of copies the next step.
        own = self.module.parameters() if self.rank == 0 else ()
        reads = Reads(self.device, known, own)
        self.kept = reads.kept
        reads.around(lambda: uncompiled(self.forward))
        self.held, self.reads = reads.held, reads

    def backward(self, columns: Sequence[Column], keep: bool) -> None:
        """From the gradients of these columns. `keep`: another backward is to follow."""
        outputs = [column.live[self.rank] for column in columns]
        if self.reads is not None:
            self.reads.check_leaves(outputs, self.anchors + self.leaves)
            self.saved |= saved_below(outputs)
            self.reads = None if not keep else self.reads
        self.present = [None] * len(self.present)
        self.made = [None] * len(self.made)
        self.awaited = set(range(len(self.made)))
        gradients = torch.autograd.grad(
            outputs,
            self.anchors + self.leaves,
            [column.gradients[self.rank] for column in columns],
            retain_graph=keep,
            allow_unused=True,
        )
        self.leaf_gradients = gradients[len(self.anchors) :]

    def end(self) -> None:
        """Drops what an attempt made, its graph above all."""
        self.module = self.arguments = self.output = None
        self.leaves, self.anchors, self.leaf_gradients = [], [], ()
        self.made = [None] * len(self.made)
        self.awaited, self.reads = set(), None


def _is_large(bucket: Bucket) -> bool:
    size_bytes = bucket.core.size_elems * bucket.dtype.itemsize
    return size_bytes > _LARGE_BYTES * bucket.count


def _zeros(bucket: Bucket, length: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(length, dtype=bucket.dtype, device=device)


def at_once(device: torch.device, pool: Any, act: Any) -> None:
    """As a recorder's `record`: a warm-up, since libraries make their handles and choose their
    kernels when they are first used."""
    with _torch_cuda.on_device(device):
        act()


def noting_reads(device: torch.device, pool: Any, act: Any) -> None:
    """The first warm-up."""
    tape = getattr(act, "__self__", None)  # a forward; a backward reads what its forward did
    at_once(device, pool, act if tape is None else tape.forward_noting_reads)
