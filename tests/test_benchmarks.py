"""The benchmarks run, and say what they promise to say. How fast anything is, is not tested here: a
busy machine must not fail the suite."""

import importlib
import json
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import measure  # noqa: E402
import models  # noqa: E402


def run(name, *options):
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def host_cost():
    done = run("host_cost.py", "--repeats", "2", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_host_cost_says_where_it_ran(host_cost):
    assert host_cost["repeats"] == 2
    assert set(host_cost["machine"]) == {
        *("cpu", "cores", "load", "python", "torch", "fastdp", "compiler", "commit", "date")
    }


def test_host_cost_measures_every_cost_beside_a_rival(host_cost):
    ways = {}
    for result in host_cost["results"]:
        ways.setdefault(result["cost"], []).append(result["way"])
        assert 0 < result["low_us"] <= result["median_us"] <= result["high_us"]
        assert result["times_fastdp"] > 0
    assert len(ways) == 12
    for cost, found in ways.items():
        assert found.count("fastdp") == 1, cost
        assert any("fastdp" not in way and not way.startswith("floor") for way in found), cost


def test_host_cost_has_four_bars(host_cost):
    medians = {(r["cost"], r["way"]): r["median_us"] for r in host_cost["results"]}
    for bar in host_cost["bars"]:
        base = 0 if bar["beyond"] is None else medians[bar["cost"], bar["beyond"]]
        ours = medians[bar["cost"], "fastdp"] - base
        ratio = (medians[bar["cost"], bar["rival"]] - base) / max(ours, 1e-3)
        assert bar["tries"][0] == pytest.approx(ratio)
        assert len(bar["tries"]) == (1 if ratio >= bar["factor"] else 5)
        assert bar["measured"] == statistics.median(bar["tries"])
        assert bar["holds"] == (bar["measured"] >= bar["factor"])
    assert [bar["factor"] for bar in host_cost["bars"]] == [10, 50, 1, 3]


def test_grad_health_measures_beside_torch():
    done = run("grad_health.py", "--repeats", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    ways = {}
    for result in found["results"]:
        ways.setdefault(result["cost"], []).append(result["way"])
        assert 0 < result["low_us"] <= result["median_us"] <= result["high_us"]
    assert len(ways) == 6 and all("fastdp" in each and len(each) > 1 for each in ways.values())
    assert [bar["cost"] for bar in found["bars"]] == [
        *("norm of 161 tensors", "clipping of 161 tensors"),
        *("norm of 1,000 tensors", "clipping of 1,000 tensors"),
    ]


@pytest.mark.parametrize("devices", [[0, 1], [torch.device("cuda:0")], ["cuda:1"]], ids=str)
def test_gpus_that_are_not_there_end_the_program(monkeypatch, devices):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="there is no GPU here; .* how to try it on the host"):
        measure.machine_of(devices)
    assert "gpu" not in measure.machine_of(["cpu", "cpu"])


@pytest.mark.parametrize("devices", [[0, 2], [torch.device("cuda:2")], ["cuda:2"]], ids=str)
def test_one_gpu_too_many_ends_the_program(monkeypatch, devices):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit, match="there is no GPU 2, but 2 in all here"):
        measure.machine_of(devices)


@pytest.mark.parametrize("script", "step memory input compiled comm launches phases".split())
def test_every_script_says_at_once_that_there_is_no_gpu(monkeypatch, capsys, script):
    """By measure.machine_of, before it makes a model, starts a process or prints."""
    module = importlib.import_module(script)
    assert "to try the script itself" in module.__doc__
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--devices", "0,1"])
    with pytest.raises(SystemExit, match="there is no GPU here; .* how to try it on the host"):
        module.main()
    assert capsys.readouterr().out == ""


def test_repeats_must_be_one_or_more():
    done = run("host_cost.py", "--repeats", "0")
    assert done.returncode == 2
    assert "argument --repeats: 0, must be at least 1" in done.stderr


# measure.py by itself, on costs whose outcome is known.


def slower(times):
    def call():
        for _ in range(200 * times):
            pass

    return call


def a_cost():
    return measure.Cost("loops", {"fastdp": slower(1), "rival": slower(40)})


@pytest.mark.parametrize("factor, word, status", [(2.0, "holds", 0), (1e6, "FAILS", 1)])
def test_a_bar_decides_the_exit_status(capsys, factor, word, status):
    bars = [measure.Bar("loops", "rival", factor)]
    assert measure.main("", [a_cost], bars, ["--repeats", "3", "--check"]) == status
    out, err = capsys.readouterr()
    assert f"{word}: loops: rival takes" in out
    assert ("a bar fails" in err) == bool(status)
    assert measure.main("", [a_cost], bars, ["--repeats", "3"]) == 0


@pytest.mark.parametrize(
    "factors, tries, holds",
    [
        ([60, 40, 40, 40, 40], 1, True),  # holds at once
        ([49, 51, 52, 40, 53], 5, True),  # the median is 51
        ([49, 90, 90, 49, 49], 5, False),  # two lucky tries do not help
    ],
    ids=["at once", "a bad moment", "fails"],
)
def test_a_bar_that_seems_not_to_hold_is_tried_again(monkeypatch, factors, tries, holds):
    left = list(factors)

    def measured(costs, repeats):
        assert [make() for make in costs] == ["made anew"] and repeats == 7
        return taken()

    def taken():
        sample = measure.Sample(float(left.pop(0)), 0.0, 0.0)
        ours = measure.Sample(1.0, 0.0, 0.0)
        rows = {"rival": sample, "fastdp": ours}
        return [measure.Result("c", way, each, 0.0) for way, each in rows.items()]

    monkeypatch.setattr(measure, "measure", measured)
    bar = measure.Bar("c", "rival", 50)
    (verdict,) = measure.judge([bar], {"c": lambda: "made anew"}, taken(), 7)
    assert verdict.tries == factors[:tries]
    assert verdict.holds is holds
    assert ("holds" if holds else "FAILS") in measure.bar_lines([verdict])


def test_ways_run_in_turn_and_the_end_is_called():
    order = []
    ways = {name: (lambda name=name: order.append(name)) for name in ("fastdp", "rival")}
    ended = []
    measure.measure([lambda: measure.Cost("turns", ways, end=lambda: ended.append(True))], 3)
    changes = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert changes == ["fastdp", "rival"] * 4  # one warm-up and three rounds
    assert ended == [True]


def test_a_bar_may_count_beyond_a_floor():
    sample = {"fastdp": 14.0, "rival": 22.0, "floor": 10.0}
    results = [
        measure.Result("c", way, measure.Sample(us, us, us), us / 14) for way, us in sample.items()
    ]
    assert measure.factor_of(measure.Bar("c", "rival", 3, beyond="floor"), results) == 3.0
    assert measure.factor_of(measure.Bar("c", "rival", 3), results) == 22 / 14


def test_median_and_spread():
    sample = measure._sample([float(value) for value in range(101)])
    assert sample == (50.0, 10.0, 90.0)


# step.py and comm.py, on the host: that they run and what they report.


def tables(tmp_path, name, *options):
    done = run(name, "--json", str(tmp_path / "out.json"), *options)
    assert done.returncode == 0, done.stderr
    return json.loads((tmp_path / "out.json").read_text()), done.stdout


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    return tables(
        tmp_path_factory.mktemp("step"),
        "step.py",
        *("--devices", "cpu,cpu", "--models", "tiny:6"),
        *("--steps", "2", "--rounds", "3", "--warmup", "2", "--transports", "auto,host"),
        "--silent",
    )


OURS = ["fastdp eager", "fastdp eager, silent", "fastdp eager host"]


def test_step_races_every_rival(step):
    found = step[0]["tables"]
    assert [table["title"] for table in found] == [
        "tiny, 6 per GPU, devices ['cpu', 'cpu'], step"
    ]
    rows = found[0]["rows"]
    assert [row["rival"] for row in rows] == ["one GPU", "torch DP", *OURS, "DDP"]
    for row in rows:
        assert "failed" not in row, row
        assert 0 < row["low_ms"] <= row["step_ms"] <= row["high_ms"]
        assert row["host_ms"] > 0


def test_step_counts_batches_of_all_gpus(step):
    for row in step[0]["tables"][0]["rows"]:
        steps = 2 if row["rival"] == "one GPU" else 1
        assert row["s_per_1000_batches"] == pytest.approx(row["step_ms"] * steps)


def test_step_compares_all_with_all(step):
    rows = {row["rival"]: row for row in step[0]["tables"][0]["rows"]}
    for row in rows.values():
        for name, times in row["times_ours"].items():
            assert times == pytest.approx(
                rows[name]["s_per_1000_batches"] / row["s_per_1000_batches"]
            )
        assert set(row["times_ours"]) == set(rows)
    ours, silent = rows["fastdp eager"], rows["fastdp eager, silent"]
    assert ours["not_hidden_ms"] == pytest.approx(ours["step_ms"] - silent["step_ms"])
    assert ours["not_hidden_share"] == pytest.approx(ours["not_hidden_ms"] / ours["step_ms"])
    assert "not_hidden_ms" not in rows["fastdp eager host"]
    assert "fastdp eager: communication not hidden " in step[1]


def test_a_scaled_step_is_an_ordinary_one():
    import rivals

    model = models.MODELS["tiny-fp16"]
    device = torch.device("cpu")
    base = model.make(device)
    before = [parameter.clone() for parameter in base.parameters()]
    trainer = rivals.Trainer(model, base, base, model.batch(4, device), "step")
    trainer.step()
    scale = trainer._scaler.get_scale()
    assert scale == 65536.0
    for old, new in zip(before, base.parameters()):
        assert torch.equal(new, old - 1e-4 * new.grad)  # the optimizer has unscaled it


def test_a_silent_step_moves_nothing():
    import rivals
    from fastdp import _C

    device = torch.device("cpu")

    def moved(silent):
        wrap = rivals.fastdp_wrap([device, device], "local", "eager")
        rival = rivals.Local(models.MODELS["tiny"], [device] * 2, 4, "step", wrap, 2, silent)
        rival.warm_up(1)
        _C.reset_counters()
        rival.block(3)
        calls = {verb: counter["calls"] for verb, counter in _C.counters().items()}
        return calls["bucket_broadcast"], calls["bucket_reduce"]

    assert moved(False) == (3, 3)
    assert moved(True) == (0, 0)


@pytest.mark.parametrize(
    "options, words",
    [
        (["--models", "resnet9"], "--models: 'resnet9' is not one of mlp, "),
        (["--models", "mlp:0"], "--models: '0' is no batch size; write mlp:64"),
        (["--devices", "0"], "--devices: two or more are needed, all GPUs or all cpu"),
        (["--devices", "0,cpu"], "--devices: two or more are needed, all GPUs or all cpu"),
        (["--devices", "a,b"], "--devices: 'a' is neither the number of a GPU nor cpu"),
        (["--rounds", "0"], "--rounds is 0: it must be at least 1"),
    ],
)
def test_step_refuses(capsys, options, words):
    import step as script

    with pytest.raises(SystemExit):
        script.parse(options)
    assert words in capsys.readouterr().err


def test_step_defaults_by_devices():
    import step as script

    two = script.parse(["--devices", "0,1"])
    assert two.transports == ["auto"] and two.gpus == 2
    assert [name for name, _ in two.models] == ["mlp", "resnet18", "resnet50", "gpt2"]
    one = script.parse(["--devices", "0,0", "--models", "resnet50:512,gpt2"])
    assert one.gpus == 1
    assert one.models == [("resnet50", 512), ("gpt2", 8)]
    rivals = script.entries_of(two.cases[0], two)
    assert [name for name in rivals if name != "fastdp compiled"] == [
        *("one GPU", "torch DP", "fastdp eager", "fastdp graph", "DDP")
    ]
    by = ["--transports", "peer,nccl", "--engines", "eager", "--silent", "--ddp", "none"]
    by = script.parse(by)
    assert list(script.entries_of(by.cases[0], by))[2:] == [
        *("fastdp eager peer", "fastdp eager peer, silent", "fastdp eager nccl"),
    ]
    assert rivals["one GPU"].batches == 1 and rivals["torch DP"].batches == 2
    alone = script.parse(["--alone", "--engines", "graph", "--ddp", "none"])
    own = script.entries_of(alone.cases[0], alone)["fastdp graph, one GPU"]
    assert own.batches == 1 and own.warmup == alone.warmup
    backward = script.parse(["--part", "backward"])
    assert "DDP" not in script.entries_of(backward.cases[0], backward)
    assert two.ahead == 64 and not two.alone


def test_input_races_ways_to_feed_a_step(tmp_path):
    options = ("--devices", "cpu,cpu", "--model", "tiny:6", "--steps", "2", "--rounds", "2")
    found, out = tables(tmp_path, "input.py", *options)
    assert found["title"] == "tiny, 6 per replica, devices ['cpu', 'cpu']"
    assert found["benchmark"] == "input" and found["bars"] == []
    assert found["batch_mb"] == 12 * 8 * 4 / 1e6
    assert [row["way"] for row in found["steps"]][:2] == ["inputs there", "pageable loader"]
    assert "prefetch" in [row["way"] for row in found["steps"]]
    for row in found["steps"]:
        assert 0 < row["low_ms"] <= row["step_ms"] <= row["high_ms"]
        assert row["longer"] == pytest.approx(row["step_ms"] / found["steps"][0]["step_ms"] - 1)
        assert row["way"] in out
    assert [row["way"] for row in found["copies"]][:2] == ["bare pinned copy", "prefetch"]
    for row in found["copies"]:
        assert row["of_bare"] == pytest.approx(row["gb_per_s"] / found["copies"][0]["gb_per_s"])


def test_input_bars():
    import input as script

    steps = {"inputs there": 0.0, "pageable loader": 0.5, "prefetch": 0.031}
    copies = {"prefetch": 0.2, "prefetch, pinned loader": 0.9}
    found = {
        "steps": [{"way": way, "longer": longer} for way, longer in steps.items()],
        "copies": [{"way": way, "of_bare": share} for way, share in copies.items()],
    }
    assert [(bar["measured"], bar["holds"]) for bar in script.bars(found)] == [
        (0.031, False),
        (0.9, True),
    ]


@pytest.mark.parametrize(
    "options, words",
    [
        (["--model", "resnet9"], "--model: 'resnet9' is not one of mlp, "),
        (["--devices", "0,cpu"], "--devices: all GPUs or all cpu"),
        (["--depth", "0"], "--depth is 0: it must be at least 1"),
    ],
)
def test_input_refuses(capsys, options, words):
    import input as script

    with pytest.raises(SystemExit):
        script.parse(options)
    assert words in capsys.readouterr().err


def test_comm_measures_every_verb(tmp_path):
    found, _ = tables(
        tmp_path, "comm.py", "--devices", "cpu,cpu,cpu", "--sizes", "4K,64K", "--rounds", "2"
    )
    assert found["machine"]["transport"] == "local"
    assert found["bars"] == []
    verbs = {}
    for row in found["rows"]:
        assert "failed" not in row, row
        assert 0 < row["low_us"] <= row["device_us"] <= row["high_us"]
        verbs.setdefault((row["verb"], row["size_bytes"]), []).append(row["way"])
    assert all(ways == ["bare copy", "fastdp"] for ways in verbs.values())
    assert [verb for verb, size in verbs if size == 65536] == [
        *("broadcast", "reduce_add", "scatter", "gather")
    ]
    assert sum("161 tensors" in verb for verb, _ in verbs) == 4


def test_comm_bars():
    import comm

    def row(verb, size_bytes, way, device_us, of_bare=0.9):
        head = {"verb": verb, "size_bytes": size_bytes, "way": way}
        return head | {"device_us": device_us, "of_bare": of_bare}

    rows = [
        row("broadcast", 64 << 20, "fastdp", 200.0, 0.84),
        row("broadcast", 1 << 20, "fastdp", 20.0),
        row("broadcast", 1 << 20, "torch.cuda.nccl", 30.0),
        row("reduce_add", 16 << 20, "fastdp", 20.0),
        row("reduce_add", 16 << 20, "torch.cuda.nccl", 10.0),
        row("scatter", 64 << 20, "fastdp", 20.0, 0.1),
    ]
    assert [(bar["measured"], bar["least"], bar["holds"]) for bar in comm.bars(rows, 2)] == [
        (0.84, 0.85, False),
        (1.5, 1.0, True),
    ]
    assert comm.bars(rows, 8) == []  # no sum of 64 MB
    rows += [
        row("reduce_add", 64 << 20, "fastdp", 300.0),
        row("reduce_add", 64 << 20, "torch.cuda.nccl", 270.0),
    ]
    assert comm.bars(rows, 8) == [
        {
            "bar": "reduce_add of 64 MB: NCCL's time over fastdp's",
            **{"measured": 0.9, "least": 1.0, "holds": False},
        }
    ]


def test_memory_is_what_a_rival_added(monkeypatch):
    import contextlib

    import rivals

    now = {"allocated": 10, "reserved": 20, "peak": 50, "reserved peak": 55, "free": 900}

    def reset(device):
        now["peak"], now["reserved peak"] = now["allocated"], now["reserved"]

    def figure(name):
        return lambda device: now[name] << 20

    for name, stand_in in {
        "init": lambda: None,
        "device": lambda device: contextlib.nullcontext(),
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": reset,
        "memory_allocated": figure("allocated"),
        "memory_reserved": figure("reserved"),
        "max_memory_allocated": figure("peak"),
        "max_memory_reserved": figure("reserved peak"),
        "mem_get_info": lambda device: (now["free"] << 20, 1000 << 20),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    watch = rivals.MemoryWatch([torch.device("cuda", 0), torch.device("cuda", 0)])
    now.update({"allocated": 30, "peak": 60, "reserved peak": 90, "free": 700})
    assert watch.read() == ([50.0], [70.0], [200.0])
    assert rivals.MemoryWatch([torch.device("cpu")]).read() == ([], [], [])
