"""What the tests of docs/*.md share: the pages, their blocks and tables, and scripts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import gloo

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = {path.name: path.read_text() for path in sorted(DOCS.glob("*.md"))}
PAGE = PAGES["migrating.md"]
FENCE = re.compile(r"^```(\w+)(?: (\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def blocks(language, name="", page=PAGE):
    return [body for kind, label, body in FENCE.findall(page) if (kind, label) == (language, name)]


def section(heading):
    """From a heading to the next of its level or above."""
    level = heading.split(" ")[0]
    text = PAGE.split(f"\n{heading}\n", 1)[1]
    return re.split(rf"\n#{{2,{len(level)}}} ", text)[0]


def table(heading):
    """The rows of the first table below a heading, as lists of cells."""
    lines = re.search(r"(^\|.*\n)+", section(heading), re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def run(code, page="migrating.md"):
    namespace = {"__name__": "__main__"}
    exec(compile(code, page, "exec"), namespace)
    return namespace


def run_alone(tmp_path, code, *before, **environment):
    """What a script of its own prints; `before` stands between the interpreter and the script."""
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, *before, str(script)], capture_output=True, text=True, timeout=300,
        env={**os.environ, **NO_GPU, **environment},
    )  # fmt: skip
    assert done.returncode == 0 or gloo.AT_EXIT in done.stderr, done.stdout + done.stderr
    return done.stdout


def torchrun(tmp_path, code):
    two = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    return run_alone(tmp_path, code, *two)
