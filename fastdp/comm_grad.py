"""The moves of `fastdp.comm` as autograd sees them: two inverse pairs, each the other's backward,
so they can be differentiated any number of times; and linear, so the tangent of a result is the
result of the tangents. All results are new memory. A backward moves on the streams that were
current in the forward, not on those that autograd's thread has on other devices than the node's.
"""

from __future__ import annotations

from typing import Any, Sequence, Tuple

import torch
from torch.autograd import Function, forward_ad

from . import _torch_autograd, moves, streams
from .arrays import TORCH


def is_recorded(tensors: Sequence[torch.Tensor]) -> bool:
    """True if autograd, backward or forward mode, must see what is made of these tensors."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    return _torch_autograd.forward_mode_active() and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    )


class Scatter(Function):
    @staticmethod
    def forward(ctx: Any, devices: Any, sizes: Any, dim: int, stream: Any, tensor: Any) -> Any:
        ctx.devices, ctx.sizes, ctx.dim, ctx.home = devices, sizes, dim, tensor.device
        ctx.compute = streams.Snapshot((*devices, tensor.device))
        source = TORCH.source(tensor, "tensor")
        return moves.scatter(TORCH, source, devices, sizes, dim, stream)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Tuple[Any, ...]:
        with ctx.compute.in_backward(ctx.devices[0]):
            return None, None, None, None, Gather.apply(ctx.dim, ctx.home, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return Scatter.apply(ctx.devices, ctx.sizes, ctx.dim, None, tangents[-1])


class Gather(Function):
    @staticmethod
    def forward(ctx: Any, dim: int, device: torch.device, *tensors: torch.Tensor) -> Any:
        ctx.dim, ctx.device = dim, device
        ctx.homes = tuple(tensor.device for tensor in tensors)
        ctx.sizes = tuple(tensor.size(dim) for tensor in tensors)
        ctx.compute = streams.Snapshot((*ctx.homes, device))
        sources = [TORCH.source(tensor, f"tensors[{i}]") for i, tensor in enumerate(tensors)]
        return moves.gather(TORCH, sources, dim, device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Any, ...]:
        with ctx.compute.in_backward(ctx.device):
            return (None, None, *Scatter.apply(ctx.homes, ctx.sizes, ctx.dim, None, grad))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return Gather.apply(ctx.dim, ctx.device, *tangents[2:])


class Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, devices: Sequence[torch.device], tensor: torch.Tensor) -> Any:
        ctx.devices, ctx.home = devices, tensor.device
        ctx.compute = streams.Snapshot((*devices, tensor.device))
        return moves.broadcast(TORCH, TORCH.source(tensor, "tensor"), devices)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Tuple[Any, ...]:
        with ctx.compute.in_backward(ctx.devices[0]):
            return None, Reduce.apply(ctx.home, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return Broadcast.apply(ctx.devices, tangents[-1])


class Reduce(Function):
    @staticmethod
    def forward(ctx: Any, device: torch.device, *tensors: torch.Tensor) -> Any:
        ctx.device, ctx.homes = device, tuple(tensor.device for tensor in tensors)
        ctx.compute = streams.Snapshot((*ctx.homes, device))
        sources = [TORCH.source(tensor, f"inputs[{i}]") for i, tensor in enumerate(tensors)]
        return moves.reduce(TORCH, sources, device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Any, ...]:
        with ctx.compute.in_backward(ctx.device):
            return (None, *Broadcast.apply(ctx.homes, grad))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return Reduce.apply(ctx.device, *tangents[1:])
