"""Argument trees: nested tuples, lists and dictionaries with tensors in them, cut into one tree per
replica and joined again. The rules are those of torch.nn.parallel's scatter_gather, so that what
ran there runs here; where torch gives garbage or fails, the better rule is said at the function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from .containers import is_namedtuple, rebuild, rebuild_dict
from .cuts import Cut, scatter_call
from .devices import parse_device, parse_devices
from .functions import gather_tensors

__all__ = ["scatter", "scatter_kwargs", "gather"]

# Leaves that gather gives back as a list with one entry per replica: torch raises for numbers and
# makes garbage of strings.
_LISTED = (int, float, complex, bool, str, bytes)


def scatter(inputs: Any, target_gpus: Sequence[Any], dim: int = 0) -> Any:
    """Cuts every tensor of a tree along `dim` and gives one tree per device.

    Args:
        inputs: a tensor, or nested tuples, named tuples, lists and dictionaries of tensors. All
            else is handed to every device as it is.
        target_gpus: devices; "cpu" is a replica on the host, and any device may repeat.
        dim: dimension that is cut, as `torch.Tensor.chunk` cuts it.

    Returns:
        A tuple of tensors for a tensor, else a list of trees. Pieces are new memory on their
        device; a tensor that requires grad gets its gradient through them. Containers are zipped:
        where tensors of one container give unequal numbers of pieces, the smallest number decides.

    Raises:
        RuntimeError: a 0-dim tensor.
        TypeError: a PackedSequence, or a dictionary type that cannot be rebuilt from pairs.
    """
    cut = Cut(parse_devices(target_gpus, "target_gpus"), dim)
    return cut.trees(inputs, "inputs")


def scatter_kwargs(
    inputs: Tuple[Any, ...],
    kwargs: Optional[Dict[str, Any]],
    target_gpus: Sequence[Any],
    dim: int = 0,
) -> Tuple[Tuple[Any, ...], Tuple[Dict[str, Any], ...]]:
    """`scatter` of positional and keyword arguments: one tuple and one dictionary per used replica.

    Args:
        inputs, kwargs: the arguments; `kwargs` may be None.
        target_gpus, dim: as in `scatter`.

    The tensors alone decide how many replicas are used: constants never add one (torch calls the
    surplus replicas without the tensors). Arguments without any tensor go to every replica; no
    arguments at all give two empty tuples. A batch in which every tensor is empty along `dim` is
    one replica's. Shapes, devices and errors as in `scatter`.
    """
    return scatter_call(inputs, kwargs, parse_devices(target_gpus, "target_gpus"), dim)


def gather(outputs: Any, target_device: Any, dim: int = 0) -> Any:
    """Joins the replicas' outputs, tensor by tensor along `dim`, on the target device.

    Args:
        outputs: a list with one tree per replica, all of one structure.
        target_device: int, str or torch.device; -1 and "cpu" are the host.
        dim: dimension along which tensors are joined. 0-dim tensors become a vector with one entry
            per replica, with torch's warning.

    Returns:
        A tree of the first replica's structure. Tuples, named tuples, lists, dictionaries and other
        mappings, dataclasses and other iterable types keep their type. None stays None. Numbers,
        bools, strings and bytes become a list with one entry per replica.

    Raises:
        ValueError: dictionaries with different keys, sequences of different lengths, None on some
            replicas only; the message names the place in the output.
        RuntimeError: tensors that do not fit together; the message names the place, the replicas,
            shapes and dtypes.
        TypeError: something that can neither be joined nor listed.
    """
    return gather_tree(list(outputs), parse_device(target_device, "target_device"), dim, ())


def gather_tree(
    outputs: List[Any], device: torch.device, dim: int, tokens: Tuple[torch.Tensor, ...]
) -> Any:
    """`gather` with the tokens of the forward's broadcasts (functions.py)."""

    def join(tensors: Sequence[torch.Tensor], path: str) -> torch.Tensor:
        return gather_tensors(tensors, device, dim, tokens, path)

    return join_trees(outputs, join)


Join = Callable[[Sequence[torch.Tensor], str], torch.Tensor]


def join_trees(outputs: List[Any], join: Join) -> Any:
    """The tree that `gather` makes, with join(tensors of all replicas, path) at each place."""
    return _gather(outputs, join, "output")


def _gather(outputs: Sequence[Any], join: Join, path: str) -> Any:
    first = outputs[0]
    _check_kinds(outputs, path)
    if isinstance(first, torch.Tensor):
        return join(outputs, path)
    if first is None:
        return None
    if isinstance(first, _LISTED):
        return list(outputs)
    if isinstance(first, dict):
        return _gather_mapping(outputs, join, path)
    if dataclasses.is_dataclass(first):
        return _gather_dataclass(outputs, join, path)
    if isinstance(first, Mapping):  # a UserDict: as a sequence it would be its keys
        return _gather_mapping(outputs, join, path)
    try:
        if hasattr(type(first), "__array__"):
            raise TypeError  # a NumPy array: its constructor takes a list for a shape
        rows = [list(out) for out in outputs]
    except TypeError:
        raise TypeError(
            f"{path} is a {type(first).__name__}, which gather cannot join: return tensors, "
            "numbers, strings, or tuples, lists, dictionaries and dataclasses of them"
        ) from None
    if len({len(row) for row in rows}) > 1:
        lengths = ", ".join(str(len(row)) for row in rows)
        raise ValueError(f"{path}: the replicas' sequences have different lengths ({lengths})")
    items = [_gather(column, join, f"{path}[{i}]") for i, column in enumerate(zip(*rows))]
    return type(first)._make(items) if is_namedtuple(first) else rebuild(type(first), items, path)


def _check_kinds(outputs: Sequence[Any], path: str) -> None:
    """None or a tensor on one replica and something else on another would be lost silently."""
    first = outputs[0]
    for rank, out in enumerate(outputs):
        if type(out) is type(first):
            continue
        for kind in (torch.Tensor, type(None)):
            if isinstance(out, kind) != isinstance(first, kind):
                raise ValueError(_unlike(first, out, rank, path))


def _unlike(first: Any, out: Any, rank: int, path: str) -> str:
    kinds = type(first).__name__, type(out).__name__
    return f"{path} is a {kinds[0]} on replica 0 but a {kinds[1]} on replica {rank}"


def _gather_mapping(outputs: Sequence[Any], join: Join, path: str) -> Any:
    first = outputs[0]
    _check_keys(outputs, path)
    pairs = [(k, _gather([out[k] for out in outputs], join, f"{path}[{k!r}]")) for k in first]
    return rebuild_dict(type(first), pairs, path)


def _check_keys(outputs: Sequence[Any], path: str) -> None:
    for rank, out in enumerate(outputs):
        if len(out) != len(outputs[0]):
            raise ValueError(
                f"{path}: All dicts must have the same number of keys, but replica 0 has "
                f"{len(outputs[0])} and replica {rank} has {len(out)}"
            )
        missing = [key for key in outputs[0] if key not in out]
        if missing:
            raise ValueError(f"{path}: replica {rank} has no key {missing[0]!r}")


def _gather_dataclass(outputs: Sequence[Any], join: Join, path: str) -> Any:
    """Field by field, past the constructor: it may be frozen, or compute fields of its own."""
    first = outputs[0]
    for rank, out in enumerate(outputs):
        if type(out) is not type(first):
            raise ValueError(_unlike(first, out, rank, path))
    result = object.__new__(type(first))
    for field in dataclasses.fields(first):
        if not hasattr(first, field.name):
            continue
        column = [getattr(out, field.name) for out in outputs]
        joined = _gather(column, join, f"{path}.{field.name}")
        object.__setattr__(result, field.name, joined)
    return result
