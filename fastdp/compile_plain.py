"""The call of a replica that could be compiled and is not: as uncompiled replicas do it, on several
GPUs each bucket of parameters is waited for where it is first read (awaited.py).

What is compiled waits by itself, from dictionaries of the plain kind, which the compiler knows. So
here the others take their place, for the length of the call.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, List, Tuple

from torch import nn

from . import _C

_NAMES = ("_parameters", "_buffers")


def plainly(where: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The output of a replica's call, uncompiled. `where`: what stands for the call."""
    if where.gate is None or where.plan is None:
        return module._call_impl(*args, **kwargs)
    if any(isinstance(part, nn.RNNBase) for part in module.modules()):
        where.wait()  # these have a list of their weights beside the dictionary
        return module._call_impl(*args, **kwargs)
    with _awaited(module, where.gate, where.plan):
        return module._call_impl(*args, **kwargs)


@contextlib.contextmanager
def _awaited(module: nn.Module, gate: Any, plan: Any) -> Iterator[None]:
    places = {id(t): k for k, t in enumerate((*module.parameters(), *module.buffers()))}
    taken: List[Tuple[Any, str, Any, Any]] = []
    try:
        for part in module.modules():
            for name in _NAMES:
                held = part.__dict__[name]
                found = [places.get(id(tensor), -1) for tensor in held.values()]
                last = max((plan.bucket_of.get(place, -1) for place in found), default=-1)
                if last < 0:
                    continue
                lazy = _C.AwaitedDict(gate)
                lazy.update(held)
                lazy.bucket = last
                part.__dict__[name] = lazy
                taken.append((part, name, held, lazy))
        yield
    finally:
        for part, name, held, lazy in taken:
            if part.__dict__.get(name) is lazy:  # with what the forward has bound anew
                held.clear()
                held.update(dict.items(lazy))
                part.__dict__[name] = held
