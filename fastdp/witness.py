"""Which replicas' gradients were not finite, before they were summed."""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from . import _torch_tensors
from .streams import current_stream

# Looks that are remembered: a bucket of a backward is one.
_MAX_LOOKS = 10_000


class _Look(NamedTuple):
    """What was seen of one rank's gradients of one bucket."""

    rank: int
    norm: torch.Tensor
    there: Optional[torch.cuda.Event]


class Witness:
    """Looks at each replica's gradients when a broadcast's backward is about to sum them, on the
    streams that read them there. The host waits in `replicas` only. Any thread."""

    def __init__(self) -> None:
        self._looks: Deque[_Look] = deque(maxlen=_MAX_LOOKS)

    def look(self, gradients: Sequence[Optional[torch.Tensor]], count: int) -> None:
        """At the gradients of a bucket of `count` tensors, rank by rank."""
        with torch.no_grad():
            for start in range(0, len(gradients), count):
                found = [g for g in gradients[start : start + count] if g is not None]
                groups: Dict[Any, List[torch.Tensor]] = {}
                for gradient in found:
                    values = _values(gradient.detach())
                    if values.numel():
                        groups.setdefault((values.dtype, values.device), []).append(values)
                for (_, device), group in groups.items():
                    self._note(start // count, device, group)

    def _note(self, rank: int, device: torch.device, group: List[torch.Tensor]) -> None:
        # In double precision, which no sum of finite numbers of fewer bits leaves.
        norms = _torch_tensors.foreach_norm(group, 1.0, torch.float64)
        norm, there = torch.stack(norms).sum(), None
        if device.type == "cuda":
            there = torch.cuda.Event()
            there.record(current_stream(device))
        self._looks.append(_Look(rank, norm, there))

    def replicas(self) -> Tuple[int, ...]:
        """The ranks whose gradients were not finite since this was last asked."""
        bad = set()
        while self._looks:
            look = self._looks.popleft()
            if look.there is not None:
                look.there.synchronize()
            if not bool(torch.isfinite(look.norm)):
                bad.add(look.rank)
        return tuple(sorted(bad))


def _values(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout == torch.sparse_coo:
        gradient = gradient.coalesce()
    if gradient.layout != torch.strided:
        gradient = gradient.values()
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
