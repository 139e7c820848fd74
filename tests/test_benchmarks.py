"""The benchmarks of inputs and moves run on the host; what all of them share of GPUs: that they are
there, and their memory."""

import contextlib
import importlib
import signal
import sys

import pytest
import torch
from benchmark_cases import BENCHMARKS, kept

sys.path.insert(0, str(BENCHMARKS))

import measure  # noqa: E402
import rivals  # noqa: E402


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


def test_input_races_ways_to_feed_a_step(tmp_path):
    options = ("--devices", "cpu,cpu", "--model", "tiny:6", "--steps", "2", "--rounds", "2")
    found, out = kept(tmp_path, "input.py", *options)
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
    found, _ = kept(
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


@pytest.mark.parametrize(
    "script, options, words",
    [
        ("phases", ["--devices", "cpu"], "--devices: two or more are needed, all GPUs or all cpu"),
        ("phases", ["--devices", "x,0"], "--devices: 'x' is neither the number of a GPU nor cpu"),
        ("phases", ["--models", "resnet9"], "argument --models: 'resnet9' is none of mlp,"),
        ("compiled", ["--devices", "0,cpu"], "--devices: all GPUs or all cpu"),
        ("input", ["--engine", "fast"], "argument --engine: invalid choice: 'fast'"),
    ],
    ids=["one", "no device", "model", "mixed", "engine"],
)
def test_options_that_cannot_be_are_named(monkeypatch, capsys, script, options, words):
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *options])
    with pytest.raises(SystemExit):
        importlib.import_module(script).main()
    assert words in capsys.readouterr().err


def test_memory_is_what_a_rival_added(monkeypatch):
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
