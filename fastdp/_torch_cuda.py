"""Private attributes of torch.cuda that fastdp uses, and what depends on how torch was built, each
behind a function; and what happens where a torch lacks it. tests/test_torch_compat.py checks the
table against the source."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, ContextManager

import torch

# name -> (where it lives, what fastdp does without it)
PRIVATE = {
    "_cuda_endAllocateToPool": ("torch._C of a CUDA build", "none: a pool stays open"),
    "_cuda_endAllocateCurrentStreamToPool": ("an older one's torch._C", "as for the one above"),
    "_cuda_releasePool": ("torch._C of a CUDA build", "none: a pool is not freed"),
    "_cuda_getCurrentRawStream": ("torch._C of a CUDA build", "the public, slower way"),
}


def on_device(device: torch.device) -> ContextManager[Any]:
    """Makes a GPU the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def raw_stream(index: int) -> int:
    """The handle of the stream that is current on a GPU for this thread."""
    get = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if get is None:
        return torch.cuda.current_stream(index).cuda_stream
    return get(index)


def is_capturing() -> bool:
    """Whether what this thread enqueues is captured into a CUDA graph."""
    return torch.backends.cuda.is_built() and torch.cuda.is_current_stream_capturing()


def records_events_outside() -> bool:
    """Whether an event can be recorded in one CUDA graph and waited for outside it."""
    return "external" in inspect.signature(torch.cuda.Event.__new__).parameters


def external_event() -> Any:
    """Such an event. Call it where `records_events_outside`."""
    return torch.cuda.Event(external=True)


def end_pool(device: torch.device, pool: Any) -> None:
    """After a capture into this pool that could not be ended: the allocator leaves the pool."""
    older = getattr(torch._C, "_cuda_endAllocateCurrentStreamToPool", None)
    end = getattr(torch._C, "_cuda_endAllocateToPool", older)
    for act in (end, getattr(torch._C, "_cuda_releasePool", None)):
        with contextlib.suppress(RuntimeError):
            if act is not None:
                act(device.index, pool)
