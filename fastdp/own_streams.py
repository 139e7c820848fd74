"""Streams of fastdp's own that no wrapper owns: one for each use and GPU, made when it is first
asked for and kept. They are not torch's: torch has 32 streams for each GPU, and after that gives
the first again. What another thread launched on a stream while it is captured would become part of
the recording, and not run at the time."""

from __future__ import annotations

import threading
from typing import Dict, Tuple

import torch

from . import _C
from .devices import dlpack_pair

_lock = threading.Lock()
_streams: Dict[Tuple[str, torch.device], torch.cuda.Stream] = {}


def own_stream(use: str, device: torch.device) -> torch.cuda.Stream:
    """The same for all who name the same use."""
    stream = _streams.get((use, device))
    if stream is None:
        with _lock:
            stream = _streams.get((use, device))
            if stream is None:
                stream = _streams[use, device] = _opened(device)
    return stream


def _opened(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.ExternalStream(_C.open_stream(dlpack_pair(device)), device)
