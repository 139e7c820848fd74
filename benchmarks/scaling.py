"""Weak and strong scaling for benchmarks/step.py: on which GPUs each model runs, and what share of
one GPU's rate each of several reaches.

Weak: every GPU has the batch that one has, and the share is step(1) / step(n). Strong: all of them
share the batch that one has, and it is step(1) / (n step(n)). step(1) is that of the same rival on
one GPU. Of fastdp it is taken in turn with step(n), and so it is of torch's DataParallel and of
bare modules, which on one GPU are the bare module; DDP's on one GPU, eager or compiled, is that of
the run's first contest of the model, minutes before.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from contest import ONE, OURS, SILENT
from step_bars import ALONE, BARE, STRONG, TORCH, WEAK

KINDS = (WEAK, STRONG)


class Case(NamedTuple):
    """One contest: a model on some devices. `gpus`: the distinct ones. `scaling`: of which kind it
    is a part, or empty."""

    name: str
    per_gpu: int
    devices: Sequence[torch.device]
    gpus: int
    scaling: str = ""

    def title(self) -> str:
        """Unlike that of any other contest of a run."""
        return f"{self.name}:{self.per_gpu}" + (f" on {self.gpus}" if self.scaling else "")

    def lone_batches(self) -> int:
        """What one GPU does in one step, in batches of `per_gpu`."""
        return self.gpus if self.scaling == STRONG else 1

    def facts(self) -> Dict[str, Any]:
        """For the run's JSON."""
        shown = [d.index if d.type == "cuda" else "cpu" for d in self.devices]
        found = {"model": self.name, "per_gpu": self.per_gpu, "devices": shown}
        if self.scaling:
            found |= {"scaling": self.scaling, "batch": self.per_gpu * self.lone_batches()}
        return found


def counts_up_to(n: int) -> List[int]:
    """1, 2, 4, 8, ..., and n itself."""
    found = [1]
    while 2 * found[-1] <= n:
        found.append(2 * found[-1])
    return found if found[-1] == n else [*found, n]


def counts_of(text: str, n: int) -> List[int]:
    """As --counts has them. ValueError if they are none."""
    if not text:
        return counts_up_to(n)
    words = text.split(",")
    counts = [int(word) for word in words if word.isdigit()]
    if len(counts) < len(words) or counts != sorted(set(counts)) or not 1 <= counts[0]:
        raise ValueError(f"{text!r} are no rising numbers of GPUs, such as 1,2,4,8")
    if counts[-1] > n:
        raise ValueError(f"{counts[-1]} GPUs, and --devices names {n}")
    return counts


def cases_of(
    models: Sequence[Tuple[str, int]],
    devices: Sequence[torch.device],
    counts: Sequence[int],
    scaling: str,
) -> List[Case]:
    """Each model on the first 1, 2, ... devices. ValueError where they cannot share its batch."""
    cases = []
    for name, batch in models:
        for n in counts:
            if scaling == STRONG and batch % n:
                raise ValueError(f"{n} GPUs cannot share the batch of {name}:{batch} evenly")
            per_gpu = batch // n if scaling == STRONG else batch
            cases.append(Case(name, per_gpu, devices[:n], n, scaling))
    return cases


# Shares of one GPU's rate.


def is_of(table: Dict[str, Any], other: Dict[str, Any]) -> bool:
    """Whether both are of one model's scaling."""
    keys = ("model", "scaling", "batch", "part")
    return all(table.get(key) == other.get(key) for key in keys)


def add_shares(table: Dict[str, Any], tables: Sequence[Dict[str, Any]]) -> None:
    """To the rows of a table: `one_gpu_ms`, what they are compared with, and `efficiency`. `tables`
    are those that the run took before."""
    n = len(table["devices"])
    if not table.get("scaling") or n == 1:
        return
    first = next((t for t in tables if is_of(t, table) and len(t["devices"]) == 1), None)
    for row in table["rows"]:
        one_ms = _one_gpu_ms(row, table, first)
        if one_ms is not None:
            share = n if table["scaling"] == STRONG else 1
            row["one_gpu_ms"] = one_ms
            row["efficiency"] = one_ms / row["step_ms"] / share


def _one_gpu_ms(
    row: Dict[str, Any], table: Dict[str, Any], first: Optional[Dict[str, Any]]
) -> Optional[float]:
    rival = row["rival"]
    if "step_ms" not in row or rival == ONE or rival.endswith((ALONE, SILENT)):
        return None
    if rival.startswith(OURS):
        return _ms_of(table, "kind", row["kind"] + ALONE) or _ms_of(first, "kind", row["kind"])
    if rival in (TORCH, BARE):
        return _ms_of(table, "rival", ONE)
    return _ms_of(first, "rival", rival)


def _ms_of(table: Optional[Dict[str, Any]], key: str, value: str) -> Optional[float]:
    for row in [] if table is None else table["rows"]:
        if row.get(key) == value and "step_ms" in row:
            return float(row["step_ms"])
    return None


def show(table: Dict[str, Any]) -> None:
    for row in table["rows"]:
        if "efficiency" in row:
            print(
                f"{row['rival']}: {100 * row['efficiency']:.1f} % of the rate of one GPU, "
                f"{len(table['devices']) * row['efficiency']:.2f} times it",
                flush=True,
            )
