"""Markdown of the contests that benchmarks/step.py took with --scaling: a line for each model and
rival, a column for each number of GPUs. Of one model only the latest run is shown, since shares of
one GPU's rate are of one run.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from markdown import NONE, figure, grid, paragraph
from step_bars import ALONE, BARE, STRONG
from step_tables import FLOOR, Line, all_lines, columns_of, remarks, title_of

SHARES = {
    "weak": "every GPU has the batch of one",
    "strong": "all GPUs share the batch, which one has alone",
}


class Climb(NamedTuple):
    """One model in one run, by number of GPUs."""

    lines: Dict[int, Line]

    def label(self) -> str:
        return next(iter(self.lines.values())).label()

    def run(self) -> int:
        return next(iter(self.lines.values())).run

    def rivals(self) -> List[str]:
        """As columns_of has them; fastdp's own on one GPU is what others are compared with."""
        return [name for name in columns_of(list(self.lines.values())) if not name.endswith(ALONE)]

    def share(self, rival: str, gpus: int) -> Optional[float]:
        """Of one GPU's rate, of which one GPU has all."""
        row = self.lines[gpus].row(rival) if gpus in self.lines else {}
        return row.get("efficiency", 1.0 if gpus == 1 and "step_ms" in row else None)


def climbs_of(files: Sequence[Dict[str, Any]]) -> Dict[Tuple[Any, ...], List[Climb]]:
    """By (weak or strong, the machine's devices): the latest of each model."""
    runs: Dict[Tuple[Any, ...], Dict[int, Line]] = {}
    for line in all_lines(files):
        table = line.table
        if "scaling" in table and line.rivals():
            machine = files[line.run - 1]["machine"].get("gpu", "host")
            head = table["scaling"], machine, table["part"], table["model"], table["batch"]
            runs.setdefault((*head, line.run), {})[len(table["devices"])] = line
    latest: Dict[Tuple[Any, ...], Climb] = {}
    for (*head, run), lines in runs.items():
        if len(lines) > 1 and (tuple(head) not in latest or run > latest[tuple(head)].run()):
            latest[tuple(head)] = Climb(dict(sorted(lines.items())))
    groups: Dict[Tuple[Any, ...], List[Climb]] = {}
    for head, climb in latest.items():
        groups.setdefault(head[:3], []).append(climb)
    order = sorted(groups, key=lambda key: (key[0] == STRONG, key[2] != "step", key))
    return {
        key: sorted(groups[key], key=lambda climb: next(iter(climb.lines.values())).place())
        for key in order
    }


def head_of(scaling: str, machine: str, part: str) -> str:
    what = "whole steps" if part == "step" else "forward and backward"
    place = "replicas on the host" if machine == "host" else machine
    return f"{scaling.capitalize()} scaling on {place}, {what}"


def counts_of(climbs: Sequence[Climb]) -> List[int]:
    return sorted({gpus for climb in climbs for gpus in climb.lines})


def cell(climb: Climb, rival: str, gpus: int) -> str:
    row = climb.lines[gpus].row(rival) if gpus in climb.lines else {}
    if "step_ms" not in row:
        return "failed" if "failed" in row else NONE
    share = "" if "efficiency" not in row else f" ({100 * row['efficiency']:.1f} %)"
    return figure(row["step_ms"]) + share


def table_of(climbs: Sequence[Climb], with_runs: bool) -> str:
    counts = counts_of(climbs)
    units = [f"{n} GPU{'s' if n > 1 else ''}" for n in counts]
    body = []
    for climb in climbs:
        for k, rival in enumerate(climb.rivals()):
            label = "" if k else climb.label()
            run = [str(climb.run())] * with_runs
            body.append([label, title_of(rival), *(cell(climb, rival, n) for n in counts), *run])
    return grid(["Model (batch)", "of", *units] + ["run"] * with_runs, body, texts=2)


def render(files: Sequence[Dict[str, Any]]) -> List[str]:
    """Paragraphs and tables; none where nothing was scaled."""
    parts = []
    for (scaling, machine, part), climbs in climbs_of(files).items():
        formula = "step(1) / step(n)" if scaling != STRONG else "step(1) / (n step(n))"
        parts.append(
            paragraph(
                f"{head_of(scaling, machine, part)}: ms, medians; {SHARES[scaling]}. In brackets "
                f"the share of one GPU's rate, {formula}. The line of one GPU is the bare module, "
                "in turn with the others of its column. "
                + (FLOOR if any(BARE in climb.rivals() for climb in climbs) else "")
            )
        )
        parts.append(table_of(climbs, len(files) > 1))
        said = remarks([line for climb in climbs for line in climb.lines.values()])
        if said:
            parts.append("\n".join(said))
    return parts
