"""docs/engines.md: its reasons are those that the code gives, and what it shows is what is printed.
test_docs.py runs its other blocks."""

import re
from pathlib import Path

import pytest
from engine_cases import WATCHED

from fastdp import engines, trials

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "engines.md").read_text()


def block(kind, label):
    (body,) = re.findall(rf"^```{kind} {label}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return body


def sources():
    """All of the package, with texts that go over several lines joined."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "fastdp").glob("*.py")))
    return re.sub(r"[\"']\n\s*f?[\"']", "", text)


def test_what_report_prints(capsys):
    exec(compile(block("python", "report"), "engines.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out.splitlines()
    shown = block("text", "report").splitlines()
    assert len(shown) > 3 and [line for line in printed if line in shown] == shown


def test_reasons_are_those_of_the_code():
    section = PAGE.split("\n## What stays eager\n")[1].split("\n## ")[0]
    cells = [line.strip("|").split("|")[-1] for line in section.splitlines() if line[:2] == "| "]
    fragments = [
        part.strip(" .:,'`")
        for cell in cells
        for quoted in re.findall(r"`([^`]+)`", cell)
        for part in quoted.split("...")
        if len(part.strip(" .:,'`")) > 2
    ]
    assert len(fragments) > 12
    text = sources()
    for fragment in fragments:
        # "it" is put before what was heard, and a name behind it.
        heard = fragment.removeprefix("it ").rsplit(" ", 1)[0]
        assert fragment in text or heard in text, fragment


@pytest.mark.parametrize(
    "text, value",
    [
        (r"\((\d+) under `\"auto\"`, \d+ under", WATCHED["auto"]),
        (r"under `\"auto\"`, (\d+) under `\"graph\"`\)", WATCHED["graph"]),
        (r"`\"auto\"` (\d+) replays and \d+ eager", trials.TIMED),
        (r"more than (\d+) times; up to then", engines._MAX_RESTARTS),
        (r"keeps at most (\d+) recordings", engines.MAX_RECORDINGS),
        (r"knows at most (\d+)\nsignatures", engines._MAX_SIGNATURES),
    ],
)
def test_numbers_are_those_of_the_code(text, value):
    assert [int(number) for number in re.findall(text, PAGE)] == [value]
