"""The proof that the tests see a wait that is missing in Python: every call in fastdp/*.py that
waits, records, synchronises or keeps alive is found by parsing the source, left out alone in a copy
of the package, and the tests that should notice are run on that. A mutant that they let pass is a
survivor: the exit status is the number of survivors.

    python build_tools/python_mutation.py [--list] [--file NAME] [--only NUMBER ...]

Needs a fastdp that is built in place (`python setup.py build_ext --inplace`), and pytest. Some
seconds for each call."""

from __future__ import annotations

import ast
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Dict, Iterable, List, Optional, Tuple

from mutants import Outcome, Site, parser_for, pick, print_list, run, survived

# Many times what the tests of a file take; a mutant that hangs is caught.
TIMEOUT_S = 120

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Methods and functions, by the last part of the name that is called.
CALLS = {
    "record": "records",
    "mark": "records",
    "wait_event": "waits",
    "wait_stream": "waits",
    "wait_for": "waits",
    "begin": "waits",
    "deliver": "waits",
    "in_backward": "waits",
    "_ordered": "waits",
    "_Beside": "waits",
    "around": "waits",
    "close": "waits",
    "check": "waits",
    "synchronize": "synchronises",
    "query": "synchronises",
    "hold_pinned": "keeps alive",
    "hold_sources": "keeps alive",
    "record_stream": "keeps alive",
    "_retire": "keeps alive",
    "release_reads": "keeps alive",
    "append": "keeps alive",
    "put": "waits",
    "take": "waits",
    "wait": "waits",
    "give_up": "waits",
}
# In which files, and by which tests a call that is left out there has to be noticed; and names that
# are many things elsewhere, and are meant there.
VAGUE = ("append", "close", "put", "take", "wait", "give_up")
FILES: Dict[str, Tuple[Tuple[str, ...], Tuple[str, ...]]] = {
    "streams.py": (
        ("tests/test_orders.py", "tests/test_orders_memory.py", "tests/test_deadlines.py",
         "tests/test_overlap.py"),
        ("append",),
    ),
    "awaited.py": (("tests/test_orders.py",), ()),
    "lending.py": (("tests/test_recording_edges.py",), ()),
    "backwards.py": (("tests/test_orders_recorded.py",), ()),
    "recordings.py": (
        ("tests/test_engine_around.py::test_a_step_waits_for_the_one_on_other_streams",
         "tests/test_engine_between.py::test_statistics_that_are_written_before_the_backward",
         "tests/test_orders_recorded.py"),
        (),
    ),
    "tapes.py": (("tests/test_orders_recorded.py",), ()),
    "plans.py": (("tests/test_orders.py",), ()),
    "replicas.py": (("tests/test_orders.py", "tests/test_fits_counted.py"), ()),
    "replica_sets.py": (("tests/test_orders.py",), ("close",)),
    "functions.py": (("tests/test_orders.py", "tests/test_orders_memory.py"), ()),
    "copies.py": (("tests/test_orders.py",), ()),
    "moves.py": (("tests/test_orders_memory.py",), ()),
    "buckets.py": (("tests/test_allocators.py",), ()),
    "comm.py": (("tests/test_orders_memory.py",), ()),
    "comm_grad.py": (("tests/test_comm_order.py",), ()),
    "deadlines.py": (("tests/test_deadlines.py",), ("close", "append", "wait")),
    "compiled.py": (("tests/test_compiled_graphs.py",), ("wait",)),
    "compile_forms.py": (("tests/test_compiled_graphs.py",), ("wait",)),
    "compile_graphs.py": (("tests/test_compiled_graphs.py",), ("wait",)),
    "compile_plain.py": (("tests/test_compiled_graphs.py",), ("wait",)),
    "workers.py": (
        ("tests/test_workers.py", "tests/test_behaviour_threads.py", "tests/test_pace.py",
         "tests/test_faults.py", "tests/test_interrupts.py"),
        ("put", "take", "wait", "give_up", "close"),
    ),
}
# Calls in these are not reached without a GPU: printed, and not run. What shows them there:
# tests/test_cuda_order_recorded.py and tests/test_cuda_bitwise.py (recorded steps),
# tests/test_prefetch_cuda.py (staging, prefetch, scattered).
GPU_ONLY = ("captures.py", "doctor.py", "health_monitor.py", "overlap.py", "prefetch.py",
            "scattered.py", "staging.py", "traces.py", "trials.py", "validations.py", "witness.py")
# Calls of such names that order nothing by themselves.
OTHERS = ("_torch_protocol.py", "cuts.py", "graph_step.py")
ON_GPUS = ("record", "wait_event", "wait_stream", "wait_for", "begin", "deliver", "synchronize",
           "query", "hold_pinned", "record_stream")


def offsets(source: str) -> List[int]:
    """Where each line begins, in bytes as `ast` counts them."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def name_of(call: ast.Call) -> Optional[str]:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else None


def instead(tree: ast.AST, call: ast.Call, name: str) -> str:
    """What stands in place of the call, so that the rest goes on as if it had been made."""
    for node in ast.walk(tree):
        if isinstance(node, ast.withitem) and node.context_expr is call:
            return "__import__('contextlib').nullcontext()"
        if isinstance(node, ast.Expr) and node.value is call:
            return "None"
    return "True" if name == "query" else "__import__('contextlib').nullcontext()"


def sites_of(path: pathlib.Path, names: Iterable[str] = tuple(CALLS)) -> List[Site]:
    source = path.read_text()
    tree = ast.parse(source)
    starts = offsets(source)
    also = FILES.get(path.name, ((), ()))[1]
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = name_of(node)
        if name not in names or name in VAGUE and name not in also:
            continue
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        text = " ".join(ast.unparse(node).split())
        found.append(
            Site(path.name, node.lineno, CALLS[name], text, start, end, instead(tree, node, name))
        )
    return sorted(found, key=lambda site: site.start)


def unlisted() -> List[str]:
    """Files of the package with such calls that stand in no table."""
    known = {*FILES, *GPU_ONLY, *OTHERS}
    paths = sorted((ROOT / "fastdp").glob("*.py"))
    return [path.name for path in paths if path.name not in known and sites_of(path)]


def mutate(package: pathlib.Path, site: Site) -> None:
    source = (ROOT / "fastdp" / site.file).read_bytes()
    changed = source[: site.start] + site.replacement.encode() + source[site.end :]
    (package / site.file).write_bytes(changed)


def run_tests(folder: pathlib.Path, tests: Tuple[str, ...]) -> Tuple[bool, str]:
    """Whether they pass with the package of that folder; what failed first, or how many passed."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--rootdir",
               str(folder), "-c", str(folder / "pyproject.toml"), *(str(folder / t) for t in tests)]
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True,
                              timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return False, "hangs"
    said = done.stdout.splitlines() or [done.stderr]
    if done.returncode == 0:
        return True, said[-1]
    return False, next((line for line in said if line.startswith(("FAILED", "ERROR"))), said[0])


def copied(folder: pathlib.Path) -> pathlib.Path:
    for name in ("fastdp", "tests"):
        skip = shutil.ignore_patterns("__pycache__", "build", "corpus", "c")
        shutil.copytree(ROOT / name, folder / name, ignore=skip)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def try_site(site: Site) -> Outcome:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = copied(pathlib.Path(name))
        mutate(folder / "fastdp", site)
        passed, text = run_tests(folder, FILES[site.file][0])
    seconds = time.monotonic() - start
    return survived(seconds) if passed else Outcome(True, text, seconds)


def main() -> int:
    chosen = parser_for(__doc__.split("\n\n")[0]).parse_args()
    if unlisted():
        print(f"FILES, GPU_ONLY and OTHERS lack {', '.join(unlisted())}", file=sys.stderr)
        return 1
    sites = [site for name in FILES for site in sites_of(ROOT / "fastdp" / name)]
    others = [site for name in GPU_ONLY for site in sites_of(ROOT / "fastdp" / name, ON_GPUS)]
    print(f"{len(sites)} calls in {len(FILES)} files wait, record, synchronise or keep alive; "
          f"{len(others)} more in {len({site.file for site in others})} files can only be shown on "
          "GPUs", flush=True)
    picked = pick(sites, chosen)
    if chosen.list:
        print_list(sites, picked, others, "on GPUs")
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = copied(pathlib.Path(name))
        tests = tuple(sorted({test for number in picked for test in FILES[sites[number].file][0]}))
        passed, text = run_tests(folder, tests)
        if not passed:
            print(f"the tests fail without any mutant: {text}")
            return 1
        if " passed" not in text:
            print(f"SKIPPED: no test that would notice can run here ({text}): that takes GPUs, or a "
                  "torch without CUDA")
            return 0
    return run(sites, picked, try_site)


if __name__ == "__main__":
    sys.exit(main())
