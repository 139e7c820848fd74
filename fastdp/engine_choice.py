"""What in a wrapper stands against recorded steps, and its warm-up."""

from __future__ import annotations

import contextlib
import random
import sys
from typing import Any, Dict, Iterator, Optional, Sequence, Tuple

import torch

from .cuts import PLAIN, replaced_scatter
from .devices import parse_device
from .streams import distinct

# What `Engine.shortcut` gives where it cannot help.
NOTHING = object()

# Forwards of a warm-up: those that an engine watches, and the one that it records.
_WARM_UPS = 4

_STEPS = ("replicate", "parallel_apply", "gather")


def own_method(wrapper: Any, *names: str) -> str:
    """The first of these methods of DataParallel that the wrapper or its class overrides, or ""."""
    from .wrapper import DataParallel

    for name in names:
        own = getattr(type(wrapper), name) is not getattr(DataParallel, name)
        if own or name in wrapper.__dict__:
            return name
    return ""


def find_obstacle(wrapper: Any, method: Optional[str]) -> str:
    """Why the forwards of this wrapper cannot be recorded, or ""."""
    if method is not None:
        return f"call() runs {method!r} instead of forward"
    if not wrapper._fastdp_gather_outputs or wrapper._fastdp_loss_weighting is not None:
        return "gather_outputs=False and loss_weighting change what is done with the outputs"
    if wrapper.__dict__.get("_fastdp_witness") is not None:
        return "watch_replicas() looks at each replica's gradients"
    own = own_method(wrapper, *_STEPS)
    if own:
        return f"{type(wrapper).__name__} has its own {own}()"
    if parse_device(wrapper.output_device, "output_device") != wrapper.src_device_obj:
        return "output_device is not device_ids[0]"
    return ""


def cuts_alike(wrapper: Any) -> bool:
    """Whether arguments that are alike are cut alike."""
    if own_method(wrapper, "scatter") or replaced_scatter() is not None:
        return False
    return wrapper._fastdp_rules() is PLAIN


def warm_up(wrapper: Any, inputs: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
    buffers = list(wrapper.module.buffers())
    kept = [buffer.detach().clone() for buffer in buffers]
    # A forward of a module that is called directly may bind them anew.
    tables = [module.__dict__.get("_buffers") for module in wrapper.module.modules()]
    bound = [(table, dict(table)) for table in tables if isinstance(table, dict)]
    devices = [buffer.device for buffer in buffers]
    if wrapper.device_ids:
        devices = [parse_device(device, "device_ids") for device in wrapper.device_ids]
    with forked_generators(devices):
        try:
            for _ in range(_WARM_UPS):
                wrapper(*inputs, **kwargs)
        finally:
            for table, names in bound:
                table.update(names)
            for buffer, value in zip(buffers, kept):
                # Not as a write that counts: a backward may be still to come.
                buffer.data.copy_(value)


@contextlib.contextmanager
def forked_generators(devices: Sequence[torch.device]) -> Iterator[None]:
    """Random numbers of torch on the host and on these devices, of Python and of NumPy go on
    afterwards as if nothing had been drawn in between."""
    indices = [device.index for device in distinct(devices)]
    with torch.random.fork_rng(indices), _forked_host_generators():
        yield


@contextlib.contextmanager
def _forked_host_generators() -> Iterator[None]:
    """As torch.random.fork_rng, for Python's and NumPy's. NumPy is not imported for it."""
    numpy_random: Any = sys.modules.get("numpy.random")
    state = random.getstate()
    numpy_state = numpy_random.get_state() if numpy_random else None
    try:
        yield
    finally:
        random.setstate(state)
        if numpy_random:
            numpy_random.set_state(numpy_state)
