"""Scaling by benchmarks/step.py, from one GPU to eight: on times that are known, and on replicas of
the host. No machine of more than two GPUs has run it yet."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import plot  # noqa: E402
import scaling  # noqa: E402
import scaling_tables  # noqa: E402
import step  # noqa: E402
import step_bars  # noqa: E402
import tables  # noqa: E402
from test_benchmark_tables import rows_of, run_of, table  # noqa: E402

EIGHT = ["--devices", "0,1,2,3,4,5,6,7", "--models", "resnet50,gpt2:8"]


def test_weak_scaling_gives_every_gpu_the_batch_of_one():
    args = step.parse([*EIGHT, "--scaling", "weak"])
    found = [(case.name, case.per_gpu, case.gpus) for case in args.cases]
    assert found == [(m, b, n) for m, b in (("resnet50", 128), ("gpt2", 8)) for n in (1, 2, 4, 8)]
    assert [d.index for d in args.cases[2].devices] == [0, 1, 2, 3]
    assert args.cases[2].title() == "resnet50:128 on 4"
    assert {case.lone_batches() for case in args.cases} == {1}
    assert args.ahead == 1 and args.alone


def test_strong_scaling_shares_the_batch():
    args = step.parse([*EIGHT, "--scaling", "strong", "--counts", "1,8"])
    assert [(case.name, case.per_gpu) for case in args.cases] == [
        *(("resnet50", 128), ("resnet50", 16), ("gpt2", 8), ("gpt2", 1)),
    ]
    assert [case.lone_batches() for case in args.cases] == [1, 8, 1, 8]
    assert [case.facts()["batch"] for case in args.cases] == [128, 128, 8, 8]
    # One GPU does all of it: as many batches in one step as eight.
    entries = step.entries_of(args.cases[1], args)
    assert {entry.batches for entry in entries.values()} == {8}


def test_devices_in_another_order_and_odd_numbers():
    args = step.parse(["--devices", "5,3,1", "--models", "mlp", "--scaling", "weak"])
    assert [[d.index for d in case.devices] for case in args.cases] == [[5], [5, 3], [5, 3, 1]]
    assert scaling.counts_up_to(8) == [1, 2, 4, 8] and scaling.counts_up_to(6) == [1, 2, 4, 6]


def test_rivals_on_each_number_of_gpus():
    options = ["--scaling", "weak", "--transports", "auto,nccl,host"]
    args = step.parse([*EIGHT, *options, "--ddp", "eager,reduce-overhead"])
    one, _, _, eight = (list(step.entries_of(case, args)) for case in args.cases[:4])
    apart = ["DDP", "DDP compiled reduce-overhead"]
    assert one == ["one GPU", "torch DP", "fastdp eager", "fastdp graph", *apart]
    assert eight == [
        *("one GPU", "torch DP"),
        *("fastdp eager", "fastdp eager, one GPU", "fastdp eager nccl", "fastdp eager host"),
        *("fastdp graph", "fastdp graph, one GPU", "fastdp graph nccl", "fastdp graph host"),
        *apart,
    ]


@pytest.mark.parametrize(
    "options, words",
    [
        (["--devices", "0,1,0", "--scaling", "weak"], "--devices: a GPU is named twice"),
        (["--counts", "1,2"], "--counts is for --scaling"),
        (["--scaling", "weak", "--counts", "2,1"], "'2,1' are no rising numbers of GPUs"),
        (["--scaling", "weak", "--counts", "0,1"], "'0,1' are no rising numbers of GPUs"),
        (["--scaling", "weak", "--counts", "1,x"], "'1,x' are no rising numbers of GPUs"),
        (["--scaling", "weak", "--counts", "1,4"], "--counts: 4 GPUs, and --devices names 2"),
        (
            ["--scaling", "strong", "--models", "gpt2:7"],
            "--models: 2 GPUs cannot share the batch of gpt2:7 evenly",
        ),
    ],
)
def test_scaling_refuses(capsys, options, words):
    with pytest.raises(SystemExit):
        step.parse(options)
    assert words in capsys.readouterr().err


# Shares of one GPU's rate, of known times.


def climb(kind="weak", model="resnet50", batch=128, counts=(1, 2, 4, 8), **more):
    """The tables of one model, as a run has them. With n GPUs the steps of fastdp's graph take
    100 + n ms, DDP's 150 + 10 n."""
    found = []
    for n in counts:
        times = {"one GPU": 100.0, "torch DP": 100.0 * n, "DDP": 150.0 + 10 * n}
        times |= {"fastdp graph": 100.0 + n, "DDP compiled default": 90.0 + n}
        if n > 1:
            times |= {"fastdp graph nccl": 200.0, "fastdp graph, one GPU": 100.0}
        per_gpu = batch // n if kind == "strong" else batch
        facts = {"scaling": kind, "batch": batch, **more}
        each = table(model, per_gpu, times, devices=range(n), **facts)
        for row in each["rows"]:
            row["kind"] = row["rival"].removesuffix(" nccl")
        scaling.add_shares(each, found)
        each["bars"] = step_bars.bars(each)
        found.append(each)
    return found


def shares(found):
    return {row["rival"]: row["efficiency"] for row in found["rows"] if "efficiency" in row}


def test_shares_of_weak_scaling():
    one, _, _, eight = climb()
    assert shares(one) == {}
    assert shares(eight) == {
        "torch DP": 100 / 800,  # in turn with the bare module
        "DDP": 160 / 230,  # of the first contest
        "DDP compiled default": 91 / 98,
        "fastdp graph": 100 / 108,  # in turn with its own on one GPU
        "fastdp graph nccl": 100 / 200,
    }


def test_shares_of_strong_scaling():
    *_, eight = climb("strong")
    assert shares(eight)["fastdp graph"] == 100 / 108 / 8
    assert shares(eight)["DDP"] == 160 / 230 / 8


def test_shares_of_bare_modules_are_of_one():
    one = table("gpt2", 8, {"one GPU": 9.0}, devices=[0], scaling="weak", batch=8)
    times = {"one GPU": 10.0, "bare modules": 12.5}
    two = table("gpt2", 8, times, devices=[0, 1], scaling="weak", batch=8)
    scaling.add_shares(two, [one])
    assert shares(two) == {"bare modules": 0.8}  # in turn with it, not of the first contest
    found = run_of(one, two)
    flat = " ".join(tables.render([found]).split())
    assert "| bare modules, no communication | – | 12.5 (80.0 %) |" in flat
    assert "in turn with the others of its column. Bare modules are a copy of the model" in flat


def test_what_did_not_run_has_no_share():
    _, two = climb(counts=(1, 2))
    bare = [table("resnet50", 128, {"one GPU": 10.0, "DDP": 10.0}, devices=[0], scaling="weak")]
    for row in two["rows"]:
        row.pop("efficiency", None)
    kept = ("one GPU", "DDP", "fastdp graph")
    two["rows"] = [row for row in two["rows"] if row["rival"] in kept]
    two["rows"].append({"rival": "torch DP", "kind": "torch DP", "failed": "no"})
    scaling.add_shares(two, bare)  # of another batch
    assert shares(two) == {}
    bare[0]["batch"] = 128
    scaling.add_shares(two, bare)
    assert shares(two) == {"DDP": 10 / 170}


def test_promises_of_eight_gpus():
    eight = climb()[-1]
    assert [(bar["bar"], bar["holds"]) for bar in eight["bars"]] == [
        ("share of one GPU's rate, fastdp graph", False),
        ("DDP over fastdp graph", True),
    ]
    assert eight["bars"][0]["measured"] == 100 / 108 and eight["bars"][0]["least"] == 0.989
    eight["rows"][0] |= {"rival": "fastdp compiled", "step_ms": 97.0, "efficiency": 0.99}
    assert [(bar["bar"], bar["holds"]) for bar in step_bars.bars(eight)[2:]] == [
        ("share of one GPU's rate, fastdp compiled", True),
        ("DDP compiled default over fastdp compiled", True),
    ]
    assert climb("strong")[-1]["bars"] == []
    assert climb(batch=64)[-1]["bars"] == []
    assert climb()[2]["bars"] == []  # four GPUs
    # Two GPUs of weak scaling are like any two; of strong scaling they share a batch.
    assert [bar["bar"] for bar in climb()[1]["bars"]] == [
        *("DDP over fastdp graph", "fastdp graph, one GPU over fastdp graph"),
    ]
    assert climb("strong", batch=256)[1]["bars"] == []


# Tables and the picture of lines.


def test_climbs_as_tables():
    found = run_of(*climb(), *climb("strong", "gpt2", 8, (1, 2)))
    text = tables.render([found])
    assert text.startswith(tables.CLIMB)  # and no picture of bars: there is nothing to show in it
    rows = rows_of(text)
    label = "ResNet-50, bf16, channels_last (128)"
    assert rows[0] == ["Model (batch)", "of", "1 GPU", "2 GPUs", "4 GPUs", "8 GPUs"]
    assert rows[1] == [label, "one GPU", "100", "100", "100", "100"]
    assert rows[-6:][0] == ["GPT-2 124M, bf16 (8 x 512 tokens)", "one GPU", "100", "100"]
    assert ["fastdp, `graph`", "101", "102 (98.0 %)", "104 (96.2 %)", "108 (92.6 %)"] in rows
    assert ["fastdp, `graph`, `nccl`", "–", "200 (50.0 %)", *["200 (50.0 %)"] * 2] in rows
    assert ["fastdp, `graph`", "101", "102 (49.0 %)"] in rows
    assert not any("one GPU" in row[1] for row in rows if row[1] != "one GPU")
    flat = " ".join(text.split())
    assert "Weak scaling on NVIDIA H200, whole steps: ms, medians; every GPU has the" in flat
    assert "the share of one GPU's rate, step(1) / (n step(n))" in flat
    assert f"- {label} on 8: 1 of 2 promises hold; not: share of one GPU's rate," in flat


def test_only_the_latest_run_of_a_model_is_shown():
    old = run_of(*climb(counts=(1, 2, 4, 8), began="2026-11-29 01:00:00"))
    new = run_of(*climb(counts=(1, 2)), *climb(model="gpt2", batch=8, counts=(1,)))
    plain = run_of(table("mlp", 64, {"one GPU": 10.0, "fastdp eager": 20.0}))
    text = tables.render([old, new, plain])
    assert text.startswith(tables.PICTURE) and tables.CLIMB in text
    (heads,) = ([row for row in rows_of(text) if row[:2] == ["Model (batch)", "of"]],)
    assert heads == [["Model (batch)", "of", "1 GPU", "2 GPUs", "run"]]
    assert "GPT-2" not in text  # one number of GPUs is no scaling
    ((_, climbs),) = scaling_tables.climbs_of([old, new, plain]).items()
    assert [each.run() for each in climbs] == [2]


def test_the_picture_has_a_line_for_each_rival(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(run_of(*climb(), *climb("strong"))))
    bars, lines = tmp_path / "steps.svg", tmp_path / "scaling.svg"
    options = [str(tmp_path / "run.json"), "--output", str(bars), "--lines", str(lines)]
    assert plot.main([*options, "--check"]) == 1
    assert plot.main(options) == 0 and plot.main([*options, "--check"]) == 0
    assert not bars.exists()
    root = ElementTree.parse(lines).getroot()
    space = "{http://www.w3.org/2000/svg}"
    drawn = list(root.iter(f"{space}polyline"))
    kinds = [line.get("class") for line in drawn]
    assert kinds == ["line torch", "line ddp", "line ddp", "line ours", "line ours"]
    assert drawn[3].get("stroke-dasharray") == "none" != drawn[4].get("stroke-dasharray")
    heights = [float(point.split(",")[1]) for point in drawn[3].get("points").split()]
    top = plot.HEAD_HEIGHT + plot.MARGIN + plot.TITLE_HEIGHT
    expected = [top + plot.PLOT_HEIGHT * (1 - share) for share in (1, 100 / 102, 100 / 104)]
    assert heights[:3] == pytest.approx(expected, abs=0.06)
    assert [len(line.get("points").split()) for line in drawn] == [4, 4, 4, 4, 3]
    texts = list(root.iter(f"{space}text"))
    words = [text.text for text in texts]
    assert {"1", "2", "4", "8 GPUs", "fastdp, graph: 92.6 %", "torch DP: 12.5 %"} <= set(words)
    names = sorted(float(t.get("y")) for t in texts if t.get("class") == "value")
    assert len(names) == 5
    assert all(b - a >= plot.NAME_STEP - 0.01 for a, b in zip(names, names[1:]))
    size = [float(root.get(side)) for side in ("width", "height")]
    for text in texts:
        assert 0 <= float(text.get("x")) < size[0] and 0 < float(text.get("y")) < size[1]


# What launching costs the host.


def test_launches_are_compared_with_those_on_the_fewest_gpus(capsys):
    import launches

    spread = {"low_us": 1.0, "high_us": 9.0}
    rows = [
        {"way": way, "gpus": gpus, "host_us": us, **spread}
        for way, gpus, us in (("a", 1, 2.0), ("b", 2, 5.0), ("a", 8, 16.0), ("b", 8, 5.0))
    ]
    launches.compare(rows)
    assert [row["times_first"] for row in rows] == [1, 1, 8, 1]
    launches.show(rows)
    assert capsys.readouterr().out.splitlines()[-1].split() == "b 8 5.0 1.0 9.0 1.00".split()


def test_launches_are_timed_on_the_host(tmp_path, capsys):
    import launches

    out = tmp_path / "out.json"
    launches.main(["--devices", "cpu,cpu,cpu", "--rounds", "2", "--json", str(out)])
    found = json.loads(out.read_text())["rows"]
    ways = ["kernels, one thread", "kernels, a thread each", "moves, one thread"]
    assert [(row["way"], row["gpus"]) for row in found] == [
        *((way, n) for n in (1, 2, 3) for way in ways[: 3 if n > 1 else 2]),
    ]
    assert all(0 < row["low_us"] <= row["host_us"] <= row["high_us"] for row in found)
    capsys.readouterr()
    for options, words in (
        (["--devices", "0,cpu"], "--devices: all GPUs or all cpu"),
        (["--counts", "4"], "--counts: 4 GPUs, and --devices names 2"),
        (["--rounds", "0"], "--rounds is 0: it must be at least 1"),
    ):
        with pytest.raises(SystemExit):
            launches.parse(options)
        assert words in capsys.readouterr().err


# On replicas of the host.


def run_on_host(tmp_path, replicas, *options):
    out = tmp_path / "out.json"
    few = ("--models", "tiny:8", "--rounds", "2", "--seconds", "0.1", "--warmup", "2")
    done = subprocess.run(
        [
            *(sys.executable, str(BENCHMARKS / "step.py"), "--json", str(out)),
            *("--devices", ",".join(["cpu"] * replicas), *few, *options),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


def test_weak_scaling_runs_to_eight_replicas(tmp_path):
    counts = ("--counts", "1,4,8")
    found, said = run_on_host(tmp_path, 8, "--scaling", "weak", "--ddp", "none", *counts)
    assert [len(each["devices"]) for each in found["tables"]] == [1, 4, 8]
    assert not any("failed" in row for each in found["tables"] for row in each["rows"])
    for each in found["tables"][1:]:
        rows = {row["rival"]: row for row in each["rows"]}
        own = rows["fastdp eager"]
        alone_ms = rows["fastdp eager, one GPU"]["step_ms"]
        assert own["one_gpu_ms"] == alone_ms
        assert own["efficiency"] == pytest.approx(alone_ms / own["step_ms"])
    assert "fastdp eager: " in said and "% of the rate of one GPU" in said
    head = rows_of(tables.render([found]))[0]
    assert head == ["Model (batch)", "of", "1 GPU", "4 GPUs", "8 GPUs"]


def test_strong_scaling_runs_beside_ddp(tmp_path):
    only = ("--only", "one GPU;fastdp eager;fastdp eager, one GPU;DDP")
    found, _ = run_on_host(tmp_path, 2, "--scaling", "strong", *only)
    one, two = found["tables"]
    assert (one["per_gpu"], two["per_gpu"], two["batch"]) == (8, 4, 8)
    first = {row["rival"]: row["step_ms"] for row in one["rows"]}
    rows = {row["rival"]: row for row in two["rows"]}
    assert rows["DDP"]["one_gpu_ms"] == first["DDP"]
    assert rows["DDP"]["efficiency"] == pytest.approx(first["DDP"] / rows["DDP"]["step_ms"] / 2)
    # A step of one GPU does as much as one of both.
    assert rows["one GPU"]["s_per_1000_batches"] == rows["one GPU"]["step_ms"]
