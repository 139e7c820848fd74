"""The tables and the picture that are made of runs, as step.py and the others write them."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import contest  # noqa: E402
import markdown  # noqa: E402
import plot  # noqa: E402
import step_bars  # noqa: E402
import step_tables  # noqa: E402
import tables  # noqa: E402

MACHINE = {
    **{"cpu": "A CPU", "cores": 32, "load": 0.1, "python": "3.12.3", "torch": "2.11.0"},
    **{"fastdp": "0.1.0", "commit": "abc", "gpu": "NVIDIA H200", "cuda": "13.0", "nccl": "2.28.9"},
}


def row(rival, step_ms, gpus=2):
    batches = 1 if rival.endswith("one GPU") else gpus
    spent = {"step_ms": step_ms, "s_per_1000_batches": step_ms * gpus / batches}
    return {"rival": rival, **spent, "turns_ms": [step_ms] * 7}


def table(model, per_gpu, times, devices=(0, 1), part="step", began="2026-11-30 03:00:00", **more):
    gpus = len(set(devices))
    rows = [row(rival, ms, gpus) for rival, ms in times.items() if not isinstance(ms, str)]
    contest.compare(rows)
    rows += [{"rival": r, "failed": why} for r, why in times.items() if isinstance(why, str)]
    head = {"model": model, "per_gpu": per_gpu, "devices": list(devices), "part": part}
    return {**head, "began": began, "is_whole": True, "rows": rows, **more}


def run_of(*contests, options="--devices 0,1", date="2026-11-30"):
    command = f"python benchmarks/step.py {options} --json /somewhere/out.json --limit 200"
    head = {"benchmark": "step", "command": command, "machine": {**MACHINE, "date": date}}
    return {**head, "tables": list(contests)}


EAGER = {"one GPU": 10.0, "torch DP": 40.0, "fastdp eager": 20.0, "fastdp graph": 8.0, "DDP": 12.0}
COMPILED = EAGER | {"DDP compiled reduce-overhead": "Traceback: it | broke"}


def rows_of(text):
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]


def test_one_run_as_a_table():
    text = tables.render([run_of(table("gpt2", 8, COMPILED))])
    found = rows_of(text)
    assert found[0] == [
        *("Model (batch per GPU)", "one GPU", "torch DP", "DDP"),
        *("DDP, compiled, `reduce-overhead`", "fastdp, `eager`", "fastdp, `graph`"),
    ]
    label = "GPT-2 124M, bf16 (8 x 512 tokens)"
    assert found[1] == [label, "10.0", "40.0", "12.0", "failed", "20.0", "8.00"]
    # One GPU does half of the work in 10 ms: all of it takes 20.
    assert found[3] == [label, "fastdp, `eager`", "1.00", "2.00", "0.60", "–"]
    assert found[4] == [label, "fastdp, `graph`", "2.50", "5.00", "1.50", "–"]
    assert len(found) == 5
    assert "Whole steps on two NVIDIA H200: ms, the median of 7 turns" in text
    assert f"- {label}, DDP, compiled, `reduce-overhead` failed: Traceback: it | broke." in text
    assert "# 2026-11-30\n$ python benchmarks/step.py --devices 0,1\n" in text
    assert "torch 2.11.0, CUDA 13.0, NCCL 2.28.9, Python 3.12.3, fastdp 0.1.0 (abc)." in " ".join(
        text.split()
    )


def test_runs_are_merged_but_not_mixed():
    first = run_of(table("mlp", 64, EAGER), table("resnet18", 16, EAGER))
    again = {"torch DP": 41.0, "fastdp graph": 7.0}
    part = run_of(table("mlp", 64, again, began="2026-11-30 04:00:00"))
    whole = run_of(table("resnet18", 16, COMPILED | {"DDP": 6.0}, began="2026-11-30 05:00:00"))
    text = tables.render([first, part, whole])
    found = [(r[0], r[-1]) for r in rows_of(text) if r[1] in ("10.0", "–")]
    # The second MLP lacks rivals, so the first stays; the second ResNet-18 has them all.
    assert found == [
        ("50-layer MLP, width 256 (64)", "1"),
        ("50-layer MLP, width 256 (64)", "2"),
        ("ResNet-18 at 64 pixels (16)", "3"),
    ]
    assert "# run 2, 2026-11-30" in text


def test_groups_of_devices_and_parts():
    shared = table("mlp", 64, EAGER, devices=(0, 0), part="backward")
    unwrapped = "Forward and backward on one NVIDIA H200, which two replicas share: ms"
    text = tables.render([run_of(shared), run_of(table("resnet50", 512, EAGER))])
    assert unwrapped in " ".join(text.split())
    assert text.index("Whole steps on two") < text.index("Forward and backward on one")
    assert "| one GPU |" not in text[text.index("times as long", text.index("Forward")) :]


def test_remarks():
    cut = table("mlp", 64, EAGER, is_whole=False)
    cut["rows"][2] |= {"not_hidden_ms": 0.3, "not_hidden_share": 0.015}
    cut["rows"][0]["turns_ms"] = [10.0] * 2
    text = " ".join(tables.render([run_of(cut)]).split())
    assert "`eager`: communication that is not hidden takes 0.30 ms, 1.5 % of the step." in text
    assert "the median of 2 to 7 turns" in text
    assert "(64): the run was cut off; medians of 2 turns or more." in text


def test_promises_of_steps():
    alone = {"fastdp graph, one GPU": 8.0, "DDP compiled reduce-overhead": 7.0}
    found = table("mlp", 64, EAGER | alone)
    assert [(b["bar"], b["measured"], b["holds"]) for b in step_bars.bars(found)] == [
        ("torch DP over fastdp eager", 2.0, True),
        ("DDP over fastdp graph", 1.5, False),
        ("fastdp graph, one GPU over fastdp graph", 1.0, True),
        ("DDP compiled reduce-overhead over fastdp graph", 0.875, False),
    ]
    assert step_bars.bars(table("mlp", 65, EAGER)) == []
    assert step_bars.bars(table("mlp", 64, EAGER, devices=("cpu", "cpu"))) == []
    shared = table("mlp", 64, EAGER, devices=(0, 0), part="backward")
    assert [bar["holds"] for bar in step_bars.bars(shared)] == [True, False]
    bound = table("gpt2", 32, EAGER)
    bound["rows"][2]["not_hidden_share"] = 0.021
    assert step_bars.bars(bound)[-1] == {
        **{"bar": "communication of fastdp eager that is not hidden", "measured": 0.021},
        **{"most": 0.02, "holds": False},
    }
    found["bars"] = step_bars.bars(found)
    text = " ".join(tables.render([run_of(found)]).split())
    assert (
        "2 of 4 promises hold; not: DDP over fastdp graph is 1.5 (at least 4.5; one GPU's recorded "
        "step alone: 1.5, no recorded step reaches it here); DDP"
    ) in text
    assert "| fastdp, `graph`, one GPU |" in text
    assert text.count("| fastdp, `graph`, one GPU |") == 1  # with the times, not with the ratios


@pytest.mark.parametrize(
    "bare_ms, eager_ms, end",
    [
        (25.0, 25.0, "; bare modules alone: 1.6, no eager step of one process reaches it here"),
        (21.0, 25.0, "; bare modules alone: 1.9"),  # a little above 1.9: within reach
        (32.0, 25.0, "; bare modules alone: 1.25"),  # slower than fastdp: no floor
        (None, 25.0, ""),
        (20.0, 20.0, None),  # the bar holds
    ],
)
def test_a_promise_that_fails_says_what_the_floor_would_be(capsys, bare_ms, eager_ms, end):
    times = EAGER | {"fastdp eager": eager_ms}
    if bare_ms is not None:
        times["bare modules"] = bare_ms
    for found in (
        table("mlp", 64, times),
        table("mlp", 64, times | {"torch DP": 36.0}, devices=(0, 0), part="backward"),
    ):
        found["bars"] = [b for b in step_bars.bars(found) if b["bar"].endswith("fastdp eager")]
        (bar,) = found["bars"]
        assert bar["holds"] == (end is None) and ("floor" in bar) == bool(end)
        step_bars.show(found["bars"])
        said = capsys.readouterr().out
        text = " ".join(tables.render([run_of(found)]).split())
        if end is None:
            assert "bare modules alone" not in said + text
        elif found["part"] == "step":
            assert said == f"FAILS: torch DP over fastdp eager is 1.600, at least 1.9{end}\n"
            assert f"torch DP over fastdp eager is 1.6 (at least 1.9{end})." in text


def test_the_floor_has_a_column_where_it_was_run():
    floor = EAGER | {"bare modules": 16.0}
    text = tables.render([run_of(table("mlp", 64, floor), table("gpt2", 8, EAGER))])
    name, found = "bare modules, no communication", rows_of(text)
    assert found[0][1:4] == ["one GPU", name, "torch DP"]
    assert [row[2] for row in found[1:3]] == ["16.0", "–"]
    assert found[3][:5] == ["Model (batch per GPU)", "of", "one GPU", name, "torch DP"]
    # 40 ms of torch DP: 2.50 times the floor, 2.00 times fastdp.
    assert [row[1:5] for row in found[4:6]] == [
        [name, "1.25", "1.00", "2.50"],
        ["fastdp, `eager`", "1.00", "0.80", "2.00"],
    ]
    assert "Bare modules are a copy of the model for each replica" in " ".join(text.split())
    assert plot.kind_of("bare modules") == plot.kind_of("one GPU") == "floor"
    assert "are modules" not in tables.render([run_of(table("mlp", 64, EAGER))])


def test_moves_and_feeds_as_tables():
    def moved(verb, size_bytes, way, us):
        return {"verb": verb, "size_bytes": size_bytes, "way": way, "device_us": us}

    bar = {"bar": "a sum", "measured": 0.8, "least": 1, "holds": False}
    comm = {
        **{"benchmark": "comm", "command": "python benchmarks/comm.py", "devices": [0, 1]},
        "machine": {**MACHINE, "date": "2026-11-30", "transport": "peer"},
        "rows": [
            moved("reduce_add", 4096, "fastdp", 8.25),
            moved("reduce_add", 2**20, "fastdp", 10.0),
            {"verb": "reduce_add", "size_bytes": 4096, "way": "NCCL", "failed": "no"},
            moved("bucket reduce, 161 tensors", 2**25, "fastdp", 123.0),
        ],
        "bars": [bar],
    }
    fed = {
        **{"benchmark": "input", "command": "python benchmarks/input.py", "devices": [0, 1]},
        **{"machine": comm["machine"], "title": "resnet50", "engine": "eager", "batch_mb": 154.1},
        **{"model": "resnet50", "per_gpu": 128, "bars": [bar | {"holds": True}]},
        "steps": [{"way": "prefetch", "step_ms": 44.0, "longer": 0.021}],
        "copies": [{"way": "prefetch", "gb_per_s": 90.0, "of_bare": 0.91}],
    }
    health = {
        **{"benchmark": "grad_health", "command": "python benchmarks/grad_health.py"},
        **{"machine": comm["machine"], "devices": [0, 1]},
        "results": [{"cost": "norm", "way": "torch", "median_us": 50.0, "times_fastdp": 2.0}],
    }
    older = {**comm, "rows": [], "machine": {**comm["machine"], "date": "2026-11-29"}}
    other = {**older, "machine": {**older["machine"], "transport": "nccl"}}
    assert "transport `nccl`" in tables.render([other, comm])  # peer's do not stand for these
    text = tables.render([older, comm, fed, health])
    assert rows_of(text) == [
        ["us on the GPUs", "way", "4 KB", "1 MB"],
        ["sum of all GPUs' tensors", "fastdp", "8.25", "10.0"],
        ["NCCL", "failed", "–"],
        ["us on the GPUs", "way", "32 MB"],
        ["bucket reduce, 161 tensors", "fastdp", "123"],
        ["Step, inputs from", "ms", "longer"],
        ["prefetch", "44.0", "2.1 %"],
        ["Copies with nobody computing", "GB/s", "of bare"],
        ["prefetch", "90.0", "91 %"],
        ["cost", "way", "median, us", "times fastdp"],
        ["norm", "torch", "50.0", "2.00"],
    ]
    assert "- sum of all GPUs' tensors, 4 KB: NCCL failed: no." in text
    assert "0 of 1 promises hold; not: a sum is 0.8 (at least 1)." in text
    assert "1 of 1 promises hold." in text and "by transport `peer`:" in text


def test_what_failed_for_one_reason_shares_a_line():
    found = [("mlp", "DDP, a", "late."), ("mlp", "fastdp", "lost"), ("mlp", "DDP, b", "late.")]
    text = "- mlp: DDP, a; DDP, b failed: late.\n- mlp: fastdp failed: lost."
    assert markdown.failures(found) == [text] and markdown.failures([]) == []


@pytest.mark.parametrize(
    "value, shown", [(None, "–"), (0.5, "0.50"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_figures(value, shown):
    assert markdown.figure(value) == shown


@pytest.fixture
def page(tmp_path):
    """A page with an empty block, a run's file, and the options that name both."""
    (tmp_path / "page.md").write_text(f"before\n{tables.BEGIN}\n{tables.END}\nafter\n")
    (tmp_path / "run.json").write_text(json.dumps(run_of(table("mlp", 64, EAGER))))
    return tmp_path / "page.md", [str(tmp_path / "run.json"), "--page", str(tmp_path / "page.md")]


def test_a_page_is_filled_and_checked(page, capsys):
    path, options = page
    assert tables.main([*options, "--check"]) == 1
    assert "page.md has other tables: benchmarks/tables.py --write" in capsys.readouterr().err
    assert tables.main([*options, "--write"]) == 0
    assert tables.main([*options, "--check"]) == 0
    text = path.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    path.write_text(text.replace("| 8.00 |", "| 7.00 |"))
    assert tables.main([*options, "--check"]) == 1
    path.write_text("no block")
    with pytest.raises(SystemExit, match="page.md: it must have <!-- figures:begin -->"):
        tables.main([*options, "--check"])


def test_files_that_are_no_runs(tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text('{"benchmark": "else"}')
    assert tables.main([str(other)]) == 1
    assert "other.json: no run of step" in capsys.readouterr().err
    other.write_text("{")
    with pytest.raises(SystemExit, match="other.json: Expecting"):
        tables.main([str(other)])


def test_the_picture_has_a_bar_for_each_time(tmp_path):
    runs = [run_of(table("mlp", 64, COMPILED), table("tiny<", 4, EAGER))]
    (tmp_path / "run.json").write_text(json.dumps(runs[0]))
    options = [str(tmp_path / "run.json"), "--output", str(tmp_path / "steps.svg")]
    assert plot.main([*options, "--check"]) == 1
    assert plot.main(options) == 0 and plot.main([*options, "--check"]) == 0
    root = ElementTree.parse(tmp_path / "steps.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    bars = [float(bar.get("width")) for bar in root.iter(f"{space}rect")][1:]
    # Each panel to its own scale: torch DP is the longest.
    one = [plot.BAR_WIDTH * ms / 40 for ms in (10, 40, 12, 20, 8)]
    assert bars == pytest.approx(one * 2, abs=0.06)
    words = [text.text for text in root.iter(f"{space}text")]
    assert words.count("failed") == 1 and words.count("not run") == 1
    assert "tiny< (4)" in words and "50-layer MLP, width 256 (64)" in words
    assert "prefers-color-scheme: dark" in root.find(f"{space}style").text
    highest = [float(root.get(side)) for side in ("width", "height")]
    for text in root.iter(f"{space}text"):
        assert 0 <= float(text.get("x")) < highest[0] and 0 < float(text.get("y")) < highest[1]


RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))


@pytest.mark.skipif(not RESULTS, reason="no run is committed yet: the figures are older")
def test_readme_and_picture_are_those_of_the_runs():
    assert tables.main(["--check"]) == 0
    assert plot.main(["--check"]) == 0


def test_readme_has_a_block():
    before, inside, after = tables.split((ROOT / "README.md").read_text(), "README.md")
    assert "### Training steps on GPUs" in before and "|" in inside and "## More" in after


def test_labels_are_of_models():
    import models

    assert set(step_tables.LABELS) <= set(models.MODELS)
    assert set(models.STANDARD) <= set(step_tables.LABELS)
