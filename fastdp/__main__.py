"""`python -m fastdp <command>`: the table of commands."""

from __future__ import annotations

import sys
from typing import Callable, Dict, List, NamedTuple, Optional

import fastdp
from fastdp import doctor, run, trace_picture


class Command(NamedTuple):
    start: Callable[[List[str]], Optional[int]]  # takes what follows its name; gives the exit code
    sentence: str


COMMANDS: Dict[str, Command] = {
    "run": Command(run.main, "run a script as it is, with its nn.DataParallel on fastdp"),
    "doctor": Command(doctor.main, "look whether this machine is fit to train on"),
    "report": Command(trace_picture.main, "sum up a trace, and draw it"),
}


def _help() -> str:
    lines = ["usage: python -m fastdp <command> ...", "", "commands:"]
    lines += [f"  {name:10}{command.sentence}" for name, command in COMMANDS.items()]
    lines += ["", "python -m fastdp <command> --help says more; --version prints fastdp's version."]
    return "\n".join(lines)


def main(arguments: List[str]) -> Optional[int]:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    name, rest = arguments[0], arguments[1:]
    if name == "--version":
        print(fastdp.__version__)
        return 0
    if name not in COMMANDS:
        print(f"fastdp: there is no command {name!r}\n\n{_help()}", file=sys.stderr)
        return 2
    return COMMANDS[name].start(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
