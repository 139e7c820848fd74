"""What torch's error in a replica does not say: which attributes stayed on another device. Only
parameters, buffers and registered modules are replicated; all else is the module's own."""

from __future__ import annotations

import re
from typing import Any, Iterator, List, Optional, Set, Tuple

import torch
from torch import nn

_REGISTERED = ("_parameters", "_buffers", "_modules", "_former_parameters", "_flat_weights")
_OF_DEVICES = re.compile("device|cuda:|stream|generator", re.IGNORECASE)
_MAX_NAMED = 5
_MAX_ITEMS = 100  # of a container that are looked at
_DEVICE_OBJECTS = (torch.cuda.Stream, torch.cuda.Event, torch.Generator)


def hint(error: BaseException, module: Any, device: Any) -> str:
    """A sentence that names attributes of a replica that lie on another device than it, or "". It
    is for errors of torch's only, and never raises."""
    if not isinstance(error, RuntimeError) or not isinstance(module, nn.Module):
        return ""
    try:
        if not _OF_DEVICES.search(str(error)):
            return ""
        found = _strangers(module, torch.device(device))
    except Exception:
        return ""  # attributes may do anything when they are read
    if not found:
        return ""
    more = "" if len(found) <= _MAX_NAMED else f" and {len(found) - _MAX_NAMED} more"
    return (
        f"\nNot on {device}, where this replica runs: {'; '.join(found[:_MAX_NAMED])}{more}. Only "
        "parameters, buffers and registered modules are replicated (register_buffer, "
        "nn.ParameterList, nn.ModuleList)."
    )


def _strangers(root: nn.Module, device: torch.device) -> List[str]:
    found = []
    seen: Set[int] = set()
    for prefix, module in root.named_modules():
        for name, value in vars(module).items():
            if name in _REGISTERED:
                continue
            path = f"{prefix}.{name}" if prefix else name
            for where, thing in _things(path, value, seen):
                place = _place(thing)
                if place is not None and place != device:
                    found.append(f"{where}, {_named(thing)} on {place}")
    return found


def _things(path: str, value: Any, seen: Set[int]) -> Iterator[Tuple[str, Any]]:
    """What an attribute holds: itself, or items of a container, or what a function refers to."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, (list, tuple)):
        for i, item in enumerate(value[:_MAX_ITEMS]):
            yield from _things(f"{path}[{i}]", item, seen)
    elif isinstance(value, dict):
        for key, item in list(value.items())[:_MAX_ITEMS]:
            yield from _things(f"{path}[{key!r}]", item, seen)
    elif isinstance(getattr(value, "__self__", None), nn.Module):
        yield path, value
    elif getattr(value, "__closure__", None):
        for cell in value.__closure__:
            try:
                held = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            if isinstance(held, (torch.Tensor, nn.Module)) or hasattr(held, "__self__"):
                yield from _things(f"{path} (through its closure)", held, seen)
    else:
        yield path, value


def _place(thing: Any) -> Optional[torch.device]:
    if isinstance(thing, torch.Tensor):
        return thing.device
    if isinstance(thing, _DEVICE_OBJECTS):
        return thing.device  # None: an event that was not recorded
    module = thing if isinstance(thing, nn.Module) else getattr(thing, "__self__", None)
    if isinstance(module, nn.Module):
        first = next(module.parameters(), next(module.buffers(), None))
        return None if first is None else first.device
    return None


def _named(thing: Any) -> str:
    if isinstance(thing, torch.Tensor):
        return "a tensor"
    if isinstance(thing, nn.Module):
        return f"a {type(thing).__name__} that is not registered"
    if isinstance(getattr(thing, "__self__", None), nn.Module):
        return f"a method of a {type(thing.__self__).__name__}"
    return f"a {type(thing).__name__}"
