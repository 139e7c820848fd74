"""Where a wrapper meets torch.compile: around it, where the wrapper stays out of the trace, and
inside, where its replicas are compiled."""

from __future__ import annotations

import logging
from operator import attrgetter
from typing import Any, Callable, Dict, Optional

import torch

from .compile_options import (
    call_in_place,
    is_compiled_in_place,
    is_compiled_module,
    of_compiled_module,
    parts_compiled_apart,
)
from .devices import parse_devices

_log = logging.getLogger("fastdp")

# What copies and files of a wrapper are without.
OF_THIS_PROCESS = (
    "_fastdp_runtime", "_fastdp_surprises", "_fastdp_witness", "_fastdp_compiled",
    "_fastdp_compiled_for", "_fastdp_seen_call", "_fastdp_said_parts",
)  # fmt: skip

_untraced: Dict[Any, Callable[..., Any]] = {}
_SHOWN = 4


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, at whose edge torch.compile of something around it stops: neither the moves nor
    replicas on several threads can be traced."""
    found = _untraced.get(function)
    if found is None:
        found = _untraced[function] = torch.compiler.disable(function)
    return found


def is_asked(wrapper: Any) -> bool:
    """Whether the replicas of a wrapper are to be compiled, as it and its module are now."""
    asked = wrapper.__dict__.get("_fastdp_compile")
    if asked is not None:
        return asked is not False
    return is_compiled_module(wrapper.module) or is_compiled_in_place(wrapper.module)


def compiler_of(wrapper: Any, anew: bool = False) -> Any:
    """The `Compiled` of a wrapper whose replicas are to be compiled, else None. `anew`: for other
    devices than before, perhaps."""
    state = wrapper.__dict__
    options = None
    if is_asked(wrapper):
        asked = state.get("_fastdp_compile")
        call = None if asked else call_in_place(wrapper.module)
        found = state.get("_fastdp_compiled")
        # module.compile() may be called at any time, and its call be taken away and put back.
        if found is not None and not anew and state.get("_fastdp_compiled_for") is call:
            return found
        options = asked or of_compiled_module(wrapper.module)
    if options is None:
        if anew:
            _say_once(wrapper)
        return None
    from .compiled import Compiled

    ids = wrapper.device_ids
    devices = parse_devices(ids, "device_ids") if ids else ()
    state["_fastdp_compiled"] = found = Compiled(options, devices)
    state["_fastdp_compiled_for"] = call
    return found


def is_seen(wrapper: Any, module: Any) -> bool:
    """Whether the module's call is the one that `see` saw. Asked several times in a step."""
    return wrapper.__dict__.get("_fastdp_seen_call") is call_in_place(module)


def see(wrapper: Any, runtime: Any, anew: bool = False) -> None:
    """Has the replicas of a runtime compiled as is asked for now, or no more. Those that a forward
    has at this moment stay what they are."""
    call = call_in_place(wrapper.module)
    runtime.replicator.compiled = compiler_of(wrapper, anew)
    wrapper.__dict__["_fastdp_seen_call"] = call


def reason_of_parts(wrapper: Any) -> str:
    """What the user has compiled apart and runs uncompiled in replicas, or ""."""
    if wrapper.__dict__.get("_fastdp_compile") is False or len(wrapper.device_ids) < 2:
        return ""
    parts = parts_compiled_apart(wrapper.module)
    if not parts:
        return ""
    shown = ", ".join(name or "the module itself" for name in parts[:_SHOWN])
    more = f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return f"what is compiled apart runs uncompiled in replicas, unless compile=True: {shown}{more}"


def _say_once(wrapper: Any) -> None:
    reason = reason_of_parts(wrapper)
    if reason and wrapper.__dict__.get("_fastdp_said_parts") != reason:
        wrapper.__dict__["_fastdp_said_parts"] = reason
        _log.warning("compile: %s", reason)


def target_of(wrapper: Any, method: Optional[str]) -> Callable[..., Any]:
    """What a wrapper calls that has no replicas: its module, compiled if that was asked for, or the
    module's method."""
    module = wrapper.module
    if method is not None:
        return attrgetter(method)(module)
    if wrapper.__dict__.get("_is_replica"):
        return module
    compiled = compiler_of(wrapper)
    return module if compiled is None else compiled.direct(module)
