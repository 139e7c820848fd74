"""`Replicated`: a mark on an argument that every replica gets whole."""

from __future__ import annotations

from typing import Any, Tuple

from .containers import rebuild_dict, with_items
from .scattered import Scattered

__all__ = ["Replicated"]

_used = False  # whether there ever was a mark


class Replicated:
    """An argument of a wrapped module that is not cut: every replica gets all of it, on its device.

    Args:
        value: a tensor, or nested tuples, named tuples, lists and dictionaries of tensors. All
            else in it is handed on as it is.

    Each replica gets new memory. Gradients of all replicas are summed, in rank order, into tensors
    that require grad. A `Replicated` adds no replicas, and no warning is given for what is in it.
    Where a wrapper calls its module directly (one device, or none), the module gets the value.

    >>> dp(batch, Replicated(table))  # doctest: +SKIP
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        global _used
        _used = True
        self.value = value

    def __reduce__(self) -> Tuple[Any, ...]:
        return Replicated, (self.value,)

    def __repr__(self) -> str:
        return f"Replicated({self.value!r})"


def unmarked(tree: Any) -> Any:
    """Arguments that no scatter has seen, with each mark replaced by what it marks, and what is
    scattered already gathered. What holds neither is the same object."""
    return _unmarked(tree) if _used or Scattered.made else tree


def _unmarked(tree: Any) -> Any:
    if isinstance(tree, Replicated):
        return _unmarked(tree.value)
    if isinstance(tree, Scattered):
        return tree.gathered()
    if isinstance(tree, dict):
        pairs = [(key, _unmarked(value)) for key, value in tree.items()]
        if all(value is tree[key] for key, value in pairs):
            return tree
        return rebuild_dict(type(tree), pairs, "inputs")
    if isinstance(tree, (tuple, list)):
        items = [_unmarked(item) for item in tree]
        if all(new is old for new, old in zip(items, tree)):
            return tree
        return with_items(tree, items)
    return tree
