"""docs/: the code of each page runs, links lead somewhere, and names and options exist."""

import os
import re
import subprocess
import sys
import warnings

import fastdp
import pytest
import torch
from docs_page import DOCS, FENCE, NO_GPU, PAGE, PAGES, ROOT, blocks, run, table, torchrun
from torch import nn

DATA_PARALLEL = "fastdp.DataParallel(model)"
ON_TWO = 'fastdp.DataParallel(model, device_ids=["cpu", "cpu"])'


def test_each_block_is_of_a_kind_that_is_run():
    kinds = {(kind, label) for kind, label, _ in FENCE.findall(PAGE)}
    assert kinds == {
        ("python", ""),
        ("python", "ddp"),
        ("python", "fastdp"),
        ("diff", ""),
        ("console", ""),
    }
    assert PAGE.count("```") == 2 * len(FENCE.findall(PAGE))
    assert len(blocks("python")) > 8


@pytest.mark.filterwarnings("ignore::fastdp.DataParallelWarning")
@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0")
@pytest.mark.parametrize(
    "page, body",
    [(name, body) for name, page in PAGES.items() for body in blocks("python", page=page)],
    ids=lambda value: value if value in PAGES else "",
)
def test_python_blocks_run(page, body):
    with warnings.catch_warnings():  # a block that changes the filters changes them for itself
        run(body, page)


def test_the_diff_changes_no_number():
    (diff,) = blocks("diff")
    assert all(line[:1] in ("", " ", "+", "-") for line in diff.splitlines())
    before = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("+"))
    after = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    old, new = run(before)["model"], run(after)["model"]
    assert type(old) is nn.DataParallel and type(new) is fastdp.DataParallel
    models = [new]
    if not torch.cuda.is_available():
        models.append(run(after.replace(DATA_PARALLEL, ON_TWO))["model"])
        assert len(models[1].device_ids) == 2
    for model in models:
        for got, want in zip(model.parameters(), old.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the losses would be those of all GPUs")
def test_the_two_scripts_print_the_same_losses(tmp_path, capsys):
    (before,), (after,) = blocks("python", "ddp"), blocks("python", "fastdp")
    assert after.count(DATA_PARALLEL) == 1
    theirs = torchrun(tmp_path, before)
    assert theirs.count("epoch") == 3
    for code in (after, after.replace(DATA_PARALLEL, ON_TWO)):
        run(code)
        ours = capsys.readouterr().out
        assert losses(ours) == pytest.approx(losses(theirs), abs=1.01e-4)
    first, *_, last = losses(ours)
    assert last < 0.7 * first


def losses(text):
    found = [float(loss) for loss in re.findall(r"^epoch \d loss ([\d.]+)$", text, re.MULTILINE)]
    assert len(found) == 3
    return found


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    links = re.findall(r"\]\(([^)\s]+)\)", PAGES[name])
    assert len(links) > 5 or name != "migrating.md"
    for link in links:
        file, _, anchor = link.partition("#")
        target = DOCS / file if file else DOCS / name
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in {anchor_of(heading) for heading in headings}, link


def anchor_of(heading):
    """As GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("name", PAGES)
def test_names_exist(name):
    bodies = [body for *_, body in FENCE.findall(PAGES[name])]
    code = re.findall(r"`([^`\n]+)`", FENCE.sub("", PAGES[name])) + bodies
    names = {name for text in code for name in re.findall(r"\bfastdp(?:\.\w+)+", text)}
    assert "fastdp.DataParallel" in names or name != "migrating.md"
    for dotted in names:
        thing = fastdp
        for part in dotted.split(".")[1:]:
            thing = getattr(thing, part)


def test_options_exist_and_are_off():
    cells = [cell for _, cell, _ in table("## Options for old workarounds")]
    named = re.findall(r"`(\w+)=", " ".join(cells))
    standard = fastdp.DataParallel.__init__.__kwdefaults__
    assert len(named) > 8
    for name in named:
        assert standard[name] in ((True,) if name == "gather_outputs" else (None, False)), name
    everywhere = re.findall(r"\b(\w+)=(?:True|False|\"\w+\")", FENCE.sub("", PAGE))
    assert set(everywhere) - {"drop_last", "shuffle", "find_unused_parameters"} <= set(standard)


TRAIN = """
import sys
import torch
from torch.nn import DataParallel as Wrapper

assert sys.argv == ["train.py", "--epochs", "3"]
model = Wrapper(torch.nn.Linear(8, 2), device_ids=["cpu", "cpu"])
print(type(model).__name__, len(model.device_ids), *model(torch.ones(5, 8)).shape)
sys.exit(3)
"""


def test_the_command_runs_a_script(tmp_path):
    (block,) = blocks("console")
    (command,) = re.findall(r"^\$ python (.*)$", block, re.MULTILINE)
    (tmp_path / "train.py").write_text(TRAIN)
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, **NO_GPU}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert done.stdout == "DataParallel 2 5 2\n"
    assert re.search(r"train\.py:7: DataParallel, 2 replicas", done.stderr)


def test_the_page_is_in_the_source_distribution():
    manifest = (ROOT / "MANIFEST.in").read_text()
    assert "recursive-include docs *.md" in manifest
    assert "recursive-include examples *.py" in manifest
