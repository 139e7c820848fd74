"""`HealthMonitor`: gradient norms, update ratios and overflows of a run, and a word in time.

Nothing here makes the host wait for a GPU. A step's numbers are copied to pinned memory behind the
step; they are looked at in a later step, when they are there.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional

import torch

from . import _torch_tensors
from .attributes import is_wrapper
from .grad_health import GradHealth, checked_number

__all__ = ["HealthMonitor", "HealthRecord"]

_log = logging.getLogger("fastdp")

# Norms that must be known before one counts as out of line with them.
_MIN_MEDIAN_OF = 5
# Records that are kept.
_MAX_RECORDS = 10_000
# Steps after which a warning of one kind is given again.
_SILENT_STEPS = 100
# Overflows in a row that are too many also where a GradScaler looks for the scale.
_MAX_OVERFLOWS = 10


class HealthRecord(NamedTuple):
    """What was seen at one step. `update_ratio`, the norm of the change of all weights over that of
    the weights, is None where it was not measured. `warning` is "" if all was well."""

    step: int
    norm: float
    overflow: bool
    update_ratio: Optional[float] = None
    warning: str = ""


class _Reading:
    """Numbers of one step on their way to the host."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._values: Dict[str, torch.Tensor] = {}
        self._events: List[torch.cuda.Event] = []

    def add(self, name: str, value: torch.Tensor) -> None:
        if value.is_cuda:
            event = torch.cuda.Event()
            with torch.cuda.device(value.device):
                landing = torch.empty((), dtype=value.dtype, device="cpu", pin_memory=True)
                landing.copy_(value, non_blocking=True)
                event.record()
            self._events.append(event)
            value = landing
        self._values[name] = value

    def is_there(self) -> bool:
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()

    def value(self, name: str) -> Optional[float]:
        found = self._values.get(name)
        return None if found is None else float(found)


class HealthMonitor:
    """Watches the gradients of a run: logs their norm, how much a step changes the weights, and
    overflows, and warns of norms that jump or vanish. All goes to the logger "fastdp": warnings,
    and the numbers of each step at level INFO.

    Args:
        dp: the wrapper.
        optimizer: whose steps are watched, while the monitor is entered as a context: `check` is
            then called by each `optimizer.step()`, unless it was called since the one before, and
            update ratios are measured. Of a step with a closure the gradients count that the
            closure has left. Default: none; call `check` yourself.
        scaler: the GradScaler of the run, if it has one: single overflows are its way to find a
            scale, and are told at level INFO.
        every: look at every n-th step.
        update_every: measure the update ratio at every n-th step that is looked at, for which the
            weights are copied once; 0 is never.
        spike_norm: warn of a norm above it.
        spike_factor: warn of a norm above this many times the running median.
        vanished_norm: warn of a norm below it.
        window: how many norms the running median is of.
        on_record: called with each `HealthRecord`.

    Attributes:
        records: of the last 10,000 steps that were looked at.
        overflows: how many steps had a norm that was NaN or infinite.

    A step is recorded one step later, or once its numbers have come from the GPU, or when the
    context is left. A warning of one kind is given again after 100 steps at the earliest; each
    record has its own. With a GradScaler call `check` yourself, behind `scaler.unscale_`: a step
    that it skips is no step of the optimizer's.

    Raises:
        TypeError, ValueError: arguments of the wrong kind, or out of bounds.

    >>> import torch, fastdp
    >>> dp = fastdp.DataParallel(torch.nn.Linear(2, 1), ["cpu", "cpu"])
    >>> optimizer = torch.optim.SGD(dp.parameters(), lr=0.1)
    >>> with HealthMonitor(dp, optimizer) as monitor:
    ...     dp(torch.ones(4, 2)).sum().backward()
    ...     optimizer.step()
    >>> [(record.step, record.norm, record.overflow) for record in monitor.records]
    [(0, 6.928203105926514, False)]
    """

    def __init__(
        self,
        dp: Any,
        optimizer: Optional[torch.optim.Optimizer] = None,
        *,
        scaler: Any = None,
        every: int = 1,
        update_every: int = 50,
        spike_norm: float = 1e3,
        spike_factor: float = 10.0,
        vanished_norm: float = 1e-7,
        window: int = 100,
        on_record: Optional[Callable[[HealthRecord], None]] = None,
    ) -> None:
        if not is_wrapper(dp):
            raise TypeError(f"dp is a {type(dp).__name__}: it must be a fastdp.DataParallel")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            raise TypeError(f"optimizer is a {kind}: it must be a torch.optim.Optimizer")
        if scaler is not None and not hasattr(scaler, "is_enabled"):
            kind = type(scaler).__name__
            raise TypeError(f"scaler is a {kind}: it must be a torch.amp.GradScaler")
        if on_record is not None and not callable(on_record):
            raise TypeError(f"on_record is {on_record!r}: it must be callable, or None")
        whole = (("every", every, 1), ("update_every", update_every, 0), ("window", window, 1))
        for name, count, least in whole:
            if isinstance(count, bool) or not isinstance(count, int):
                raise TypeError(f"{name} is {count!r}: it must be a whole number")
            if count < least:
                raise ValueError(f"{name} is {count}: it must be at least {least}")
        for name, bound in (
            ("spike_norm", spike_norm),
            ("spike_factor", spike_factor),
            ("vanished_norm", vanished_norm),
        ):
            if not checked_number(name, bound) >= 0:
                raise ValueError(f"{name} is {bound}: it must be at least 0")
        self._dp = dp
        self._optimizer = optimizer
        self._scaled = scaler is not None and scaler.is_enabled()
        self._every, self._update_every = every, update_every
        self._spike_norm, self._spike_factor = spike_norm, spike_factor
        self._vanished_norm = vanished_norm
        self._on_record = on_record
        self.records: Deque[HealthRecord] = deque(maxlen=_MAX_RECORDS)
        self.overflows = 0
        self._norms: Deque[float] = deque(maxlen=window)
        self._readings: Deque[_Reading] = deque()
        self._current: Optional[_Reading] = None  # of a step that the optimizer has yet to take
        self._checked = False  # whether `check` was called for that step
        self._steps = 0
        # The weights while their update is measured, and what they were before.
        self._measured: List[torch.Tensor] = []
        self._before: List[torch.Tensor] = []
        self._in_a_row = 0
        self._warned: Dict[str, int] = {}
        self._hooks: List[Any] = []

    # The run

    def check(self) -> None:
        """Looks at the gradients as they are now: call it once a step, behind the backward."""
        self._settle(False)
        self._current = None
        if self._steps % self._every == 0:
            self._current = _Reading(self._steps)
            self._current.add("norm", self._norm())
            self._readings.append(self._current)
        self._steps += 1
        self._checked = True

    def __enter__(self) -> HealthMonitor:
        if self._optimizer is not None and not self._hooks:
            self._hooks = [
                self._optimizer.register_step_pre_hook(self._before_step),
                self._optimizer.register_step_post_hook(self._after_step),
            ]
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the watch of the optimizer, and waits for what is still to be recorded."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._before, self._measured = [], [], []
        self._settle(True)

    def _norm(self) -> torch.Tensor:
        norm = GradHealth.grad_norm(self._dp)  # a subclass may have another use for the name
        # A fused optimizer unscales by itself, in the step.
        scale = getattr(self._optimizer, "grad_scale", None)
        return norm if scale is None else norm / scale.to(norm.device)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # The gradients that a closure makes are there behind it only.
        has_closure = any(map(callable, (*args[1:], kwargs.get("closure"))))
        if not self._checked and not has_closure:
            self.check()
        step = self._steps - 1 if self._checked else self._steps
        if self._update_every and step % (self._every * self._update_every) == 0:
            self._measured = self._weights()
            self._before = [weight.detach().clone() for weight in self._measured]

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._checked:
            self.check()
        self._checked = False
        before, self._before = self._before, []
        after, self._measured = self._measured, []
        if before and self._current is not None:
            length = _norm_of(before)
            with torch.no_grad():
                torch._foreach_sub_(before, [weight.detach() for weight in after])
            self._current.add("update_ratio", _norm_of(before) / length)

    def _weights(self) -> List[torch.Tensor]:
        every = self._dp.module.parameters()
        return [each for each in every if each.requires_grad and each.numel()]

    # What was seen

    def _settle(self, wait: bool) -> None:
        """Records the steps whose numbers are there, in order."""
        while self._readings:
            if wait:
                self._readings[0].wait()
            elif not self._readings[0].is_there():
                return
            self._record(self._readings.popleft())

    def _record(self, reading: _Reading) -> None:
        norm = reading.value("norm")
        assert norm is not None
        overflow = not math.isfinite(norm)
        self._in_a_row = self._in_a_row + 1 if overflow else 0
        self.overflows += overflow
        kind, warning = self._judge(norm, overflow)
        if not overflow:
            self._norms.append(norm)
        ratio = reading.value("update_ratio")
        record = HealthRecord(reading.step, norm, overflow, ratio, warning)
        self.records.append(record)
        told = "" if ratio is None else f", update ratio {ratio:.3g}"
        _log.info("health: step %d: gradient norm %.4g%s", record.step, norm, told)
        last = self._warned.get(kind)
        if warning and (last is None or record.step - last >= _SILENT_STEPS):
            self._warned[kind] = record.step
            _log.warning("health: step %d: %s", record.step, warning)
        if self._on_record is not None:
            self._on_record(record)

    def _judge(self, norm: float, overflow: bool) -> Any:
        """(kind, text) of what is wrong, or ("", "")."""
        if overflow:
            if not self._scaled:
                return "overflow", f"the gradient norm is {norm}; dp.nonfinite() tells where"
            if self._in_a_row >= _MAX_OVERFLOWS:
                return "overflow", (
                    f"the gradient norm is {norm}, {self._in_a_row} steps in a row: no scale "
                    "helps; dp.nonfinite() tells where"
                )
            return "", ""
        if norm < self._vanished_norm:
            return "vanished", f"the gradient norm is {norm:.3g}, below {self._vanished_norm:g}"
        if norm > self._spike_norm:
            return "spike", f"the gradient norm is {norm:.4g}, above {self._spike_norm:g}"
        if len(self._norms) >= _MIN_MEDIAN_OF:
            median = statistics.median(self._norms)
            if norm > self._spike_factor * median:
                return "jump", (
                    f"the gradient norm is {norm:.4g}, over {self._spike_factor:g} times the "
                    f"running median of {median:.4g}"
                )
        return "", ""


def _norm_of(tensors: List[torch.Tensor]) -> torch.Tensor:
    groups: Dict[torch.dtype, List[torch.Tensor]] = {}
    for tensor in tensors:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        groups.setdefault(real.dtype, []).append(real)
    norms = []
    for dtype, group in groups.items():
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        norms += [norm.float() for norm in _torch_tensors.foreach_norm(group, 2, wide)]
    return torch.linalg.vector_norm(torch.stack(norms))
