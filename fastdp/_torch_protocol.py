"""The protocol between nn.Module, nn.DataParallel and torch's own modules, which a drop-in keeps.

`SHARED`: its private names, which any file may use. `PRIVATE`: what nn.DataParallel itself calls,
used in this file alone, behind a function. tests/test_torch_compat.py checks both tables against
this torch and against the package's source.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Callable, Dict

import torch

# name -> (where it lives, what fastdp does without it)
PRIVATE = {
    "_log_api_usage_once": ("torch._C", "use is not logged"),
    "_check_balance": ("torch.nn.parallel.data_parallel", "unlike GPUs draw no warning"),
    "_named_members": ("torch.nn.Module", "replicas' weights are not found among attributes"),
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
    "_pytree": "torch's walk over nested containers",
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


def log_use(name: str) -> None:
    """Tells torch's own log of what programs use, once a process, as nn.DataParallel does."""
    log = getattr(torch._C, "_log_api_usage_once", None)
    if log is not None:
        log(name)


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


_is_shown = False
_theirs: Dict[str, Any] = {}  # what stood in nn.Module before


def show_weights_of_replicas() -> None:
    """From now on code finds a replica's weights where nn.DataParallel's have them. They are plain
    attributes there, so some ask for all tensors in `module.__dict__`, by nn.Module's own list of
    members: torchdiffeq does so for the weights of its adjoint, and without them nothing learns."""
    global _is_shown
    found = None if _is_shown else getattr(torch.nn.Module, "_named_members", None)
    if found is not None:
        # Another thread may be here, too: of what both found, the first is torch's.
        _theirs.setdefault("_named_members", found)
        setattr(torch.nn.Module, "_named_members", _named_members)
        _is_shown = True


def _named_members(
    self: torch.nn.Module, get_members_fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if getattr(get_members_fn, "__module__", "") != torch.nn.Module.__module__:
        get_members_fn = functools.partial(_members_with_weights, get_members_fn)
    return _theirs["_named_members"](self, get_members_fn, *args, **kwargs)


def _members_with_weights(find: Callable[..., Any], module: torch.nn.Module) -> Any:
    if not module.__dict__.get("_is_replica"):
        return find(module)
    weights = {name: p for name, p in module._parameters.items() if p is not None}
    shown = type(module).__new__(type(module))
    shown.__dict__.update({**module.__dict__, **weights})
    return find(shown)
