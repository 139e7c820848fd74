"""Streams of fastdp's own that no wrapper owns: one for each use and GPU, made when it is first
asked for and kept. torch has 32 streams for each GPU, and after that gives the first again."""

from __future__ import annotations

from typing import Dict, Tuple

import torch

_streams: Dict[Tuple[str, torch.device], torch.cuda.Stream] = {}


def own_stream(use: str, device: torch.device) -> torch.cuda.Stream:
    """The same for all who name the same use; threads that meet here get one."""
    stream = _streams.get((use, device))
    if stream is None:
        stream = _streams.setdefault((use, device), torch.cuda.Stream(device))
    return stream
