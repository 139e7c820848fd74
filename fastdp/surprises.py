"""Warnings of calls that run as in nn.DataParallel but may compute something else than meant. Each
is given once for each wrapper and place in the arguments, for the line that called the wrapper.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any, Iterable, Set, Tuple

import torch

from .containers import place

__all__ = ["DataParallelWarning"]

# After so many places a wrapper has said enough.
_MAX_SAID = 64


class DataParallelWarning(UserWarning):
    """Of inputs that are not cut as one may think, of replicas without work, and of memory that the
    first GPU alone holds.

    To silence: `warnings.filterwarnings("ignore", category=fastdp.DataParallelWarning)`.
    """

    __module__ = "fastdp"  # as EngineError's


class Surprises:
    """What one wrapper has warned of."""

    __slots__ = ("_said",)

    def __init__(self) -> None:
        self._said: Set[Any] = set()

    def uncut_list(self, path: Any, length: int) -> None:
        if self._is_new(path):
            self._warn(
                path,
                f"{place(path)} is a list of {length}, as many as the batch has samples, but lists "
                "are not cut: every replica gets all of it. Pass split_lists=True to cut lists of "
                "samples, or fastdp.Replicated(...) if it is meant so",
            )

    def unequal(self, found: Iterable[Tuple[Any, torch.Tensor]], dim: int, replicas: int) -> None:
        """Tensors, with their paths, of different sizes along the dimension that is cut."""
        first: Any = None
        for path, tensor in found:
            if tensor.dim() == 0:
                continue
            size = tensor.size(dim)
            if first is None:
                first = path, size
            if size == first[1] or (tensor.dim() == 1 and size == replicas):
                continue  # the latter is one entry for each replica
            if self._is_new(path):
                self._warn(
                    path,
                    f"{place(path)} has size {size} along dimension {dim} and {place(first[0])} "
                    f"has {first[1]}: each is cut for itself, into pieces that do not belong "
                    "together. Pass fastdp.Replicated(...) for what every replica is to get "
                    "whole, or split_lists=True to cut lists of samples",
                )

    def idle(self, used: int, replicas: int, batch: int) -> None:
        if self._is_new(None):
            self._warn(None, f"a batch of {batch} gave work to {used} of {replicas} replicas only")

    def uneven(self, text: str) -> None:
        """What balance.py says of the first GPU's memory."""
        if self._is_new("memory"):
            self._warn("memory", text)

    def _is_new(self, key: Any) -> bool:
        return key not in self._said and len(self._said) < _MAX_SAID

    def _warn(self, key: Any, text: str) -> None:
        warnings.warn(text, DataParallelWarning, stacklevel=_depth_of_caller())
        self._said.add(key)  # behind: where warnings are errors, each call is one


def _depth_of_caller() -> int:
    """Of the first frame that is neither fastdp's nor torch's, for `_warn`."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if name.split(".", 1)[0] not in ("fastdp", "torch"):
            break
        depth, frame = depth + 1, frame.f_back
    return depth
