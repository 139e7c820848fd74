"""Counting the memory of a computation by what its operators make: when a storage first comes out
of one, and when the last that refers to it is gone. It needs no allocator that counts, and works on
tensors that have no memory at all."""

from __future__ import annotations

import weakref
from itertools import zip_longest
from typing import Any, Dict, Iterable, Optional

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .aside import Stop
from .cuts import find_tensors
from .fast_paths import IN_STEPS
from .probes import Probes, rounded


class Ledger(TorchDispatchMode):
    """While it is on, counts by device what operators make: `live` bytes, and their `peak`.

    Args:
        probes: what some operators take beside what the shapes of their results tell.
        fakes: the mode of the fake tensors that it is on around, if it is.
        stop: whether somebody still waits for the count, if that may end.
    """

    def __init__(self, probes: Probes, fakes: Any = None, stop: Optional[Stop] = None) -> None:
        super().__init__()
        self._stop = stop
        self.live: Dict[torch.device, int] = {}
        self.peak: Dict[torch.device, int] = {}
        self.counts = True  # False: what is made now counts nothing
        self._probes = probes
        self._fakes = fakes
        self._known: Dict[int, Any] = {}  # by identity of the storage

    def ignore(self, tensors: Iterable[Any]) -> None:
        """These are there already."""
        for tensor in tensors:
            self._enter(tensor, False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._stop is not None and func.namespace == "aten":  # "prim" must not raise: aside.py
            self._stop.look()
        in_steps = IN_STEPS.get(func.overloadpacket)
        if in_steps is not None:
            with self:
                return in_steps(*args, **(kwargs or {}))
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            args, kwargs = tree_map_only(torch.Tensor, self._without_memory, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        made = find_tensors(result)
        probe = self._probes.look(func, args, kwargs or {}, made[0].device) if made else None
        known = probe.results if probe is not None else ()
        for tensor, size_bytes in zip_longest(made, known):
            self._enter(tensor, self.counts, size_bytes)
        if probe is not None and probe.workspace:
            device = made[0].device
            whole = self.live.get(device, 0) + probe.workspace
            self.peak[device] = max(self.peak.get(device, 0), whole)
        return result

    def _without_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """As a fake tensor. Among real ones alone, such as those that a module keeps as plain
        attributes, fake tensors' mode would let an operator write memory, or draw numbers."""
        if self._fakes is None or self._fakes.is_our_fake(tensor):
            return tensor
        return self._fakes.from_tensor(tensor)

    def _enter(
        self, tensor: torch.Tensor, counted: bool, size_bytes: Optional[int] = None
    ) -> None:
        """A tensor that is there now; `size_bytes` if it is known better than the tensor says."""
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        # The same object for as long as anything refers to the memory.
        identity = id(storage)
        if identity in self._known:
            return
        device = tensor.device
        held = storage.nbytes() if size_bytes is None else size_bytes
        if device.type == "cuda":
            held = rounded(held)
        held = held if counted else 0
        known, live = self._known, self.live

        def leave(_: Any) -> None:
            del known[identity]
            live[device] -= held

        known[identity] = weakref.ref(storage, leave)
        live[device] = live.get(device, 0) + held
        self.peak[device] = max(self.peak.get(device, 0), live[device])
