"""Buckets: the tensors of a module in few flat buffers, as autograd and the replicas see them.

A `Bucket` is a plan for a list of tensors of one dtype: its memory is new at every use. A flat
buffer belongs to whoever holds a slot of it (a replica's parameter, a `.grad`), so an older graph
stays valid and a kept gradient is never overwritten; torch's caching allocator is the pool.
"""

from __future__ import annotations

from typing import Any, Callable, Collection, List, Optional, Sequence, Tuple

import torch

from . import _C, _torch_tensors
from .devices import dlpack_pair
from .flat_weights import FlatWeights
from .streams import Communication


class Bucket:
    """Tensors of one dtype that all require grad, or all do not.

    Args:
        tensors: the tensors as they are now: their shapes, strides and dtype make the plan.
        places: where each stands in the list that it was taken from.
        parameters: for each, whether its copies are `nn.Parameter`s.
        communication: the streams that its moves run on; its devices are those of all ranks.
        devices: of the ranks; the first is the home, where the tensors lie.
        unused_grad: "zero" or "none": the gradient of a tensor that took part in nothing.
        flat: where the tensors have to lie, if that matters.
        transport: what must carry it, or "auto"; None: what FASTDP_TRANSPORT says.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        places: Sequence[int],
        parameters: Sequence[bool],
        devices: Sequence[torch.device],
        communication: Communication,
        unused_grad: str,
        flat: Optional[FlatWeights] = None,
        transport: Optional[str] = None,
    ) -> None:
        self.communication = communication
        self.number = 0  # its place in its plan
        self.places = tuple(places)
        self.parameters = tuple(parameters)
        self._kinds = tuple(torch.nn.Parameter if each else None for each in self.parameters)
        self.devices = tuple(devices)
        self.device = self.devices[0]
        self.dtype = tensors[0].dtype
        self.requires_grad = tensors[0].requires_grad
        self.keeps_none = unused_grad == "none"
        self.core = _C.Bucket(tuple(tensors), flat.offsets if flat else None, transport)
        self._lost = _strides_lost(tensors, self.core.slots)
        self.count = len(self.places)
        self._are_parameters = all(self.parameters)
        self._are_plain_buffers = not any(self.parameters) and not self.requires_grad
        self._looks_first = False
        # The exchange table's tensors are the host's: torch's allocator knows nothing of them.
        self._makes_views = self.device.type == "cpu"
        self.length = max(self.core.size_elems, flat.length if flat else 0)

    def _flat(self, device: torch.device) -> torch.Tensor:
        return self._told(self._new(device))

    def _told(self, made: torch.Tensor) -> torch.Tensor:
        """What was made on a communication stream, once the allocator knows who reads it."""
        for stream in self.communication.readers(made.device):
            made.record_stream(stream)
        return made

    def _new(self, device: torch.device) -> torch.Tensor:
        if device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
            # torch.empty would fill it at once, on a stream that has not waited yet for those who
            # still read what the memory held before. A storage is not filled.
            flat = torch.empty(0, dtype=self.dtype, device=device)
            storage = torch.UntypedStorage(self.length * flat.element_size(), device=device)
            return flat.set_(storage, 0, (self.length,))
        return torch.empty(self.length, dtype=self.dtype, device=device)

    def slots(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """Each slot as a tensor with a version counter of its own and no view relation: an in-place
        change of one must not invalidate the graphs of the others."""
        slots = self.core.views(flat) if self._makes_views else None
        slots = self.core.split(flat) if slots is None else slots
        return self._with_strides(slots) if self._lost else slots

    def _with_strides(self, slots: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The slots, with the strides that their tensors have."""
        changed = list(slots)
        for k, shape, strides in self._lost:
            changed[k] = changed[k].as_strided(shape, strides).data
        return tuple(changed)

    def with_zeros(
        self, tensors: Sequence[Optional[torch.Tensor]], flat: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """One tensor per slot, zeros in `flat` where there is None."""
        zeros = self._slots_of_sums(((None,) * self.count,), flat)
        return [zero if tensor is None else tensor for zero, tensor in zip(zeros, tensors)]

    def take(self, home: bool) -> Tuple[torch.Tensor, ...]:
        """New flat buffers for `copies`, one for each rank that gets one. On GPUs they are taken
        with the communication streams current, and these wait before they are written."""
        return tuple(self._flat(device) for device in self.devices[1 if home else 0 :])

    def copies(
        self, tensors: Sequence[torch.Tensor], home: bool, flats: Tuple[torch.Tensor, ...]
    ) -> List[torch.Tensor]:
        """The tensors once for each rank, rank by rank, in `flats`. With `home` rank 0 gets the
        tensors themselves, parameters and differentiable ones under new names."""
        if flats:
            tensors = tuple(tensors)
            if not self._moves(self.core.broadcast, tensors, flats, tensors):
                self.broadcast(tuple(map(resolved, tensors)), flats)
            if self.length > self.core.size_elems:
                for flat in flats:
                    flat[self.core.size_elems :].zero_()
        result = self.named_home(tensors) if home else []
        for flat in flats:
            result.extend(self.named_slots(flat) if home else self.slots(flat))
        return result

    def broadcast(self, tensors: Tuple[torch.Tensor, ...], flats: Tuple[torch.Tensor, ...]) -> None:
        """Plain tensors into flat buffers that there are."""
        self._move(self.core.broadcast, tensors, flats)

    def reduce(self, rows: Tuple[Any, ...], flat: torch.Tensor) -> None:
        """The sum of plain gradients, a row for each rank, None where there is none."""
        self._move(self.core.reduce, rows, flat)

    def reduce_flats(self, flats: Tuple[torch.Tensor, ...], flat: torch.Tensor) -> None:
        """The sum of what each rank has packed."""
        size = self.core.size_elems
        self._move(_C.reduce, flats, flat if flat.numel() == size else flat[:size])

    def _move(self, move: Callable[[Any, Any], None], sources: Any, targets: Any) -> None:
        """The core's scratch is not torch's: what torch keeps of the GPUs' memory without using it
        is given back before memory counts as short."""
        try:
            move(sources, targets)
        except MemoryError:
            if self.device.type != "cuda":
                raise
            for device in dict.fromkeys(self.devices):
                with torch.cuda.device(device):
                    torch.cuda.empty_cache()
            move(sources, targets)

    def _moves(
        self,
        move: Callable[[Any, Any], None],
        sources: Any,
        targets: Any,
        tensors: Sequence[Optional[torch.Tensor]],
    ) -> bool:
        """`_move`; False, with nothing moved, where not all of the tensors are plain. The core
        finds out as it reads them, and refuses: they are looked at first only if that came before,
        since a refusal is slow."""
        if self._looks_first and not _are_plain(tensors, self.dtype):
            return False
        try:
            self._move(move, sources, targets)
        except (TypeError, ValueError):
            if _are_plain(tensors, self.dtype):
                raise
            self._looks_first = True
            return False
        return True

    def named_home(self, tensors: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        """The tensors as replica 0's: the same memory, parameters under new names."""
        if self._are_parameters:
            as_parameter = _torch_tensors.as_parameter
            return list(_C.aliases(tuple(tensors), torch.nn.Parameter, as_parameter))
        if self._are_plain_buffers:
            return list(tensors)  # as `_named` has each of them
        return [self._named(k, tensor) for k, tensor in enumerate(tensors)]

    def _named(self, k: int, tensor: torch.Tensor) -> torch.Tensor:
        if self.parameters[k]:
            return _torch_tensors.as_parameter(tensor)
        # A buffer of replica 0 is the base's own: in-place updates persist there, and only there.
        return tensor.detach() if tensor.requires_grad else tensor

    def named_slots(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """The slots of `flat` as another replica's tensors."""
        slots = self.slots(flat)
        _C.become(slots, self._kinds)
        return slots

    def take_for_sums(self) -> torch.Tensor:
        """A new flat buffer for `sums`."""
        return self._flat(self.device)

    def sums(
        self, gradients: Sequence[Optional[torch.Tensor]], flat: torch.Tensor
    ) -> Tuple[Any, ...]:
        """The sum over the ranks of each tensor's gradient, in rank order, in `flat`. `gradients`
        come rank by rank, None where there is none."""
        count = self.count
        rows = tuple(
            [tuple(gradients[i : i + count]) for i in range(0, len(gradients), count)]
        )
        result: Sequence[Any]
        if self._moves(self.core.reduce, rows, flat, gradients):
            result = self.slots(flat)
        else:
            result = self._mixed_sums(rows, flat)
        if self.keeps_none:
            result = [
                None if all(row[k] is None for row in rows) else slot
                for k, slot in enumerate(result)
            ]
        return tuple(result)

    def _mixed_sums(
        self, rows: Sequence[Tuple[Optional[torch.Tensor], ...]], flat: torch.Tensor
    ) -> List[Any]:
        """Where the core cannot read all gradients as they are."""
        count = self.count
        sparse = [k for k in range(count) if any(is_sparse(row[k]) for row in rows)]
        summed = {k: _sum_in_order([row[k] for row in rows], self.device) for k in sparse}
        dense = tuple(
            tuple(None if k in summed else resolved(row[k]) for k in range(count))
            if summed
            else tuple(map(resolved, row))
            for row in rows
        )
        result = self._slots_of_sums(dense, flat)
        for k, total in summed.items():
            if total.layout == torch.sparse_coo:
                self._told(total._indices()), self._told(total._values())
            result[k] = total
        return result

    def _slots_of_sums(
        self, rows: Tuple[Tuple[Optional[torch.Tensor], ...], ...], flat: torch.Tensor
    ) -> List[Any]:
        self.reduce(rows, flat)
        return list(self.slots(flat))


def _strides_lost(
    tensors: Sequence[torch.Tensor], slots: Sequence[Tuple[int, Tuple[int, ...], Tuple[int, ...]]]
) -> List[Tuple[int, Tuple[int, ...], Tuple[int, ...]]]:
    """(place, shape, strides) of tensors whose slots differ in the stride of a dimension of size 1:
    a torch before 2.11 exports it changed. No element lies elsewhere for it, but torch tells
    by it whether channels come last, and so how to convolve."""
    lost = []
    for k, (tensor, (_, shape, strides)) in enumerate(zip(tensors, slots)):
        own = tensor.stride()
        differ = [size for size, a, b in zip(shape, own, strides) if a != b]
        if differ and tensor.numel() and max(differ) == 1:
            lost.append((k, shape, own))
    return lost


def _are_plain(tensors: Sequence[Optional[torch.Tensor]], dtype: torch.dtype) -> bool:
    """Whether none is sparse, nor lazily negated or conjugated."""
    return _C.are_plain(tuple(tensors), torch.strided, dtype.is_complex)


def is_sparse(tensor: Optional[torch.Tensor]) -> bool:
    return tensor is not None and tensor.layout != torch.strided


def resolved(tensor: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """Lazy conjugation and negation carried out: the core sees memory only."""
    if tensor is None:
        return None
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg()
    return tensor


def _sum_in_order(
    gradients: Sequence[Optional[torch.Tensor]], device: torch.device
) -> torch.Tensor:
    """Where a sparse gradient takes part: sparse + sparse stays sparse (coalesced, so that the
    order of the sum is fixed), sparse + dense is dense. Sparse tensors are moved by torch."""
    present = [gradient.to(device) for gradient in gradients if gradient is not None]
    total = present[0]
    for gradient in present[1:]:
        if total.layout == torch.strided:
            total = total + gradient
        else:
            total = gradient + total
    return total.coalesce() if total.layout == torch.sparse_coo else total


def find_transport(devices: Sequence[torch.device], transport: Optional[str]) -> Tuple[str, str]:
    """(name, reason) of what carries buckets between two or more devices, the first of them the
    home: for diagnostics. `transport` as Bucket's; NotImplementedError, with what is missing, when
    that cannot. The first time it opens the devices."""
    return _C.transport(tuple(map(dlpack_pair, devices)), transport)


def transport_or_lack(
    devices: Sequence[torch.device], transport: Optional[str]
) -> Optional[Tuple[Optional[str], str]]:
    """As `find_transport`, but (None, what is missing) when that cannot, and None where there are
    fewer than two devices."""
    if len(devices) < 2:
        return None
    try:
        return find_transport(devices, transport)
    except NotImplementedError as error:
        return None, str(error)


def _row_of(tensor: torch.Tensor) -> Tuple[Tuple[int, ...], Tuple[int, ...]]:
    """What tensors have in common that differ in their first dimension only."""
    return tuple(tensor.shape[1:]), tuple(tensor.stride()[1:])


def make_buckets(
    tensors: Sequence[torch.Tensor],
    left_out: Collection[int],
    parameter_count: int,
    devices: Sequence[torch.device],
    communication: Communication,
    limit_bytes: int,
    unused_grad: str,
    apart: Sequence[FlatWeights] = (),
    transport: Optional[str] = None,
    first_bytes: Optional[int] = None,
) -> List[Bucket]:
    """Buckets of at most `limit_bytes`, the first parameter's of `first_bytes`, each of one dtype
    and one requires_grad, for all tensors but those at the places `left_out`; one larger tensor
    makes its own, and so do the weights of an RNN, `apart`. The first `parameter_count` tensors are
    parameters. Buckets with buffers come first, since a replica 0 that updates a buffer in place
    has to wait until it was read; then in the order of their first tensors. Within a bucket order
    is of no matter."""
    open_buckets: dict = {}
    made: List[List[int]] = []
    flats = {flat.places: flat for flat in apart}
    settled = set(left_out).union(*flats)
    for place, tensor in enumerate(tensors):
        if place in settled:
            continue
        key = (tensor.dtype, tensor.requires_grad)
        size_bytes = tensor.numel() * tensor.element_size()
        group, room = open_buckets.get(key, (None, 0))
        if group is None or size_bytes > room:
            group, room = [], limit_bytes if place or first_bytes is None else first_bytes
            made.append(group)
        group.append(place)
        open_buckets[key] = group, room - size_bytes
    for group in made:
        # Alike ones side by side: their slots are made by one split (csrc/py_slots.h).
        group.sort(key=lambda place: _row_of(tensors[place]))
    groups: List[Sequence[int]] = [*flats, *made]
    groups.sort(key=lambda group: (max(group) < parameter_count, min(group)))
    return [
        Bucket(
            [resolved(tensors[place]) for place in group],
            group,
            [place < parameter_count for place in group],
            devices,
            communication,
            unused_grad,
            flats.get(tuple(group)),
            transport,
        )
        for group in groups
    ]
