"""The tables of README.md from the JSON of benchmarks.

    python benchmarks/tables.py out.json more.json     prints them
    python benchmarks/tables.py --write                into README.md, of benchmarks/results/*.json
    python benchmarks/tables.py --check                exits 1 if README.md says something else

Between `<!-- figures:begin -->` and `<!-- figures:end -->` README.md has what these files give, and
nothing by hand; between `<!-- summary:begin -->` and `<!-- summary:end -->`, where a page has
these, the few figures of benchmarks/summary_table.py. Each file is one run of a benchmark with
--json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import compiled_tables  # noqa: E402
import memory_tables  # noqa: E402
import move_tables  # noqa: E402
import scaling_tables  # noqa: E402
import step_tables  # noqa: E402
import summary_table  # noqa: E402
from markdown import runs  # noqa: E402

ROOT = HERE.parent
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"
SUMMARY = "<!-- summary:begin -->", "<!-- summary:end -->"
# By benchmarks/plot.py.
PICTURE = "![The times of these steps as bars](docs/steps.svg)"
CLIMB = "![The share of one GPU's rate by the number of GPUs](docs/scaling.svg)"


def render_steps(files: Sequence[Dict[str, Any]]) -> List[str]:
    steps, climbs = step_tables.render(files), scaling_tables.render(files)
    return [*([PICTURE] if steps else []), *steps, *([CLIMB] if climbs else []), *climbs]


# Benchmark, as its JSON names it -> the parts of its tables from all of its runs.
RENDERERS: Dict[str, Callable[[Sequence[Dict[str, Any]]], List[str]]] = {
    "step": render_steps,
    "compiled": compiled_tables.render,
    "memory": memory_tables.render,
    "comm": move_tables.render_comm,
    "input": move_tables.render_input,
    "grad_health": move_tables.render_grad_health,
}


def read(paths: Sequence[Path]) -> List[Dict[str, Any]]:
    """The runs, earliest first. Files of benchmarks without a table here are left out, by name."""
    files = []
    for path in paths:
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise SystemExit(f"{path}: {error}") from None
        if not isinstance(found, dict) or found.get("benchmark") not in RENDERERS:
            print(f"{path}: no run of {', '.join(RENDERERS)}; left out", file=sys.stderr)
        else:
            files.append(found)
    return sorted(files, key=began)


def began(found: Dict[str, Any]) -> str:
    tables = found.get("tables")
    return str(tables[0]["began"] if tables else found["machine"]["date"])


def render(files: Sequence[Dict[str, Any]]) -> str:
    parts = []
    for benchmark, renderer in RENDERERS.items():
        own = [found for found in files if found["benchmark"] == benchmark]
        if own:
            parts += [*renderer(own), *runs(own)]
    return "\n\n".join(parts)


def split(text: str, page: str, begin: str = BEGIN, end: str = END) -> List[str]:
    """What stands before the block, in it, and after it."""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise SystemExit(f"{page}: it must have {begin} and {end} once, in this order")
    before, rest = text.split(begin)
    inside, after = rest.split(end)
    return [before, inside.strip("\n"), after]


def filled(text: str, page: str, files: Sequence[Dict[str, Any]]) -> str:
    """The page with the tables of these runs."""
    text = with_block(text, page, (BEGIN, END), render(files))
    if SUMMARY[0] not in text:
        return text
    return with_block(text, page, SUMMARY, summary_table.render(files))


def with_block(text: str, page: str, marks: Tuple[str, str], inside: str) -> str:
    before, _, after = split(text, page, *marks)
    return f"{before}{marks[0]}\n\n{inside}\n\n{marks[1]}{after}"


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="default: benchmarks/results/*.json")
    parser.add_argument("--write", action="store_true", help="into the page")
    parser.add_argument("--check", action="store_true", help="that the page has them already")
    parser.add_argument("--page", type=Path, default=ROOT / "README.md")
    args = parser.parse_args(arguments)
    files = read(args.files or sorted((HERE / "results").glob("*.json")))
    if not files:
        print("no run of a benchmark: nothing to make a table of", file=sys.stderr)
        return 0 if args.check else 1
    if not args.write and not args.check:
        print(render(files))
        return 0
    text = args.page.read_text()
    new = filled(text, args.page.name, files)
    if args.write:
        args.page.write_text(new)
    elif text != new:
        print(f"{args.page.name} has other tables: benchmarks/tables.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
