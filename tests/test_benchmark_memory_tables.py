"""benchmarks/memory_tables.py: the tables of runs of benchmarks/memory.py."""

import json
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import memory_bars  # noqa: E402
import tables  # noqa: E402

MB = 2**20
MACHINE = {
    **{"cpu": "A CPU", "cores": 32, "load": 0.1, "python": "3.12.3", "torch": "2.11.0"},
    **{"fastdp": "0.1.0", "commit": "abc", "date": "2026-11-30", "gpu": "NVIDIA H200"},
}


def added(*sizes):
    """Of cuda:0 and on, in MB: (allocated, taken); without taken as an older script has it."""
    kinds = ("allocated", "taken")
    return {
        f"cuda:{k}": {kind: size * MB for kind, size in zip(kinds, each)}
        for k, each in enumerate(sizes)
    }


def estimate(*ratios):
    devices = {
        f"cuda:{k}": {"peak_bytes": MB, **({} if ratio is None else {"ratio": ratio})}
        for k, ratio in enumerate(ratios)
    }
    return {"seconds": 1.0, "fits": True, "devices": devices}


def ours(sizes, train, evaluation, buckets=98):
    estimates = {"train": estimate(*train), "eval": estimate(*evaluation)}
    row = {"way": "fastdp eager", "added": added(*sizes), "bucket_bytes": buckets * MB}
    return {**row, **estimates}


def ddp(*sizes):
    return {"way": "DDP", "added": added(*sizes)}


def table(model, per_gpu, *rows, began="2026-11-30 11:00:00"):
    bars = memory_bars.bars_of(rows, "cuda:0")
    head = {"title": "", "model": model, "per_gpu": per_gpu, "began": began}
    return {**head, "rows": list(rows), "bars": bars}


def run_of(*found, devices=(0, 1)):
    return {
        "benchmark": "memory",
        "command": "python benchmarks/memory.py --devices 0,1",
        "machine": MACHINE,
        "devices": list(devices),
        "models": [f"{each['model']}:{each['per_gpu']}" for each in found],
        "ways": list(dict.fromkeys(row["way"] for each in found for row in each["rows"])),
        "tables": list(found),
    }


def rows_of(text):
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]


RESNET = "ResNet-50, bf16, channels_last (128)"
GPT = "GPT-2 124M, bf16 (8 x 512 tokens)"


def test_a_run_as_tables():
    eager = ours([(5843, 7000), (5591, 6800)], (0.994, 0.995), (0.999, 0.996))
    gpt = ours([(7149, 9001), (6047, 8000)], (1.0, 1.103), (1.0, 1.0), 475)
    text = tables.render(
        [
            run_of(
                table("resnet50", 128, eager, ddp((5854, 7100), (5854, 7200))),
                table("gpt2", 8, {"way": "one GPU", "added": added((7000, 8000))}, gpt,
                      ddp((8005, 8500), (8005, 8500))),
            )
        ]
    )  # fmt: skip
    columns = [f"{kind}, {place}" for kind in ("allocated", "taken") for place in
               ("first GPU", "others")]  # fmt: skip
    assert rows_of(text) == [
        ["Model (batch per GPU)", "of", *columns],
        [RESNET, "fastdp, `eager`", "5,843", "5,591", "7,000", "6,800"],
        ["DDP", "5,854", "5,854", "7,100", "7,200"],
        [GPT, "one GPU", "7,000", "–", "8,000", "–"],
        ["fastdp, `eager`", "7,149", "6,047", "9,001", "8,000"],
        ["DDP", "8,005", "8,005", "8,500", "8,500"],
        ["Model (batch per GPU)", "buckets, MB", "fits, training", "fits, evaluation"],
        [RESNET, "98.0", "0.994", "0.996"],
        [GPT, "475", "1.103", "1.000"],
    ]
    words = " ".join(text.split())
    assert "Memory of whole steps on two NVIDIA H200, MB (2**20 bytes)." in words
    assert '"Allocated" is the peak' in words and '"Taken" is all that' in words
    assert "may have as much as DDP's and one set of buckets:" in words
    assert "on the GPU where it was farthest off (10 % at most):" in words
    assert (
        f"10 of 12 promises hold; not: {GPT}, fits, train, cuda:1: how far from the measured peak "
        f"is 0.103 (at most 0.1); {GPT}, cuda:0, taken: how much more than DDP and one set of "
        "buckets is 0.0029 (at most 0)."
    ) in words
    assert "$ python benchmarks/memory.py --devices 0,1\n" in text


def test_of_more_gpus_the_one_with_most_stands_for_the_others():
    eager = ours([(3, 4), (7, 5), (6, 9)], (1.02, 0.97, 1.0), (1.0, 1.0, 1.01))
    text = tables.render([run_of(table("mlp", 64, eager), devices=(0, 1, 2))])
    assert rows_of(text)[1][1:] == ["fastdp, `eager`", "3.00", "7.00", "4.00", "9.00"]
    assert rows_of(text)[3][1:] == ["98.0", "0.970", "1.010"]
    assert "on 3 NVIDIA H200" in text


def test_a_file_without_taken_has_no_such_columns():
    found = run_of(table("mlp", 64, {"way": "one GPU", "added": added((5,), (6,))}))
    found["note"] = "What was taken is left out."
    text = tables.render([found])
    assert "\n\nWhat was taken is left out.\n\n" in text
    assert rows_of(text) == [
        ["Model (batch per GPU)", "of", "allocated, first GPU", "allocated, others"],
        ["50-layer MLP, width 256 (64)", "one GPU", "5.00", "6.00"],
    ]
    assert '"Taken"' not in text


def test_one_gpu_has_no_others():
    eager = ours([(3, 4)], (1.0,), (1.0,))
    text = tables.render([run_of(table("mlp", 64, eager), devices=(0, 0))])
    assert rows_of(text)[0][2:] == ["allocated, first GPU", "taken, first GPU"]
    assert "on one NVIDIA H200, which two replicas share, MB" in text


def test_what_failed_says_so():
    eager = {"way": "fastdp eager", "failed": "OutOfMemoryError: CUDA"}
    broken = {"way": "DDP", "failed": "no answer in 240 s"}
    alone = table("mlp", 64, {"way": "one GPU", "added": added((5, 6))}, eager, broken)
    text = tables.render([run_of(alone)])
    label = "50-layer MLP, width 256 (64)"
    assert rows_of(text)[1:] == [
        [label, "one GPU", "5.00", "6.00"],
        ["fastdp, `eager`", "failed", "failed"],
        ["DDP", "failed", "failed"],
    ]
    assert f"- {label}: fastdp, `eager` failed: OutOfMemoryError: CUDA.\n" in text
    assert f"- {label}: DDP failed: no answer in 240 s.\n" in text
    assert "promises" not in text
    text = tables.render([run_of(table("mlp", 64, eager, broken))])
    assert "two NVIDIA H200: nobody has counted it.\n" in text and rows_of(text) == []
    assert f"- {label}: DDP failed: no answer in 240 s.\n" in text


def test_the_host_counts_nothing():
    eager = ours([], (None,), (None,))
    found = run_of(table("tiny", 4, eager, ddp()), devices=("cpu", "cpu"))
    text = tables.render([found])
    assert "Memory of whole steps of 2 replicas on the host: nobody has counted it.\n" in text
    assert rows_of(text) == []


def test_the_latest_of_runs_alike_stands(tmp_path):
    def file(name, size, began, *more):
        row = {"way": "one GPU", "added": added((size, size))}
        found = run_of(table("mlp", 64, row, *more, began=began))
        (tmp_path / name).write_text(json.dumps(found))
        return tmp_path / name

    paths = [
        file("a.json", 5, "2026-11-30 12:00:00"),
        file("b.json", 4, "2026-11-30 11:00:00"),
        file("c.json", 3, "2026-11-30 10:00:00", ddp((6, 6))),  # other ways
    ]
    shown = [row[1:3] for row in rows_of(tables.render(tables.read(paths)))]
    assert shown == [
        ["of", "allocated, first GPU"], ["one GPU", "3.00"], ["6.00", "6.00"],
        ["of", "allocated, first GPU"], ["one GPU", "5.00"],
    ]  # fmt: skip
