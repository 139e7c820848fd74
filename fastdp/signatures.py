"""The signature of a forward: all by which one replay of a recording may stand for it.

Two forwards of one signature launch the same kernels on the same addresses, as far as the arguments
decide. What the module's attributes decide is `_C.Snapshot`'s; what neither sees is named in
watch.py.
"""

from __future__ import annotations

import enum
from typing import Any, Callable, Dict, Hashable, List, Optional, Sequence, Tuple

import torch

from .containers import is_namedtuple

Tensors = Tuple[torch.Tensor, ...]

# Baked into a recording, and compared by value.
_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, type(Ellipsis), range,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, enum.Enum,
)  # fmt: skip


class NotRecordable(Exception):
    """Why a forward cannot be recorded, in words that stand behind "the forward is not recorded:
    "."""


class EngineError(RuntimeError):
    """engine="graph" was asked for, and this forward cannot be recorded. The message says why."""

    __module__ = "fastdp"  # the name that a traceback shows is the one to catch it by


def of_arguments(
    rows: Sequence[Any], named: Sequence[Any], devices: Sequence[torch.device]
) -> Tuple[Hashable, List[List[torch.Tensor]]]:
    """The signature of the replicas' arguments, and each replica's tensors in order.

    Raises:
        NotRecordable: an argument that is more than tensors, numbers, strings and containers of
            them; a tensor that no static buffer can stand for.
    """
    key: List[Hashable] = []
    tensors: List[List[torch.Tensor]] = []
    for row, keywords, device in zip(rows, named, devices):
        found: List[torch.Tensor] = []
        key.append(_walk(tuple(row), found, "input", device))
        key.append(_walk(dict(keywords), found, "input", device))
        tensors.append(found)
    return tuple(key), tensors


def of_whole(
    inputs: Tuple[Any, ...], kwargs: Dict[str, Any]
) -> Tuple[Hashable, List[torch.Tensor]]:
    """The signature of arguments that are not cut yet, and their tensors in order, which is that of
    each replica's pieces. Raises as `of_arguments`."""
    found: List[torch.Tensor] = []
    key = _walk(tuple(inputs), found, "input", None), _walk(kwargs, found, "input", None)
    return key, found


def _walk(
    tree: Any, found: List[torch.Tensor], path: str, device: Optional[torch.device]
) -> Hashable:
    kind = type(tree)
    if isinstance(tree, torch.Tensor):
        _check_tensor(tree, path, device)
        found.append(tree)
        place = tree.device if device is None else None
        return kind, tree.shape, tree.stride(), tree.dtype, tree.requires_grad, place
    if isinstance(tree, _CONSTANTS):
        # 1 == 1.0 == True, and nan != nan: the type and the written form tell them apart.
        return kind, repr(tree) if kind in (float, complex) else tree
    if isinstance(tree, (tuple, list)):
        return kind, tuple(
            _walk(item, found, f"{path}[{i}]", device) for i, item in enumerate(tree)
        )
    if isinstance(tree, dict):
        return kind, tuple(
            (_key_of(name, path), _walk(value, found, f"{path}[{name!r}]", device))
            for name, value in tree.items()
        )
    raise NotRecordable(
        f"{path} is a {kind.__name__}, whose content may change without a sign: only tensors, "
        "numbers, strings, and tuples, lists and dictionaries of them can be arguments of a "
        "recording"
    )


def _key_of(name: Any, path: str) -> Hashable:
    if not isinstance(name, _CONSTANTS):
        raise NotRecordable(f"{path} has a key of type {type(name).__name__}")
    return type(name), name


def _check_tensor(tensor: torch.Tensor, path: str, device: Optional[torch.device]) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise NotRecordable(f"{path} is a {type(tensor).__name__}, a class of its own")
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        raise NotRecordable(f"{path} is sparse, or lazily conjugated or negated")
    if device is not None and tensor.device != device:
        raise NotRecordable(f"{path} lies on {tensor.device}, not on its replica's {device}")


def with_tensors(tree: Any, take: Callable[[], torch.Tensor]) -> Any:
    """The tree anew, each of its tensors replaced by the next of `take`."""
    if isinstance(tree, torch.Tensor):
        return take()
    if is_namedtuple(tree):
        return type(tree)(*(with_tensors(item, take) for item in tree))
    if isinstance(tree, (tuple, list)) and not isinstance(tree, torch.Size):
        return type(tree)(with_tensors(item, take) for item in tree)
    if isinstance(tree, dict):
        return type(tree)((name, with_tensors(value, take)) for name, value in tree.items())
    return tree


def of_tensors(tensors: Tensors) -> Hashable:
    """Where parameters and buffers lie: a recording reads and writes them there."""
    return tuple([tensor.data_ptr() for tensor in tensors])
