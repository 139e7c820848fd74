"""Names for the phases of a step, seen by torch.profiler (record_function), and as NVTX ranges
where `torch.autograd.profiler.emit_nvtx` is on. Nothing is made while no profiler listens.

Names: "DataParallel.forward", "fastdp: scatter", "fastdp: replicate", "fastdp: parallel_apply",
"fastdp: gather", "fastdp: replica 0", "fastdp: broadcast of bucket 0",
"fastdp: reduce of bucket 0", "fastdp: replay of forwards", "fastdp: replay of backwards". A range
on the host lasts until its call returns: what it enqueued on a GPU is another row of the trace.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ContextManager

from torch.autograd.profiler import record_function

from ._torch_state import profiler_listens

_NOTHING: ContextManager[Any] = nullcontext()


def phase(name: str) -> ContextManager[Any]:
    """Around a phase."""
    return record_function(f"fastdp: {name}") if profiler_listens() else _NOTHING


def forward_phase() -> ContextManager[Any]:
    """Around a whole forward, under torch's own name for it."""
    return record_function("DataParallel.forward") if profiler_listens() else _NOTHING


def replica_phase(rank: int) -> ContextManager[Any]:
    """Around one replica's forward, on its thread. torch's profiler looks at the threads of
    replicas other than 0 only if it is asked for all threads, as `DataParallel.trace` does."""
    return record_function(f"fastdp: replica {rank}") if profiler_listens() else _NOTHING


def bucket_phase(verb: str, number: int) -> ContextManager[Any]:
    """Around a verb ("broadcast", "reduce") on bucket `number` of its plan."""
    if not profiler_listens():
        return _NOTHING
    return record_function(f"fastdp: {verb} of bucket {number}")
