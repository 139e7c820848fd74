"""What a wrapper has besides torch's attributes: threads, replicas and leases."""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext
from typing import Any, Callable, ContextManager, List, Optional, Sequence, Tuple

import torch
from torch import nn

from . import captures
from .balance import Balance
from .deadlines import Deadline
from .devices import parse_devices
from .replicas import Lease, Replicator
from .streams import current_stream, distinct
from .surprises import Surprises
from .workers import Teams

# Two threads at a wrapper's first forward share one runtime.
MAKING = threading.RLock()

_NOTHING: ContextManager[Any] = nullcontext()

# Leases of forwards that were written by hand and never gathered; older ones are given back.
_MAX_OPEN_LEASES = 8


class Runtime:
    """Made at a wrapper's first forward; in no copy or pickle of it, and knows nothing of it."""

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        options: Tuple[int, str, Optional[str]],
        weak: bool = False,
    ) -> None:
        self.devices = tuple(devices)
        self._gpus = distinct(devices)
        self.device_ids: Sequence[Any] = ()  # as the wrapper wrote them
        self.options = options
        self.teams = Teams()
        self.replicator = Replicator(module, devices, *options, weak=weak)
        self.surprises = Surprises()
        self.balance = Balance(devices)
        self._module = weakref.ref(module)
        self._open = threading.local()
        self._engine: Any = None
        self._deadline: Optional[Deadline] = None
        self.recorder: Any = None  # tests: what records in place of CUDA

    def engine_of(self, kind: str) -> Any:
        """The engine "auto" or "graph" of this wrapper, made when it is first asked for."""
        from .engines import Engine

        if self._engine is None or self._engine.kind != kind:
            self._engine = Engine(kind, self.replicator, self.recorder)
        return self._engine

    def deadline_of(self, timeout_s: float) -> Deadline:
        """What keeps this wrapper's deadline, made when it is first asked for."""
        if self._deadline is None:
            with MAKING:
                self._deadline = self._deadline or Deadline(timeout_s)
        self._deadline.timeout_s = timeout_s
        return self._deadline

    def current_streams(self) -> List[Any]:
        """Those of the calling thread, one for each GPU."""
        return [current_stream(device) for device in distinct(self.devices)]

    def reports(self) -> Any:
        """(signatures, reasons) of the engine, as `Engine` gives them."""
        return ([], []) if self._engine is None else (self._engine.report(), self._engine.reasons())

    def recordings(self) -> List[Any]:
        """The engine's recorded steps."""
        return [] if self._engine is None else self._engine.recordings()

    def release(self, kept: Sequence[Any], note: str) -> None:
        """Drops all recorded steps but these."""
        if self._engine is not None:
            self._engine.release(kept, note)

    def watching(self, replicas: Sequence[nn.Module]) -> ContextManager[Any]:
        """Around the replicas' forward: the engine may watch it."""
        return _NOTHING if self._engine is None else self._engine.watching(replicas)

    def is_for(self, module: nn.Module, wrapper: Any) -> bool:
        """`serves`, where the wrapper's devices and options are written as they were."""
        return (
            self._module() is module
            and wrapper.device_ids == self.device_ids
            and self.options == wrapper._fastdp_move_options()
        )

    def serves(self, module: nn.Module, devices: Sequence[torch.device], options: Any) -> bool:
        return (
            self._module() is module
            and (devices is self.devices or self.devices[: len(devices)] == tuple(devices))
            and self.options == options
        )

    def parsed(self, device_ids: Any) -> Tuple[torch.device, ...]:
        """The devices of a list, which is looked at closely only if it is not the wrapper's own."""
        if type(device_ids) is list and device_ids == self.device_ids:
            return self.devices
        count = len(device_ids) if isinstance(device_ids, list) else 0
        if 0 < count and device_ids == self.device_ids[:count]:
            return self.devices[:count]
        return parse_devices(device_ids, "device_ids")

    def leases(self) -> List[Lease]:
        """This thread's open leases: a forward inside a forward has its own on top."""
        if not hasattr(self._open, "leases"):
            self._open.leases = []
        return self._open.leases

    def replicas(self, ranks: int) -> List[nn.Module]:
        early = self._in_forward()
        leases = self.leases()
        if not early:
            # By hand: replicas whose gather never came go back; tokens may still be asked for.
            for lease in leases:
                self.replicator.give_back(lease)
        roots, lease = self.replicator.take(ranks, not torch.is_grad_enabled(), early)
        leases.append(lease)
        if len(leases) > _MAX_OPEN_LEASES:
            self.replicator.give_back(leases.pop(0))
        return roots

    def tokens(self) -> Tuple[torch.Tensor, ...]:
        """The tokens of the newest lease, whose replicas go back. The lease ends with its forward,
        or here where the forward is written by hand."""
        leases = self.leases()
        if not leases:
            return ()
        lease = leases[-1] if self._in_forward() else leases.pop()
        self.replicator.give_back(lease)
        return lease.tokens

    def _in_forward(self) -> bool:
        return getattr(self._open, "forwards", 0) > 0

    def check_capture(self) -> None:
        """Raises RuntimeError where the caller captures a CUDA graph and there are several GPUs:
        it would break in the middle, and leave streams behind that nobody can use."""
        if len(self._gpus) > 1 and captures.under_way(self._gpus):
            raise RuntimeError(
                f"DataParallel on {len(self._gpus)} GPUs cannot run inside torch.cuda.graph, which "
                'captures on one: use engine="graph", which records a graph for each replica'
            )

    def forward(self, steps: Callable[[], Any]) -> Any:
        """Runs the steps of a whole forward: leases that they leave open, by an error or an
        override of gather, end with it; so copies may be on their way while replicas start."""
        leases = self.leases()
        outer = getattr(self._open, "forwards", 0)
        # A forward inside a forward leaves the outer one's alone; what else is there was left by
        # an interrupt, or by hand.
        depth = len(leases) if outer else 0
        try:
            self._open.forwards = outer + 1
            return steps()
        finally:
            self._open.forwards = outer
            while len(leases) > depth:
                self.replicator.give_back(leases.pop())
