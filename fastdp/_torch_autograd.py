"""Private attributes of torch's autograd that fastdp uses, each behind a function, and what happens
where a torch lacks it. tests/test_torch_compat.py checks the table against the source."""

from __future__ import annotations

from typing import Any, Callable

import torch

_ASKED_SLOWLY = "recordings ask in the public, slower way"

# name -> (where it lives, what fastdp does without it)
PRIVATE = {
    "_set_sequence_nr": ("a node of torch.autograd.Function", "gradients are summed later"),
    "_current_level": ("torch.autograd.forward_ad", "frozen parameters carry no tangents"),
    "_functorch": ("torch._C", "as for maybe_current_level"),
    "maybe_current_level": ("torch._C._functorch", "torch.func raises torch's own error"),
    "_autograd": ("torch._C", _ASKED_SLOWLY),
    "_top_saved_tensors_default_hooks": ("torch._C._autograd", _ASKED_SLOWLY),
}


# Functions and their nodes.


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


# What is on around them.


def forward_mode_active() -> bool:
    """True inside `torch.autograd.forward_ad.dual_level()`."""
    return getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0


def inside_function_transform() -> bool:
    """True below torch.func.grad, vjp, jvp, vmap and the like."""
    functorch = getattr(torch._C, "_functorch", None)
    level = getattr(functorch, "maybe_current_level", None)
    return level is not None and level() is not None


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
