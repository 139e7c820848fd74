"""A picture of the steps that benchmarks/step.py took, as docs/steps.svg: bars of one model side by
side, shorter is better. It needs nothing but Python, and is readable on light and dark pages.

    python benchmarks/plot.py                          of benchmarks/results/*.json
    python benchmarks/plot.py out.json --output steps.svg
    python benchmarks/plot.py --check                  exits 1 if docs/steps.svg is another picture

It shows the whole steps on most GPUs: the first of the tables that benchmarks/tables.py makes.
"""

from __future__ import annotations

import argparse
import sys
from html import escape
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from markdown import figure  # noqa: E402
from step_tables import DDP, ONE, OURS, Line, columns_of, lines_of, where  # noqa: E402
from tables import ROOT, read  # noqa: E402

# In pixels.
MARGIN, GAP = 16, 28
LABEL_WIDTH, BAR_WIDTH, VALUE_WIDTH = 204, 190, 56
BAR_HEIGHT, BAR_STEP = 15, 21
HEAD_HEIGHT, TITLE_HEIGHT = 54, 26
PANEL_WIDTH = LABEL_WIDTH + BAR_WIDTH + VALUE_WIDTH
PANELS_ABREAST = 2

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


def kind_of(rival: str) -> str:
    """The class of its bar."""
    if rival == ONE:
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


def picture(lines: Sequence[Line], head: str, note: str) -> str:
    columns = columns_of(lines)
    panel_height = TITLE_HEIGHT + len(columns) * BAR_STEP
    abreast = min(PANELS_ABREAST, len(lines))
    down = -(-len(lines) // abreast)
    width = 2 * MARGIN + abreast * PANEL_WIDTH + (abreast - 1) * GAP
    height = HEAD_HEIGHT + MARGIN + down * (panel_height + GAP)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">',
        f"<title>{escape(head)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}" rx="6"/>',
        text(MARGIN, MARGIN + 12, "head", head),
        text(MARGIN, MARGIN + 30, "note", note),
    ]
    for k, line in enumerate(lines):
        x = MARGIN + k % abreast * (PANEL_WIDTH + GAP)
        drawn += panel(line, columns, x, HEAD_HEIGHT + MARGIN + k // abreast * (panel_height + GAP))
    return "\n".join([*drawn, "</svg>", ""])


def first_lines(paths: Sequence[Path]) -> Optional[Tuple[List[Line], str, str]]:
    """What is to be drawn, with its head and its note."""
    files = [found for found in read(paths) if found["benchmark"] == "step"]
    for (devices, part), lines in lines_of(files).items():
        whole = [line for line in lines if line.rivals()]
        if whole:
            machine = files[whole[-1].run - 1]["machine"]
            dates = sorted({files[line.run - 1]["machine"]["date"] for line in whole})
            share = "; one GPU does its share only" if len(set(devices)) > 1 else ""
            head = f"{where(devices, part, machine)}: ms, shorter is better"
            return whole, head, f"torch {machine['torch']}, {', '.join(dates)}{share}"
    return None


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="default: benchmarks/results/*.json")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "steps.svg")
    parser.add_argument("--check", action="store_true", help="that it is there already")
    args = parser.parse_args(arguments)
    found = first_lines(args.files or sorted((HERE / "results").glob("*.json")))
    if found is None:
        print("no run of benchmarks/step.py: nothing to draw", file=sys.stderr)
        return 0 if args.check else 1
    drawn = picture(*found)
    if not args.check:
        args.output.write_text(drawn)
    elif not args.output.exists() or args.output.read_text() != drawn:
        print(f"{args.output.name} is another picture: benchmarks/plot.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
