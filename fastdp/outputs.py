"""One replica's output with its tensors replaced: for a wrapper of one device, which joins nothing,
and to keep the structure without the graph."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Sequence

import torch

from .containers import is_namedtuple, rebuild_dict
from .signatures import NotRecordable
from .tapes import Column


def map_output(output: Any, take: Any, path: str) -> Any:
    """One replica's output anew, each tensor replaced."""
    if isinstance(output, torch.Tensor):
        return take([output], path)
    if isinstance(output, dict):
        pairs = [(k, map_output(v, take, f"{path}[{k!r}]")) for k, v in output.items()]
        return rebuild_dict(type(output), pairs, path)
    if is_namedtuple(output):
        items = [map_output(v, take, f"{path}[{i}]") for i, v in enumerate(output)]
        return type(output)(*items)
    if type(output) in (tuple, list):
        items = [map_output(v, take, f"{path}[{i}]") for i, v in enumerate(output)]
        return type(output)(items)
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return _map_dataclass(output, take, path)
    if output is None or isinstance(output, (bool, int, float, complex, str, bytes)):
        return output
    raise NotRecordable(f"{path} is a {type(output).__name__}: no container that can be made anew")


def _map_dataclass(output: Any, take: Any, path: str) -> Any:
    """Past the constructor, as gather makes one."""
    result = object.__new__(type(output))
    for field in dataclasses.fields(output):
        if hasattr(output, field.name):
            value = map_output(getattr(output, field.name), take, f"{path}.{field.name}")
            object.__setattr__(result, field.name, value)
    return result


def without_graph(output: Any, columns: Sequence[Column], rank: int) -> Any:
    """The same tree with the tensors that a step reads; deepcopy keeps every type."""
    memo = {id(column.live[rank]): column.live[rank].detach() for column in columns}
    try:
        return copy.deepcopy(output, memo)
    except Exception as error:
        raise NotRecordable(f"the output cannot be copied: {error}") from error
