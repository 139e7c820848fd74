"""benchmarks/memory.py runs, and judges what it promises to judge."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import memory as benchmark  # noqa: E402

MB = 2**20


def run(*options):
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "memory.py"), *options],
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
    rows = {row["way"]: row for row in table["rows"]}
    assert list(rows) == ["one GPU", "torch DP", "fastdp eager", "DDP"]
    assert not any("failed" in row for row in rows.values())
    train = rows["fastdp eager"]["train"]["devices"]["cpu"]
    assert train["optimizer_bytes"] == train["held_bytes"] == 3 * (64 + 8) * 4
    assert train["peak_bytes"] > rows["fastdp eager"]["eval"]["devices"]["cpu"]["peak_bytes"] > 0
    assert "train on cpu: estimated" in done.stdout
    assert {"machine", "tables"} == set(found) and found["machine"]["torch"]


def test_a_way_that_fails_fails_the_check():
    options = ("--devices", "cpu,cpu", "--models", "tiny", "--steps", "1", "--ways", "DDP")
    done = run(*options, "--port", "70000", "--check")  # no port
    assert done.returncode == 1 and "DDP             failed: " in done.stdout


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
    found = benchmark.rows_of("one GPU", ["cpu"], models, 1, 0)
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
    found = benchmark.bars_of(rows(*given), "cuda:0")
    assert [bar["holds"] for bar in found] == holds
    benchmark.show("title", rows(*given), found)
    printed = capsys.readouterr().out
    assert printed.count("holds: ") == sum(holds)
    assert printed.count("FAILS: ") == 3 - sum(holds)


def test_bars_of_what_failed():
    ours, ddp = rows(100, 100)
    assert benchmark.bars_of([{"way": "fastdp eager", "failed": "of memory"}, ddp], "cuda:0") == []
    assert len(benchmark.bars_of([ours, {"way": "DDP", "failed": "NCCL"}], "cuda:0")) == 1


@pytest.mark.parametrize(
    "options, words",
    [
        (("--devices", "0,cpu"), "--devices: '0,cpu' is neither numbers of GPUs nor cpu's"),
        (("--models", "nothing"), "--models: 'nothing' is not one of mlp, "),
        (("--models", "tiny:0"), "--models: '0' is no batch size; write tiny:4"),
        (("--steps", "0"), "--steps is 0: it must be at least 1"),
        (("--ways", "theirs"), "--ways: 'theirs' is not one of one GPU, torch DP, fastdp eager"),
    ],
    ids=["devices", "model", "batch", "steps", "ways"],
)
def test_bad_options(options, words, capsys):
    with pytest.raises(SystemExit):
        benchmark.parse(options)
    assert words in capsys.readouterr().err
