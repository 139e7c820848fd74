"""The contests of benchmarks/step.py: between rivals whose times are known, and in a run that is
cut off or goes on in another process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import apart  # noqa: E402
import contest  # noqa: E402
import measure  # noqa: E402
import rivals  # noqa: E402
import step  # noqa: E402


class Known:
    """Takes `step_ms` for a step; raises what `at` holds for its number of a call."""

    def __init__(self, step_ms, at=()):
        self.step_ms = step_ms
        self.errors = dict(at)
        self.asked = []
        self.ended = 0

    def warm_up(self, steps, answer_s=None):
        self.call(("warm", steps))
        return rivals.Memory([1.0], [2.0], [3.0])

    def block(self, steps):
        self.call(steps)
        return rivals.Block(self.step_ms, self.step_ms / 2)

    def begin(self, steps):
        self.asked.append(("begin", steps))

    def call(self, what):
        self.asked.append(what)
        error = self.errors.get(len(self.asked))
        if error is not None:
            raise error

    def facts(self):
        return {"transport": ["local", "a reason"]}

    def end(self):
        self.ended += 1


def known_contest(rounds=3, steps=40, seconds=3.0, ends_at=1e9, are_apart=(), **players):
    entries = {
        name: contest.Entry(lambda each=each: each, 1, 5, {"kind": name}, name in are_apart)
        for name, each in players.items()
    }
    bounds = contest.Bounds(rounds, steps, seconds, ends_at, 10.0)
    return contest.Contest("known", entries, bounds, 1)


def hold(game):
    game.send_off()
    game.warm_up()
    game.take_turns()
    game.end()
    return {row["rival"]: row for row in game.rows()}


def test_turns_fill_the_seconds():
    quick, middling, slow = Known(1.0), Known(100.0), Known(5000.0)
    rows = hold(known_contest(quick=quick, middling=middling, slow=slow))
    # One second in each of three turns; at most --steps and at least two.
    assert [rows[n]["steps_per_turn"] for n in ("quick", "middling", "slow")] == [40, 10, 2]
    assert middling.asked == [("warm", 5), 2, 10, 10, 10]
    assert rows["slow"]["turns_ms"] == [5000.0] * 3
    assert rows["quick"]["times_ours"] == {"quick": 1, "middling": 100, "slow": 5000}
    assert rows["quick"]["transport"] == ["local", "a reason"]
    assert [each.ended for each in (quick, middling, slow)] == [1, 1, 1]


def test_processes_begin_first_and_are_waited_for_last():
    order = []

    class Noted(Known):
        def call(self, what):
            order.append((self.step_ms, what))

        def begin(self, steps):
            order.append((self.step_ms, "begin"))

    hold(known_contest(rounds=1, steps=2, are_apart=("other",), other=Noted(1.0), local=Noted(2.0)))
    assert order[:3] == [(1.0, "begin"), (2.0, ("warm", 5)), (1.0, ("warm", 5))]
    assert order[3:] == [(1.0, 2), (2.0, 2)] * 2  # the short turn that plans, and one that counts


def test_no_turn_counts_before_all_processes_are_ready():
    """Of a later contest, too: they would compile beside the turns of the first."""
    order = []

    class Noted(Known):
        def call(self, what):
            order.append((self.step_ms, what))

    first = known_contest(rounds=1, steps=2, are_apart=("ddp",), ddp=Noted(1.0))
    later = known_contest(rounds=1, steps=2, are_apart=("ddp",), ddp=Noted(2.0), own=Noted(3.0))
    args = step.parse(["--devices", "cpu,cpu", "--models", "tiny,tiny:3"])
    first.send_off()
    later.send_off()
    step.hold(first, args.cases[0], args, [later])
    assert order == [(1.0, ("warm", 5)), (1.0, 2), (2.0, ("warm", 5)), (1.0, 2)]
    del order[:]
    step.hold(later, args.cases[1], args)
    assert order[0] == (3.0, ("warm", 5))  # the other one is warm
    assert (2.0, ("warm", 5)) not in order


@pytest.mark.parametrize("call", [1, 2, 4], ids=["warm-up", "plan", "turn"])
def test_a_rival_that_fails_leaves_the_others_in(call, capsys):
    bad, good = Known(1.0, {call: RuntimeError("first\nthe last line")}), Known(2.0)
    rows = hold(known_contest(bad=bad, good=good))
    assert rows["bad"] == {"rival": "bad", "kind": "bad", "failed": "the last line"}
    assert len(rows["good"]["turns_ms"]) == 3
    assert bad.ended == 1 if call > 1 else bad.ended <= 1
    assert "known: bad failed: the last line" in capsys.readouterr().out


def test_a_rival_that_fails_without_a_word_leaves_the_others_in():
    rows = hold(known_contest(bad=Known(1.0, {1: AssertionError()}), good=Known(2.0)))
    assert rows["bad"]["failed"] == "AssertionError" and len(rows["good"]["turns_ms"]) == 3
    assert measure.reason_of(ValueError("first\nlast\n"), 0) == "first"


def test_a_process_that_is_not_warm_in_time_says_after_how_long(monkeypatch):
    """Not only how long it was waited for at last, behind others."""
    clock = [3.0]
    monkeypatch.setattr(contest, "spent_s", lambda: clock[0])
    late, good = Known(1.0, {2: rivals.NoAnswer("did not answer in 1 s")}), Known(2.0)
    game = known_contest(are_apart=("late",), late=late, good=good)
    game.send_off()
    clock[0] = 85.0
    game.warm_up()
    assert game.failed == {"late": "not warm 82 s after it was started"}


def test_a_contest_over_its_limit_ends_after_a_round():
    rows = hold(known_contest(ends_at=-1.0, one=Known(1.0), other=Known(2.0)))
    assert [len(rows[name]["turns_ms"]) for name in ("one", "other")] == [1, 1]


def test_a_contest_that_is_interrupted_keeps_its_turns():
    # Warm-up, plan and two turns; then Ctrl-C.
    one, other = Known(1.0, {5: KeyboardInterrupt()}), Known(2.0)
    game = known_contest(one=one, other=other)
    args = step.parse(["--devices", "cpu,cpu", "--models", "tiny"])
    table = step.hold(game, args.cases[0], args)
    assert table["is_whole"] is False
    assert [(row["rival"], len(row["turns_ms"])) for row in table["rows"]] == [
        ("one", 2),
        ("other", 2),
    ]


def run_patched(patch, out, *options):
    """step.py in a process of its own, two models of three rivals, after some lines of Python."""
    program = f"""
import os, signal, sys, threading
sys.path.insert(0, {str(BENCHMARKS)!r})
import contest, rivals, step
{patch}
step.main(sys.argv[1:])
"""
    models = ("--devices", "cpu,cpu", "--models", "tiny,tiny:3", "--ddp", "none")
    return subprocess.run(
        [sys.executable, "-c", program, *models, "--seconds", "0.1", "--json", str(out), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_run_that_is_killed_has_written_what_it_had(tmp_path):
    patch = """
turn, left = contest.Contest._turn, [7]
def counted(self, name):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGTERM)
    left[0] -= 1
    turn(self, name)
contest.Contest._turn = counted
"""
    done = run_patched(patch, tmp_path / "out.json", "--rounds", "9")
    assert done.returncode == 130, done.stderr
    assert "tiny:4: interrupted" in done.stdout
    (table,) = json.loads((tmp_path / "out.json").read_text())["tables"]
    assert table["is_whole"] is False
    assert [len(row["turns_ms"]) for row in table["rows"]] == [3, 2, 2]


def test_the_first_error_of_a_process_ends_the_wait():
    class Pretended(rivals.Distributed):
        def __init__(self):
            self._pipes, self.theirs = zip(*(rivals.mp.Pipe() for _ in range(2)))
            self._processes, self._is_warming = [], False

    ddp = Pretended()
    ddp.theirs[1].send("Traceback\nValueError: no")  # rank 0 hangs
    with pytest.raises(RuntimeError, match="DDP's rank 1: Traceback\nValueError: no"):
        ddp.warm_up(3, 60.0)
    silent = Pretended()
    with pytest.raises(RuntimeError, match="DDP's ranks 0, 1 did not answer in 0 s"):
        silent.warm_up(3, 0.01)
    dead = Pretended()
    dead.theirs[0].close()
    with pytest.raises(RuntimeError, match="DDP's rank 0 has died"):
        dead.block(3)

    class Alone(Pretended, apart.Apart):
        pass

    alone = Alone()
    with pytest.raises(RuntimeError, match="^its process did not answer in 0 s"):
        alone.warm_up(3, 0.01)


def test_a_run_goes_on_in_a_new_process_without_a_rival_that_never_comes_back(tmp_path):
    """The watching thread replaces the process; the models that were done stay."""
    patch = """
contest.TURN_S = 10.0
block = rivals.Local.block
def stuck(self, steps):
    module = self._trainer.module
    if hasattr(module, "report") and self._trainer.batch.shape[0] == 6:
        threading.Event().wait(600)
    return block(self, steps)
rivals.Local.block = stuck
"""
    out = tmp_path / "out.json"
    done = run_patched(patch, out, "--rounds", "2")
    assert done.returncode == 0, done.stderr
    assert "in stuck" in done.stderr  # where it hung
    assert "tiny:3: fastdp eager spoiled the process (no answer in 10 s)" in done.stdout
    found = json.loads(out.read_text())
    assert "--resume" not in found["command"]
    first, second = ([row["rival"] for row in each["rows"]] for each in found["tables"])
    assert first == second == ["one GPU", "torch DP", "fastdp eager"]
    assert found["tables"][1]["rows"][2]["failed"] == "no answer in 10 s"
    assert "step_ms" in found["tables"][0]["rows"][2]


def test_a_rival_that_leaves_the_gpus_unusable_is_lost(monkeypatch):
    import rescue

    lost = []
    watch = rescue.Rescue({"lost": []}, [], [], "", 1e9)
    monkeypatch.setattr(watch, "lose", lambda *words: lost.append(words))
    watch.look_after("mlp:64", "fastdp graph", "an error")  # the GPUs are well
    assert lost == []

    def unwell(devices):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(rescue, "wait", unwell)
    game = known_contest(bad=Known(1.0, {1: RuntimeError("its words")}), good=Known(1.0))
    game._rescue = watch
    hold(game)
    assert lost == [("known", "bad", "its words")]
