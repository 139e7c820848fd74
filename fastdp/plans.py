"""How the tensors of a module travel, as long as they are described by the same words: which bucket
each is in, and how its copies find their places. Also what cannot travel, said by name.
"""

from __future__ import annotations

from itertools import islice
from operator import itemgetter
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn

from . import _C, _torch_autograd, _torch_protocol
from .buckets import Bucket, is_sparse, resolved
from .functions import Broadcast, Land
from .phases import bucket_phase
from .streams import Communication

Tensors = Tuple[torch.Tensor, ...]


class Plan:
    """How the tensors of a module travel: buckets, what is in none (sparse tensors, and buffers
    that may grow: torch copies them), and the order to put their copies back in."""

    def __init__(
        self,
        description: bytes,
        buckets: List[Bucket],
        alone: List[int],
        parameter_count: int,
        devices: Sequence[torch.device],
        communication: Communication,
    ) -> None:
        self.description = description
        self.buckets = buckets
        for k, bucket in enumerate(buckets):
            bucket.number = k
        self.communication = communication
        self.alone = alone
        # The same for a recording, in which no buffer grows; None until one asks.
        self.recorded: Optional[Plan] = None
        self.parameter_count = parameter_count
        self.devices = devices
        # The ranks whose gradients go to another stream: each lands as a whole.
        home = devices[0]
        self._linked = [
            rank for rank, device in enumerate(devices) if communication.apart or device != home
        ]
        self._pick = [_picker(bucket.places) for bucket in buckets]
        places = [place for bucket in buckets for place in bucket.places] + alone
        order = sorted(range(len(places)), key=places.__getitem__)
        self._in_order = order != list(range(len(order)))
        self._reorder = itemgetter(*order) if len(order) > 1 else tuple
        self.bucket_of = {place: k for k, bucket in enumerate(buckets) for place in bucket.places}

    def copies(
        self, tensors: Tensors, differentiable: bool
    ) -> Tuple[List[Tuple[Tensors, Tensors]], Tensors]:
        """(parameters, buffers) of each rank, and the tokens of the broadcasts."""
        communication = self.communication
        rows: List[List[torch.Tensor]] = [[] for _ in self.devices]
        tokens = []
        communication.open()
        compute = communication.compute()
        as_nodes = _torch_autograd.forward_mode_active()
        # The tensors were described, the copies are new: memory that none of torch.func's has.
        broadcast = _torch_autograd.applied_at_once(Broadcast)
        land = _torch_autograd.applied_at_once(Land)
        made = []
        with communication.current():
            flats = [bucket.take(True) for bucket in self.buckets]
            communication.begin(compute)
            for k, bucket in enumerate(self.buckets):
                chosen = self._pick[k](tensors)
                landings: Dict[int, Tensors] = {}
                with bucket_phase("broadcast", k):
                    if as_nodes or differentiable and bucket.requires_grad:
                        landings = dict.fromkeys(self._linked, ())
                        copies = broadcast(bucket, True, flats[k], compute, landings, *chosen)
                        tokens.append(copies[-1])
                        _torch_autograd.run_early(copies[-1].grad_fn)
                    else:
                        copies = bucket.copies(chosen, True, flats[k])
                communication.mark(k)
                made.append((bucket, copies, landings))
        for bucket, copies, landings in made:
            _share_out(bucket, copies, landings, rows, land)
        for place in self.alone:
            for rank, (row, device) in enumerate(zip(rows, self.devices)):
                tensor = tensors[place]
                row.append(tensor.to(device, copy=True) if rank > 0 else tensor)
        ordered = [self._reorder(row) if self._in_order else tuple(row) for row in rows]
        cut = self.parameter_count
        keeps_none = any(bucket.keeps_none for bucket in self.buckets)
        return [(row[:cut], row[cut:]) for row in ordered], () if keeps_none else tuple(tokens)


def _picker(places: Sequence[int]) -> Callable[[Tensors], Tensors]:
    """What gives the tensors at some places of a list."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1))


def _share_out(
    bucket: Bucket,
    outputs: Sequence[torch.Tensor],
    landings: Dict[int, Tensors],
    rows: List[List[torch.Tensor]],
    land: Callable[..., Tensors],
) -> None:
    """Puts each rank's copies into its row."""
    rest = iter(outputs)
    for rank, row in enumerate(rows):
        if rank not in landings:
            row.extend(islice(rest, bucket.count))
            continue
        copies = land(landings[rank], next(rest))
        _torch_autograd.run_early(copies[0].grad_fn)
        row.extend(copies)


class Source(NamedTuple):
    """A module as it is now, and how its tensors travel: what a recording is made of."""

    root: nn.Module
    tree: Any  # _C.Tree
    plan: Plan
    tensors: Tensors  # parameters, then buffers
    devices: Tuple[torch.device, ...]  # one per replica
    gathered: bool  # whether outputs are joined: also a single one of a wrapper of several devices
    communication: Communication
    held: Callable[[Callable[[], Any]], Any]  # runs an act with the tree held
    grad: bool  # whether gradients may be asked for
    dim: int
    compiled: Any = None  # what compiles the replicas


def alone_in_plan(tensors: Tensors, parameter_count: int) -> List[int]:
    """The places of those that no bucket takes: sparse tensors, and buffers that a forward resizes
    when it knows how many channels there are, as observers of quantization do: a slot between
    others has no room for it."""
    places = []
    for place, tensor in enumerate(tensors):
        may_grow = place >= parameter_count and tensor.dim() == 1 and tensor.numel() <= 1
        if may_grow or is_sparse(tensor):
            places.append(place)
    return places


def check_tensors(root: nn.Module) -> None:
    """torch's own methods keep all else out of these dictionaries; other code may write there."""
    for prefix, module in root.named_modules():
        for kind, members in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, value in members.items():
                if value is not None and not isinstance(value, torch.Tensor):
                    path = f"{prefix}.{name}" if prefix else f"{name}"
                    raise TypeError(
                        f"{kind} {path!r} must be a tensor or None, got {type(value).__name__}"
                    )


def check_home(tensors: Iterable[torch.Tensor], home: torch.device) -> None:
    for tensor in tensors:
        if tensor.device != home:
            raise RuntimeError(
                "module must have its parameters and buffers "
                f"on device {home} (device_ids[0]) but found one of "
                f"them on device: {tensor.device}"
            )


def described(tensors: Tensors, root: nn.Module, home: torch.device) -> bytes:
    try:
        return _C.describe(tensors)
    except Exception:
        check_tensors(root)
        check_home(tensors, home)
        # A lazy module that has not run yet says so itself, in torch's words.
        for module in root.modules():
            if _torch_protocol.replicates_itself(module):
                module._replicate_for_data_parallel()
        found = [resolved(tensor) for tensor in tensors if not is_sparse(tensor)]
        alone = [
            (t.layout, t.dtype, t.requires_grad) if is_sparse(t) else None for t in tensors
        ]
        try:
            return _C.describe(tuple(found)) + repr(alone).encode()
        except Exception:
            _name_what_cannot_travel(root)
            raise


def _name_what_cannot_travel(root: nn.Module) -> None:
    for kind, named in (("parameter", root.named_parameters()), ("buffer", root.named_buffers())):
        for name, tensor in named:
            try:
                _C.describe((resolved(tensor),))
            except Exception as error:
                if not is_sparse(tensor):
                    raise TypeError(f"{kind} {name!r} cannot be replicated: {error}") from error
