"""Markdown of what benchmarks/compiled.py took: steps of compiled rivals, and times to compile.
Runs on the same devices are joined: of a model's part the latest stands.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

from markdown import NONE, failures, figure, grid, kept, paragraph
from step_tables import rank_of


def render(files: Sequence[Dict[str, Any]]) -> List[str]:
    """Of runs in the order of their dates."""
    parts: List[str] = []
    notes: List[str] = []
    for devices in dict.fromkeys(tuple(found["devices"]) for found in files):
        models: Dict[str, Dict[str, Any]] = {}
        for found in files:
            if tuple(found["devices"]) == devices:
                for model, taken in found["models"].items():
                    models.setdefault(model, {}).update(taken)
                if "note" in found:
                    notes.append(found["note"])
        ranked = sorted(models, key=lambda model: rank_of(model.split(":")[0]))
        parts += _tables(", ".join(devices), {model: models[model] for model in ranked})
    return [*parts, *map(paragraph, notes)]


def _tables(devices: str, models: Dict[str, Dict[str, Any]]) -> List[str]:
    parts = []
    steps = {model: taken["steps"]["rows"] for model, taken in models.items() if "steps" in taken}
    times = {model: taken["time"] for model, taken in models.items() if "time" in taken}
    if steps:
        rivals = list(dict.fromkeys(row["rival"] for rows in steps.values() for row in rows))
        text = f"Whole steps of compiled models, ms, devices {devices}, rivals in turn:"
        head = ["Model (batch per GPU)", *rivals]
        body = [_line(model, rows, rivals) for model, rows in steps.items()]
        parts += [paragraph(text), grid(head, body)]
        parts += failures(
            [
                (_named(model), row["rival"], row["failed"])
                for model, rows in steps.items()
                for row in rows
                if "failed" in row
            ]
        )
        parts += _compilations(steps)
    if times:
        counts = sorted({n for taken in times.values() for n in taken if n.isdigit()}, key=int)
        text = "Seconds that fastdp compiles for, with nothing in the compiler's caches:"
        head = ["Model (batch per GPU)", *(f"{n} replica{'s' * (n != '1')}" for n in counts)]
        body = [
            [_named(model), *(figure(taken.get(n, {}).get("compile_s")) for n in counts)]
            for model, taken in times.items()
        ]
        parts += [paragraph(text), grid(head, body)]
    bars = [
        {**bar, "bar": f"{_named(model)}: {bar['bar']}"}
        for model, taken in models.items()
        for part in taken.values()
        for bar in part.get("bars", ())
    ]
    return [*parts, *map(paragraph, kept(bars))]


def _compilations(steps: Dict[str, Sequence[Dict[str, Any]]]) -> List[str]:
    """How long fastdp's rivals had compiled for when their turns came."""
    body = []
    for model, rows in steps.items():
        for row in rows:
            forms = (row.get("compiled") or {}).get("forms", ())
            seconds: Dict[str, float] = {}
            for form in forms:
                for device, taken in form["seconds"].items():
                    seconds[device] = seconds.get(device, 0.0) + taken
            if seconds:
                pieces = max(form["pieces"] for form in forms)
                first = next(iter(seconds.values()))
                cells = [str(pieces), figure(first), figure(sum(seconds.values()))]
                body.append([_named(model), row["rival"], *cells])
    if not body:
        return []
    text = (
        "Seconds that these compiled for, with nothing in the compiler's caches, and with the "
        "other rivals' compilers beside them; pieces are what a graph is cut into for the overlap:"
    )
    head = ["Model (batch per GPU)", "rival", "pieces", "first replica", "all replicas"]
    return [paragraph(text), grid(head, body, texts=2)]


def _line(model: str, rows: Sequence[Dict[str, Any]], rivals: Sequence[str]) -> List[str]:
    found = {row["rival"]: row for row in rows}
    return [_named(model), *(_cell(found.get(rival)) for rival in rivals)]


def _cell(row: Optional[Dict[str, Any]]) -> str:
    if row is None:
        return NONE
    return "failed" if "failed" in row else figure(row["step_ms"])


def _named(model: str) -> str:
    name, batch = model.split(":")
    return f"{name} ({batch})"
