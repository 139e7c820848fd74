"""Whether the moves of a module's parameters are worth hiding behind its compute.

Hiding costs the host time: streams of their own, events for every gradient that crosses from one
stream to another (the engine makes them), and waits where a parameter is read. A module whose
parameters travel in a fraction of a millisecond is better off without: its moves then run on the
streams of its compute. How long they take is measured, once for some GPUs and a process.
"""

from __future__ import annotations

import time
from typing import Dict, List, Optional, Sequence, Tuple

import torch

from . import _C, environment
from .peers import open_peers
from .streams import distinct

# A broadcast that takes longer is hidden. With the sums on the way back, twice that is exposed.
_EXPOSED_S = 200e-6
_PROBE_BYTES = 64 * 2**20
_PROBES = 6  # one behind the other; the fastest counts, since the host may be late with the others
_DEADLINE_S = 10.0
_NVLINK_BYTES_PER_S = 350e9

_rates: Dict[Tuple[Tuple[torch.device, ...], Optional[str]], float] = {}


def is_worth_hiding(
    tensors: Sequence[torch.Tensor], devices: Sequence[torch.device], transport: Optional[str]
) -> bool:
    """Whether moves of the tensors from devices[0] to all others should run beside compute.
    FASTDP_OVERLAP says so where it is set."""
    targets = distinct(devices)
    if len(targets) < 2:
        return False
    wish = environment.overlap()
    if wish != "auto":
        return wish == "always"
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    rate = _bytes_per_s(tuple(targets), transport)
    return rate is None or size_bytes > _EXPOSED_S * rate


def _bytes_per_s(devices: Tuple[torch.device, ...], transport: Optional[str]) -> Optional[float]:
    """How fast one tensor comes from the first to all others; None if it cannot be measured now."""
    rate = _rates.get((devices, transport))
    if rate is not None or torch.cuda.is_current_stream_capturing():
        return rate
    try:
        rate = _rates[devices, transport] = measured_bytes_per_s(devices, transport)
    except (torch.cuda.OutOfMemoryError, MemoryError):
        return None  # a step may fit where this does not
    return rate


def known_bytes_per_s(devices: Sequence[torch.device]) -> float:
    """How fast parameters come to all of them, if that was measured; else what NVLink does."""
    found = [rate for (gpus, _), rate in _rates.items() if set(gpus) == set(devices) and rate > 0]
    return max(found, default=_NVLINK_BYTES_PER_S)


def measured_bytes_per_s(devices: Tuple[torch.device, ...], transport: Optional[str]) -> float:
    """How fast one tensor comes from the first to all others, measured now; 0 where it takes
    seconds."""
    open_peers(devices)
    source = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=devices[0])
    flats = tuple(torch.empty_like(source, device=device) for device in devices[1:])
    bucket = _C.Bucket((source,), None, transport)
    bucket.broadcast((source,), flats)  # what is made at a first use does not count
    rows = [_timing_events(devices[1:])]
    for _ in range(_PROBES):
        bucket.broadcast((source,), flats)
        rows.append(_timing_events(devices[1:]))
    if not all(has_passed(event) for event in rows[-1]):
        return 0.0  # something is very slow
    _C.scratch(True)  # three times the probe on the first, which no step would take again
    taken_ms = [
        max(first.elapsed_time(last) for first, last in zip(before, after))
        for before, after in zip(rows, rows[1:])
    ]
    return _PROBE_BYTES / max(min(taken_ms) * 1e-3, 1e-9)


def _timing_events(devices: Sequence[torch.device]) -> List[torch.cuda.Event]:
    events = []
    for device in devices:
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record(torch.cuda.current_stream(device))
    return events


def has_passed(event: torch.cuda.Event) -> bool:
    """Waits for it, some seconds at most."""
    deadline_s = time.monotonic() + _DEADLINE_S
    while not event.query():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(1e-4)
    return True
