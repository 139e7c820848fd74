"""Pieces of Markdown for benchmarks/tables.py."""

from __future__ import annotations

import shlex
import textwrap
from typing import Any, Dict, List, Optional, Sequence, Tuple

from bars import beside_floor

NONE = "–"
# Of a command: where it wrote, and when it would have stopped, change no figure.
_LEFT_OUT = ("--json", "--limit")


def figure(value: Optional[float]) -> str:
    """Three digits, and no more than are there."""
    if value is None:
        return NONE
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def grid(head: Sequence[str], body: Sequence[Sequence[str]], texts: int = 1) -> str:
    """A table whose first columns are text, the others figures."""
    rules = ["---" if i < texts else "---:" for i in range(len(head))]
    rows = [f"| {' | '.join(row)} |" for row in (head, *body)]
    return "\n".join([rows[0], f"|{'|'.join(rules)}|", *rows[1:]])


def paragraph(text: str, hanging: str = "") -> str:
    return textwrap.fill(
        text, 100, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
    )


def kept(bars: Sequence[Dict[str, Any]]) -> List[str]:
    """What of a run's promises holds, as one text or none."""
    if not bars:
        return []
    failed = [bar for bar in bars if not bar["holds"]]
    text = f"{len(bars) - len(failed)} of {len(bars)} promises hold"
    each = []
    for bar in failed:
        bound = "most" if "most" in bar else "least"
        words = f"at {bound} {bar[bound]:.3g}{beside_floor(bar)}"
        each.append(f"{bar['bar']} is {bar['measured']:.3g} ({words})")
    return [f"{text}{'; not: ' if each else ''}{'; '.join(each)}."]


def failures(found: Sequence[Tuple[str, str, str]]) -> List[str]:
    """Of (where, who, reason) each: why a table says "failed", as one text or none. Those that
    failed for one reason share a line."""
    names: Dict[Tuple[str, str], List[str]] = {}
    for place, name, reason in found:
        names.setdefault((place, reason), []).append(name)
    lines = [
        paragraph(f"- {place}: {'; '.join(who)} failed: {reason.rstrip('.')}.", hanging="  ")
        for (place, reason), who in names.items()
    ]
    return ["\n".join(lines)] if lines else []


def machine_text(found: Dict[str, Any]) -> str:
    """Where a run was taken, without its day and its load."""
    words = [
        found.get("gpu"),
        f"{found['cores']} cores of {found['cpu']}",
        f"torch {found['torch']}",
        f"CUDA {found['cuda']}" if found.get("cuda") else None,
        f"NCCL {found['nccl']}" if found.get("nccl") else None,
        f"Python {found['python']}",
        f"fastdp {found['fastdp']}" + (f" ({found['commit']})" if found.get("commit") else ""),
    ]
    return ", ".join(word for word in words if word)


def shown_command(command: str) -> str:
    words, shown = shlex.split(command), []
    while words:
        word = words.pop(0)
        name, joined, _ = word.partition("=")
        if name not in _LEFT_OUT:
            shown.append(word)
        elif not joined and words:
            words.pop(0)
    return shlex.join(shown)


def runs(files: Sequence[Dict[str, Any]]) -> List[str]:
    """The commands, with their numbers if there are several, and the machines."""
    lines, machines = [], {}
    for number, found in enumerate(files, 1):
        date = found["machine"]["date"]
        run = f"run {number}, " if len(files) > 1 else ""
        lines += [f"# {run}{date}", f"$ {shown_command(found['command'])}"]
        machines.setdefault(machine_text(found["machine"]), []).append(str(number))
    parts = ["\n".join(["```console", *lines, "```"])]
    for text, numbers in machines.items():
        which = f"Runs {', '.join(numbers)}: " if len(machines) > 1 else ""
        parts.append(paragraph(f"{which}{text}."))
    return parts
