"""The differentiable moves, in inverse pairs: Scatter and Gather, Broadcast and Reduce.

Each is an ordinary autograd Function whose backward is its partner, so each is differentiable as
often as one likes. The bytes move in the core (`moves.py`, `buckets.py`). Where no gradient can
flow, the move is made without a node. `Land` moves nothing: it is where the copies of a Broadcast
become tensors of their readers' stream.

Broadcast has one more output than tensors, the token: an empty tensor that every Gather of the same
forward takes and answers with None. The engine thus visits the node of a bucket none of whose
parameters were used, which gives them the zeros that nn.DataParallel gives.
"""

from __future__ import annotations

import warnings
from itertools import chain, islice
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch.autograd import Function

from . import _torch_autograd, moves, streams
from .arrays import TORCH
from .buckets import Bucket
from .phases import bucket_phase

Tensors = Tuple[torch.Tensor, ...]
Gradients = Tuple[Optional[torch.Tensor], ...]


def needs_node(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a gradient or a tangent has to be carried: a tangent would be dropped silently."""
    if _torch_autograd.forward_mode_active():
        return True
    return torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors])


def scatter_tensor(
    tensor: torch.Tensor,
    devices: Sequence[torch.device],
    dim: int,
    sizes: Optional[Sequence[int]] = None,
) -> Tensors:
    """Pieces of the given sizes, or as `tensor.chunk` cuts them, each in new memory on its device;
    fewer than devices when there are fewer rows."""
    if sizes is None:
        size = tensor.size(dim)
        sizes = moves.chunk_lengths(size, len(devices)) if size else [0] * len(devices)
    dim = dim % tensor.dim()
    if needs_node((tensor,)):
        return Scatter.apply(tuple(devices), tuple(sizes), dim, tensor)
    return moves.scatter(TORCH, TORCH.source(tensor, "inputs"), devices, sizes, dim)


class Scatter(Function):
    """Consecutive pieces of one tensor along `dim`, piece i on devices[i]."""

    @staticmethod
    def forward(ctx: Any, devices: Any, sizes: Any, dim: int, tensor: torch.Tensor) -> Tensors:
        ctx.dim, ctx.home, ctx.node_device = dim, tensor.device, devices[0]
        ctx.compute = streams.Snapshot((*devices, tensor.device))
        return moves.scatter(TORCH, TORCH.source(tensor, "inputs"), devices, sizes, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        with ctx.compute.in_backward(ctx.node_device):
            return None, None, None, _gathered(gradients, ctx.home, ctx.dim)


class Gather(Function):
    """Tensors joined along `dim` on one device, then tokens, which get no gradient."""

    @staticmethod
    def forward(
        ctx: Any, device: torch.device, dim: int, count: int, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.dim, ctx.token_count = dim, len(tensors) - count
        ctx.devices = tuple(tensor.device for tensor in tensors[:count])
        ctx.sizes = tuple(tensor.size(dim) for tensor in tensors[:count])
        ctx.node_device = device
        ctx.compute = streams.Snapshot((*ctx.devices, device))
        return _joined(tensors[:count], device, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with ctx.compute.in_backward(ctx.node_device):
            if torch.is_grad_enabled():
                pieces = Scatter.apply(ctx.devices, ctx.sizes, ctx.dim, gradient)
            else:
                source = TORCH.source(gradient, "gradient")
                pieces = moves.scatter(TORCH, source, ctx.devices, ctx.sizes, ctx.dim)
        return (None, None, None, *pieces, *(None,) * ctx.token_count)


def _joined(tensors: Sequence[torch.Tensor], device: torch.device, dim: int) -> torch.Tensor:
    return moves.gather(TORCH, [TORCH.source(t, "outputs") for t in tensors], dim, device)


def _gathered(tensors: Sequence[torch.Tensor], device: torch.device, dim: int) -> torch.Tensor:
    if needs_node(tensors):
        return Gather.apply(device, dim, len(tensors), *tensors)
    return _joined(tensors, device, dim)


def gather_tensors(
    tensors: Sequence[torch.Tensor],
    device: torch.device,
    dim: int,
    tokens: Tensors,
    path: str,
) -> torch.Tensor:
    """One tensor of the replicas' outputs, joined in replica 0's dtype, as torch's gather joins
    them; `path` names it in errors."""
    if dim == 0 and all(tensor.dim() == 0 for tensor in tensors):
        warnings.warn(
            "Was asked to gather along dimension 0, but all input tensors were scalars; will "
            "instead unsqueeze and return a vector.",
            stacklevel=2,
        )
        tensors = [tensor.view(1) for tensor in tensors]
    check_fit(tensors, dim, path)
    dtype = tensors[0].dtype
    tensors = [t if t.dtype == dtype else t.to(dtype) for t in tensors]
    dim = dim % tensors[0].dim()
    if needs_node(tensors):
        return Gather.apply(device, dim, len(tensors), *tensors, *tokens)
    return _joined(tensors, device, dim)


def check_fit(tensors: Sequence[torch.Tensor], dim: int, path: str) -> None:
    """Whether the replicas' tensors can be joined; `path` names them in the error."""
    first = tensors[0]
    if not -first.dim() <= dim < first.dim():
        raise RuntimeError(
            f"{path} has shape {tuple(first.shape)} on replica 0: it cannot be gathered along "
            f"dimension {dim}"
        )
    for rank, tensor in enumerate(tensors):
        if tensor.shape == first.shape and tensor.dtype == first.dtype:
            continue  # as nearly always
        if tensor.is_complex() != first.is_complex():
            raise RuntimeError(
                f"{path} has dtype {first.dtype} on replica 0 but {tensor.dtype} on replica {rank}"
            )
        shape, expected = list(tensor.shape), list(first.shape)
        if len(shape) == len(expected):
            shape[dim] = expected[dim]
        if shape != expected:
            raise RuntimeError(
                f"{path} cannot be gathered along dimension {dim}: it has shape "
                f"{tuple(first.shape)} on replica 0 ({first.device}) but {tuple(tensor.shape)} on "
                f"replica {rank} ({tensor.device})"
            )


@_torch_autograd.are_false
class Broadcast(Function):
    """A bucket's tensors, once for each rank: count * ranks outputs, rank by rank, and the token.
    With `home`, rank 0's are the inputs themselves under new names (same memory and version
    counter, so that a graph through them raises after an in-place update). `flats` are the buffers
    for the copies (`Bucket.take`), `compute` the forward's compute streams. For each rank in
    `landings` the output is one empty tensor, the link; its copies are left there for `Land`."""

    @staticmethod
    def forward(
        ctx: Any,
        bucket: Bucket,
        home: bool,
        flats: Any,
        compute: Any,
        landings: Dict[int, Tensors],
        *tensors: torch.Tensor,
    ) -> Tensors:
        ctx.set_materialize_grads(False)
        ctx.bucket, ctx.compute = bucket, compute
        ctx.linked = ()
        outputs: Sequence[torch.Tensor] = bucket.copies(tensors, home, flats)
        if landings:
            ctx.linked = [rank in landings for rank in range(len(outputs) // bucket.count)]
            outputs = _landed(outputs, bucket, landings)
        return (*outputs, torch.empty(0, device=bucket.device))

    @staticmethod
    def backward(ctx: Any, *gradients: Optional[torch.Tensor]) -> Any:
        bucket, compute = ctx.bucket, ctx.compute
        communication = bucket.communication
        flat = bucket.take_for_sums()  # before the waits, as in a forward
        gradients = _unpacked(gradients[:-1], ctx.linked, bucket.count)
        with communication.in_backward(compute, gradients):
            if communication.witness is not None:
                communication.witness.look(gradients, bucket.count)
            with bucket_phase("reduce", bucket.number):
                sums = _reduced(bucket, compute, flat, gradients)
        return (None, None, None, None, None, *sums)


def _landed(
    copies: Sequence[torch.Tensor], bucket: Bucket, landings: Dict[int, Tensors]
) -> List[torch.Tensor]:
    """The outputs of a broadcast some of whose ranks are linked."""
    outputs: List[torch.Tensor] = []
    for start in range(0, len(copies), bucket.count):
        rank, row = start // bucket.count, copies[start : start + bucket.count]
        if rank in landings:
            landings[rank] = tuple(row)
            row = [torch.empty(0, device=bucket.devices[rank])]
        outputs.extend(row)
    return outputs


def _unpacked(gradients: Gradients, linked: Sequence[bool], count: int) -> Gradients:
    """Those of each copy, rank by rank, of those of the outputs."""
    if not linked:
        return gradients
    rest = iter(gradients)
    rows: List[Sequence[Optional[torch.Tensor]]] = []
    for is_linked in linked:
        if is_linked:
            parcel = next(rest)
            rows.append((None,) * count if parcel is None else parcel.fastdp_gradients)
        else:
            rows.append(tuple(islice(rest, count)))
    return tuple(chain.from_iterable(rows))


@_torch_autograd.are_false
class Land(Function):
    """One rank's copies of a bucket: `copies`, which nobody else holds, as outputs of a node whose
    stream is that of their readers. The gradients of all go back to `Broadcast` by one edge, its
    link, as an attribute of an empty tensor. One by one they would cost the host an event and a
    wait each wherever they go to another stream (the engine makes them), and hold back memory. An
    attribute travels with its tensor, so each backward has its own; and the sum is made of the
    gradients themselves, so that it is differentiable."""

    @staticmethod
    def forward(ctx: Any, copies: Tensors, link: torch.Tensor) -> Tensors:
        ctx.set_materialize_grads(False)
        ctx.like = link.dtype, link.device
        return copies

    @staticmethod
    def backward(ctx: Any, *gradients: Optional[torch.Tensor]) -> Any:
        dtype, device = ctx.like
        parcel = torch.empty(0, dtype=dtype, device=device)
        parcel.fastdp_gradients = gradients
        return None, parcel


class Reduce(Function):
    """The sum over ranks of each tensor of a bucket, in rank order: inputs rank by rank, None where
    there is no gradient."""

    @staticmethod
    def forward(
        ctx: Any, bucket: Bucket, compute: Any, flat: Any, *gradients: Optional[torch.Tensor]
    ) -> Gradients:
        # Zeros that the engine makes would be in memory that nobody has waited for.
        ctx.set_materialize_grads(False)
        ctx.bucket, ctx.compute = bucket, compute
        ctx.present = [gradient is not None for gradient in gradients]
        return bucket.sums(gradients, flat[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        bucket = ctx.bucket
        communication = bucket.communication
        with communication.in_backward(ctx.compute, gradients, spreads=True):
            is_partial = any([gradient is None for gradient in gradients])
            zeros = bucket.take_for_sums() if is_partial else None
            flats = bucket.take(False)
            communication.begin(ctx.compute)  # behind whoever had that memory, as in a forward
            if zeros is not None:
                gradients = bucket.with_zeros(gradients, zeros)
            if torch.is_grad_enabled():
                copies = Broadcast.apply(bucket, False, flats, ctx.compute, {}, *gradients)[:-1]
            else:
                copies = bucket.copies(gradients, False, flats)
        present = zip(copies, ctx.present)
        return (None, None, None, *(copy if there else None for copy, there in present))


def _reduced(
    bucket: Bucket, compute: Any, flat: torch.Tensor, gradients: Gradients
) -> Gradients:
    if torch.is_grad_enabled() and any(g is not None and g.requires_grad for g in gradients):
        # In a tuple: memory to write is no input of the node.
        return Reduce.apply(bucket, compute, (flat,), *gradients)
    return bucket.sums(gradients, flat)
