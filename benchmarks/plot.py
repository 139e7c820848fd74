"""Pictures of the steps that benchmarks/step.py took. docs/steps.svg: bars of one model side by
side, shorter is better. docs/scaling.svg: the share of one GPU's rate by the number of GPUs, for
each rival a line, higher is better. They need nothing but Python, and are readable on light and
dark pages.

    python benchmarks/plot.py                          of benchmarks/results/*.json
    python benchmarks/plot.py out.json --output steps.svg
    python benchmarks/plot.py --check                  exits 1 if the page has other pictures

Bars show the whole steps on most GPUs, lines the weak scaling: of each kind the first of the tables
that benchmarks/tables.py makes. Where a kind was not run there is no picture of it.
"""

from __future__ import annotations

import argparse
import sys
from html import escape
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from markdown import figure  # noqa: E402
from scaling_tables import SHARES, Climb, climbs_of, counts_of, head_of  # noqa: E402
from step_bars import BARE  # noqa: E402
from step_tables import DDP, ONE, OURS, Line, columns_of, lines_of, title_of, where  # noqa: E402
from tables import ROOT, read  # noqa: E402

# In pixels.
MARGIN, GAP = 16, 28
LABEL_WIDTH, BAR_WIDTH, VALUE_WIDTH = 204, 190, 56
BAR_HEIGHT, BAR_STEP = 15, 21
HEAD_HEIGHT, TITLE_HEIGHT = 54, 26
PANEL_WIDTH = LABEL_WIDTH + BAR_WIDTH + VALUE_WIDTH
PANELS_ABREAST = 2
PLOT_HEIGHT, PLOT_WIDTH, NAME_WIDTH, NAME_STEP = 190, 230, 256, 14
AXIS_WIDTH, AXIS_HEIGHT = 40, 26
FULL_HEIGHT = TITLE_HEIGHT + PLOT_HEIGHT + AXIS_HEIGHT  # of one panel of lines
DASHES = ("none", "6 3", "2 3", "9 3 2 3")  # of lines in one colour

STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1f2328; }
.head { font-size: 15px; font-weight: 600; } .title { font-weight: 600; } .note { fill: #59636e; }
.page { fill: #ffffff; } .floor { fill: #c5ccd3; } .torch { fill: #8b949e; } .ddp { fill: #4c86c6; }
.eager { fill: #f0a35e; } .ours { fill: #d9600d; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .note { fill: #9198a1; } .page { fill: #0d1117; } .floor { fill: #3d444d; }
.torch { fill: #6e7681; } .ddp { fill: #4c86c6; } .eager { fill: #b8743a; } .ours { fill: #f0883e; }
}
"""
# Of the picture of lines besides.
LINE_STYLE = """.line { fill: none; stroke-width: 2; }
.line.torch { stroke: #8b949e; } .line.ddp { stroke: #4c86c6; } .line.eager { stroke: #f0a35e; }
.line.ours { stroke: #d9600d; } .rule { stroke: #c5ccd3; }
@media (prefers-color-scheme: dark) {
.line { fill: none; } .line.torch { stroke: #6e7681; } .line.eager { stroke: #b8743a; }
.line.ours { stroke: #f0883e; } .rule { stroke: #3d444d; }
}
"""


def kind_of(rival: str) -> str:
    """The class of its bar."""
    if rival in (ONE, BARE):
        return "floor"
    if rival.startswith(DDP):
        return "ddp"
    if not rival.startswith(OURS):
        return "torch"
    return "eager" if rival.startswith(f"{OURS} eager") else "ours"


def text(x: float, y: float, kind: str, words: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def panel(line: Line, columns: Sequence[str], x: float, y: float) -> List[str]:
    """The bars of one model, to a scale of their own."""
    drawn = [text(x, y + 14, "title", line.label())]
    longest_ms = max(line.step_ms(name) for name in columns)
    for k, name in enumerate(columns):
        top = y + TITLE_HEIGHT + k * BAR_STEP
        base, left = top + BAR_HEIGHT - 3, x + LABEL_WIDTH
        drawn.append(text(left - 8, base, "note", name, "end"))
        row = line.row(name)
        if "step_ms" not in row:
            drawn.append(text(left, base, "note", "failed" if "failed" in row else "not run"))
            continue
        width = max(1.0, BAR_WIDTH * row["step_ms"] / longest_ms)
        size = f'width="{width:.1f}" height="{BAR_HEIGHT}"'
        drawn.append(f'<rect class="{kind_of(name)}" x="{left:g}" y="{top:g}" {size} rx="2"/>')
        drawn.append(text(left + width + 6, base, "value", figure(row["step_ms"])))
    return drawn


def page(width: float, height: float, head: str, note: str, style: str) -> List[str]:
    """What both pictures begin with."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">',
        f"<title>{escape(head)}</title>",
        f"<style>{style}</style>",
        f'<rect class="page" width="{width}" height="{height}" rx="6"/>',
        text(MARGIN, MARGIN + 12, "head", head),
        text(MARGIN, MARGIN + 30, "note", note),
    ]


def picture(lines: Sequence[Line], head: str, note: str) -> str:
    columns = columns_of(lines)
    panel_height = TITLE_HEIGHT + len(columns) * BAR_STEP
    abreast = min(PANELS_ABREAST, len(lines))
    down = -(-len(lines) // abreast)
    width = 2 * MARGIN + abreast * PANEL_WIDTH + (abreast - 1) * GAP
    height = HEAD_HEIGHT + MARGIN + down * (panel_height + GAP)
    drawn = page(width, height, head, note, STYLE)
    for k, line in enumerate(lines):
        x = MARGIN + k % abreast * (PANEL_WIDTH + GAP)
        drawn += panel(line, columns, x, HEAD_HEIGHT + MARGIN + k // abreast * (panel_height + GAP))
    return "\n".join([*drawn, "</svg>", ""])


def spread(tops: Sequence[float]) -> List[float]:
    """Places near the wished ones, in their order, but no two on top of each other."""
    placed: List[float] = []
    for top in tops:
        placed.append(max(top, placed[-1] + NAME_STEP) if placed else top)
    return placed


def climb_panel(climb: Climb, counts: Sequence[int], x: float, y: float) -> List[str]:
    """The lines of one model over the numbers of GPUs, which stand at even distances."""
    rivals = [name for name in climb.rivals() if name != ONE]
    shares = {name: [climb.share(name, n) for n in counts] for name in rivals}
    highest = max([1.0, *(share for row in shares.values() for share in row if share is not None)])
    left, top = x + AXIS_WIDTH, y + TITLE_HEIGHT

    def across(place: int) -> float:
        return left + PLOT_WIDTH * place / max(1, len(counts) - 1)

    def down(share: float) -> float:
        return top + PLOT_HEIGHT * (1 - share / highest)

    drawn = [text(x, y + 14, "title", climb.label())]
    for quarter in range(5):
        level = down(quarter / 4)
        ends = f'x1="{left:g}" x2="{left + PLOT_WIDTH:g}" y1="{level:.1f}" y2="{level:.1f}"'
        drawn.append(f'<line class="rule" {ends}/>')
        drawn.append(text(left - 6, level + 4, "note", f"{25 * quarter} %", "end"))
    for place, n in enumerate(counts):
        words = f"{n} GPUs" if n == counts[-1] and n > 1 else str(n)
        drawn.append(text(across(place), top + PLOT_HEIGHT + 18, "note", words, "middle"))
    ends, drawn_of_kind = [], {}
    for name in rivals:
        points = [(across(k), down(s)) for k, s in enumerate(shares[name]) if s is not None]
        if len(points) < 2:
            continue
        kind = kind_of(name)
        dash = DASHES[drawn_of_kind.get(kind, 0) % len(DASHES)]
        drawn_of_kind[kind] = drawn_of_kind.get(kind, 0) + 1
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        drawn.append(f'<polyline class="line {kind}" stroke-dasharray="{dash}" points="{path}"/>')
        for px, py in points:
            drawn.append(f'<circle class="{kind}" cx="{px:.1f}" cy="{py:.1f}" r="3"/>')
        last = [share for share in shares[name] if share is not None][-1]
        ends.append((points[-1][1], f"{title_of(name).replace('`', '')}: {100 * last:.1f} %"))
    ends.sort()
    for level, (_, words) in zip(spread([end for end, _ in ends]), ends):
        drawn.append(text(left + PLOT_WIDTH + 10, level + 4, "value", words))
    return drawn


def climb_picture(climbs: Sequence[Climb], head: str, note: str) -> str:
    counts = counts_of(climbs)
    abreast = min(PANELS_ABREAST, len(climbs))
    panel_width = AXIS_WIDTH + PLOT_WIDTH + 10 + NAME_WIDTH
    width = 2 * MARGIN + abreast * panel_width + (abreast - 1) * GAP
    height = HEAD_HEIGHT + MARGIN + -(-len(climbs) // abreast) * (FULL_HEIGHT + GAP)
    drawn = page(width, height, head, note, STYLE + LINE_STYLE)
    for k, climb in enumerate(climbs):
        x = MARGIN + k % abreast * (panel_width + GAP)
        y = HEAD_HEIGHT + MARGIN + k // abreast * (FULL_HEIGHT + GAP)
        drawn += climb_panel(climb, counts, x, y)
    return "\n".join([*drawn, "</svg>", ""])


def bars_of(files: Sequence[Dict[str, Any]]) -> Optional[str]:
    """The picture of the first table that has times."""
    for (devices, part), lines in lines_of(files).items():
        whole = [line for line in lines if line.rivals()]
        if whole:
            share = "; one GPU does its share only" if len(set(devices)) > 1 else ""
            machine = files[whole[-1].run - 1]["machine"]
            head = f"{where(devices, part, machine)}: ms, shorter is better"
            return picture(whole, head, dated(files, [line.run for line in whole]) + share)
    return None


def climbs_drawn(files: Sequence[Dict[str, Any]]) -> Optional[str]:
    for (scaling, machine, part), climbs in climbs_of(files).items():
        head = f"{head_of(scaling, machine, part)}: % of one GPU's rate, higher is better"
        note = dated(files, [climb.run() for climb in climbs])
        return climb_picture(climbs, head, f"{note}; {SHARES[scaling]}")
    return None


def dated(files: Sequence[Dict[str, Any]], runs: Sequence[int]) -> str:
    machines = [files[run - 1]["machine"] for run in runs]
    return f"torch {machines[-1]['torch']}, {', '.join(sorted({m['date'] for m in machines}))}"


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    docs = ROOT / "docs"
    parser.add_argument("files", nargs="*", type=Path, help="default: benchmarks/results/*.json")
    parser.add_argument("--output", type=Path, default=docs / "steps.svg", help="of bars")
    parser.add_argument("--lines", type=Path, default=docs / "scaling.svg", help="of lines")
    parser.add_argument("--check", action="store_true", help="that they are there already")
    args = parser.parse_args(arguments)
    found = read(args.files or sorted((HERE / "results").glob("*.json")))
    files = [each for each in found if each["benchmark"] == "step"]
    pictures = [(args.output, bars_of(files)), (args.lines, climbs_drawn(files))]
    pictures = [(path, drawn) for path, drawn in pictures if drawn is not None]
    if not pictures:
        print("no run of benchmarks/step.py: nothing to draw", file=sys.stderr)
        return 0 if args.check else 1
    for path, drawn in pictures:
        if not args.check:
            path.write_text(drawn)
        elif not path.exists() or path.read_text() != drawn:
            print(f"{path.name} is another picture: benchmarks/plot.py", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
