"""What tests of the benchmarks share: a script in a process of its own. How fast anything is, is
not tested: a busy machine must not fail the suite."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def run(name, *options):
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def kept(tmp_path, name, *options):
    """What it wrote with --json, and what it printed."""
    done = run(name, "--json", str(tmp_path / "out.json"), *options)
    assert done.returncode == 0, done.stderr
    return json.loads((tmp_path / "out.json").read_text()), done.stdout
