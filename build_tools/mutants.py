"""What every run of mutants does, whatever the language: which calls are picked by the command
line, a list of them, and each left out alone, two at a time, with a line on what noticed that. How
calls are found and what is run without one is up to mutation.py and python_mutation.py."""

from __future__ import annotations

import argparse
import concurrent.futures
from typing import Callable, List, NamedTuple


class Site(NamedTuple):
    """A call, and where in its file it stands: what is between `start` and `end` is replaced."""

    file: str
    line: int
    kind: str
    text: str
    start: int
    end: int
    replacement: str


class Outcome(NamedTuple):
    """What came of a mutant: what noticed it, or that nothing did."""

    is_caught: bool
    text: str
    seconds: float


def survived(seconds: float) -> Outcome:
    return Outcome(False, "SURVIVES", seconds)


def parser_for(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--list", action="store_true", help="print the calls, and stop")
    parser.add_argument("--file", help="only the calls of this file")
    parser.add_argument("--only", type=int, nargs="+", help="only these numbers of the list")
    return parser


def pick(sites: List[Site], chosen: argparse.Namespace) -> List[int]:
    """The numbers of those that the command line names."""
    return [number for number, site in enumerate(sites)
            if (not chosen.only or number in chosen.only)
            and (not chosen.file or site.file == chosen.file)]


def print_list(sites: List[Site], picked: List[int], others: List[Site], whose: str) -> None:
    """`others` are found and not run; `whose` says why, in a word."""
    for number in picked:
        site = sites[number]
        print(f"{number}: {site.file}:{site.line}: {site.kind}: {site.text} -> {site.replacement}")
    for site in others:
        print(f"{whose}: {site.file}:{site.line}: {site.kind}: {site.text}")


def run(sites: List[Site], picked: List[int], attempt: Callable[[Site], Outcome]) -> int:
    """Makes and tries them all; the exit status, which is the number of survivors."""
    survivors = []
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        outcomes = pool.map(lambda number: attempt(sites[number]), picked)
        for number, outcome in zip(picked, outcomes):
            site = sites[number]
            print(f"{number}: {site.file}:{site.line}: {site.text[:80]}: {outcome.text[:200]} "
                  f"({outcome.seconds:.1f} s)", flush=True)
            if not outcome.is_caught:
                survivors.append(number)
    print(f"{len(picked)} mutants, {len(picked) - len(survivors)} caught, survivors: {survivors}")
    return min(len(survivors), 100)
