"""Counting the memory of a computation by what its operators make: when a storage first comes out
of one, and when the last that refers to it is gone. It needs no allocator that counts, and works on
tensors that have no memory at all."""

from __future__ import annotations

import weakref
from typing import Any, Dict, Iterable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .cuts import find_tensors

# torch's CUDA allocator hands memory out in multiples of this.
_CUDA_GRAIN_BYTES = 512


class Ledger(TorchDispatchMode):
    """While it is on, counts by device what operators make: `live` bytes, and their `peak`.

    Args:
        workspace: bytes that an operator, by its overload packet, takes for as long as it runs,
            beside its results.
    """

    def __init__(self, workspace: Dict[Any, int]) -> None:
        super().__init__()
        self.live: Dict[torch.device, int] = {}
        self.peak: Dict[torch.device, int] = {}
        self.counts = True  # False: what is made now counts nothing
        self._workspace = workspace
        self._known: Dict[int, Any] = {}  # by identity of the storage

    def ignore(self, tensors: Iterable[Any]) -> None:
        """These are there already."""
        for tensor in tensors:
            self._enter(tensor, False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        workspace = self._workspace.get(func.overloadpacket, 0)
        for tensor in find_tensors(result):
            self._enter(tensor, self.counts)
            if workspace:
                whole = self.live.get(tensor.device, 0) + workspace
                self.peak[tensor.device] = max(self.peak.get(tensor.device, 0), whole)
        return result

    def _enter(self, tensor: torch.Tensor, counted: bool) -> None:
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        # The same object for as long as anything refers to the memory.
        identity = id(storage)
        if identity in self._known:
            return
        device, size_bytes = tensor.device, storage.nbytes() if counted else 0
        if device.type == "cuda":
            size_bytes = -(-size_bytes // _CUDA_GRAIN_BYTES) * _CUDA_GRAIN_BYTES
        known, live = self._known, self.live

        def leave(_: Any) -> None:
            del known[identity]
            live[device] -= size_bytes

        known[identity] = weakref.ref(storage, leave)
        live[device] = live.get(device, 0) + size_bytes
        self.peak[device] = max(self.peak.get(device, 0), live[device])
