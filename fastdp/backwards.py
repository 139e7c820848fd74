"""One way back through a recorded step: all replicas' backward graphs, for gradients of some of the
outputs. A recording has one for those that had gradients while it was watched, and if these are not
all of them, another for all. And the sums of what they gave, bucket by bucket."""

from __future__ import annotations

from typing import Any, FrozenSet, List, Optional, Sequence

import torch

from .buckets import Bucket
from .streams import current_stream
from .tapes import Column, Tape


class Backward:
    """Made right after its capture; `places` are those of its columns among all, `counts` the
    numbers of tensors of the buckets."""

    def __init__(
        self, places: List[int], graphs: List[Any], tapes: Sequence[Tape], counts: Sequence[int]
    ) -> None:
        self.places = places
        self.graphs = graphs
        # For each bucket, the slots for which no replica has a gradient.
        self.unused = [
            [slot for slot in range(count) if not any(row and row[slot] for row in rows)]
            for count, rows in zip(counts, zip(*[tape.present for tape in tapes]))
        ]
        # For each bucket whose gradients are not packed, those of each replica.
        self.made = [
            tuple([row or (None,) * count for row in rows])
            for count, rows in zip(counts, zip(*[tape.made for tape in tapes]))
        ]
        self.input_gradients: List[Optional[torch.Tensor]] = [
            None if gradient is None else gradient.detach()
            for tape in tapes
            for gradient in tape.leaf_gradients
        ]

    def serves(self, gradients: Sequence[Optional[torch.Tensor]]) -> bool:
        """Whether there are no others."""
        return sum(g is not None for g in gradients) <= sum(
            gradients[place] is not None for place in self.places
        )


def ways(columns: Sequence[Column], asked: Optional[FrozenSet[int]]) -> List[List[int]]:
    """The places of the columns of each way back."""
    every = [place for place, column in enumerate(columns) if column.differentiable]
    some = every if asked is None else [place for place in every if place in asked]
    found = [some, every] if 0 < len(some) < len(every) else [every]
    return [places for places in found if places]


class Sums:
    """The gradients of one bucket, of each replica, on their way to their sum."""

    def __init__(self, bucket: Bucket, tapes: Sequence[Tape], keeps_none: bool) -> None:
        k = bucket.number
        self.bucket = bucket
        self._keeps_none = keeps_none
        self._reached: Optional[List[int]] = None
        self._packed = tuple(tape.packed[k] for tape in tapes)
        self._ready = [(tape.device, event) for tape in tapes for event in tape.ready[k : k + 1]]

    def reached(self, ways: Sequence[Backward], singly: bool) -> List[int]:
        """The slots that some way back reaches, `singly` or all of the bucket together: an eager
        step's backward visits no others, and calls none of their hooks."""
        slots = list(range(self.bucket.count))
        if not self._keeps_none:
            return slots
        unused = [set(way.unused[self.bucket.number]) for way in ways]
        found = [slot for slot in slots if any(slot not in each for each in unused)]
        return found if singly or not found else slots

    def narrow(self, slots: List[int]) -> None:
        """From now on `into` gives these alone."""
        self._reached = slots if len(slots) < self.bucket.count else None

    def into(self, flat: torch.Tensor, way: Backward) -> List[Optional[torch.Tensor]]:
        """On the streams that are current: behind the recorded events, the sum in rank order."""
        for device, event in self._ready:
            current_stream(device).wait_event(event)
        if self._packed[0] is None:
            self.bucket.reduce(way.made[self.bucket.number], flat)
        else:
            self.bucket.reduce_flats(self._packed, flat)
        slots: List[Optional[torch.Tensor]] = list(self.bucket.slots(flat))
        for slot in way.unused[self.bucket.number] if self._keeps_none else ():
            slots[slot] = None
        return slots if self._reached is None else [slots[slot] for slot in self._reached]

    @property
    def places(self) -> Sequence[int]:
        """Of the tensors whose gradients `into` gives, among the module's."""
        places = self.bucket.places
        return places if self._reached is None else [places[slot] for slot in self._reached]
