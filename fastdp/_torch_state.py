"""Private attributes of torch that tell what is set for a thread or the process (modes, the default
device, hooks, settings of kernels, profilers), each behind a function, and what happens where a
torch lacks it. tests/test_torch_compat.py checks the table against the source."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, ContextManager, Hashable, List, Tuple

import torch

from ._torch_autograd import saved_tensors_hooks_active

# What recordings look at (watch.py), and no eager forward.
_UNNOTICED = "recordings do not notice it"

# Getters of what kernels are chosen by, where no public function is as quick.
_FLAGS = (
    "_get_cublas_allow_tf32",
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction",
    "_get_cublas_allow_fp16_accumulation",
    "_get_cudnn_enabled",
    "_get_cudnn_benchmark",
    "_get_cudnn_deterministic",
    "_get_cudnn_allow_tf32",
    "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_math_sdp_enabled",
    "_get_cudnn_sdp_enabled",
    "_get_math_sdp_allow_fp16_bf16_reduction",
)
# Dictionaries of hooks that run for every module of the process -> their kind.
_GLOBAL_HOOKS = {
    "_global_forward_pre_hooks": "forward pre-hook",
    "_global_forward_hooks": "forward hook",
    "_global_backward_pre_hooks": "backward pre-hook",
    "_global_backward_hooks": "backward hook",
}

# name -> (where it lives, what fastdp does without it)
PRIVATE = {
    "_device": ("torch.utils", "defaults set in a forward stay; an old torch's are not carried"),
    "_len_torch_function_stack": ("torch._C", _UNNOTICED),
    "_get_function_stack_at": ("torch._C", _UNNOTICED),
    "_len_torch_dispatch_stack": ("torch._C", _UNNOTICED),
    "_get_fp32_precision_getter": ("torch._C", _UNNOTICED),
    "_get_sdp_priority_order": ("torch._C", _UNNOTICED),
    **dict.fromkeys(_FLAGS, ("torch._C", _UNNOTICED)),
    **dict.fromkeys(_GLOBAL_HOOKS, ("torch.nn.modules.module", _UNNOTICED)),
    "_is_profiler_enabled": ("torch.autograd.profiler", "phases have no names in profiles"),
    "_ExperimentalConfig": ("torch.profiler", "traces lack the threads of replicas"),
}


# Modes, and the default device, which is one.


def function_modes() -> Tuple[Any, ...]:
    """This thread's torch function modes, `with torch.device(...)` among them; outermost first."""
    count = getattr(torch._C, "_len_torch_function_stack", int)()
    at = getattr(torch._C, "_get_function_stack_at", None) if count else None
    return () if at is None else tuple([at(i) for i in range(count)])


def dispatch_mode_active() -> bool:
    """Whether this thread has a torch dispatch mode."""
    return getattr(torch._C, "_len_torch_dispatch_stack", int)() > 0


def is_default_device(mode: Any) -> bool:
    """Whether a function mode is what `torch.set_default_device` or `with torch.device(...)`
    entered; its `device` is then the default."""
    return type(mode).__module__ == "torch.utils._device"


def default_device() -> Any:
    """What `torch.set_default_device` or `with torch.device(...)` made the default here, or
    None."""
    if not getattr(torch._C, "_len_torch_function_stack", lambda: 1)():
        return None  # either is a function mode; to ask below takes some microseconds
    try:
        device = torch.get_default_device() if _sees_contexts() else _device_of_contexts()
    except AttributeError:  # an older torch, after `torch.set_default_device(None)`
        return None
    return None if device is None or device.type == "cpu" else device


@functools.cache
def _sees_contexts() -> bool:
    """Whether `torch.get_default_device` knows of `with torch.device(...)`: not in torch 2.6."""
    with torch.device("meta"), contextlib.suppress(AttributeError):
        return torch.get_default_device().type == "meta"
    return False


def _device_of_contexts() -> Any:
    """That of the innermost."""
    for mode in reversed(function_modes()):
        if is_default_device(mode):
            return torch.empty(0, device=mode.device).device  # with its index
    return None


def use_default_device(device: Any) -> ContextManager[Any]:
    """The default inside the context; with None nothing changes."""
    return contextlib.nullcontext() if device is None else torch.device(device)


# Hooks.


def global_module_hooks() -> List[Tuple[str, Any]]:
    """(kind, hook) of each hook that runs for every module of the process."""
    place = torch.nn.modules.module
    return [
        (kind, hook)
        for name, kind in _GLOBAL_HOOKS.items()
        for hook in getattr(place, name, {}).values()
    ]


def watched_from_python() -> bool:
    """Whether something in this thread, or for all modules, is to be told of operators, saved
    tensors or calls of modules: a mode, hooks, anomaly mode."""
    return (
        dispatch_mode_active()
        or torch.is_anomaly_enabled()
        or saved_tensors_hooks_active()
        or any(map(_MODULE_GLOBALS.get, _GLOBAL_HOOKS))
    )


# A module's own look-up of these is by name too: a name that is gone is an empty dictionary.
_MODULE_GLOBALS = vars(torch.nn.modules.module)


# Settings by which torch chooses its kernels on a GPU.


def _flag_getters() -> Tuple[Callable[[], Any], ...]:
    found = [getattr(torch._C, name, None) for name in _FLAGS]
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)
    if precision is not None:
        for place in (("generic", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")):
            found.append(functools.partial(precision, *place))
    return tuple(get for get in found if get is not None)


_GETTERS = _flag_getters()


def kernel_flags() -> Tuple[Hashable, ...]:
    """The process-wide ones."""
    order = getattr(torch._C, "_get_sdp_priority_order", tuple)
    try:
        return (*[get() for get in _GETTERS], *order())
    except RuntimeError:  # old and new names of one setting were mixed: torch does not answer
        return (*map(_answer, _GETTERS), *order())


def _answer(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except RuntimeError:
        return None


# Profilers.


def profiler_listens() -> bool:
    """Whether a profiler of torch's, or emit_nvtx, is on."""
    return getattr(torch.autograd.profiler, "_is_profiler_enabled", False)


def all_threads() -> Any:
    """The `experimental_config` of a profiler that looks at threads that were there before it; None
    where torch has none."""
    config = getattr(torch.profiler, "_ExperimentalConfig", None)
    try:
        return config and config(profile_all_threads=True)
    except TypeError:  # torch < 2.6
        return None
