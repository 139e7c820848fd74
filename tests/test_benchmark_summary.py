"""benchmarks/summary_table.py: the figures at the top of README.md, of runs of known times."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import summary_table  # noqa: E402
import tables  # noqa: E402

TIMES = {"torch DP": 40.0, "DDP": 10.0, "fastdp eager": 20.0, "fastdp graph": 5.0}


def step_run(model, times, devices=(0, 1), part="step"):
    rows = [{"rival": rival, "step_ms": ms} for rival, ms in times.items()]
    table = {
        "model": model, "per_gpu": 64, "devices": list(devices), "part": part,
        "began": "2026-11-30 01:02:03", "rows": rows,
    }  # fmt: skip
    machine = {"gpu": "NVIDIA H200", "date": "2026-11-30"}
    return {"benchmark": "step", "machine": machine, "tables": [table]}


def body_of(text):
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_ratios_are_torchs_time_over_fastdps():
    text = summary_table.render([step_run("mlp", TIMES)])
    assert body_of(text) == [["50-layer MLP, width 256 (64)", "2.00", "0.50", "8.00", "2.00"]]
    assert "on two NVIDIA H200 (2026-11-30)" in " ".join(text.split())


def test_what_was_not_run_on_all_ways_is_left_out():
    lacking = {name: ms for name, ms in TIMES.items() if name != "DDP"}
    text = summary_table.render([step_run("mlp", TIMES), step_run("resnet18", lacking)])
    assert [row[0] for row in body_of(text)] == ["50-layer MLP, width 256 (64)"]


def test_runs_on_the_most_gpus_are_shown():
    four = step_run("gpt2", {**TIMES, "fastdp eager": 10.0}, devices=range(4))
    text = summary_table.render([step_run("mlp", TIMES), four])
    assert [row[1] for row in body_of(text)] == ["4.00"] and "on four NVIDIA" in text


def test_shared_gpus_hosts_and_parts_of_steps_are_no_summary():
    for run in (
        step_run("mlp", TIMES, devices=(0, 0)),
        step_run("mlp", TIMES, devices=("cpu", "cpu")),
        step_run("mlp", TIMES, part="backward"),
        {"benchmark": "comm"},
    ):
        assert summary_table.render([run]) == ""


def test_a_page_with_the_marks_gets_it(monkeypatch):
    monkeypatch.setattr(tables, "render", lambda files: "all")
    begin, end = tables.SUMMARY
    page = f"top\n{begin}\nold\n{end}\n{tables.BEGIN}\n{tables.END}\n"
    text = tables.filled(page, "page.md", [step_run("mlp", TIMES)])
    assert "old" not in text and "| 8.00 |" in text.partition(end)[0]
    assert tables.split(text, "page.md")[1] == "all"
    plain = f"{tables.BEGIN}\n{tables.END}\n"
    assert tables.filled(plain, "page.md", []) == f"{tables.BEGIN}\n\nall\n\n{tables.END}\n"
