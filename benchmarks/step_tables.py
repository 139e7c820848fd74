"""Markdown of what benchmarks/step.py took: times of steps, how many times as long others take.

Figures of different runs stand in different lines, even for the same model: only those of one run
are compared. A later run takes the place of an earlier one if it has all of its rivals.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from markdown import figure, grid, kept, paragraph
from step_bars import ALONE, BARE

LABELS = {
    "mlp": "50-layer MLP, width 256",
    "resnet18": "ResNet-18 at 64 pixels",
    "resnet50": "ResNet-50, bf16, channels_last",
    "resnet50-fp16": "ResNet-50, fp16 with GradScaler, channels_last",
    "resnet50-fp32": "ResNet-50, fp32, channels_last",
    "gpt2": "GPT-2 124M, bf16",
    "gpt-causal": "GPT of that size, `is_causal=True`, bf16",
}
UNITS = {"gpt2": " x 512 tokens", "gpt-causal": " x 512 tokens"}
COUNTS = {1: "one", 2: "two", 4: "four", 8: "eight"}
ONE, TORCH, DDP, OURS = "one GPU", "torch DP", "DDP", "fastdp"
SILENT = ", silent"
WAYS = ("eager", "auto", "graph")
FLOOR = (
    "Bare modules are a copy of the model for each replica with its share of the batch, without "
    "sums: no way to train, but what eager steps of one process cost, whoever wraps them. "
)
RATIOS = "How many times as long the others take for as many batches as fastdp"


class Line(NamedTuple):
    """One model in one run. `run`: its number among the files."""

    run: int
    table: Dict[str, Any]

    def row(self, rival: str) -> Dict[str, Any]:
        return next((row for row in self.table["rows"] if row["rival"] == rival), {})

    def step_ms(self, rival: str) -> float:
        """0 where it did not run or failed."""
        return float(self.row(rival).get("step_ms", 0.0))

    def rivals(self) -> List[str]:
        return [row["rival"] for row in self.table["rows"] if "step_ms" in row]

    def label(self) -> str:
        name = self.table["model"]
        # Of strong scaling: what all GPUs share.
        batch = self.table.get("batch", self.table["per_gpu"])
        return f"{LABELS.get(name, name)} ({batch}{UNITS.get(name, '')})"

    def place(self) -> Tuple[int, int]:
        """Among the models of a table."""
        return rank_of(self.table["model"]), self.table["per_gpu"]


def rank_of(model: str) -> int:
    """Its place among all that tables know; those that they do not come last."""
    known = list(LABELS)
    return known.index(model) if model in known else len(known)


def all_lines(files: Sequence[Dict[str, Any]]) -> List[Line]:
    """In the order in which they were taken."""
    taken = [Line(run, table) for run, found in enumerate(files, 1) for table in found["tables"]]
    return sorted(taken, key=lambda line: str(line.table["began"]))


def lines_of(files: Sequence[Dict[str, Any]]) -> Dict[Tuple[Any, ...], List[Line]]:
    """By devices and part of the step: lines in the order in which models were run first. Those of
    scaling are for scaling_tables.py."""
    kept: Dict[Tuple[Any, ...], List[Line]] = {}
    taken = [line for line in all_lines(files) if "scaling" not in line.table]
    for line in taken:
        table = line.table
        lines = kept.setdefault((tuple(table["devices"]), table["part"]), [])
        for old in lines:
            same = all(old.table[key] == table[key] for key in ("model", "per_gpu"))
            if same and set(old.rivals()) <= set(line.rivals()):
                lines[lines.index(old)] = line
                break
        else:
            lines.append(line)
    # Those with most GPUs first, and whole steps before parts of them.
    order = sorted(kept, key=lambda key: (-len(set(key[0])), key[1] != "step", str(key)))
    return {key: sorted(kept[key], key=Line.place) for key in order}


def columns_of(lines: Sequence[Line]) -> List[str]:
    """Rivals that ran or failed: torch's before fastdp's, each kind in the order of its turns."""
    found = dict.fromkeys(row["rival"] for line in lines for row in line.table["rows"])

    def place(name: str) -> int:
        kinds = (ONE, BARE, TORCH, DDP, "DDP compiled", *(f"{OURS} {way}" for way in WAYS))
        matching = [kind for kind in kinds if name == kind or name.startswith(kind + " ")]
        return kinds.index(matching[-1]) if matching else len(kinds)

    return sorted((name for name in found if not name.endswith(SILENT)), key=place)


def title_of(name: str) -> str:
    """As it stands at the head of a column."""
    if name == BARE:
        return f"{name}, no communication"
    if name.endswith(ALONE):
        return f"{title_of(name.removesuffix(ALONE))}{ALONE}"
    for kind in (OURS, f"{DDP} compiled"):
        if name.startswith(kind + " "):
            words = name[len(kind) + 1 :].split(" ")
            return ", ".join([kind.replace(" ", ", "), *(f"`{word}`" for word in words)])
    return name


def where(devices: Sequence[Any], part: str, machine: Dict[str, Any]) -> str:
    gpus, replicas = len(set(devices)), len(devices)
    what = "Whole steps" if part == "step" else "Forward and backward"
    if devices[0] == "cpu":
        return f"{what} of {replicas} replicas on the host"
    count = COUNTS.get(gpus, str(gpus))
    shared = "" if gpus == replicas else f", which {COUNTS.get(replicas, replicas)} replicas share"
    return f"{what} on {count} {machine.get('gpu', 'GPU')}{shared}"


def times(lines: Sequence[Line], with_runs: bool) -> str:
    columns = columns_of(lines)
    head = ["Model (batch per GPU)", *map(title_of, columns)] + ["run"] * with_runs
    body = []
    for line in lines:
        cells = []
        for name in columns:
            row = line.row(name)
            cells.append("failed" if "failed" in row else figure(row.get("step_ms")))
        body.append([line.label(), *cells] + [str(line.run)] * with_runs)
    return grid(head, body)


def ratios(lines: Sequence[Line], with_runs: bool) -> str:
    """Of each way of fastdp, and of the floor: how many times as long the others take; and, of
    several GPUs, how many times as many batches it takes in the same time as one GPU."""
    names = columns_of(lines)
    ways = [name for name in names if name.startswith((OURS, BARE)) and not name.endswith(ALONE)]
    others = [name for name in names if not name.startswith(OURS)]
    if ONE in others and len(set(lines[0].table["devices"])) == 1:
        others.remove(ONE)  # there it does as much
    body = []
    for line in lines:
        for way in ways:
            own = line.row(way).get("times_ours")
            if own:
                cells = [figure(own.get(name)) for name in others]
                body.append([line.label(), title_of(way), *cells] + [str(line.run)] * with_runs)
    if not body or not others:
        return ""
    head = ["Model (batch per GPU)", "of", *map(title_of, others)] + ["run"] * with_runs
    return grid(head, body, texts=2)


def remarks(lines: Sequence[Line]) -> List[str]:
    said = []
    for line in lines:
        gpus = len(line.table["devices"])
        label = line.label() + (f" on {gpus}" if "scaling" in line.table else "")
        for row in line.table["rows"]:
            if "not_hidden_ms" in row:
                said.append(
                    f"- {label}, {title_of(row['rival'])}: communication that is not hidden "
                    f"takes {row['not_hidden_ms']:.2f} ms, {100 * row['not_hidden_share']:.1f} % "
                    "of the step."
                )
            if "failed" in row:
                said.append(f"- {label}, {title_of(row['rival'])} failed: {row['failed']}.")
        if not line.table["is_whole"]:
            turns = min((len(row["turns_ms"]) for row in line.table["rows"] if "step_ms" in row))
            said.append(f"- {label}: the run was cut off; medians of {turns} turns or more.")
        said += [f"- {label}: {text}" for text in kept(line.table.get("bars", []))]
    return [paragraph(text, hanging="  ") for text in said]


def render(files: Sequence[Dict[str, Any]]) -> List[str]:
    """Paragraphs and tables."""
    parts = []
    for (devices, part), lines in lines_of(files).items():
        with_runs = len(files) > 1
        rows = [row for line in lines for row in line.table["rows"] if "turns_ms" in row]
        if not rows:
            continue
        counts = sorted({len(row["turns_ms"]) for row in rows})
        share = "One GPU does its share of the batch only. " if len(set(devices)) > 1 else ""
        turns = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
        place = where(devices, part, files[lines[0].run - 1]["machine"])
        parts.append(
            paragraph(
                f"{place}: ms, the median of {turns} turns, rivals in turn. {share}"
                + (FLOOR if any(row["rival"] == BARE for row in rows) else "")
                + ("Figures of different runs are not compared." if with_runs else "")
            )
        )
        parts.append(times(lines, with_runs))
        compared = ratios(lines, with_runs)
        if compared:
            words = " (against one GPU this is the speed-up):" if share else ":"
            parts += [paragraph(RATIOS + words), compared]
        said = remarks(lines)
        if said:
            parts.append("\n".join(said))
    return parts
