"""Whole copies of a tensor and weighted sums of tensors, across devices: an inverse pair of
differentiable nodes, each the other's backward, so both can be differentiated any number of times.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

import torch
from torch.autograd import Function

from . import moves, streams
from .arrays import TORCH
from .functions import needs_node

Weights = Optional[Tuple[float, ...]]


class Copies(Function):
    """One tensor on each device, times its weight, in new memory."""

    @staticmethod
    def forward(
        ctx: Any, devices: Tuple[torch.device, ...], weights: Weights, tensor: torch.Tensor
    ) -> Tuple[torch.Tensor, ...]:
        ctx.weights, ctx.home, ctx.node_device = weights, tensor.device, devices[0]
        ctx.compute = streams.Snapshot((*devices, tensor.device))
        return _copied(tensor, devices, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        with ctx.compute.in_backward(ctx.node_device):
            return None, None, sum_of(gradients, ctx.home, ctx.weights)


class Sum(Function):
    """The sum of tensors times their weights, in their order, on one device."""

    @staticmethod
    def forward(
        ctx: Any, device: torch.device, weights: Weights, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.devices, ctx.weights = tuple(tensor.device for tensor in tensors), weights
        ctx.node_device = device
        ctx.compute = streams.Snapshot((*ctx.devices, device))
        return _summed(tensors, device, weights)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with ctx.compute.in_backward(ctx.node_device):
            return (None, None, *copies_of(gradient, ctx.devices, ctx.weights))


def copies_of(
    tensor: torch.Tensor, devices: Sequence[torch.device], weights: Weights = None
) -> Tuple[torch.Tensor, ...]:
    if needs_node((tensor,)):
        return Copies.apply(tuple(devices), weights, tensor)
    return _copied(tensor, devices, weights)


def sum_of(
    tensors: Sequence[torch.Tensor], device: torch.device, weights: Weights = None
) -> torch.Tensor:
    if needs_node(tensors):
        return Sum.apply(device, weights, *tensors)
    return _summed(tensors, device, weights)


def _copied(
    tensor: torch.Tensor, devices: Sequence[torch.device], weights: Weights
) -> Tuple[torch.Tensor, ...]:
    copies = moves.broadcast(TORCH, TORCH.source(tensor, "inputs"), devices)
    for copy, weight in zip(copies, weights or ()):
        copy.mul_(weight)
    return copies


def _summed(
    tensors: Sequence[torch.Tensor], device: torch.device, weights: Weights
) -> torch.Tensor:
    sources = [TORCH.source(tensor, f"tensors[{i}]") for i, tensor in enumerate(tensors)]
    if weights is not None:
        sources = [source * weight for source, weight in zip(sources, weights)]
    if all(source.device != device for source in sources):
        # Sums are made where one of the terms is; then one copy.
        total = moves.reduce(TORCH, sources, sources[0].device)
        return moves.broadcast(TORCH, total, (device,))[0]
    return moves.reduce(TORCH, sources, device)
