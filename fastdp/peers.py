"""Memory of GPUs that is open to each other, before the first move between them."""

from __future__ import annotations

import os
from itertools import combinations
from typing import FrozenSet, Iterable, Set

import torch

# GPUs all of whose memory is open to each other: pairs, and whole lists that were asked for. A
# child has no CUDA of its parent's.
_open: Set[FrozenSet[torch.device]] = set()
os.register_at_fork(after_in_child=_open.clear)


def open_peers(devices: Iterable[torch.device]) -> None:
    """Before the first move between some GPUs, which may come before any of the parameters. torch
    opens its memory to peers itself, at its first copy between two GPUs: memory that it maps piece
    by piece (expandable segments) can be opened by nobody else. Done once in a process for each two
    GPUs; threads that meet here may both do it."""
    gpus = tuple(dict.fromkeys(device for device in devices if device.type == "cuda"))
    if len(gpus) < 2 or frozenset(gpus) in _open:
        return
    for pair in combinations(gpus, 2):
        if frozenset(pair) not in _open:
            for source, target in (pair, pair[::-1]):
                torch.empty(1, device=source).to(target)
            _open.add(frozenset(pair))
    _open.add(frozenset(gpus))
