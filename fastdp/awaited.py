"""Waiting for a bucket where it is first read.

On several GPUs a replica's forward starts while its parameters are still on their way. What makes
that safe is that nobody can read one without passing here: the dictionaries that hold a replica's
parameters and buffers (`_C.AwaitedDict`) make the reader's stream wait for the bucket first. (A
hook at the module that owns a parameter would not do: others read it too, as
`nn.TransformerEncoderLayer` reads `self_attn.out_proj.weight`.) A wait is enqueued on the stream,
never on the host, and once per bucket and stream (`_C.Gate`).
"""

from __future__ import annotations

import functools
from typing import Any, List

import torch

from . import _C, _torch_cuda
from .streams import current_stream

# Buckets, from the first on, that a recorded forward waits for one by one.
_SINGLE = 3


def make_gate(device: torch.device) -> _C.Gate:
    """A gate for the readers on one GPU; `_C.Gate.close` tells it what they have to wait for."""
    return _C.Gate(device.index, functools.partial(_wait, device), _torch_cuda.raw_stream)


def _wait(device: torch.device, event: Any) -> None:
    current_stream(device).wait_event(event)


def waits(bucket_count: int) -> List[int]:
    """For each bucket the one that is waited for where it is first read, itself or a later one: a
    wait costs a recorded forward some 10 us, and copies are much faster than compute. So groups of
    buckets, larger and larger ones, are waited for at once."""
    lasts: List[int] = []
    size = 1
    while len(lasts) < bucket_count:
        last = min(len(lasts) + size, bucket_count) - 1
        lasts += [last] * (last + 1 - len(lasts))
        if len(lasts) >= _SINGLE:
            size *= 2
    return lasts
