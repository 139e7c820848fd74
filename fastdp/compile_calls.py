"""The arguments of a compiled call, and what a call that fails half-way must not have changed."""

from __future__ import annotations

from typing import Any, Dict, Hashable, List, Tuple

import torch
from torch import nn


class Arguments:
    """`structure` is what calls of one family have in common, `sizes` what they differ in: shapes,
    strides and numbers. Devices count as the replica's own or another."""

    __slots__ = ("args", "kwargs", "structure", "sizes")

    def __init__(self, args: Tuple[Any, ...], kwargs: Dict[str, Any], device: torch.device) -> None:
        self.args, self.kwargs = args, kwargs
        sizes: List[Hashable] = []
        self.structure = _walk(args, device, sizes), _walk(kwargs, device, sizes)
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
        return kind, tree.dtype, tree.dim(), tree.layout, tree.requires_grad, place
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


def _name(key: Any) -> Hashable:
    return key if isinstance(key, (str, int)) else type(key)


class State:
    """Buffers and random numbers as they are, to be put back if a call fails that has begun."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        self._device = device if device.type == "cuda" else None
        self._host = torch.get_rng_state()
        self._gpu = torch.cuda.get_rng_state(device) if self._device else None

    def restore(self) -> None:
        for buffer, value in self._buffers:
            # Not as a write that counts: a backward may be still to come.
            buffer.data.copy_(value)
        torch.set_rng_state(self._host)
        if self._gpu is not None:
            torch.cuda.set_rng_state(self._gpu, self._device)
