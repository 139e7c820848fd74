"""The gradients of a module as few tensors. After a backward they are slots of the flat buffers
that the replicas' gradients were summed in (`buckets.py`): neighbours can be read and written as
one.

What can be joined is seen from addresses: gradients of one dtype whose bytes lie side by side are
one flat tensor, and equal ones at equal distances (small tensors, whose slots have gaps) are one
matrix. On a GPU they have to be of one storage, which the whole is a view of; on the host, where
slots are tensors by themselves, it is made from the address. Nothing is assumed of where a gradient
came from: one that a user has put in place of another stands alone, or with what it lies beside.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import torch

from . import _C


class Run(NamedTuple):
    """`rows` pieces of `length` elements each, `pitch` elements apart, from the start of gradient
    `first` on."""

    first: int
    rows: int
    length: int
    pitch: int


class _Found(NamedTuple):
    """What the runs of a list of gradients were found from, and the runs."""

    addresses: List[int]
    description: bytes
    runs: List[Run]


_found: "weakref.WeakKeyDictionary[Any, _Found]" = weakref.WeakKeyDictionary()


def joined(owner: Any, gradients: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    """The strided gradients as few tensors over the same memory, without autograd, to be used while
    these are held. Empty ones are left out. `owner` is whose they are: at the next step they mostly
    lie as they did."""
    addresses = [gradient.data_ptr() for gradient in gradients]
    try:
        description = _C.describe(tuple(gradients))
    except Exception:  # what the core does not read, such as lazily conjugated ones
        return [gradient.detach() for gradient in gradients if gradient.numel()]
    found = _found.get(owner)
    if found is None or found.addresses != addresses or found.description != description:
        found = _Found(addresses, description, _runs(gradients, addresses))
        _found[owner] = found
    return [_view(gradients[run.first], run) for run in found.runs]


def _view(gradient: torch.Tensor, run: Run) -> torch.Tensor:
    if run.rows == 0 or run.length * run.rows == gradient.numel():
        return gradient.detach()
    length = run.pitch * (run.rows - 1) + run.length
    size_bytes = length * gradient.element_size()
    start_bytes = gradient.storage_offset() * gradient.element_size()
    if start_bytes + size_bytes <= gradient.untyped_storage().nbytes():
        whole = gradient.detach().as_strided((length,), (1,))
    else:
        memory = (ctypes.c_byte * size_bytes).from_address(gradient.data_ptr())
        whole = torch.frombuffer(memory, dtype=gradient.dtype)
    return whole if run.rows == 1 else whole.as_strided((run.rows, run.length), (run.pitch, 1))


def _runs(gradients: Sequence[torch.Tensor], addresses: Sequence[int]) -> List[Run]:
    """Where rows is 0: the gradient as it is."""
    runs: List[Run] = []
    groups: Dict[Tuple[Any, Any, int], List[int]] = {}
    for i, gradient in enumerate(gradients):
        if gradient.numel() == 0:
            continue
        if _is_dense(gradient):
            storage = gradient.untyped_storage().data_ptr() if gradient.is_cuda else 0
            groups.setdefault((gradient.dtype, gradient.device, storage), []).append(i)
        else:
            runs.append(Run(i, 0, 0, 0))
    for group in groups.values():
        group.sort(key=addresses.__getitem__)
        runs.extend(_matrices(_flats(group, gradients, addresses), gradients, addresses))
    return runs


def _flats(
    group: Sequence[int], gradients: Sequence[torch.Tensor], addresses: Sequence[int]
) -> List[Run]:
    """Those side by side, in order of addresses, as one row each. One that several parameters share
    or that overlaps another counts as often as it is there."""
    flats: List[Run] = []
    end = -1
    for i in group:
        count = gradients[i].numel()
        if addresses[i] == end:
            last = flats[-1]
            flats[-1] = Run(last.first, 1, last.length + count, last.length + count)
        else:
            flats.append(Run(i, 1, count, count))
        end = addresses[i] + count * gradients[i].element_size()
    return flats


def _matrices(
    flats: Sequence[Run], gradients: Sequence[torch.Tensor], addresses: Sequence[int]
) -> List[Run]:
    """Rows of one length at one distance as a matrix."""
    result: List[Run] = []
    for flat in flats:
        last = result[-1] if result else None
        if last is not None and last.length == flat.length:
            item_bytes = gradients[flat.first].element_size()
            distance_bytes = addresses[flat.first] - addresses[last.first]
            pitch = distance_bytes // item_bytes if last.rows == 1 else last.pitch
            if pitch > flat.length and distance_bytes == pitch * last.rows * item_bytes:
                result[-1] = Run(last.first, last.rows + 1, last.length, pitch)
                continue
        result.append(flat)
    return result


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill their memory without gaps or overlaps, in whichever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
