"""benchmarks/compiled.py says what it promises to say; with a compiler that takes no time."""

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import compiled_contest  # noqa: E402
import contest  # noqa: E402
import tables  # noqa: E402
from apart import Apart  # noqa: E402
from rivals import Block, Memory  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture
def script(monkeypatch):
    place = importlib.util.spec_from_file_location("bench_compiled", BENCHMARKS / "compiled.py")
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    monkeypatch.setattr(module, "LOSSES", 5)
    monkeypatch.setattr(contest, "_BEGAN", time.monotonic())
    yield module
    torch._dynamo.reset()


GIVEN = ["--devices", "cpu,cpu", "--models", "tiny", "--rounds", "2", "--seconds", "0.05"]
GIVEN += ["--warmup", "2", "--backend", "aot_eager"]


def test_losses_are_told(script, tmp_path, capsys):
    kept = tmp_path / "kept.json"
    script.main([*GIVEN, "--part", "losses", "--json", str(kept)])
    found = json.loads(kept.read_text())["models"]["tiny:4"]["losses"]
    assert found["bars"][0]["holds"] and len(found["losses"]) == 4
    assert all(len(each) == script.LOSSES for each in found["losses"])
    assert "holds: tiny: losses of fastdp compiled" in capsys.readouterr().out


def test_steps_are_told_of_rivals_in_processes_of_their_own(script, tmp_path):
    kept = tmp_path / "kept.json"
    only = "one GPU, reduce-overhead;fastdp compiled;fastdp compiled, whole"
    script.main([*GIVEN, "--part", "steps", "--only", only, "--json", str(kept)])
    found = json.loads(kept.read_text())["models"]["tiny:4"]["steps"]
    rows = {row["rival"]: row for row in found["rows"]}
    assert ";".join(rows) == only
    assert all(row["step_ms"] > 0 and len(row["turns_ms"]) == 2 for row in rows.values())
    assert rows["fastdp compiled"]["compiled"]["forms"]
    assert "compiled" not in rows["one GPU, reduce-overhead"]
    assert 0 < rows["fastdp compiled"]["warm_up_s"] < contest.spent_s()


def test_a_process_of_its_own_tells_the_time_to_compile(script, capsys):
    script.main([*GIVEN, "--part", "child"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < found["compile_s"] <= found["first_steps_s"]
    assert found["forms"][0]["kind"] == "one size"


class Rival:
    """Takes as long as it says. `fails_at`: the turn that raises."""

    def __init__(self, step_ms, fails_at=None, error=KeyboardInterrupt):
        self.step_ms, self.fails_at, self.error = step_ms, fails_at, error
        self.answer_s = None
        self.turns = -2  # the first block is a plan

    def begin(self, steps):
        pass

    def warm_up(self, steps, answer_s=None):
        self.answer_s = answer_s or self.answer_s
        if self.fails_at == 0:
            raise RuntimeError("did not answer")
        return Memory([], [], [])

    def block(self, steps):
        self.turns += 1
        if self.turns == self.fails_at:
            raise self.error
        return Block(self.step_ms, self.step_ms)

    def facts(self):
        return {}

    def end(self):
        pass


class Alone(Rival, Apart):
    """`warmed`: what of all the rivals was asked for, in order, before their turns."""

    def __init__(self, name, warmed):
        super().__init__(1.0)
        self.name, self.warmed = name, warmed

    def warm_up(self, steps, answer_s=None):
        self.warmed.append((self.name, steps))
        return super().warm_up(steps, answer_s)


@pytest.fixture
def taken(monkeypatch):
    """taken(rivals by name, seconds that are left) -> what was noted."""
    noted = []

    def take(rivals, left_s=100.0):
        entries = {
            name: contest.Entry(lambda rival=rival: rival, 1, 2, {"kind": name}, is_apart=True)
            for name, rival in rivals.items()
        }
        monkeypatch.setattr(compiled_contest, "entries_of", lambda model, args: entries)
        cpus = [torch.device("cpu")] * 2
        args = argparse.Namespace(devices=cpus, rounds=3, seconds=2.0, warmup=9)
        ends_at = contest.spent_s() + left_s

        def note(model, what):
            noted.append((model, json.loads(json.dumps(what))))

        compiled_contest.take_steps([("mlp", 64)], ends_at, args, note)

    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    take.noted = noted
    return take


def turns_in(noted):
    return [[len(row["turns_ms"]) for row in what["rows"]] for _, what in noted]


def test_what_there_is_is_noted_after_each_round_and_bars_are_judged(taken):
    steps_ms = {
        "one GPU, reduce-overhead": 4.0,
        "fastdp compiled, one": 4.2,
        "fastdp compiled": 4.0,
        "DDP, default": 9.0,
        "DDP, reduce-overhead": 5.0,
    }
    taken({name: Rival(ms) for name, ms in steps_ms.items()})
    assert turns_in(taken.noted) == [[k] * 5 for k in (1, 2, 3, 3)]
    bars = taken.noted[-1][1]["bars"]
    assert [(bar["measured"], bar["most"], bar["holds"]) for bar in bars] == [
        (4.0 / 5.0, 0.80, True),
        (4.2 / 4.0, 1.02, False),
    ]


def test_engines_are_chosen_when_nothing_compiles_any_more(taken):
    warmed = []
    taken({name: Alone(name, warmed) for name in ("one", "other")})
    assert warmed == [("one", 2), ("other", 2), ("one", 9), ("other", 9)]


def test_a_run_that_is_broken_off_leaves_what_it_had(taken):
    with pytest.raises(KeyboardInterrupt):
        taken({"one": Rival(1.0), "other": Rival(1.0, fails_at=1)})
    assert turns_in(taken.noted) == [[1, 1]]


def test_who_is_not_warm_in_time_is_left_out_and_turns_have_their_share(taken):
    rivals = {"late": Rival(1.0, fails_at=0), "in time": Rival(1.0)}
    taken(rivals, left_s=30.0)
    share_s = compiled_contest.TURNS_TAKE * 2.0 * len(rivals)
    assert all(0 < rival.answer_s <= 30.0 - share_s for rival in rivals.values())
    rows = {row["rival"]: row for row in taken.noted[-1][1]["rows"]}
    assert rows["late"]["failed"] == "did not answer"
    assert len(rows["in time"]["turns_ms"]) == 3


def test_after_the_limit_nothing_begins_and_shares_grow(script, monkeypatch, tmp_path, capsys):
    clock, seen = [0.0], []
    monkeypatch.setattr(script, "spent_s", lambda: clock[0])

    def take(models, ends_at, args, note):
        seen.append((models, ends_at - clock[0]))
        note(models[0], {"rows": []})
        clock[0] += 10.0 if len(seen) == 1 else 85.0

    monkeypatch.setattr(script, "take_steps", take)
    kept = tmp_path / "kept.json"
    models = "tiny:1,tiny:2,tiny:3,tiny:4,tiny:5"
    given = [*GIVEN, "--part", "steps", "--limit", "100", "--together", "2", "--models", models]
    script.main([*given, "--json", str(kept)])
    assert seen == [([("tiny", 1), ("tiny", 2)], 100 / 3), ([("tiny", 3), ("tiny", 4)], 45.0)]
    assert "steps of tiny:5: left out, 100 s are over" in capsys.readouterr().out
    assert set(json.loads(kept.read_text())["models"]) == {"tiny:1", "tiny:3"}


@pytest.mark.parametrize("option", ["--limit", "--together", "--rounds", "--warmup"])
def test_options_below_their_bound_are_named(script, capsys, option):
    with pytest.raises(SystemExit):
        script.parse([*GIVEN, option, "0"])
    assert f"{option} is 0" in capsys.readouterr().err


def test_tables_join_runs_and_name_what_does_not_hold():
    machine = {
        "date": "2026-11-30", "cores": 32, "cpu": "a CPU", "torch": "2.11", "python": "3.12",
        "fastdp": "0.1.0",
    }  # fmt: skip
    forms = [
        {"seconds": {"cuda:0": 60.0, "cuda:1": 2.5}, "pieces": 5},
        {"seconds": {"cuda:0": 1.0}, "pieces": 1},
    ]
    row = {"rival": "fastdp compiled", "step_ms": 3.14159, "compiled": {"forms": forms}}
    bar = {"bar": "fastdp compiled by DDP compiled", "measured": 0.9, "most": 0.8, "holds": False}
    steps = {"rows": [row, {"rival": "DDP, default", "failed": "out of memory"}], "bars": [bar]}
    times = {"1": {"compile_s": 12.34}, "2": {"compile_s": 13.0}, "bars": [{**bar, "holds": True}]}
    files = [
        {"benchmark": "compiled", "command": f"python benchmarks/compiled.py --part {part}",
         "machine": machine, "devices": ["0", "1"], "models": models}
        for part, models in (
            ("steps", {"mlp:64": {"steps": {"rows": []}}, "gpt2:8": {"steps": {"rows": [row]}}}),
            ("steps", {"mlp:64": {"steps": steps}}),
            ("time", {"mlp:64": {"time": times}}),
        )
    ]  # fmt: skip
    files[1]["note"] = "It was a slow day."
    text = tables.render(files)
    assert "| Model (batch per GPU) | fastdp compiled | DDP, default |" in text
    assert "\n\n- mlp (64): DDP, default failed: out of memory.\n\n" in text
    assert "| mlp (64) | 3.14 | failed |" in text and "| gpt2 (8) | 3.14 | \u2013 |" in text
    assert "| gpt2 (8) | fastdp compiled | 5 | 61.0 | 63.5 |" in text
    assert text.index("| mlp (64) | 3.14") < text.index("| gpt2 (8) | 3.14"), "as in other tables"
    assert "\n\nIt was a slow day.\n\n" in text
    assert "| Model (batch per GPU) | 1 replica | 2 replicas |" in text
    assert "| mlp (64) | 12.3 | 13.0 |" in text
    assert "1 of 2 promises hold; not: mlp (64): fastdp compiled by DDP compiled is 0.9" in text
    assert "$ python benchmarks/compiled.py --part time" in text
