"""Markdown of what benchmarks/memory.py took: the memory of steps, and estimates beside it. Of runs
with the same devices, models and ways the latest stands for all.
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

from markdown import NONE, failures, figure, grid, kept, paragraph
from memory_bars import BOUND, MB, OURS
from move_tables import latest
from step_tables import Line, title_of, where

# What is counted -> what that is.
KINDS = {
    "allocated": '"Allocated" is the peak of what torch has allocated.',
    "taken": '"Taken" is all that the process has taken of the GPU since it had its CUDA context '
    "there, by the driver's count: torch's cache, scratch and communicators are in it.",
}
PLACES = ("first GPU", "others")
MODES = {"train": "training", "eval": "evaluation"}


def render(files: Sequence[Dict[str, Any]]) -> List[str]:
    parts = []
    for found in latest(files, "devices", "models", "ways"):
        place = where(found["devices"], "step", found["machine"])
        lines = [Line(0, table) for table in found["tables"]]
        parts += peaks(f"Memory of {place[0].lower()}{place[1:]}", lines, found["devices"][0])
        parts += estimates(lines)
        rows = [(line.label(), row) for line in lines for row in line.table["rows"]]
        parts += failures(
            [(label, title_of(r["way"]), r["failed"]) for label, r in rows if "failed" in r]
        )
        bars = [
            {**bar, "bar": f"{line.label()}, {bar['bar']}"}
            for line in lines
            for bar in line.table["bars"]
        ]
        parts += map(paragraph, [*kept(bars), *([found["note"]] if "note" in found else [])])
    return parts


def figures_of(row: Dict[str, Any], first: Any) -> Dict[str, int]:
    """Bytes by column; of the GPUs but the first that of the one that has most."""
    found: Dict[str, int] = {}
    for device, counted in row.get("added", {}).items():
        place = PLACES[device != f"cuda:{first}"]
        for kind in KINDS:
            if kind in counted:
                column = f"{kind}, {place}"
                found[column] = max(found.get(column, 0), counted[kind])
    return found


def peaks(head: str, lines: Sequence[Line], first: Any) -> List[str]:
    """A line for each model and way."""
    rows = [
        ("" if k else line.label(), row, figures_of(row, first))
        for line in lines
        for k, row in enumerate(line.table["rows"])
    ]
    counted = {column for _, _, figures in rows for column in figures}
    if not counted:
        return [f"{head}: nobody has counted it."]
    columns = [f"{kind}, {place}" for kind in KINDS for place in PLACES]
    columns = [column for column in columns if column in counted]
    body = []
    for label, row, figures in rows:
        other = "failed" if "failed" in row else NONE
        cells = [figure(figures[c] / MB) if c in figures else other for c in columns]
        body.append([label, title_of(row["way"]), *cells])
    text = " ".join(
        [
            f"{head}, MB (2**20 bytes).",
            *(means for kind, means in KINDS.items() if any(c.startswith(kind) for c in columns)),
            "On the first GPU fastdp's eager steps may have as much as DDP's and one set of "
            "buckets:",
        ]
    )
    return [paragraph(text), grid(["Model (batch per GPU)", "of", *columns], body, texts=2)]


def estimates(lines: Sequence[Line]) -> List[str]:
    """A line for each model whose estimates were followed by measured peaks."""
    body = []
    for line in lines:
        ours = next((row for row in line.table["rows"] if row["way"] == OURS), {})
        cells = [worst(ours[mode]) for mode in MODES if mode in ours]
        if set(cells) - {NONE}:
            body.append([line.label(), figure(ours["bucket_bytes"] / MB), *cells])
    if not body:
        return []
    text = (
        "One set of buckets; and what `dp.fits` estimated before a step, as a share of the peak "
        f"that was then measured, on the GPU where it was farthest off ({100 * BOUND:g} % at most):"
    )
    head = ["Model (batch per GPU)", "buckets, MB", *(f"fits, {mode}" for mode in MODES.values())]
    return [paragraph(text), grid(head, body)]


def worst(estimate: Dict[str, Any]) -> str:
    found = [row["ratio"] for row in estimate["devices"].values() if "ratio" in row]
    return f"{max(found, key=lambda ratio: abs(ratio - 1)):.3f}" if found else NONE
