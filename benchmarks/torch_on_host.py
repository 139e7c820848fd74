"""torch's own nn.DataParallel Python on host tensors: the rival of the benchmarks.

tests/oracle.py runs the sources of torch.nn.parallel on host replicas. Its stand-ins for torch's
copies in C++ are written for clarity; here they are as fast as Python can make them (one flat copy,
one call that cuts it), so that what is timed beside fastdp is torch's Python.
"""

from __future__ import annotations

import importlib
import importlib.util
import types
from pathlib import Path
from typing import Any, Dict, List, Sequence

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def _load_oracle() -> Any:
    path = Path(__file__).resolve().parent.parent / "tests" / "oracle.py"
    spec = importlib.util.spec_from_file_location("torch_on_host_oracle", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _broadcast_coalesced(tensors: Any, devices: Sequence[int], buffer_size: int = 0) -> List[Any]:
    detached = [tensor.detach() for tensor in tensors]
    copies = [
        list(_unflatten_dense_tensors(_flatten_dense_tensors(detached), detached))
        if detached  # of none an older torch makes nothing flat
        else []
        for _ in devices[1:]
    ]
    return [list(tensors), *copies]


def _reduce_add_coalesced(inputs: Any, destination: Any = None, buffer_size: int = 0) -> Any:
    total = _flatten_dense_tensors(inputs[0])
    for rank in inputs[1:]:
        total.add_(_flatten_dense_tensors(rank))
    return _unflatten_dense_tensors(total, inputs[0])


def _scatter(
    tensor: torch.Tensor,
    devices: Any = None,
    chunk_sizes: Any = None,
    dim: int = 0,
    streams: Any = None,
) -> Any:
    if chunk_sizes is None:
        return tuple(chunk.clone() for chunk in tensor.chunk(len(devices), dim))
    return tuple(chunk.clone() for chunk in tensor.split_with_sizes(list(chunk_sizes), dim))


def _gather(tensors: Any, dim: int = 0, destination: Any = None) -> torch.Tensor:
    return torch.cat(tuple(tensors), dim)


oracle = _load_oracle()
oracle.comm.broadcast_coalesced = _broadcast_coalesced
oracle.comm.reduce_add_coalesced = _reduce_add_coalesced
oracle.comm.scatter = _scatter
oracle.comm.gather = _gather

DataParallel = oracle.DataParallel
replicate = oracle.replicate
Broadcast = importlib.import_module(f"{oracle.PACKAGE}._functions").Broadcast


def replicate_without_broadcast(copies: Dict[int, List[torch.Tensor]]) -> Any:
    """torch's `replicate` with ready-made copies in place of its broadcast. `copies`: for the id of
    the first tensor of a list, a copy of the list; each device is given the same."""

    def ready_made(tensors: Any, devices: Sequence[int], detach: bool = False) -> Any:
        return [copies[id(tensors[0])] for _ in devices] if len(tensors) > 0 else []

    own = oracle.replicate
    names = {**own.__globals__, "_broadcast_coalesced_reshape": ready_made}
    return types.FunctionType(own.__code__, names, own.__name__, own.__defaults__)
