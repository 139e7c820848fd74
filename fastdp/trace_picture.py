"""A trace as a picture: one row for each thread of the host and each stream of a device, the phases
as boxes. One HTML file that needs nothing else. And the command that makes it."""

from __future__ import annotations

import argparse
import html
import json
import sys
from typing import Any, Dict, List, Sequence, Tuple

from .trace_summary import Piece, Trace, read, summarize, text_of

_WIDTH, _ROW, _LEFT, _TOP = 1200, 26, 150, 30
_COLOURS = {
    "scatter": "#4e79a7",
    "replicate": "#9c755f",
    "broadcast": "#f28e2b",
    "parallel_apply": "#bab0ac",
    "replica": "#59a14f",
    "replay": "#76b7b2",
    "gather": "#b07aa1",
    "reduce": "#e15759",
    "compute": "#59a14f",
}
_LEAST = 0.5  # boxes of one phase that are closer than this, in pixels, become one

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 13px sans-serif; margin: 20px; }} pre {{ font-size: 12px; }}
text {{ font: 11px sans-serif; }} .key {{ display: inline-block; margin-right: 14px; }}
.key i {{ display: inline-block; width: 11px; height: 11px; margin-right: 4px; }}</style></head>
<body><h1>{title}</h1><p>{keys}</p>
{picture}
<pre>{summary}</pre></body></html>
"""


def colour_of(phase: str) -> str:
    return _COLOURS.get(phase.split()[0], "#888888")


def draw(trace: Trace, title: str) -> str:
    """The page."""
    pieces = sorted([*trace.host, *trace.gpu], key=lambda p: (p.begin_us, -p.end_us))
    kinds = sorted({piece.phase.split()[0] for piece in pieces})
    keys = "".join(
        f'<span class="key"><i style="background:{colour_of(kind)}"></i>{html.escape(kind)}</span>'
        for kind in kinds
    )
    return _PAGE.format(
        title=html.escape(title),
        keys=keys,
        picture=_picture(trace, pieces) if pieces else "<p>The trace has no phases.</p>",
        summary=html.escape(text_of(summarize(trace))),
    )


def _picture(trace: Trace, pieces: Sequence[Piece]) -> str:
    begin_us = min(piece.begin_us for piece in pieces)
    end_us = max(piece.end_us for piece in pieces)
    scale = (_WIDTH - _LEFT) / max(end_us - begin_us, 1e-3)
    rows = _rows(trace)
    height = _TOP + _ROW * len(rows)
    lines = [f'<svg width="{_WIDTH}" height="{height}" role="img">']
    for k in range(6):
        x = _LEFT + (_WIDTH - _LEFT) * k / 5
        label = f"{(end_us - begin_us) * k / 5e3:.2f} ms"
        anchor = "end" if k == 5 else "start"
        lines.append(f'<text x="{x:.1f}" y="14" text-anchor="{anchor}">{label}</text>')
        lines.append(f'<path d="M{x:.1f} 18V{height}" stroke="#dddddd"/>')
    for k, (name, found) in enumerate(rows):
        y = _TOP + _ROW * k
        lines.append(f'<text x="0" y="{y + 15}">{html.escape(name)}</text>')
        for phase, first, last, depth, count in _boxes(found, scale):
            x, width = _LEFT + (first - begin_us) * scale, max((last - first) * scale, 0.4)
            told = f"{phase}: {(last - first) / 1e3:.3f} ms" + (f", {count} x" if count > 1 else "")
            top = y + 5 * min(depth, 3)
            lines.append(
                f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{y + 21 - top}" '
                f'fill="{colour_of(phase)}"><title>{html.escape(told)}</title></rect>'
            )
    return "\n".join([*lines, "</svg>"])


def _rows(trace: Trace) -> List[Tuple[str, List[Piece]]]:
    """(name, pieces) of each row: threads in the order in which they begin, then devices."""
    host: Dict[Any, List[Piece]] = {}
    for piece in sorted(trace.host, key=lambda p: (p.begin_us, -p.end_us)):
        host.setdefault(piece.row, []).append(piece)
    gpu: Dict[Any, List[Piece]] = {}
    for piece in sorted(trace.gpu, key=lambda p: (p.row[0], p.row[1], p.begin_us)):
        gpu.setdefault(piece.row, []).append(piece)
    rows = [(f"thread {k}", found) for k, found in enumerate(host.values())]
    return rows + [(f"{device}, stream {stream}", found) for (device, stream), found in gpu.items()]


def _boxes(pieces: Sequence[Piece], scale: float) -> List[Tuple[str, float, float, int, int]]:
    """(phase, begin, end, depth, count): phases inside others are deeper; many short ones of one
    phase side by side are one box."""
    boxes: List[Tuple[str, float, float, int, int]] = []
    ends: List[float] = []
    for piece in pieces:
        while ends and ends[-1] <= piece.begin_us:
            ends.pop()
        depth = len(ends)
        ends.append(piece.end_us)
        if boxes:
            phase, begin, end, former_depth, count = boxes[-1]
            near = (piece.begin_us - end) * scale < _LEAST
            if (phase, former_depth) == (piece.phase, depth) and near:
                boxes[-1] = (phase, begin, max(end, piece.end_us), depth, count + 1)
                continue
        boxes.append((piece.phase, piece.begin_us, piece.end_us, depth, 1))
    return boxes


def main(arguments: List[str]) -> int:
    """`python -m fastdp report trace.json`."""
    parser = argparse.ArgumentParser(
        prog="python -m fastdp report",
        description="Sums up a trace that DataParallel.trace has written: time by phase, how busy "
        "GPUs were, what was hidden behind compute.",
        allow_abbrev=False,
    )
    parser.add_argument("trace", help="the file")
    parser.add_argument("--html", metavar="FILE", help="draw the phases into this file")
    parser.add_argument("--json", action="store_true", help="the sums as JSON")
    options = parser.parse_args(arguments)
    try:
        trace = read(options.trace)
        if options.html:
            with open(options.html, "w", encoding="utf-8") as file:
                file.write(draw(trace, options.trace))
    except (OSError, ValueError) as error:
        print(f"fastdp report: {error}", file=sys.stderr)
        return 2
    summary = summarize(trace)
    print(json.dumps(summary, indent=1) if options.json else text_of(summary))
    return 0
