"""benchmarks/memory.py runs, and judges what it promises to judge."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import no_cuda_reason

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import memory as benchmark  # noqa: E402
import memory_bars  # noqa: E402
import tables  # noqa: E402
import torch  # noqa: E402

MB = 2**20


def run(*options, **environment):
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "memory.py"), *options],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_it_runs_on_the_host(tmp_path):
    path = tmp_path / "memory.json"
    options = ("--devices", "cpu,cpu", "--models", "tiny:6", "--steps", "2", "--check")
    done = run(*options, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    (table,) = found["tables"]
    assert table["title"] == "tiny, 6 per GPU, devices cpu, cpu" and table["bars"] == []
    assert (table["model"], table["per_gpu"]) == ("tiny", 6)
    rows = {row["way"]: row for row in table["rows"]}
    assert list(rows) == ["one GPU", "torch DP", "fastdp eager", "DDP"]
    assert not any("failed" in row for row in rows.values())
    train = rows["fastdp eager"]["train"]["devices"]["cpu"]
    assert train["optimizer_bytes"] == train["held_bytes"] == 3 * (64 + 8) * 4
    assert train["peak_bytes"] > rows["fastdp eager"]["eval"]["devices"]["cpu"]["peak_bytes"] > 0
    assert "train on cpu: estimated" in done.stdout
    assert found["machine"]["torch"]
    # Nothing of where it was written.
    assert found["command"] == f"python benchmarks/memory.py {' '.join(options)}"
    assert found["models"] == ["tiny:6"] and found["ways"] == list(rows)
    assert (found["benchmark"], found["devices"]) == ("memory", ["cpu", "cpu"])
    (read,) = tables.read([path])
    text = tables.render([read])
    assert "Memory of whole steps of 2 replicas on the host: nobody has counted it." in text
    assert f"$ {found['command']}\n" in text and "|" not in text


@pytest.mark.skipif(bool(no_cuda_reason()), reason=str(no_cuda_reason()))
def test_it_runs_on_a_gpu(tmp_path):
    path = tmp_path / "memory.json"
    options = ("--devices", "0,0", "--models", "tiny", "--ways", "fastdp eager", "--steps", "2")
    done = run(*options, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    (table,) = json.loads(path.read_text())["tables"]
    (row,) = table["rows"]
    assert set(row["added"]["cuda:0"]) == {"allocated", "reserved", "taken"}
    for mode in ("train", "eval"):
        assert row[mode]["devices"]["cuda:0"]["measured_bytes"] > 0
    assert "allocated, first GPU | taken, first GPU |" in tables.render(tables.read([path]))


def test_a_way_that_fails_fails_the_check():
    options = ("--devices", "cpu,cpu", "--models", "tiny", "--steps", "1", "--ways", "DDP")
    done = run(*options, "--check", GLOO_SOCKET_IFNAME="none")  # no such interface
    assert done.returncode == 1 and "DDP             failed: " in done.stdout


class Driver:
    """What torch.cuda says of pretended GPUs, whose memory others change."""

    def __init__(self, monkeypatch, contexts):
        self.free, self.seen = dict.fromkeys(contexts, 1000 * MB), []
        self.contexts = contexts
        for name in ("init", "set_device", "empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "synchronize", self.make_context)
        monkeypatch.setattr(torch.cuda, "mem_get_info", self.info)

    def make_context(self, device):
        self.free[str(device)] -= self.contexts[str(device)]
        self.contexts[str(device)] = 0
        for other in self.free:  # as a context may, which maps the others' memory
            self.free[other] -= 0 if str(device) in self.seen else MB
        self.seen.append(str(device))

    def info(self, device):
        return self.free[str(device)], 2000 * MB


def test_taken_counts_from_the_context_and_has_the_process_group(monkeypatch):
    driver = Driver(monkeypatch, {"cuda:0": 400 * MB, "cuda:1": 500 * MB})

    def group(backend, where, rank, world_size):
        assert (backend, where, rank, world_size) == ("nccl", "file:///none", 1, 2)
        driver.free["cuda:1"] -= 250 * MB
        driver.free["cuda:0"] -= 7 * MB  # not this process's

    monkeypatch.setattr(torch.distributed, "init_process_group", group)
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    way = benchmark.Way("DDP", gpus, 1, "file:///none")
    assert way.taken() == {"cuda:1": 250 * MB}
    driver.free["cuda:1"] -= 30 * MB  # a model, and what it leaves behind
    assert way.taken() == {"cuda:1": 280 * MB}
    driver.free["cuda:1"] += 10 * MB
    assert way.taken() == {"cuda:1": 270 * MB}


def test_taken_has_no_context_of_any_gpu(monkeypatch):
    driver = Driver(monkeypatch, {"cuda:0": 400 * MB, "cuda:1": 500 * MB})
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cuda", 0)]
    way = benchmark.Way("fastdp eager", gpus, 0, "")
    assert driver.seen == ["cuda:0", "cuda:1"]
    assert way.taken() == {"cuda:0": 0, "cuda:1": 0}
    assert benchmark.Way("one GPU", [torch.device("cpu")], 0, 0).taken() == {}


def test_a_row_has_torchs_figures_since_the_model_and_the_drivers_since_the_context(monkeypatch):
    way = benchmark.Way("one GPU", [torch.device("cpu")], 0, 0)
    acts = []

    def counted(peaks):
        acts.append("peaks" if peaks else "before")
        sizes = (50, 60) if peaks else (20, 21)
        return {"cuda:0": dict(zip(("allocated", "reserved"), sizes))}

    monkeypatch.setattr(way, "counted", counted)
    monkeypatch.setattr(way, "taken", lambda: acts.append("taken") or {"cuda:0": 900})
    monkeypatch.setattr(way, "forget", lambda: acts.append("forget"))
    monkeypatch.setattr(benchmark, "_step", lambda *given: acts.append("step"))
    added = benchmark.train(way, "tiny", 4, 2)["added"]
    assert added == {"cuda:0": {"allocated": 30, "reserved": 39, "taken": 900}}
    assert acts == ["forget", "before", "step", "step", "taken", "peaks"]


class Pretended:
    """A process and its pipe in one: its answers, with the seconds after which each comes."""

    daemon = True

    def __init__(self, answers):
        self.answers, self.killed = list(answers), False

    def poll(self, seconds):
        return bool(self.answers) and self.answers[0][0] <= seconds

    def recv(self):
        answer = self.answers.pop(0)[1]
        if answer is None:
            raise EOFError
        return answer

    def start(self):
        pass

    close = start

    def join(self, seconds):
        pass

    def is_alive(self):
        return not self.killed

    def kill(self):
        self.killed = True


@pytest.mark.parametrize(
    "answers, failed",
    [
        ([(1, {"way": "one GPU", "added": {}})] * 3, [None] * 3),
        ([(300, {"way": "one GPU", "added": {}})] * 3, ["no answer in 240 s"] * 3),
        ([(1, {"way": "one GPU", "failed": "memory"}), (1, None)],
         ["memory", "its process has died", "its process has died"]),
    ],
    ids=["all", "late", "dead"],
)  # fmt: skip
def test_a_late_answer_does_not_pass_for_the_next_models(monkeypatch, answers, failed):
    process = Pretended(answers)

    class Context:
        Pipe = staticmethod(lambda: (process, Pretended([])))
        Process = staticmethod(lambda **given: process)

    monkeypatch.setattr(benchmark.mp, "get_context", lambda kind: Context)
    models = [("tiny", 4), ("tiny", 6), ("tiny", 8)]
    found = benchmark.rows_of("one GPU", ["cpu"], models, 1)
    assert [row.get("failed") for row in found] == failed and process.killed
    assert not any("is_over" in row for row in found)


def rows(estimate, measured, mine=100, theirs=90, taken=0):
    def device(size):
        return {"allocated": size * MB, "reserved": size * MB, "taken": (size + taken) * MB}

    row = {"peak_bytes": estimate, "measured_bytes": measured, "ratio": estimate / measured}
    ours = {
        "way": "fastdp eager",
        "train": {"seconds": 1.0, "devices": {"cuda:0": row}},
        "eval": {"seconds": 1.0, "devices": {"cuda:0": {"peak_bytes": 1}}},
        "added": {"cuda:0": device(mine)},
        "bucket_bytes": 10 * MB,
    }
    ddp = {"way": "DDP", "added": {"cuda:0": device(theirs), "cuda:1": device(theirs)}}
    ddp["added"]["cuda:0"]["taken"] = theirs * MB
    return [ours, ddp]


@pytest.mark.parametrize(
    "given, holds",
    [
        ((109, 100), [True, True, True]),
        ((91, 100), [True, True, True]),
        ((111, 100), [False, True, True]),
        ((89, 100), [False, True, True]),
        ((100, 100, 101), [True, False, False]),
        ((100, 100, 100, 90, 1), [True, True, False]),
    ],
    ids=["over", "under", "too much", "too little", "memory", "beside torch"],
)
def test_bars(given, holds, capsys):
    found = memory_bars.bars_of(rows(*given), "cuda:0")
    assert [bar["holds"] for bar in found] == holds
    memory_bars.show("title", rows(*given), found)
    printed = capsys.readouterr().out
    assert printed.count("holds: ") == sum(holds)
    assert printed.count("FAILS: ") == 3 - sum(holds)
    assert "one set of buckets: 10.0 MB\n" in printed
    more = "0.010, at most 0\n" if given[2:] == (101,) else "0.000, at most 0\n"
    assert f": cuda:0, allocated: how much more than DDP and one set of buckets: {more}" in printed
    off = f"{abs(given[0] - 100) / 100:.3f}, at most 0.1\n"
    assert f": fits, train, cuda:0: how far from the measured peak: {off}" in printed


def test_bars_of_what_failed():
    ours, ddp = rows(100, 100)
    assert (
        memory_bars.bars_of([{"way": "fastdp eager", "failed": "of memory"}, ddp], "cuda:0") == []
    )
    assert len(memory_bars.bars_of([ours, {"way": "DDP", "failed": "NCCL"}], "cuda:0")) == 1


@pytest.mark.parametrize(
    "options, words",
    [
        (("--devices", "0,cpu"), "--devices: all GPUs or all cpu"),
        (("--devices", "gpu"), "--devices: 'gpu' is neither the number of a GPU nor cpu"),
        (("--models", "nothing"), "--models: 'nothing' is not one of mlp, "),
        (("--models", "tiny:0"), "--models: '0' is no batch size; write tiny:4"),
        (("--steps", "0"), "--steps is 0: it must be at least 1"),
        (("--ways", "theirs"), "--ways: 'theirs' is not one of one GPU, torch DP, fastdp eager"),
    ],
    ids=["mixed devices", "devices", "model", "batch", "steps", "ways"],
)
def test_bad_options(options, words, capsys):
    with pytest.raises(SystemExit):
        benchmark.parse(options)
    assert words in capsys.readouterr().err
