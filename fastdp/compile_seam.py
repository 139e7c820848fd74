"""Where a wrapper meets torch.compile: around it, where the wrapper stays out of the trace, and
inside, where its replicas are compiled."""

from __future__ import annotations

import logging
from operator import attrgetter
from typing import Any, Callable, Dict, Optional

import torch

from .compile_options import (
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
    "_fastdp_said_parts",
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


def compiler_of(wrapper: Any, anew: bool = False) -> Any:
    """The `Compiled` of a wrapper whose replicas are to be compiled, else None. `anew`: for other
    devices than before, perhaps."""
    asked = wrapper.__dict__.get("_fastdp_compile")
    module = wrapper.module
    if asked is False:
        return None
    if asked is None and not is_compiled_module(module) and not is_compiled_in_place(module):
        if anew:
            _say_once(wrapper)
        return None
    found = wrapper.__dict__.get("_fastdp_compiled")
    if found is None or anew:
        from .compiled import Compiled

        options = asked or of_compiled_module(module)
        if options is None:
            if anew:
                _say_once(wrapper)
            return None
        ids = wrapper.device_ids
        devices = parse_devices(ids, "device_ids") if ids else ()
        found = wrapper.__dict__["_fastdp_compiled"] = Compiled(options, devices)
    return found


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
