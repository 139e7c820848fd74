"""What a recorded step writes of the module's own tensors, and what may not be written between its
forward and its backward: as autograd counts and checks it for an eager step. A replay's writes are
kernels, which torch does not count, and what its backward reads was saved when it was recorded.
"""

from __future__ import annotations

from typing import List, Sequence, Set, Tuple

import torch

from . import _torch_compat

Tensors = Tuple[torch.Tensor, ...]


class Versions:
    """Of the tensors of one recording's source, parameters first."""

    def __init__(self, tensors: Tensors, parameter_count: int) -> None:
        self._count = parameter_count
        self._before = [_version(tensor) for tensor in tensors]
        self._written: List[int] = []
        self._saved: List[int] = []  # buffers

    def learn(self, tensors: Tensors, saved: Set[int]) -> None:
        """After a forward of the first replica, which saved tensors at these addresses for its
        backward."""
        after = [_version(tensor) for tensor in tensors]
        self._written = [k for k, pair in enumerate(zip(self._before, after)) if len(set(pair)) > 1]
        self._saved = [
            place
            for place, tensor in enumerate(tensors)
            if place >= self._count and memory_of(tensor) in saved
        ]

    def after_forward(self, tensors: Tensors) -> Tuple[int, ...]:
        """Counts what it wrote; what `check` compares with."""
        if self._written:
            _torch_compat.increment_versions([tensors[place] for place in self._written])
        return tuple([tensor._version for tensor in self._watched(tensors)])

    def check(self, tensors: Tensors, versions: Tuple[int, ...]) -> None:
        """In a backward.

        Raises:
            RuntimeError: one of them was written since, in the words of autograd.
        """
        watched = self._watched(tensors)
        if versions == tuple([tensor._version for tensor in watched]):
            return
        places = [*range(self._count), *self._saved]
        for place, tensor, version in zip(places, watched, versions):
            if tensor._version != version:
                name = f"parameter {place}" if place < self._count else "a buffer"
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: {name} of the module, of shape "
                    f"{list(tensor.shape)}, is at version {tensor._version}; expected version "
                    f"{version} instead. Call backward before {_WRITES[place < self._count]}"
                )

    def _watched(self, tensors: Tensors) -> Sequence[torch.Tensor]:
        parameters = tensors[: self._count]
        if not self._saved:
            return parameters
        return [*parameters, *[tensors[place] for place in self._saved]]


_WRITES = {True: "the optimizer's step", False: "what writes it, such as another forward"}


def storages_of(tensors: Tensors) -> Tuple[torch.UntypedStorage, ...]:
    """What keeps their memory, wherever they point later."""
    return tuple([tensor.untyped_storage() for tensor in tensors])


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
