"""Markdown of what benchmarks/comm.py, benchmarks/input.py and benchmarks/grad_health.py took. Of
each the latest run on the same devices stands for all: they measure all their ways in one run.
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

from markdown import failures, figure, grid, kept, paragraph

NAMES = {
    "broadcast": "broadcast to the other GPUs",
    "reduce_add": "sum of all GPUs' tensors",
    "scatter": "scatter",
    "gather": "gather",
}


def latest(files: Sequence[Dict[str, Any]], *keys: str) -> List[Dict[str, Any]]:
    """Files are in the order of their dates. What one transport moved does not stand for another's
    moves."""

    def kind(found: Dict[str, Any]) -> str:
        return str([found["machine"].get("transport"), *(found.get(key) for key in keys)])

    return list({kind(found): found for found in files}.values())


def size_text(size_bytes: int) -> str:
    for unit, name in ((2**20, "MB"), (1024, "KB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.3g} {name}"
    return f"{size_bytes} B"


def verb_table(rows: Sequence[Dict[str, Any]]) -> str:
    """Verbs of the same sizes; a verb's name stands in its first row."""
    sizes = sorted({row["size_bytes"] for row in rows})
    cells = {(row["verb"], row["way"], row["size_bytes"]): row for row in rows}
    body, former = [], None
    for verb, way in dict.fromkeys((row["verb"], row["way"]) for row in rows):
        taken = [cells.get((verb, way, size), {}) for size in sizes]
        figures = ["failed" if "failed" in t else figure(t.get("device_us")) for t in taken]
        body.append(["" if verb == former else NAMES.get(verb, verb), way, *figures])
        former = verb
    return grid(["us on the GPUs", "way", *map(size_text, sizes)], body, texts=2)


def place_of(row: Dict[str, Any]) -> str:
    return f"{NAMES.get(row['verb'], row['verb'])}, {size_text(row['size_bytes'])}"


def render_comm(files: Sequence[Dict[str, Any]]) -> List[str]:
    parts = []
    for found in latest(files, "devices"):
        names = ", ".join(map(str, found["devices"]))
        parts.append(
            f"Moves between devices {names}, by transport `{found['machine']['transport']}`:"
        )
        buckets = [row for row in found["rows"] if "tensors" in row["verb"]]
        verbs = [row for row in found["rows"] if "tensors" not in row["verb"]]
        for rows in (verbs, buckets):
            failed = [row for row in rows if "failed" in row]
            parts += [verb_table(rows)] if rows else []
            parts += failures([(place_of(row), row["way"], row["failed"]) for row in failed])
        parts += map(paragraph, kept(found["bars"]))
    return parts


def render_input(files: Sequence[Dict[str, Any]]) -> List[str]:
    parts = []
    for found in latest(files, "devices", "model", "per_gpu", "engine"):
        parts.append(
            paragraph(
                f"Steps fed from the host: {found['title']}, engine `{found['engine']}`, "
                f"{found['batch_mb']:.1f} MB a batch:"
            )
        )
        steps = [
            [row["way"], figure(row["step_ms"]), f"{100 * row['longer']:.1f} %"]
            for row in found["steps"]
        ]
        copies = [
            [row["way"], figure(row["gb_per_s"]), f"{100 * row['of_bare']:.0f} %"]
            for row in found["copies"]
        ]
        parts.append(grid(["Step, inputs from", "ms", "longer"], steps))
        parts.append(grid(["Copies with nobody computing", "GB/s", "of bare"], copies))
        parts += map(paragraph, kept(found["bars"]))
    return parts


def render_grad_health(files: Sequence[Dict[str, Any]]) -> List[str]:
    parts = []
    for found in latest(files, "devices"):
        names = ", ".join(map(str, found["devices"]))
        body, former = [], None
        for row in found["results"]:
            first = "" if row["cost"] == former else row["cost"]
            times = figure(row["times_fastdp"])
            body.append([first, row["way"], figure(row["median_us"]), times])
            former = row["cost"]
        parts.append(f"Gradients that are watched, devices {names}:")
        parts.append(grid(["cost", "way", "median, us", "times fastdp"], body, texts=2))
    return parts
