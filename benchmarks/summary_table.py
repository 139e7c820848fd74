"""The few figures at the top of README.md, for benchmarks/tables.py: whole steps on the most GPUs
there were, how many times as fast as torch's own ways.
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

from markdown import figure, grid, paragraph
from step_tables import COUNTS, DDP, TORCH, Line, lines_of

WAYS = (("fastdp eager", "eager"), ("fastdp graph", "recorded"))
RIVALS = ((TORCH, "nn.DataParallel"), (DDP, "DDP"))


def chosen(files: Sequence[Dict[str, Any]]) -> Tuple[int, List[Line]]:
    """How many GPUs, and the models that were run there on all ways."""
    for (devices, part), lines in lines_of(files).items():
        gpus = len(set(devices))
        if part == "step" and gpus > 1 and devices[0] != "cpu":
            names = {name for name, _ in (*WAYS, *RIVALS)}
            return gpus, [line for line in lines if names <= set(line.rivals())]
    return 0, []


def ratio(line: Line, way: str, rival: str) -> float:
    return line.step_ms(rival) / line.step_ms(way)


def render(files: Sequence[Dict[str, Any]]) -> str:
    """Nothing where no run has them."""
    files = [found for found in files if found["benchmark"] == "step"]
    gpus, lines = chosen(files)
    if not lines:
        return ""
    machine = files[lines[-1].run - 1]["machine"]
    place = f"{COUNTS.get(gpus, str(gpus))} {machine['gpu']} ({machine['date']})"
    text = (
        f"How many times as fast a whole training step of fastdp was on {place} as one of "
        "nn.DataParallel and one of DistributedDataParallel (DDP); below 1 it was slower:"
    )
    columns = [(way, rival) for way, _ in WAYS for rival, _ in RIVALS]
    head = [f"{title} / {name}" for _, title in WAYS for _, name in RIVALS]
    body = [
        [line.label(), *(figure(ratio(line, *column)) for column in columns)] for line in lines
    ]
    return "\n\n".join([paragraph(text), grid(["Model (batch per GPU)", *head], body)])
