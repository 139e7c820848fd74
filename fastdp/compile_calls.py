"""The arguments of a compiled call, and what a call that fails half-way must not have changed."""

from __future__ import annotations

from typing import Any, Dict, Hashable, List, Tuple

import torch
from torch import nn


class Arguments:
    """`structure` is what calls of one family have in common, `sizes` what they differ in: shapes,
    strides and numbers. Devices count as the replica's own or another. Tensors that share memory
    are told from such that do not: code for the latter is wrong where one of them is written."""

    __slots__ = ("args", "kwargs", "structure", "sizes")

    def __init__(self, args: Tuple[Any, ...], kwargs: Dict[str, Any], device: torch.device) -> None:
        self.args, self.kwargs = args, kwargs
        sizes: List[Hashable] = []
        trees = _walk(args, device, sizes), _walk(kwargs, device, sizes)
        self.structure = trees, _overlaps(self.tensors(args, kwargs))
        self.sizes = tuple(sizes)

    @staticmethod
    def tensors(*trees: Any) -> List[torch.Tensor]:
        """All tensors whose kind the structure tells."""
        found: List[torch.Tensor] = []
        for tree in trees:
            if isinstance(tree, torch.Tensor):
                found.append(tree)
            elif isinstance(tree, (tuple, list)):
                found.extend(Arguments.tensors(*tree))
            elif isinstance(tree, dict):
                found.extend(Arguments.tensors(*tree.values()))
        return found


def _walk(tree: Any, device: torch.device, sizes: List[Hashable]) -> Hashable:
    kind = type(tree)
    if isinstance(tree, torch.Tensor):
        place = None if tree.device == device else str(tree.device)
        if tree.layout == torch.strided:
            sizes.append((tree.shape, tree.stride()))
        view = tree.is_conj(), tree.is_neg()
        return kind, tree.dtype, tree.dim(), tree.layout, tree.requires_grad, place, view
    if isinstance(tree, (tuple, list)):
        return kind, tuple([_walk(item, device, sizes) for item in tree])
    if isinstance(tree, dict):
        items = [(_name(name), _walk(value, device, sizes)) for name, value in tree.items()]
        return kind, tuple(items)
    if kind in (int, float):
        sizes.append((kind, repr(tree)))
        return kind
    if tree is None or kind in (bool, str, bytes, torch.dtype, torch.device):
        return kind, tree
    return kind  # the compiler's guards look into it


def _overlaps(tensors: List[torch.Tensor]) -> Hashable:
    """For each tensor the first one with which it shares memory, and how far behind that it begins;
    None where all lie apart, which is nearly always told by their storages alone."""
    dense = [tensor for tensor in tensors if tensor.layout == torch.strided]
    if len({tensor.untyped_storage().data_ptr() for tensor in dense}) == len(dense):
        return None
    spans = [_span(tensor) for tensor in dense]
    found = []
    for i, span in enumerate(spans):
        k = next(k for k, other in enumerate(spans) if k == i or _meet(span, other))
        found.append((k, span[1] - spans[k][1]))
    return tuple(found) if any(k != i for i, (k, _) in enumerate(found)) else None


def _span(tensor: torch.Tensor) -> Tuple[int, int, int]:
    """(storage, first byte, behind the last one)."""
    size = tensor.element_size()
    start = tensor.storage_offset() * size
    steps = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    end = start + (steps + 1) * size if tensor.numel() else start
    return tensor.untyped_storage().data_ptr(), start, end


def _meet(one: Tuple[int, int, int], other: Tuple[int, int, int]) -> bool:
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]


def _name(key: Any) -> Hashable:
    return key if isinstance(key, (str, int)) else type(key)


def buffers_meet(module: nn.Module) -> bool:
    """Whether some of the module's buffers share memory with each other or with parameters."""
    buffers = list(module.buffers())
    return bool(buffers) and _overlaps([*buffers, *module.parameters()]) is not None


class State:
    """Buffers and random numbers as they are, to be put back if a call fails that has begun.
    Parameters are too large to be kept for that; whether the call wrote any can be told."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        counted = [p for p in module.parameters() if not p.is_inference()]
        self._parameters = [(parameter, parameter._version) for parameter in counted]
        self._device = device if device.type == "cuda" else None
        self._host = torch.get_rng_state()
        self._gpu = torch.cuda.get_rng_state(device) if self._device else None

    def parameters_written(self) -> bool:
        return any(parameter._version != before for parameter, before in self._parameters)

    def restore(self) -> None:
        for buffer, value in self._buffers:
            # Not as a write that counts: a backward may be still to come.
            buffer.data.copy_(value)
        torch.set_rng_state(self._host)
        if self._gpu is not None:
            torch.cuda.set_rng_state(self._gpu, self._device)
