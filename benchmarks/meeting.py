"""Where the processes of a DistributedDataParallel find each other: a file of their own, which
nobody else can have taken, as a port can be."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

import torch


def meeting_point() -> str:
    """A new one, until this process ends."""
    folder = tempfile.mkdtemp(prefix="fastdp-benchmark-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return "file://" + os.path.join(folder, "ranks")


def meet(where: str, device: torch.device, rank: int, ranks: int) -> None:
    """Called by each of them: makes the process group for its device."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, where, rank=rank, world_size=ranks)
