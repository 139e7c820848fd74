"""A recorder for replicas on the host: what a CUDA graph would launch again is computed again, into
the memory of the first time. Everything around the graphs (static memory, what is copied when, what
a step gives back) is then the engine's own, and can be compared with eager steps exactly.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch


class HostRecorder:
    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def events(self, count: int) -> list:
        return [None] * count

    def aside(self, act):
        state = torch.get_rng_state()
        cached = torch.is_autocast_cache_enabled()
        try:
            torch.set_autocast_cache_enabled(False)
            act()
        finally:
            torch.set_autocast_cache_enabled(cached)
            torch.set_rng_state(state)

    def rehearsal(self):
        return contextlib.nullcontext()

    def pool(self) -> Any:
        return None

    def pool_bytes(self, pools: Any) -> dict:
        return {}

    def record(self, device: torch.device, pool: Any, act: Any) -> "_Again":
        act()
        self.recorded += 1
        return _Again(self, act)

    def mark(self) -> "_Mark":
        return _Mark()


class _Mark:
    def __init__(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "_Mark") -> float:
        return 1e3 * (other.at - self.at)


def _tensors(tree: Any) -> list:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    elif hasattr(tree, "__dataclass_fields__"):
        tree = [getattr(tree, name) for name in tree.__dataclass_fields__]
    return [t for item in tree for t in _tensors(item)] if isinstance(tree, (list, tuple)) else []


def _flat(made: list) -> list:
    return [gradient for gradients in made for gradient in gradients or ()]


def _write(static: torch.Tensor, value: torch.Tensor) -> None:
    """As a kernel writes that runs again: each element once, and its own result nowhere else."""
    for dim, (size, stride) in enumerate(zip(static.shape, static.stride())):
        if size > 1 and stride == 0:
            static, value = static.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    if static.data_ptr() != value.data_ptr():
        static.copy_(value)


class _Again:
    def __init__(self, recorder: HostRecorder, act: Any) -> None:
        self._recorder = recorder
        # A forward is a tape's method; a backward has the output's columns bound to it as well.
        self._columns = act.args[0] if hasattr(act, "args") else None
        self._tape = (act.func if hasattr(act, "func") else act).__self__
        tape = self._tape
        if self._columns is None:
            self._module, self._arguments = tape.module, tape.arguments
            self._first = [t.detach() for t in _tensors(tape.output)]
        else:
            self._anchors, self._leaves = tape.anchors, tape.leaves
            self._first = list(tape.leaf_gradients)
            self._made = list(tape.made)
            self._wanted = [c for c in self._columns if c.differentiable]
            outputs = _tensors(tape.output)
            self._places = [
                [id(t) for t in outputs].index(id(c.live[tape.rank])) for c in self._wanted
            ]

    def replay(self) -> None:
        self._recorder.replayed += 1
        tape = self._tape
        if self._columns is None:
            row, named = self._arguments
            learns = any(tape.wants) or any(tape.learns)
            with torch.set_grad_enabled(learns):
                tape.again = _tensors(self._module(*row, **named))
            results = tape.again
        else:
            outputs = [tape.again[place] for place in self._places]
            gradients = [c.gradients[tape.rank] for c in self._wanted]
            tape.made = [None] * len(tape.made)
            tape.awaited = set(range(len(tape.made)))
            results = torch.autograd.grad(
                outputs, self._anchors + self._leaves, gradients, allow_unused=True
            )[len(self._anchors) :]
            tape.again = None
            self._write_all(_flat(self._made), _flat(tape.made))
        self._write_all(self._first, results)

    def _write_all(self, firsts: list, results: list) -> None:
        with torch.no_grad():
            for first, result in zip(firsts, results):
                if first is not None:
                    _write(first, result)
