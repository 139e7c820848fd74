"""Modules that a model holds without having registered them: in a list, in a dictionary, past
`__setattr__`. `self.teacher = [teacher]` keeps a teacher's parameters out of the model's own, and
the forward runs it all the same. A recording reads them where they were, and freezes what they
decide.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

import torch
from torch import nn

# As deep as a `_C.Snapshot` looks into containers, and as many values.
_DEPTH = 4
_MAX_VALUES = 8192

_SEQUENCES = (list, tuple, set, frozenset, collections.deque)
# What registers, hooks and torch's own bookkeeping: none of it holds another module.
_OWN = frozenset(vars(nn.Module()))


def modules_outside(registered: Iterable[nn.Module]) -> List[nn.Module]:
    """Those that these hold, and all modules below them, each once."""
    known = dict.fromkeys(registered)
    found: Dict[nn.Module, None] = {}
    waiting = list(known)
    values = 0
    while waiting:
        module = waiting.pop()
        for name, value in list(vars(module).items()):
            for held in () if name in _OWN else _held(value, _DEPTH):
                values += 1
                if values > _MAX_VALUES:
                    return list(found)
                if held is None or held in known or held in found:
                    continue
                new = [each for each in held.modules() if each not in known and each not in found]
                found.update(dict.fromkeys(new))
                waiting.extend(new)
    return list(found)


def _held(value: Any, depth: int) -> Iterator[Optional[nn.Module]]:
    """The modules in a value, and None for each other leaf."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, types.MethodType):
        yield value.__self__ if isinstance(value.__self__, nn.Module) else None
    elif depth == 0:
        yield None
    elif isinstance(value, _SEQUENCES):
        for item in value:
            yield from _held(item, depth - 1)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _held(item, depth - 1)
    elif isinstance(value, functools.partial):
        yield from _held((value.func, value.args, value.keywords), depth)
    elif dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace):
        yield from _held(dict(getattr(value, "__dict__", ())), depth)
    else:
        yield None


class Outside:
    """A `_C.Snapshot` that covers such modules too, and their parameters and buffers as they were:
    `differs()` is as its own."""

    def __init__(self, snapshot: Any, modules: List[nn.Module]) -> None:
        self._snapshot = snapshot
        self._places = [
            (type(module).__name__, held, name)
            for module in modules
            for held in (module._parameters, module._buffers)
            for name in held
        ]
        self._tensors = self._now()

    def differs(self) -> Optional[str]:
        changed: Optional[str] = self._snapshot.differs()
        if changed is not None:  # their names may be gone
            return changed
        now = self._now()
        if now == self._tensors:
            return None
        for (kind, _, name), was, place in zip(self._places, self._tensors, now):
            if was != place:
                return f"{kind}.{name}, of a module that is not registered,"
        return None

    def _now(self) -> List[Tuple[Any, ...]]:
        return [_place_of(held[name]) for _, held, name in self._places]


def _place_of(tensor: Optional[torch.Tensor]) -> Tuple[Any, ...]:
    if tensor is None or tensor.layout != torch.strided:
        return (id(tensor),)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad
