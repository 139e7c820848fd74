"""`validation`: a guard around evaluation that is run between training steps. Memory is looked at
before; afterwards what evaluation alone needed is given back."""

from __future__ import annotations

import gc
import weakref
from typing import Any, Dict, List, Optional, Type

import torch

from .attributes import is_wrapper
from .devices import parse_device
from .diagnosis import size_text
from .fits import Fit
from .memory import devices_of, free_bytes, make_graphs, scratch_bytes, usage
from .options import whole_number
from .streams import distinct

__all__ = ["Validation", "validation"]

Bytes = Dict[torch.device, int]

_RELEASED = "it was recorded in a validation, whose recordings are released at its end"


def validation(dp: Any, reserve_bytes: Any = 0) -> Validation:
    """A context around evaluation in the middle of training, so that it neither runs out of memory
    in its midst nor leaves training with less:

        with torch.no_grad(), fastdp.validation(dp, reserve_bytes=2 * 2**30):
            ...

    Before: looks whether `reserve_bytes` can be taken on each of the wrapper's devices: free for
    the system, or kept by torch without being used. If not, the core's idle scratch is given back,
    and it is looked again.

    Afterwards, also when the block raises: steps that were recorded in the block are dropped (those
    that were there before stay, but for what was recorded beyond the number that is kept at all),
    garbage is collected, the core's idle scratch and what torch's allocator keeps unused are given
    back to the devices. This waits for the wrapper's GPUs.

    What stays is what your code keeps, such as outputs that it collects on a GPU, and what
    libraries took at a first use. `left_bytes` of the context and `left_by_validation` of
    `dp.memory()` say how much that is, by device: what is allocated, recorded and lent as scratch
    now, beyond what was when the block began.

    It sets nothing: train() or eval(), and grad mode, are yours.

    Args:
        dp: the wrapper.
        reserve_bytes: how many bytes must be there on each device, or what `dp.fits(...,
            mode="eval")` gave: its `step_bytes` of each. 0: no look.

    Raises:
        TypeError: something else than a wrapper; bytes that are no whole number.
        ValueError: bytes below 0.
        MemoryError: at the beginning, where a device has less; it names the device, the bytes
            needed and the bytes free.
    """
    return Validation(dp, reserve_bytes)


class Validation:
    """What `validation` returns."""

    def __init__(self, dp: Any, reserve_bytes: Any) -> None:
        if not is_wrapper(dp):
            raise TypeError(f"dp is a {type(dp).__name__}: it must be a fastdp.DataParallel")
        self._dp = dp
        self._reserved = _checked(reserve_bytes, devices_of(dp))
        self._kept: List[Any] = []
        self._before: Bytes = {}
        self.left_bytes: Dict[str, int] = {}

    def __enter__(self) -> Validation:
        self._check_free()
        runtime = self._dp.__dict__.get("_fastdp_runtime")
        self._kept = [] if runtime is None else runtime.recordings()
        self._before = _in_use(self._dp)
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], *error: Any) -> None:
        release(self._dp, self._kept)
        self._kept = []
        after = _in_use(self._dp)
        left = {device: max(0, after[device] - self._before.get(device, 0)) for device in after}
        self.left_bytes = {str(device): size_bytes for device, size_bytes in left.items()}
        _left[self._dp] = left

    def _check_free(self) -> None:
        short = self._short()
        if short:
            scratch_bytes(trim=True)
            short = self._short()
        if short:
            raise MemoryError(
                "validation: "
                + "; ".join(
                    f"{device} has {free} bytes free ({size_text(free)}), but {needed} "
                    f"({size_text(needed)}) are needed"
                    for device, needed, free in short
                )
            )

    def _short(self) -> List[Any]:
        """(device, bytes needed, bytes free) of those that have too little."""
        found = []
        for device, needed in self._reserved.items():
            free = free_bytes(device) if needed else None
            if free is not None and free < needed:
                found.append((device, needed, free))
        return found


def release(wrapper: Any, kept: Any) -> None:
    """Gives back what no step to come is known to need: recorded steps but `kept`, scratch, and
    torch's unused memory."""
    runtime = wrapper.__dict__.get("_fastdp_runtime")
    if runtime is not None:
        runtime.release(kept, _RELEASED)
    gc.collect()
    gpus = distinct(devices_of(wrapper))
    for device in gpus:
        torch.cuda.synchronize(device)  # scratch that is in use cannot be given back
    scratch_bytes(trim=True)
    for device in gpus:
        # Under its own device: another one's memory may not be given back.
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


_left: weakref.WeakKeyDictionary[Any, Bytes] = weakref.WeakKeyDictionary()


def left_bytes(wrapper: Any) -> Bytes:
    """By how much the wrapper's last validation has left each device fuller than it was."""
    return _left.get(wrapper, {})


def _in_use(wrapper: Any) -> Bytes:
    scratch, graphs = scratch_bytes(), make_graphs(wrapper)
    held = {}
    for device in devices_of(wrapper):
        whole, counted = graphs.get(device, (0, 0))
        allocated = usage(device)["allocated"]
        if allocated is None:
            counted = allocated = 0
        held[device] = allocated + whole - counted + scratch.get(device, 0)
    return held


def _checked(reserve_bytes: Any, devices: List[torch.device]) -> Bytes:
    """By device."""
    if isinstance(reserve_bytes, Fit):
        rows = reserve_bytes.devices.items()
        return {parse_device(name, "reserve_bytes"): row.step_bytes for name, row in rows}
    try:
        count = whole_number(reserve_bytes)
    except TypeError:
        raise TypeError(
            f"reserve_bytes is {reserve_bytes!r}: it must be a whole number of bytes, or what "
            "dp.fits() gave"
        ) from None
    if count < 0:
        raise ValueError(f"reserve_bytes is {count}: it must be at least 0")
    return dict.fromkeys(devices, count)
