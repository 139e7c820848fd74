"""What the options of a wrapper may be. Errors name the option, its value and what is allowed."""

from __future__ import annotations

import operator
from typing import Any, List, Optional

LOSS_WEIGHTINGS = ("chunk",)

# As FASTDP_TIMEOUT_MS.
MIN_TIMEOUT_S = 0.001
MAX_TIMEOUT_S = 86400


def whole_number(value: Any) -> int:
    """TypeError, without words, for what is none; a bool is none."""
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: it must be True or False")
    return value


def loss_weighting(value: Optional[str]) -> Optional[str]:
    if value is not None and value not in LOSS_WEIGHTINGS:
        raise ValueError(
            f"loss_weighting is {value!r}: it must be None or one of {', '.join(LOSS_WEIGHTINGS)}"
        )
    return value


def timeout_s(value: Any) -> Optional[float]:
    """A number of seconds, or None for no deadline."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"timeout_s is {value!r}: it must be a number of seconds, or None")
    if not MIN_TIMEOUT_S <= value <= MAX_TIMEOUT_S:
        raise ValueError(
            f"timeout_s is {value!r}: it must be from {MIN_TIMEOUT_S} to {MAX_TIMEOUT_S} seconds, "
            "or None"
        )
    return float(value)


def chunk_sizes(value: Any, replicas: int) -> Any:
    """A list with a size for each replica, or a callable that gives one for each batch. A wrapper
    that calls its module directly has no replicas, and any number will do."""
    if value is None or callable(value):
        return value
    sizes = _checked(value, "chunk_sizes")
    if replicas and len(sizes) != replicas:
        raise ValueError(
            f"chunk_sizes is {value!r}, with {len(sizes)} entries: it must have {replicas}, one "
            "for each replica"
        )
    return value


def sizes_for(value: Any, batch: int, replicas: int) -> List[int]:
    """The sizes of the pieces of this batch, one for each replica that is used.

    A list is filled from its start, so that a short batch leaves later replicas less, or nothing.
    """
    if not callable(value):
        sizes = _checked(chunk_sizes(value, replicas), "chunk_sizes")
        room = sum(sizes)
        if batch > room:
            raise ValueError(
                f"chunk_sizes is {value!r}, which is room for {room} samples, but the batch has "
                f"{batch}: a callable of batch size and number of replicas can cut any batch"
            )
        filled, left = [], batch
        for size in sizes:
            filled.append(min(size, left))
            left -= filled[-1]
        return _without_end(filled)
    result = value(batch, replicas)
    name = f"what chunk_sizes gave for a batch of {batch} and {replicas} replicas"
    sizes = _checked(result, name)
    if len(sizes) > replicas or sum(sizes) != batch:
        raise ValueError(
            f"{name} is {result!r}: it must have at most {replicas} entries that add up to {batch}"
        )
    return _without_end(sizes)


def _checked(value: Any, name: str) -> List[int]:
    """As ints, at least 1 but for zeros at the end."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(
            f"{name} is {value!r}: it must be a list of sizes"
            + (", or a callable that gives one" if name == "chunk_sizes" else "")
        )
    sizes = []
    for i, entry in enumerate(value):
        try:
            sizes.append(whole_number(entry))
        except TypeError:
            raise TypeError(
                f"{name}[{i}] is {entry!r}: it must be a whole number of samples"
            ) from None
    used = _without_end(sizes)
    for i, size in enumerate(used):
        if size < 1:
            raise ValueError(
                f"{name}[{i}] is {size}: it must be at least 1, or 0 for the last replicas only"
            )
    if not used:
        raise ValueError(f"{name} is {value!r}: at least one replica must get samples")
    return sizes


def _without_end(sizes: List[int]) -> List[int]:
    while sizes and sizes[-1] == 0:
        sizes = sizes[:-1]
    return sizes
