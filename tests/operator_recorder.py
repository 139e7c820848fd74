"""A recorder for replicas on the host that freezes what a CUDA graph freezes: a replay runs the
operators of the recorded step again, on the addresses of then, and no Python of the model.

Closer to a GPU than host_recorder.py, whose replays call the modules: what Python decided stays
decided here, what lies elsewhere by now is read where it was, and memory that nobody keeps is found
out. What it takes longer for is the noting, operator by operator.
"""

from __future__ import annotations

import ctypes
from typing import Any, List

import torch
from engine_cases import StillMark
from host_recorder import HostRecorder, _write
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class FreedMemory(AssertionError):
    """A replay would read or write what its owner gave back."""


class Pool:
    """Of one replica's graphs: what they make lives as long as the recording."""

    def __init__(self) -> None:
        self.made: dict = {}

    def take(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.made.setdefault(storage.data_ptr(), storage)

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.made


class OperatorRecorder(HostRecorder):
    def mark(self) -> StillMark:
        return StillMark()

    def pool(self) -> Pool:
        return Pool()

    def record(self, device: torch.device, pool: Pool, act: Any) -> "_Operators":
        tape = (act.func if hasattr(act, "func") else act).__self__
        with _Noting(pool, tape.static()) as noting:
            act()
        self.recorded += 1
        return _Operators(self, noting)


class _Noting(TorchDispatchMode):
    """What is launched, and whose memory it reads: the pool's, `static`, or others'."""

    def __init__(self, pool: Pool, static: List[torch.Tensor]) -> None:
        super().__init__()
        self.pool = pool
        self.calls: List[Any] = []
        self.owners = {
            _address(t): StorageWeakRef(t.untyped_storage()) for t in static if t.numel()
        }
        self._static = [(_address(t), t.untyped_storage().nbytes()) for t in static]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _waits(function, args):
            raise RuntimeError(f"{function}: not permitted while a stream is capturing")
        if function is torch.ops.aten.lift_fresh.default:
            self.pool.take(args[0])  # torch.tensor(...), just now
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        for tensor in given:
            self._meet(tensor)
        result = function(*args, **kwargs)
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        known = {_address(t) for t in given}
        for tensor in made:
            if _address(tensor) not in known:
                self.pool.take(tensor)
        call = function, *tree_map(_frozen, (args, kwargs)), [_frozen(t) for t in made]
        self.calls.append(call)
        return result

    def _meet(self, tensor: torch.Tensor) -> None:
        address = _address(tensor)
        # The slots of a flat buffer are storages of their own, which go before the buffer does.
        is_slot = any(start <= address < start + size for start, size in self._static)
        if address and not self.pool.has(tensor) and not is_slot:
            self.owners.setdefault(address, StorageWeakRef(tensor.untyped_storage()))


class _Operators:
    def __init__(self, recorder: HostRecorder, noting: _Noting) -> None:
        self._recorder = recorder
        self._calls, self._pool = noting.calls, noting.pool
        self._owners = list(noting.owners.values())

    def replay(self) -> None:
        self._recorder.replayed += 1
        if any(owner.expired() for owner in self._owners):
            raise FreedMemory("a replay reads memory that was given back")
        with torch.no_grad():
            for function, args, kwargs, made in self._calls:
                result = function(*args, **kwargs)
                again = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
                for static, value in zip(made, again):
                    _write(static, value)


def _waits(function: Any, args: Any) -> bool:
    """Whether the host would wait for the device. Of indices only masks make it."""
    if function is torch.ops.aten.index.Tensor:
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return any(tag in function.tags for tag in tags)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _frozen(leaf: Any) -> Any:
    """The tensor as an address: it neither keeps the memory nor knows whose it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    size_bytes = leaf.untyped_storage().nbytes()
    if leaf.numel() == 0 or size_bytes == 0:
        return leaf.detach()
    place = (ctypes.c_char * size_bytes).from_address(_address(leaf))
    whole = torch.frombuffer(place, dtype=leaf.dtype)
    tensor = whole.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
    tensor = tensor.conj() if leaf.is_conj() else tensor
    return torch._neg_view(tensor) if leaf.is_neg() else tensor
