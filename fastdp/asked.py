"""Which outputs of a forward get gradients, as some eager steps show. A backward that is recorded
for these alone makes no zeros for the others, which would cost, and which times infinity are nan.
"""

from __future__ import annotations

import functools
from typing import Any, FrozenSet, Optional, Sequence, Set

import torch

from .outputs import map_output
from .signatures import NotRecordable


class Asked:
    """What is learned of one signature."""

    def __init__(self) -> None:
        self._places: Set[int] = set()
        self._is_known = True

    def watch(self, outputs: Any) -> None:
        """From now on gradients of these outputs count."""
        count = 0

        def hook(tensors: Sequence[torch.Tensor], path: str) -> torch.Tensor:
            nonlocal count
            (tensor,) = tensors
            if tensor.grad_fn is not None:  # at a leaf the hook would stay
                tensor.register_hook(functools.partial(self._note, count))
            count += 1
            return tensor

        try:
            map_output(outputs, hook, "output")
        except (NotRecordable, TypeError):
            self._is_known = False

    def places(self) -> Optional[FrozenSet[int]]:
        """Of the output's tensors, in order, those that had gradients; None where that is not
        known, as before the first backward."""
        return frozenset(self._places) if self._is_known and self._places else None

    def _note(self, place: int, gradient: torch.Tensor) -> None:
        self._places.add(place)
