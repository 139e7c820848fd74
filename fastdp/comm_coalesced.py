"""Many arrays moved in few buckets. Arrays of one dtype and one device go into a bucket, in order,
until `limit_bytes` is reached; an array larger than that has a bucket of its own. What comes out is
in the order of what came in, whatever the mix of dtypes.

A sparse COO tensor travels as its indices and its values, two dense arrays of the list. Sums of
sparse tensors are torch's own additions, in rank order.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Sequence, Tuple

import torch

from . import _C, moves
from .arrays import DLPACK, TORCH
from .peers import open_peers


def broadcast(
    family: Any, arrays: Sequence[Any], devices: Sequence[torch.device], limit_bytes: int
) -> List[List[Any]]:
    """result[i][k] is arrays[k] in new memory on devices[i]."""
    if family is DLPACK:
        columns = [
            moves.broadcast(family, family.source(array, f"tensors[{k}]"), devices)
            for k, array in enumerate(arrays)
        ]
        return [list(row) for row in zip(*columns)]
    if family is TORCH and any(array.is_sparse for array in arrays):
        return _broadcast_sparse(arrays, devices, limit_bytes)
    sources = [family.source(array, f"tensors[{k}]") for k, array in enumerate(arrays)]
    return _broadcast_dense(family, sources, devices, limit_bytes)


def _broadcast_dense(
    family: Any, sources: Sequence[Any], devices: Sequence[torch.device], limit_bytes: int
) -> List[List[Any]]:
    results: List[List[Any]] = [[None] * len(sources) for _ in devices]
    if not devices:  # the tensors themselves are all that was asked for
        return results
    open_peers((*devices, *map(family.device, sources)))
    for group in _groups(family, [sources], limit_bytes):
        prototypes = tuple(sources[k] for k in group)
        bucket = _C.Bucket(prototypes)
        flats = tuple(family.flat(bucket, prototypes[0], device) for device in devices)
        bucket.broadcast(prototypes, flats)
        for row, flat in zip(results, flats):
            for k, slot in zip(group, family.slots(bucket, flat)):
                row[k] = slot
    return results


def _broadcast_sparse(
    arrays: Sequence[torch.Tensor], devices: Sequence[torch.device], limit_bytes: int
) -> List[List[torch.Tensor]]:
    parts: List[torch.Tensor] = []
    for k, array in enumerate(arrays):
        plain = array.detach()
        pieces = (plain._indices(), plain._values()) if array.is_sparse else (plain,)
        parts.extend(TORCH.source(piece, f"tensors[{k}]") for piece in pieces)
    results = []
    for row in _broadcast_dense(TORCH, parts, devices, limit_bytes):
        moved = iter(row)
        results.append([_whole(array, moved) for array in arrays])
    return results


def _whole(array: torch.Tensor, moved: Iterator[torch.Tensor]) -> torch.Tensor:
    if not array.is_sparse:
        return next(moved)
    indices, values, coalesced = next(moved), next(moved), array.is_coalesced()
    return torch.sparse_coo_tensor(
        indices, values, array.shape, is_coalesced=coalesced, check_invariants=False
    )


def reduce(
    family: Any, ranks: Sequence[Sequence[Any]], device: torch.device, limit_bytes: int
) -> List[Any]:
    """result[k] is the sum over ranks of ranks[r][k], in rank order, in new memory on `device`."""
    if family is DLPACK:
        return [
            moves.reduce(family, [family.source(a, "inputs") for a in column], device)
            for column in zip(*ranks)
        ]
    results: List[Any] = [None] * len(ranks[0])
    dense: List[List[Any]] = [[] for _ in ranks]
    places: List[int] = []
    for k, column in enumerate(zip(*ranks)):
        if family is TORCH and all(array.is_sparse for array in column):
            results[k] = add_sparse([array.detach() for array in column], device)
            continue
        places.append(k)
        for rank, array in enumerate(column):
            if family is TORCH and array.is_sparse:
                array = array.detach().to_dense()
            dense[rank].append(family.source(array, f"inputs[{rank}][{k}]"))
    open_peers((device, *(family.device(row[0]) for row in dense if row)))
    for group in _groups(family, dense, limit_bytes):
        bucket = _C.Bucket(tuple(dense[0][j] for j in group))
        flat = family.flat(bucket, dense[0][group[0]], device)
        bucket.reduce(tuple(tuple(row[j] for j in group) for row in dense), flat)
        for j, slot in zip(group, family.slots(bucket, flat)):
            results[places[j]] = slot
    return results


def add_sparse(column: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The sum of sparse COO tensors by torch's additions, in the order given; new memory."""
    result = column[0].to(device)
    for other in column[1:]:
        result = result + other.to(device)
    return result.clone() if len(column) == 1 else result


def _groups(family: Any, rows: Sequence[Sequence[Any]], limit_bytes: int) -> Iterator[List[int]]:
    """Column numbers of `rows`, bucket by bucket. Every row of a bucket is of one device."""
    open_groups: Dict[Tuple[Any, ...], Tuple[List[int], int]] = {}
    for k, column in enumerate(zip(*rows)):
        key = (family.dtype(column[0]), *(family.device(array) for array in column))
        group, size_bytes = open_groups.get(key, ([], 0))
        more_bytes = family.size_bytes(column[0])
        if group and size_bytes + more_bytes > limit_bytes:
            yield group
            group, size_bytes = [], 0
        group.append(k)
        open_groups[key] = (group, size_bytes + more_bytes)
    for group, _ in open_groups.values():
        yield group
