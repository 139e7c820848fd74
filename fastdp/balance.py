"""Whether the first GPU of a wrapper holds much more memory than the others, and what of: looked at
after a few of its forwards, which costs nothing in between."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence

import torch

from .containers import tensors_of
from .diagnosis import size_text
from .memory import gradients_of, held_by
from .streams import distinct
from .surprises import Surprises

# The forwards after which it is looked. By the first of them whole steps have been run.
_LOOKS = (3, 30, 300)

# The first GPU holds too much where it holds more than the fullest other one by both.
_SHARE = 0.25
_BYTES = 2 * 2**30

# What makes less of the difference is not worth a word.
_WORTH = 0.1


class Reading(NamedTuple):
    """What torch has allocated on a GPU: now, at the end of a forward, and at its peak so far."""

    device: str
    now_bytes: int
    peak_bytes: int


class Balance:
    """Of one wrapper."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = distinct(devices)
        self._forwards = 0

    def look(self, module: torch.nn.Module, outputs: Any, surprises: Surprises) -> None:
        """At the end of each forward, with what it gives."""
        self._forwards += 1
        if self._forwards not in _LOOKS or len(self._devices) < 2:
            return
        first = self._devices[0]
        joined = held_by(tensors_of(outputs)).get(first, 0)
        gradients = held_by(gradients_of(module)).get(first, 0)
        text = judge([reading_of(device) for device in self._devices], joined, gradients)
        if text is not None:
            surprises.uneven(text)


def reading_of(device: torch.device) -> Reading:
    now, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return Reading(str(device), now, peak)


def judge(readings: Sequence[Reading], joined: int, gradients: int) -> Optional[str]:
    """What is to be said of the first GPU, or None. `joined` and `gradients`: bytes of outputs and
    of the parameters' `.grad` that it holds now."""
    first, others = readings[0], readings[1:]
    fullest = max(reading.peak_bytes for reading in others)
    more = first.peak_bytes - fullest
    if more <= _BYTES or more <= _SHARE * fullest:
        return None
    # The replicas have the rest of what is there alike.
    standing = min(more, first.now_bytes - max(reading.now_bytes for reading in others))
    causes = (
        (
            joined,
            "outputs that are joined there (a loss inside of forward, or gather_outputs=False with "
            "fastdp.sum_losses, leaves them where they are)",
        ),
        (gradients, "sums of gradients"),
        (
            standing - joined - gradients,
            "what lies there besides: the optimizer's state, inputs, other tensors and models (a "
            "smaller share of the batch by chunk_sizes makes up for it)",
        ),
        (
            more - standing,
            "what comes and goes there in a step: a loss outside of the model, which works on the "
            "joined outputs, or sums of gradients",
        ),
    )
    said: List[str] = [
        f"{size_text(size_bytes)} are {cause}"
        for size_bytes, cause in sorted(causes, key=lambda each: -each[0])
        if size_bytes > _WORTH * more
    ]
    return (
        f"{first.device} holds {size_text(more)} more than any other GPU of the wrapper: "
        f"{size_text(first.peak_bytes)} at its peak, the others at most {size_text(fullest)}. "
        f"{'; '.join(said)}. See docs/troubleshooting.md, Memory on the first GPU"
    )
