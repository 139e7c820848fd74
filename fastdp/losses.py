"""Losses of replicas: summed where they are, or weighted by how many samples each is a mean of."""

from __future__ import annotations

import math
from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch.autograd import Function

from .containers import map_tensors
from .copies import sum_of
from .cuts import Rows, find_tensors

__all__ = ["sum_losses"]


def sum_losses(
    losses: Sequence[torch.Tensor], weights: Optional[Sequence[float]] = None
) -> torch.Tensor:
    """The sum of losses that lie on several devices, as one node of autograd.

    Made for `DataParallel(..., gather_outputs=False)`: compute a loss from each replica's output
    on the device where it is, then sum, and call backward once.

    Args:
        losses: floating point tensors of one shape and dtype, all on CUDA devices or all on the
            host; as a rule 0-dim, one for each replica.
        weights: a number for each loss, which it is multiplied by. None: 1 each. The mean of a
            batch is the sum of its chunks' means with each chunk's share of the samples as weight.

    Returns:
        A tensor on the first loss's device, added in the order given; differentiable any number of
        times. Nothing waits for a GPU.

    Raises:
        TypeError: something else than floating point tensors, weights that are no numbers.
        ValueError: an empty list, losses that differ in shape, dtype or kind of device, a number
            of weights that is not the number of losses, weights that are not finite.

    >>> sum_losses([torch.tensor(1.0), torch.tensor(3.0)], [0.75, 0.25])
    tensor(1.5000)
    """
    losses = _checked_losses(losses)
    numbers = None if weights is None else _checked_weights(weights, len(losses))
    return sum_of(losses, losses[0].device, numbers)


def _checked_losses(losses: Any) -> List[torch.Tensor]:
    if isinstance(losses, torch.Tensor) or not hasattr(losses, "__iter__"):
        raise TypeError(f"losses is a {type(losses).__name__}: it must be a list of tensors")
    losses = list(losses)
    if not losses:
        raise ValueError("losses is empty: at least one tensor is needed")
    for i, loss in enumerate(losses):
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"losses[{i}] is a {type(loss).__name__}: it must be a tensor")
        if not (loss.is_floating_point() or loss.is_complex()):
            raise TypeError(f"losses[{i}] has dtype {loss.dtype}: it must be floating point")
        for what, mine, first in (
            ("shape", tuple(loss.shape), tuple(losses[0].shape)),
            ("dtype", loss.dtype, losses[0].dtype),
            ("kind of device", loss.device.type, losses[0].device.type),
        ):
            if mine != first:
                raise ValueError(f"losses[{i}] has {what} {mine}, but losses[0] has {first}")
    return losses


def _checked_weights(weights: Any, count: int) -> Tuple[float, ...]:
    if isinstance(weights, torch.Tensor) or not hasattr(weights, "__iter__"):
        raise TypeError(f"weights is a {type(weights).__name__}: it must be a list of numbers")
    weights = list(weights)
    if len(weights) != count:
        raise ValueError(f"weights has {len(weights)} entries: it must have {count}, as losses")
    for i, weight in enumerate(weights):
        if isinstance(weight, torch.Tensor) or not hasattr(weight, "__float__"):
            raise TypeError(f"weights[{i}] is a {type(weight).__name__}: it must be a number")
        if not math.isfinite(weight):
            raise ValueError(f"weights[{i}] is {weight}: it must be finite")
    return tuple(float(weight) for weight in weights)


def weigh(outputs: List[Any], rows: Sequence[Any], named: Sequence[Any], dim: int) -> List[Any]:
    """The replicas' outputs with each 0-dim floating point tensor weighted by its replica's share
    of the samples, so that the mean over replicas is that over samples."""
    if len(outputs) == 1:
        return outputs
    sizes = rows.sizes if isinstance(rows, Rows) else _sizes_found(rows, named, dim)
    total, count = sum(sizes), len(outputs)
    if len(sizes) != count or total == 0:
        return outputs  # constants only: every replica did the same
    factors = [size * count / total for size in sizes]

    def weighted(factor: float) -> Any:
        def change(tensor: torch.Tensor) -> torch.Tensor:
            is_loss = tensor.dim() == 0 and (tensor.is_floating_point() or tensor.is_complex())
            return tensor * factor if is_loss else tensor

        return change

    return [
        output if factor == 1 else map_tensors(output, weighted(factor))
        for output, factor in zip(outputs, factors)
    ]


def _sizes_found(rows: Sequence[Any], named: Sequence[Any], dim: int) -> List[int]:
    """Where a scatter of the user's cut the arguments: the size of the first tensor of each."""
    sizes = []
    for rank, arguments in enumerate(zip(rows, named)):
        tensors = [tensor for tensor in find_tensors(arguments) if tensor.dim() > 0]
        if not tensors:
            raise ValueError(
                f"loss_weighting='chunk' cannot tell how many samples replica {rank} has: "
                "scatter() gave it no tensor with samples"
            )
        sizes.append(tensors[0].size(dim))
    return sizes


class Anchor(Function):
    """A tensor under a new name that also depends on tokens (functions.py)."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *tokens: torch.Tensor) -> torch.Tensor:
        ctx.token_count = len(tokens)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (gradient, *(None,) * ctx.token_count)


def anchored(outputs: List[Any], tokens: Tuple[torch.Tensor, ...]) -> List[Any]:
    """Outputs that are not gathered: parameters that none of them used get their zeros all the
    same."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        return Anchor.apply(tensor, *tokens) if tensor.requires_grad else tensor

    return [map_tensors(output, change) for output in outputs] if tokens else outputs
