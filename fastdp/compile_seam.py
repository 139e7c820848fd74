"""Where a wrapper meets torch.compile: around it, where the wrapper stays out of the trace, and
inside, where its replicas are compiled."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Callable, Dict, Optional

import torch

from .compile_options import is_compiled_module, of_compiled_module
from .devices import parse_devices

# What copies and files of a wrapper are without.
OF_THIS_PROCESS = (
    "_fastdp_runtime", "_fastdp_surprises", "_fastdp_witness", "_fastdp_compiled",
)  # fmt: skip

_untraced: Dict[Any, Callable[..., Any]] = {}


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
    if asked is False or asked is None and not is_compiled_module(wrapper.module):
        return None
    found = wrapper.__dict__.get("_fastdp_compiled")
    if found is None or anew:
        from .compiled import Compiled

        options = asked or of_compiled_module(wrapper.module)
        if options is None:
            return None
        ids = wrapper.device_ids
        devices = parse_devices(ids, "device_ids") if ids else ()
        found = wrapper.__dict__["_fastdp_compiled"] = Compiled(options, devices)
    return found


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
