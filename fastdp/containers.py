"""Containers that argument and output trees are made of, and how they are made anew."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import UserDict
from collections.abc import Mapping
from typing import Any, Callable, Iterable, List, Tuple

import torch


def is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_asdict") and hasattr(value, "_fields")


def place(path: Any) -> str:
    """A path in words: a name, or (path, key) for what is in it."""
    if isinstance(path, str):
        return path
    return f"{place(path[0])}[{path[1]!r}]"


def rebuild_dict(kind: type, pairs: Iterable[Tuple[Any, Any]], path: Any) -> Any:
    """A dictionary type made of its items; some would take them for the value of a field: if it is
    a dataclass, too, as diffusers' outputs are, it is made of its fields."""
    pairs = list(pairs)
    rebuilt = rebuild(kind, pairs, path)
    held = (*rebuilt.values(), *getattr(rebuilt, "__dict__", {}).values())
    if any(value is pairs for value in held):
        if dataclasses.is_dataclass(kind):
            with contextlib.suppress(TypeError):  # where its fields have other names
                rebuilt = kind(**dict(pairs))
                if all(rebuilt.get(key) is value for key, value in pairs):
                    return rebuilt
        raise TypeError(
            f"{place(path)}: {kind.__name__} takes an iterable of its items for the value of a "
            "field; convert it to a dict, or override scatter() or gather()"
        )
    return rebuilt


def rebuild(kind: type, items: Any, path: Any) -> Any:
    try:
        return kind(items)
    except TypeError as error:
        raise TypeError(
            f"{place(path)}: {kind.__name__} cannot be rebuilt from an iterable of its items "
            f"({error}); convert it to a dict or a list, or override scatter() or gather()"
        ) from error


def map_tensors(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The tree with each tensor changed. What holds no changed tensor is the same object, and what
    is no container that gather knows is left alone."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, (dict, UserDict)):
        changed = [(key, map_tensors(value, change)) for key, value in tree.items()]
        changed = [(key, value) for key, value in changed if value is not tree[key]]
        if changed:
            tree = copy.copy(tree)
            for key, value in changed:
                tree[key] = value
        return tree
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name)]
        fields = [(name, map_tensors(getattr(tree, name), change)) for name in names]
        if any(value is not getattr(tree, name) for name, value in fields):
            tree = copy.copy(tree)
            for name, value in fields:
                object.__setattr__(tree, name, value)
        return tree
    if isinstance(tree, Mapping):
        pairs = [(key, map_tensors(tree[key], change)) for key in tree]
        if any(value is not tree[key] for key, value in pairs):
            return rebuild_dict(type(tree), pairs, "output")
        return tree
    if isinstance(tree, (tuple, list)):
        items = [map_tensors(item, change) for item in tree]
        if all(new is old for new, old in zip(items, tree)):
            return tree
        if isinstance(tree, list):
            tree = copy.copy(tree)  # a kind of list may want more than its items
            tree[:] = items
            return tree
        return with_items(tree, items)
    return tree


def with_items(tree: Any, items: Iterable[Any]) -> Any:
    """A tuple, named tuple or list of the same type with other items."""
    return type(tree)._make(items) if is_namedtuple(tree) else type(tree)(items)


def tensors_of(tree: Any) -> List[torch.Tensor]:
    """The tensors of a tree, in order."""
    found: List[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(tree, note)
    return found
