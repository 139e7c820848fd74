"""The proof that the simulation of training steps sees a missing wait: every call in csrc/ that
waits, records, synchronises, retires or keeps alive is found by parsing, left out alone in a copy
of its file, and what comes of it is built and simulated (tests/c/simulate.c). A mutant that the
simulation lets pass is a survivor: the exit status is the number of survivors.

    python build_tools/mutation.py [--list] [--file NAME] [--only NUMBER ...] [--schedules N]

Needs a C compiler and make; takes some minutes on two cores.
"""

from __future__ import annotations

import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Dict, List, Optional, Set, Tuple

from mutants import Outcome, Site, parser_for, pick, print_list, run, survived

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Through the table of a device.
TABLE = {
    "event_record": "records",
    "stream_wait": "waits",
    "event_synchronize": "synchronises",
    "event_query": "synchronises",
    "stream_close": "retires",
    "event_close": "retires",
    "memory_drop": "retires",
    "pinned_drop": "retires",
}
# The core's own ways to them.
CORE = {
    "fdp_order_after": "waits",
    "fdp_endpoint_after": "waits",
    "fdp_endpoint_settle": "waits",
    "fdp_lane_leave": "waits",
    "fdp_pool_give": "keeps alive",
    "fdp_pool_give_many": "keeps alive",
    "fdp_pool_lose": "keeps alive",
    "fdp_stage_close": "keeps alive",
    "fdp_pool_close": "retires",
    "fdp_order_close": "retires",
    "fdp_lanes_close": "retires",
}
# A function that calls one of these, or opens something, does work: it is no helper of the above.
WORK = re.compile(r"\b(copy|copy_strided|pack|unpack|sum|memory_take|pinned_take|run_group|calloc"
                  r"|malloc|fdp_nccl_comms_run\w*|fdp_pool_take\w*|fdp_endpoint_copy|\w+_open)\(")
# Backends of the table, which implement it; and the seam, which needs Python and a GPU.
BACKENDS = re.compile(r"^(device|host_stream|device_.*)\.c$")
SEAM = re.compile(r"^py_.*\.c$")

FUNCTION = re.compile(r"^(static )?(?:inline )?([A-Za-z_][\w ]*?[ *]+)(\w+)\(([^;{]*?)\) \{$", re.M)


def blank(source: str) -> str:
    """The source with comments and strings blanked out, every character in its place."""

    def spaces(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    return re.sub(r"/\*.*?\*/|\"(?:\\.|[^\"\\])*\"", spaces, source, flags=re.S)


def closing(code: str, start: int) -> int:
    """The index after the bracket that closes the one at `start`."""
    depth = 0
    for index in range(start, len(code)):
        if code[index] in "({[":
            depth += 1
        elif code[index] in ")}]":
            depth -= 1
            if depth == 0:
                return index + 1
    raise ValueError("a bracket is not closed")


def functions(code: str) -> List[Tuple[str, str, bool, int, int]]:
    """Name, return type, whether static, and where the body begins and ends."""
    found = []
    for match in FUNCTION.finditer(code):
        start = match.end() - 1
        found.append((match.group(3), match.group(2).strip(), bool(match.group(1)), start,
                      closing(code, start)))
    return found


def calls(code: str, names: Set[str]) -> List[Tuple[str, int, int]]:
    """Name, first character of the whole call expression, and the one after it."""
    found = []
    for match in re.finditer(r"(?:[A-Za-z_]\w*(?:\[\w+\])?(?:->|\.))*\b([A-Za-z_]\w*)\(", code):
        name = match.group(1)
        is_table = "ops->" in match.group()
        if name not in names or is_table != (name in TABLE):
            continue
        found.append((name, match.start(), closing(code, match.end() - 1)))
    return found


def helpers(code: str) -> Dict[str, str]:
    """Static functions that do nothing else with devices, by their return types."""
    own = [(name, returned, code[start:end]) for name, returned, is_static, start, end
           in functions(code) if is_static]
    works: Set[str] = set()
    found: Dict[str, str] = {}
    while True:
        before = len(works) + len(found)
        for name, returned, body in own:
            if WORK.search(body) or works & set(re.findall(r"\b(\w+)\(", body)):
                works.add(name)
        for name, returned, body in own:
            is_plain = name not in works and returned in ("fdp_status", "void", "bool")
            if is_plain and calls(body, set(TABLE) | set(CORE) | set(found)):
                found[name] = returned
        found = {name: returned for name, returned in found.items() if name not in works}
        if len(works) + len(found) == before:
            return found


def without(code: str, start: int, end: int, returned: str) -> str:
    """What stands in place of the call."""
    arguments = code[code.index("(", start):end]
    if returned == "void":
        return "(void)0"
    if returned == "bool":
        return "true"
    if re.search(r"[,(]\s*status\s*[,)]", arguments):
        return "status"
    return "FDP_OK"


def sites_of(path: pathlib.Path) -> List[Site]:
    source = path.read_text()
    code = blank(source)
    own = helpers(code)
    types = {**{name: "fdp_status" for name in {**TABLE, **CORE}}, **own}
    for name in ("stream_close", "event_close", "memory_drop", "pinned_drop", "fdp_pool_close",
                 "fdp_order_close", "fdp_lanes_close", "fdp_pool_lose"):
        types[name] = "void"
    found = []

    def add(kind: str, start: int, end: int, replacement: str) -> None:
        line = source.count("\n", 0, start) + 1
        text = " ".join(source[start:end].split())
        found.append(Site(path.name, line, kind, text, start, end, replacement))

    for _, _, _, body, body_end in functions(code):
        for name, start, end in calls(code[body:body_end], set(types)):
            start, end = start + body, end + body
            kind = TABLE.get(name) or CORE.get(name) or "helper"
            add(kind, start, end, without(code, start, end, types[name]))
        for match in re.finditer(r"users\[\w+\+\+\] = [^;]*;", code[body:body_end]):
            add("keeps alive", match.start() + body, match.end() + body, ";")
    return sorted(found, key=lambda site: site.start)


class Build:
    """The simulation, compiled and linked as tests/c/simulate.mk says, from a copy of the sources:
    nobody's edits come between."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.csrc = folder / "csrc"
        self.tests = folder / "tests" / "c"
        for name in ("csrc", "kernels", "tests/c"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("build"))
        make = ["make", "-s", "-C", str(self.tests), "-f", "simulate.mk"]
        subprocess.run([*make, "-j2"], check=True)
        lines = subprocess.run([*make, "flags"], check=True, capture_output=True, text=True).stdout
        flags, objects, link = lines.splitlines()
        self.flags = [flag for flag in shlex.split(flags) if not flag.startswith("-W")]
        self.objects = objects.split()
        self.link = shlex.split(link)

    def make(self, site: Site, folder: pathlib.Path) -> Optional[pathlib.Path]:
        """The program without that call; None if it does not compile."""
        source = (self.csrc / site.file).read_text()
        copy = folder / site.file
        copy.write_text(source[:site.start] + site.replacement + source[site.end:])
        made = folder / "mutant.o"
        program = folder / "simulate"
        compiled = subprocess.run(["gcc", *self.flags, "-w", "-iquote", str(self.csrc), "-c",
                                   str(copy), "-o", str(made)], capture_output=True, text=True)
        if compiled.returncode != 0:
            print(compiled.stderr, file=sys.stderr)
            return None
        own = f"csrc/{site.file[:-2]}.o"
        objects = [str(made) if name.endswith(own) else name for name in self.objects]
        subprocess.run(["gcc", "-g", *objects, *self.link, "-o", str(program)], cwd=self.tests,
                       check=True)
        return program


def catch(program: pathlib.Path, schedules: int) -> Outcome:
    """What the simulation says of the mutant. First failures by chance, then each 29th call in
    turn, in many worlds."""
    start = time.monotonic()
    for options in (["--seed", "1", "--schedules", str(schedules)],
                    ["--seed", "300", "--sweep", "--every", "29", "--schedules",
                     str(2 * schedules)]):
        done = subprocess.run([str(program), *options, "--brief"], capture_output=True, text=True)
        if done.returncode != 0:
            text = " ".join(done.stderr.split()).split(" replay:")[0]
            return Outcome(True, text, time.monotonic() - start)
    return survived(time.monotonic() - start)


def try_site(build: Build, site: Site, schedules: int) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        program = build.make(site, pathlib.Path(folder))
        if program is None:
            return Outcome(False, "does not compile: the script is wrong", 0.0)
        return catch(program, schedules)


def main() -> int:
    parser = parser_for(__doc__.split("\n\n")[0])
    parser.add_argument("--schedules", type=int, default=20000,
                        help="by chance, and twice as many in turn, after which a mutant "
                        "has survived (default: %(default)s)")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        build = Build(pathlib.Path(name))
        files = sorted(path for path in build.csrc.glob("*.c") if not BACKENDS.match(path.name))
        sites = [site for path in files if not SEAM.match(path.name) for site in sites_of(path)]
        seam = [site for path in files if SEAM.match(path.name) for site in sites_of(path)]
        seam = [site for site in seam if "ops->" in site.text]
        print(f"{len(sites)} calls wait, record, synchronise, retire or keep alive; "
              f"{len(seam)} more in the seam are not simulated", flush=True)
        picked = pick(sites, chosen)
        if chosen.list:
            print_list(sites, picked, seam, "seam")
            return 0
        return run(sites, picked, lambda site: try_site(build, site, chosen.schedules))


if __name__ == "__main__":
    sys.exit(main())
