"""benchmarks/step.py runs on the host, and says what it promises to say: rivals, rows, options."""

import sys

import pytest
import torch
from benchmark_cases import BENCHMARKS, kept

sys.path.insert(0, str(BENCHMARKS))

import models  # noqa: E402
import rivals  # noqa: E402
import step as script  # noqa: E402


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    return kept(
        tmp_path_factory.mktemp("step"),
        "step.py",
        *("--devices", "cpu,cpu", "--models", "tiny:6"),
        *("--steps", "2", "--rounds", "3", "--warmup", "2", "--transports", "auto,host"),
        *("--silent", "--floor"),
    )


OURS = ["fastdp eager", "fastdp eager, silent", "fastdp eager host"]


def test_step_races_every_rival(step):
    found = step[0]["tables"]
    assert [table["title"] for table in found] == [
        "tiny, 6 per GPU, devices ['cpu', 'cpu'], step"
    ]
    rows = found[0]["rows"]
    assert [row["rival"] for row in rows] == ["one GPU", "torch DP", "bare modules", *OURS, "DDP"]
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


def test_step_tells_what_the_floor_would_be(step):
    rows = {row["rival"]: row for row in step[0]["tables"][0]["rows"]}
    over = [rows[name]["times_ours"]["torch DP"] for name in ("fastdp eager", "bare modules")]
    way = rows["bare modules"]["forward"]
    assert way in ("at once", "in turn")
    words = f"{over[0]:.2f} over fastdp eager, {over[1]:.2f} over bare modules (forwards {way})"
    assert f"\ntorch DP is {words}\n" in step[1]


def test_a_scaled_step_is_an_ordinary_one():
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
        (["--ddp", "eager,fast"], "--ddp: 'fast' is not one of eager, default, reduce-overhead,"),
    ],
)
def test_step_refuses(capsys, options, words):
    with pytest.raises(SystemExit):
        script.parse(options)
    assert words in capsys.readouterr().err


def test_step_defaults_by_devices():
    two = script.parse(["--devices", "0,1"])
    assert two.transports == ["auto"] and two.gpus == 2
    assert [name for name, _ in two.models] == ["mlp", "resnet18", "resnet50", "gpt2"]
    one = script.parse(["--devices", "0,0", "--models", "resnet50:512,gpt2"])
    assert one.gpus == 1
    assert one.models == [("resnet50", 512), ("gpt2", 8)]
    entries = script.entries_of(two.cases[0], two)
    assert [name for name in entries if name != "fastdp compiled"] == [
        *("one GPU", "torch DP", "fastdp eager", "fastdp graph", "DDP")
    ]
    by = ["--transports", "peer,nccl", "--engines", "eager", "--silent", "--ddp", "none"]
    by = script.parse(by)
    assert list(script.entries_of(by.cases[0], by))[2:] == [
        *("fastdp eager peer", "fastdp eager peer, silent", "fastdp eager nccl"),
    ]
    assert entries["one GPU"].batches == 1 and entries["torch DP"].batches == 2
    alone = script.parse(["--alone", "--engines", "graph", "--ddp", "none"])
    own = script.entries_of(alone.cases[0], alone)["fastdp graph, one GPU"]
    assert own.batches == 1 and own.warmup == alone.warmup
    floor = script.parse(["--floor", "--engines", "graph", "--ddp", "none"])
    entries = script.entries_of(floor.cases[0], floor)
    assert list(entries) == ["one GPU", "torch DP", "bare modules", "fastdp graph"]
    assert entries["bare modules"].batches == 2
    backward = script.parse(["--part", "backward"])
    assert "DDP" not in script.entries_of(backward.cases[0], backward)
    assert two.ahead == 64 and not two.alone


def test_rivals_that_are_not_there_end_the_program():
    few = script.parse(["--only", "DDP;one GPU"])
    assert list(script.entries_of(few.cases[0], few)) == ["one GPU", "DDP"]
    typo = script.parse(["--only", "DDP;fastdp eagre"])
    with pytest.raises(SystemExit, match="--only: 'fastdp eagre' is not one of one GPU; torch DP;"):
        script.entries_of(typo.cases[0], typo)
    scaled = script.parse(["--only", "fastdp graph, one GPU", "--scaling", "weak"])
    assert [list(script.entries_of(case, scaled)) for case in scaled.cases[:2]] == [
        [],
        ["fastdp graph, one GPU"],
    ]
