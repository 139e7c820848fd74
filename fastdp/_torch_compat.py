"""Every private attribute of torch that fastdp uses, and what happens where a torch lacks it.

Two tables, which tests/test_torch_compat.py checks against this torch and against the package's
source. `PRIVATE`: used in this file alone, behind a function. `SHARED`: named elsewhere too, as
they are the protocol between nn.Module, nn.DataParallel and torch's own modules, which a drop-in
keeps.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from typing import Any, Callable, ContextManager, Hashable, List, Tuple

import torch

# What recordings look at (watch.py), and no eager forward.
_UNNOTICED = "recordings do not notice it"
_ASKED_SLOWLY = "recordings ask in the public, slower way"

# name -> (where it lives, what fastdp does without it)
PRIVATE = {
    "_make_subclass": ("torch.Tensor", "none: parameters of a subclass raise"),
    "_set_sequence_nr": ("a node of torch.autograd.Function", "gradients are summed later"),
    "_log_api_usage_once": ("torch._C", "use is not logged"),
    "_is_profiler_enabled": ("torch.autograd.profiler", "phases have no names in profiles"),
    "_foreach_norm": ("torch", "norms of gradients are taken one by one"),
    "_ExperimentalConfig": ("torch.profiler", "traces lack the threads of replicas"),
    "_check_balance": ("torch.nn.parallel.data_parallel", "unlike GPUs draw no warning"),
    "_current_level": ("torch.autograd.forward_ad", "frozen parameters carry no tangents"),
    "_device": ("torch.utils", "an old torch's default device is not known to other replicas"),
    "_functorch": ("torch._C", "as for maybe_current_level"),
    "maybe_current_level": ("torch._C._functorch", "torch.func raises torch's own error"),
    "_cuda_endAllocateToPool": ("torch._C of a CUDA build", "none: a pool stays open"),
    "_cuda_endAllocateCurrentStreamToPool": ("an older one's torch._C", "as for the one above"),
    "_cuda_releasePool": ("torch._C of a CUDA build", "none: a pool is not freed"),
    "_cuda_getCurrentRawStream": ("torch._C of a CUDA build", "the public, slower way"),
    "_get_cublas_allow_tf32": ("torch._C", _UNNOTICED),
    "_get_cublas_allow_fp16_reduced_precision_reduction": ("torch._C", _UNNOTICED),
    "_get_cublas_allow_bf16_reduced_precision_reduction": ("torch._C", _UNNOTICED),
    "_get_cublas_allow_fp16_accumulation": ("torch._C", _UNNOTICED),
    "_get_cudnn_enabled": ("torch._C", _UNNOTICED),
    "_get_cudnn_benchmark": ("torch._C", _UNNOTICED),
    "_get_cudnn_deterministic": ("torch._C", _UNNOTICED),
    "_get_cudnn_allow_tf32": ("torch._C", _UNNOTICED),
    "_get_flash_sdp_enabled": ("torch._C", _UNNOTICED),
    "_get_mem_efficient_sdp_enabled": ("torch._C", _UNNOTICED),
    "_get_math_sdp_enabled": ("torch._C", _UNNOTICED),
    "_get_cudnn_sdp_enabled": ("torch._C", _UNNOTICED),
    "_get_math_sdp_allow_fp16_bf16_reduction": ("torch._C", _UNNOTICED),
    "_get_sdp_priority_order": ("torch._C", _UNNOTICED),
    "_get_fp32_precision_getter": ("torch._C", _UNNOTICED),
    "_len_torch_function_stack": ("torch._C", _UNNOTICED),
    "_get_function_stack_at": ("torch._C", _UNNOTICED),
    "_len_torch_dispatch_stack": ("torch._C", _UNNOTICED),
    "_autograd": ("torch._C", _ASKED_SLOWLY),
    "_top_saved_tensors_default_hooks": ("torch._C._autograd", _ASKED_SLOWLY),
    "_global_forward_pre_hooks": ("torch.nn.modules.module", _UNNOTICED),
    "_global_forward_hooks": ("torch.nn.modules.module", _UNNOTICED),
    "_global_backward_pre_hooks": ("torch.nn.modules.module", _UNNOTICED),
    "_global_backward_hooks": ("torch.nn.modules.module", _UNNOTICED),
}

# name -> what it is
SHARED = {
    "_parameters": "nn.Module's dictionaries",
    "_buffers": "nn.Module's dictionaries",
    "_modules": "nn.Module's dictionaries",
    "_is_replica": "nn.DataParallel's mark on a replica",
    "_former_parameters": "a replica's parameters, where nn.DataParallel leaves them",
    "_replicate_for_data_parallel": "nn.Module's hook for classes that replicate themselves",
    "_compiled_call_impl": "what nn.Module.compile() binds to the base",
    "_call_impl": "the call of a module, hooks and forward, that is not compiled",
    "_flat_weights": "an RNN's list of its weights",
    "_flat_weights_names": "their names",
    "_flat_weight_refs": "weak references to them",
    "_orig_mod": "the module inside one that torch.compile made",
    "_initialize": "a method of such a module, and of lazy ones",
    "_dynamo": "the part of torch that traces; looked for among the loaded modules only",
    "_version": "a tensor's count of writes in place",
    "_python_dispatch": "where torch keeps the class of dispatch modes",
    "_subclasses": "where torch keeps fake tensors, on which a step's memory is estimated",
    "_schema": "of an operator: which of its arguments it writes to",
    "_native_multi_head_attention": "an operator, whose memory is estimated step by step",
    "_transformer_encoder_layer_fwd": "an operator, whose memory is estimated step by step",
    "_is_param": "what makes isinstance(..., nn.Parameter) true of a tensor of another class",
    "_backward_cls": "the class of a Function's nodes, as Python sees them",
    "_optimizer_step_pre_hooks": "an optimizer's own hooks",
    "_optimizer_step_post_hooks": "an optimizer's own hooks",
    "_indices": "a sparse tensor's, coalesced or not",
    "_values": "a sparse tensor's, coalesced or not",
    "_forward_hooks": "nn.Module's hooks; copied as nn.Module._replicate_for_data_parallel does",
    "_forward_pre_hooks": "hooks",
    "_forward_hooks_with_kwargs": "hooks",
    "_forward_pre_hooks_with_kwargs": "hooks",
    "_forward_hooks_always_called": "hooks",
    "_backward_hooks": "hooks",
    "_backward_pre_hooks": "hooks",
    "_state_dict_hooks": "hooks",
    "_state_dict_pre_hooks": "hooks",
    "_load_state_dict_pre_hooks": "hooks",
    "_load_state_dict_post_hooks": "hooks",
}


def as_parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    """The tensor as an `nn.Parameter` that does not require grad itself: a Function that returns it
    makes it a non-leaf parameter with a grad_fn. Shares memory and version counter."""
    if type(tensor) is not torch.nn.Parameter:  # a subclass may have a detach of its own
        return torch.Tensor._make_subclass(torch.nn.Parameter, tensor, False)
    alias = tensor.detach()
    become_parameter(alias)
    return alias


@functools.cache
def _norms_take_dtype() -> bool:
    try:
        torch._foreach_norm([torch.ones(1)], 2, dtype=torch.float64)
    except (AttributeError, TypeError):
        return False
    return True


def foreach_norm(
    tensors: List[torch.Tensor], order: float, dtype: torch.dtype
) -> List[torch.Tensor]:
    """The norm of each tensor, computed in `dtype`; all of one dtype, none empty."""
    if _norms_take_dtype():
        return list(torch._foreach_norm(tensors, order, dtype=dtype))
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


def increment_versions(tensors: List[torch.Tensor]) -> None:
    """Each was written past torch. A torch before 2.5 takes them one by one."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except (RuntimeError, TypeError, ValueError):
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)


def become_parameter(tensor: torch.Tensor) -> None:
    """`as_parameter` in place, for a tensor that nobody else holds yet: as torch's lazy parameters
    become ordinary ones, and at a tenth of the cost."""
    tensor.__class__ = torch.nn.Parameter


def are_false(function: Any) -> Any:
    """A Function whose nodes are false. nn.Module refuses a parameter with a true `grad_fn`, which
    a replica's has; what is given from one part of a replica to another is a plain tensor where
    torch made the replica, and not refused. Without this it is a ValueError."""
    nodes = getattr(function, "_backward_cls", None)
    if nodes is not None:
        nodes.__bool__ = lambda node: False
    return function


def applied_at_once(function: Any) -> Callable[..., Any]:
    """`function.apply` without torch's Python around it, which looks at each argument for a tensor
    that outlived a torch.func transform: for arguments among which there can be none. Below such a
    transform it is `function.apply`, which refuses."""
    if inside_function_transform():
        return function.apply
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


def run_early(node: Any) -> None:
    """Lets the engine run this node as soon as its gradients are there, before nodes made later.
    Without it the numbers are the same, only later."""
    raise_number = getattr(node, "_set_sequence_nr", None)
    if raise_number is not None:
        raise_number(2**62)


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


def forward_mode_active() -> bool:
    """True inside `torch.autograd.forward_ad.dual_level()`."""
    return getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0


def inside_function_transform() -> bool:
    """True below torch.func.grad, vjp, jvp, vmap and the like."""
    functorch = getattr(torch._C, "_functorch", None)
    level = getattr(functorch, "maybe_current_level", None)
    return level is not None and level() is not None


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


def _flag_getters() -> Tuple[Callable[[], Any], ...]:
    found = [getattr(torch._C, name, None) for name in _FLAGS]
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)
    if precision is not None:
        for place in (("generic", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")):
            found.append(functools.partial(precision, *place))
    return tuple(get for get in found if get is not None)


_GETTERS = _flag_getters()


def kernel_flags() -> Tuple[Hashable, ...]:
    """Process-wide settings by which torch chooses its kernels on a GPU."""
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


def function_modes() -> Tuple[Any, ...]:
    """This thread's torch function modes, `with torch.device(...)` among them; outermost first."""
    count = getattr(torch._C, "_len_torch_function_stack", int)()
    at = getattr(torch._C, "_get_function_stack_at", None) if count else None
    return () if at is None else tuple([at(i) for i in range(count)])


def dispatch_mode_active() -> bool:
    """Whether this thread has a torch dispatch mode."""
    return getattr(torch._C, "_len_torch_dispatch_stack", int)() > 0


def saved_tensors_hooks_active() -> bool:
    """True inside `torch.autograd.graph.saved_tensors_hooks`, and so inside checkpointing."""
    autograd = getattr(torch._C, "_autograd", None)
    top = getattr(autograd, "_top_saved_tensors_default_hooks", None)
    if top is not None:
        return top(True) is not None
    try:  # torch < 2.8
        with torch.autograd.graph.disable_saved_tensors_hooks("asked for by fastdp"):
            return False
    except RuntimeError:
        return True


def global_module_hooks() -> List[Tuple[str, Any]]:
    """(kind, hook) of each hook that runs for every module of the process."""
    kinds = (
        ("forward pre-hook", "_global_forward_pre_hooks"),
        ("forward hook", "_global_forward_hooks"),
        ("backward pre-hook", "_global_backward_pre_hooks"),
        ("backward hook", "_global_backward_hooks"),
    )
    place = torch.nn.modules.module
    return [(kind, hook) for kind, name in kinds for hook in getattr(place, name, {}).values()]


def watched_from_python() -> bool:
    """Whether something in this thread, or for all modules, is to be told of operators, saved
    tensors or calls of modules: a mode, hooks, anomaly mode."""
    return (
        dispatch_mode_active()
        or torch.is_anomaly_enabled()
        or saved_tensors_hooks_active()
        or any(map(_GLOBAL_HOOKS.get, _HOOK_DICTIONARIES))
    )


# A module's own look-up of these is by name too: a name that is gone is an empty dictionary.
_GLOBAL_HOOKS = vars(torch.nn.modules.module)
_HOOK_DICTIONARIES = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


def raw_stream(index: int) -> int:
    """The handle of the stream that is current on a GPU for this thread."""
    get = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if get is None:
        return torch.cuda.current_stream(index).cuda_stream
    return get(index)


def records_events_outside() -> bool:
    """Whether an event can be recorded in one CUDA graph and waited for outside it."""
    return "external" in inspect.signature(torch.cuda.Event.__new__).parameters


def is_capturing() -> bool:
    """Whether what this thread enqueues is captured into a CUDA graph."""
    return torch.backends.cuda.is_built() and torch.cuda.is_current_stream_capturing()


def external_event() -> Any:
    return torch.cuda.Event(external=True)


def end_pool(device: torch.device, pool: Any) -> None:
    """After a capture into this pool that could not be ended: the allocator leaves the pool."""
    older = getattr(torch._C, "_cuda_endAllocateCurrentStreamToPool", None)
    end = getattr(torch._C, "_cuda_endAllocateToPool", older)
    for act in (end, getattr(torch._C, "_cuda_releasePool", None)):
        with contextlib.suppress(RuntimeError):
            if act is not None:
                act(device.index, pool)


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
    """That of the innermost; `torch.set_default_device` enters one as well."""
    for mode in reversed(function_modes()):
        if type(mode).__module__ == "torch.utils._device":
            return torch.empty(0, device=mode.device).device  # with its index
    return None


def use_default_device(device: Any) -> ContextManager[Any]:
    return contextlib.nullcontext() if device is None else torch.device(device)


def on_device(device: torch.device) -> ContextManager[Any]:
    """Makes a GPU the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def log_use(name: str) -> None:
    getattr(torch._C, "_log_api_usage_once", str)(name)


def check_balance(indices: Any) -> None:
    """torch's warning about unlike GPUs."""
    # By its full name: torch.nn.parallel.data_parallel is also a function of that name.
    module = importlib.import_module("torch.nn.parallel.data_parallel")
    check = getattr(module, "_check_balance", None)
    if check is not None:
        check(indices)


def replicates_itself(module: torch.nn.Module) -> bool:
    """Whether a class, or a module that was given a method, makes replicas in its own way."""
    if "_replicate_for_data_parallel" in module.__dict__:
        return True
    own = type(module)._replicate_for_data_parallel
    return own not in (
        torch.nn.Module._replicate_for_data_parallel,
        torch.nn.RNNBase._replicate_for_data_parallel,
    )
