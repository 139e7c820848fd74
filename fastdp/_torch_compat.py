"""Every private attribute of torch that fastdp uses, with what happens where a torch lacks it.

Nothing else in the package may name a private attribute of torch (tests/test_torch_compat.py reads
the list below and says which one a new torch has lost).
"""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager

import torch

# name -> where it lives; the test looks each one up.
PRIVATE = {
    "_make_subclass": "torch.Tensor",
    "_set_sequence_nr": "torch.autograd.Function",  # on a node, made by a Function
    "_log_api_usage_once": "torch._C",
    "_check_balance": "torch.nn.parallel.data_parallel",
    "_current_level": "torch.autograd.forward_ad",
    "maybe_current_level": "torch._C._functorch",
    "_cuda_getCurrentRawStream": "torch._C",  # in CUDA builds of torch
}


def as_parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    """The tensor as an `nn.Parameter` that does not require grad itself: a Function that returns it
    makes it a non-leaf parameter with a grad_fn. Shares memory and version counter."""
    if type(tensor) is not torch.nn.Parameter:  # a subclass may have a detach of its own
        return torch.Tensor._make_subclass(torch.nn.Parameter, tensor, False)
    alias = tensor.detach()
    become_parameter(alias)
    return alias


def become_parameter(tensor: torch.Tensor) -> None:
    """`as_parameter` in place, for a tensor that nobody else holds yet: as torch's lazy parameters
    become ordinary ones, and at a tenth of the cost."""
    tensor.__class__ = torch.nn.Parameter


def run_early(node: Any) -> None:
    """Lets the engine run this node as soon as its gradients are there, before nodes made later.
    Without it the numbers are the same, only later."""
    raise_number = getattr(node, "_set_sequence_nr", None)
    if raise_number is not None:
        raise_number(2**62)


def forward_mode_active() -> bool:
    """True inside `torch.autograd.forward_ad.dual_level()`."""
    return getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0


def inside_function_transform() -> bool:
    """True below torch.func.grad, vjp, jvp, vmap and the like."""
    functorch = getattr(torch._C, "_functorch", None)
    level = getattr(functorch, "maybe_current_level", None)
    return level is not None and level() is not None


def raw_stream(device: torch.device) -> int:
    """The handle of the stream that is current on a GPU for this thread."""
    get = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if get is None:
        return torch.cuda.current_stream(device).cuda_stream
    return get(device.index)


def default_device() -> Any:
    """What `torch.set_default_device` or `with torch.device(...)` made the default here, or
    None."""
    device = torch.get_default_device()
    return None if device.type == "cpu" else device


def use_default_device(device: Any) -> ContextManager[Any]:
    return contextlib.nullcontext() if device is None else torch.device(device)


def log_use(name: str) -> None:
    log_once = getattr(torch._C, "_log_api_usage_once", None)
    if log_once is not None:
        log_once(name)


def check_balance(indices: Any) -> None:
    """torch's warning about unlike GPUs."""
    from torch.nn.parallel import data_parallel

    check = getattr(data_parallel, "_check_balance", None)
    if check is not None:
        check(indices)
