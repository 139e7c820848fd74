"""What a worker thread takes over from the thread that called the wrapper.

Carried: grad mode, inference mode, autocast (enabled and dtype of each device type, cache), the
default device (`torch.set_default_device`, `with torch.device(...)`), context variables (a copy,
so that what a forward sets does not reach the next one on that thread), on the host the number of
threads of torch's operators and whether denormals are zero, and on CUDA the current stream of the
replica's device. Process-wide in torch, so in no need of carrying: default dtype,
anomaly mode, deterministic mode, matmul precision, the seed.
Not carried: saved-tensor hooks and torch's function and dispatch modes, which reach replica 0 alone
(it runs on the caller's thread); the order in which saved tensors are unpacked makes hooks unsafe
to share with checkpointing.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from typing import Any, Callable, Iterator, Tuple

import torch

from . import _torch_state


def _autocast_types() -> Tuple[str, ...]:
    # Not is_available(), which may ask the driver at every call.
    return ("cpu", "cuda") if torch.backends.cuda.is_built() else ("cpu",)


def _flushes_denormals() -> bool:
    """Of this thread; torch can set it, but not tell."""
    return sys.float_info.min / 2.0 == 0.0


class ThreadState:
    """A snapshot of the calling thread, to be entered on another."""

    __slots__ = (
        "grad", "inference", "autocast", "cache", "default_device", "threads", "flushes", "context"
    )  # fmt: skip

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in _autocast_types()
        ]
        self.cache = torch.is_autocast_cache_enabled()
        self.default_device = _torch_state.default_device()
        self.threads = torch.get_num_threads()
        self.flushes = _flushes_denormals()
        self.context = contextvars.copy_context()

    def run(self, work: Callable[[], Any]) -> Any:
        """What `work` gives on this thread in this state, among context variables of its own."""
        return self.context.copy().run(self._run_here, work)

    def _run_here(self, work: Callable[[], Any]) -> Any:
        with restored_defaults(), self.entered():
            return work()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Sets the state on this thread. Autocast is set by the raw setters: leaving a thread's
        outermost `torch.autocast` clears the cast cache of the whole process."""
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.cache)
        # A thread starts with the number that any thread has set last: with 1, once a DataLoader
        # has pinned memory. What torch compiled with another number does not do then.
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        if _flushes_denormals() != self.flushes:
            torch.set_flush_denormal(self.flushes)
        with torch.inference_mode(self.inference):
            # Inside: leaving or entering inference mode changes grad mode.
            torch.set_grad_enabled(self.grad)
            with _torch_state.use_default_device(self.default_device):
                yield


def end_casts() -> None:
    """After a forward of several replicas. torch's own threads leave an autocast each, which clears
    the cast cache of the process; programs that stay in one autocast for a whole run rely on it:
    weights that no wrapper has, such as those of a loss, are cast anew at each step."""
    torch.clear_autocast_cache()


class Tracing:
    """What debuggers and profilers ask of new threads (`threading.settrace`, `setprofile`): Python
    looks for it when a thread begins, and a thread that is kept before each job."""

    __slots__ = ("_trace", "_profile")

    def __init__(self) -> None:
        self._trace = threading.gettrace()
        self._profile = threading.getprofile()

    def follow(self) -> None:
        """On the thread itself. What was set for this thread alone stays as it is."""
        trace, profile = threading.gettrace(), threading.getprofile()
        if trace is not self._trace:
            self._trace = trace
            sys.settrace(trace)
        if profile is not self._profile:
            self._profile = profile
            sys.setprofile(profile)


class restored_defaults:
    """Around a replica's forward: a grad mode or a default device that it sets ends with it. On the
    caller's thread, where replica 0 runs, it would leak out, on another into the next forward."""

    __slots__ = ("_grad", "_modes")

    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._modes = _torch_state.function_modes()  # a default device is one

    def __exit__(self, *error: Any) -> None:
        torch.set_grad_enabled(self._grad)
        modes = _torch_state.function_modes()
        # torch up to 2.9 cannot leave one of several devices.
        if modes != self._modes and sum(map(_torch_state.is_default_device, modes)) < 2:
            torch.set_default_device(None)
            left = _torch_state.function_modes()
            for mode in self._modes:
                if mode not in left and _torch_state.is_default_device(mode):
                    torch.set_default_device(mode.device)
