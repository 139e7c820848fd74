"""The contests of benchmarks/step.py, and the tables and the picture that are made of them: on
rivals whose times are known, and on a run that is cut off."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import apart  # noqa: E402
import contest  # noqa: E402
import markdown  # noqa: E402
import measure  # noqa: E402
import plot  # noqa: E402
import rivals  # noqa: E402
import step  # noqa: E402
import step_tables  # noqa: E402
import tables  # noqa: E402

# Contests between rivals whose times are known.


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


# Tables and the picture of runs as step.py writes them.

MACHINE = {
    **{"cpu": "A CPU", "cores": 32, "load": 0.1, "python": "3.12.3", "torch": "2.11.0"},
    **{"fastdp": "0.1.0", "commit": "abc", "gpu": "NVIDIA H200", "cuda": "13.0", "nccl": "2.28.9"},
}


def row(rival, step_ms, gpus=2):
    batches = 1 if rival.endswith("one GPU") else gpus
    spent = {"step_ms": step_ms, "s_per_1000_batches": step_ms * gpus / batches}
    return {"rival": rival, **spent, "turns_ms": [step_ms] * 7}


def table(model, per_gpu, times, devices=(0, 1), part="step", began="2026-11-30 03:00:00", **more):
    gpus = len(set(devices))
    rows = [row(rival, ms, gpus) for rival, ms in times.items() if not isinstance(ms, str)]
    contest.compare(rows)
    rows += [{"rival": r, "failed": why} for r, why in times.items() if isinstance(why, str)]
    head = {"model": model, "per_gpu": per_gpu, "devices": list(devices), "part": part}
    return {**head, "began": began, "is_whole": True, "rows": rows, **more}


def run_of(*contests, options="--devices 0,1", date="2026-11-30"):
    command = f"python benchmarks/step.py {options} --json /somewhere/out.json --limit 200"
    head = {"benchmark": "step", "command": command, "machine": {**MACHINE, "date": date}}
    return {**head, "tables": list(contests)}


EAGER = {"one GPU": 10.0, "torch DP": 40.0, "fastdp eager": 20.0, "fastdp graph": 8.0, "DDP": 12.0}
COMPILED = EAGER | {"DDP compiled reduce-overhead": "Traceback: it | broke"}


def rows_of(text):
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]


def test_one_run_as_a_table():
    text = tables.render([run_of(table("gpt2", 8, COMPILED))])
    found = rows_of(text)
    assert found[0] == [
        *("Model (batch per GPU)", "one GPU", "torch DP", "DDP"),
        *("DDP, compiled, `reduce-overhead`", "fastdp, `eager`", "fastdp, `graph`"),
    ]
    label = "GPT-2 124M, bf16 (8 x 512 tokens)"
    assert found[1] == [label, "10.0", "40.0", "12.0", "failed", "20.0", "8.00"]
    # One GPU does half of the work in 10 ms: all of it takes 20.
    assert found[3] == [label, "fastdp, `eager`", "1.00", "2.00", "0.60", "–"]
    assert found[4] == [label, "fastdp, `graph`", "2.50", "5.00", "1.50", "–"]
    assert len(found) == 5
    assert "Whole steps on two NVIDIA H200: ms, the median of 7 turns" in text
    assert f"- {label}, DDP, compiled, `reduce-overhead` failed: Traceback: it | broke." in text
    assert "# 2026-11-30\n$ python benchmarks/step.py --devices 0,1\n" in text
    assert "torch 2.11.0, CUDA 13.0, NCCL 2.28.9, Python 3.12.3, fastdp 0.1.0 (abc)." in " ".join(
        text.split()
    )


def test_runs_are_merged_but_not_mixed():
    first = run_of(table("mlp", 64, EAGER), table("resnet18", 16, EAGER))
    again = {"torch DP": 41.0, "fastdp graph": 7.0}
    part = run_of(table("mlp", 64, again, began="2026-11-30 04:00:00"))
    whole = run_of(table("resnet18", 16, COMPILED | {"DDP": 6.0}, began="2026-11-30 05:00:00"))
    text = tables.render([first, part, whole])
    found = [(r[0], r[-1]) for r in rows_of(text) if r[1] in ("10.0", "–")]
    # The second MLP lacks rivals, so the first stays; the second ResNet-18 has them all.
    assert found == [
        ("50-layer MLP, width 256 (64)", "1"),
        ("50-layer MLP, width 256 (64)", "2"),
        ("ResNet-18 at 64 pixels (16)", "3"),
    ]
    assert "# run 2, 2026-11-30" in text


def test_groups_of_devices_and_parts():
    shared = table("mlp", 64, EAGER, devices=(0, 0), part="backward")
    unwrapped = "Forward and backward on one NVIDIA H200, which two replicas share: ms"
    text = tables.render([run_of(shared), run_of(table("resnet50", 512, EAGER))])
    assert unwrapped in " ".join(text.split())
    assert text.index("Whole steps on two") < text.index("Forward and backward on one")
    assert "| one GPU |" not in text[text.index("times as long", text.index("Forward")) :]


def test_remarks():
    cut = table("mlp", 64, EAGER, is_whole=False)
    cut["rows"][2] |= {"not_hidden_ms": 0.3, "not_hidden_share": 0.015}
    cut["rows"][0]["turns_ms"] = [10.0] * 2
    text = " ".join(tables.render([run_of(cut)]).split())
    assert "`eager`: communication that is not hidden takes 0.30 ms, 1.5 % of the step." in text
    assert "the median of 2 to 7 turns" in text
    assert "(64): the run was cut off; medians of 2 turns or more." in text


def test_promises_of_steps():
    import step_bars

    alone = {"fastdp graph, one GPU": 8.0, "DDP compiled reduce-overhead": 7.0}
    found = table("mlp", 64, EAGER | alone)
    assert [(b["bar"], b["measured"], b["holds"]) for b in step_bars.bars(found)] == [
        ("torch DP over fastdp eager", 2.0, True),
        ("DDP over fastdp graph", 1.5, False),
        ("fastdp graph, one GPU over fastdp graph", 1.0, True),
        ("DDP compiled reduce-overhead over fastdp graph", 0.875, False),
    ]
    assert step_bars.bars(table("mlp", 65, EAGER)) == []
    assert step_bars.bars(table("mlp", 64, EAGER, devices=("cpu", "cpu"))) == []
    shared = table("mlp", 64, EAGER, devices=(0, 0), part="backward")
    assert [bar["holds"] for bar in step_bars.bars(shared)] == [True, False]
    bound = table("gpt2", 32, EAGER)
    bound["rows"][2]["not_hidden_share"] = 0.021
    assert step_bars.bars(bound)[-1] == {
        **{"bar": "communication of fastdp eager that is not hidden", "measured": 0.021},
        **{"most": 0.02, "holds": False},
    }
    found["bars"] = step_bars.bars(found)
    text = " ".join(tables.render([run_of(found)]).split())
    assert "2 of 4 promises hold; not: DDP over fastdp graph is 1.5 (at least 4.5); DDP" in text
    assert "| fastdp, `graph`, one GPU |" in text
    assert text.count("| fastdp, `graph`, one GPU |") == 1  # with the times, not with the ratios


def test_moves_and_feeds_as_tables():
    def moved(verb, size_bytes, way, us):
        return {"verb": verb, "size_bytes": size_bytes, "way": way, "device_us": us}

    bar = {"bar": "a sum", "measured": 0.8, "least": 1, "holds": False}
    comm = {
        **{"benchmark": "comm", "command": "python benchmarks/comm.py", "devices": [0, 1]},
        "machine": {**MACHINE, "date": "2026-11-30", "transport": "peer"},
        "rows": [
            moved("reduce_add", 4096, "fastdp", 8.25),
            moved("reduce_add", 2**20, "fastdp", 10.0),
            {"verb": "reduce_add", "size_bytes": 4096, "way": "NCCL", "failed": "no"},
            moved("bucket reduce, 161 tensors", 2**25, "fastdp", 123.0),
        ],
        "bars": [bar],
    }
    fed = {
        **{"benchmark": "input", "command": "python benchmarks/input.py", "devices": [0, 1]},
        **{"machine": comm["machine"], "title": "resnet50", "engine": "eager", "batch_mb": 154.1},
        **{"model": "resnet50", "per_gpu": 128, "bars": [bar | {"holds": True}]},
        "steps": [{"way": "prefetch", "step_ms": 44.0, "longer": 0.021}],
        "copies": [{"way": "prefetch", "gb_per_s": 90.0, "of_bare": 0.91}],
    }
    health = {
        **{"benchmark": "grad_health", "command": "python benchmarks/grad_health.py"},
        **{"machine": comm["machine"], "devices": [0, 1]},
        "results": [{"cost": "norm", "way": "torch", "median_us": 50.0, "times_fastdp": 2.0}],
    }
    older = {**comm, "rows": [], "machine": {**comm["machine"], "date": "2026-11-29"}}
    other = {**older, "machine": {**older["machine"], "transport": "nccl"}}
    assert "transport `nccl`" in tables.render([other, comm])  # peer's do not stand for these
    text = tables.render([older, comm, fed, health])
    assert rows_of(text) == [
        ["us on the GPUs", "way", "4 KB", "1 MB"],
        ["sum of all GPUs' tensors", "fastdp", "8.25", "10.0"],
        ["NCCL", "failed", "–"],
        ["us on the GPUs", "way", "32 MB"],
        ["bucket reduce, 161 tensors", "fastdp", "123"],
        ["Step, inputs from", "ms", "longer"],
        ["prefetch", "44.0", "2.1 %"],
        ["Copies with nobody computing", "GB/s", "of bare"],
        ["prefetch", "90.0", "91 %"],
        ["cost", "way", "median, us", "times fastdp"],
        ["norm", "torch", "50.0", "2.00"],
    ]
    assert "- sum of all GPUs' tensors, 4 KB: NCCL failed: no." in text
    assert "0 of 1 promises hold; not: a sum is 0.8 (at least 1)." in text
    assert "1 of 1 promises hold." in text and "by transport `peer`:" in text


def test_what_failed_for_one_reason_shares_a_line():
    found = [("mlp", "DDP, a", "late."), ("mlp", "fastdp", "lost"), ("mlp", "DDP, b", "late.")]
    text = "- mlp: DDP, a; DDP, b failed: late.\n- mlp: fastdp failed: lost."
    assert markdown.failures(found) == [text] and markdown.failures([]) == []


@pytest.mark.parametrize(
    "value, shown", [(None, "–"), (0.5, "0.50"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_figures(value, shown):
    assert markdown.figure(value) == shown


@pytest.fixture
def page(tmp_path):
    """A page with an empty block, a run's file, and the options that name both."""
    (tmp_path / "page.md").write_text(f"before\n{tables.BEGIN}\n{tables.END}\nafter\n")
    (tmp_path / "run.json").write_text(json.dumps(run_of(table("mlp", 64, EAGER))))
    return tmp_path / "page.md", [str(tmp_path / "run.json"), "--page", str(tmp_path / "page.md")]


def test_a_page_is_filled_and_checked(page, capsys):
    path, options = page
    assert tables.main([*options, "--check"]) == 1
    assert "page.md has other tables: benchmarks/tables.py --write" in capsys.readouterr().err
    assert tables.main([*options, "--write"]) == 0
    assert tables.main([*options, "--check"]) == 0
    text = path.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    path.write_text(text.replace("| 8.00 |", "| 7.00 |"))
    assert tables.main([*options, "--check"]) == 1
    path.write_text("no block")
    with pytest.raises(SystemExit, match="page.md: it must have <!-- figures:begin -->"):
        tables.main([*options, "--check"])


def test_files_that_are_no_runs(tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text('{"benchmark": "else"}')
    assert tables.main([str(other)]) == 1
    assert "other.json: no run of step" in capsys.readouterr().err
    other.write_text("{")
    with pytest.raises(SystemExit, match="other.json: Expecting"):
        tables.main([str(other)])


def test_the_picture_has_a_bar_for_each_time(tmp_path):
    runs = [run_of(table("mlp", 64, COMPILED), table("tiny<", 4, EAGER))]
    (tmp_path / "run.json").write_text(json.dumps(runs[0]))
    options = [str(tmp_path / "run.json"), "--output", str(tmp_path / "steps.svg")]
    assert plot.main([*options, "--check"]) == 1
    assert plot.main(options) == 0 and plot.main([*options, "--check"]) == 0
    root = ElementTree.parse(tmp_path / "steps.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    bars = [float(bar.get("width")) for bar in root.iter(f"{space}rect")][1:]
    # Each panel to its own scale: torch DP is the longest.
    one = [plot.BAR_WIDTH * ms / 40 for ms in (10, 40, 12, 20, 8)]
    assert bars == pytest.approx(one * 2, abs=0.06)
    words = [text.text for text in root.iter(f"{space}text")]
    assert words.count("failed") == 1 and words.count("not run") == 1
    assert "tiny< (4)" in words and "50-layer MLP, width 256 (64)" in words
    assert "prefers-color-scheme: dark" in root.find(f"{space}style").text
    highest = [float(root.get(side)) for side in ("width", "height")]
    for text in root.iter(f"{space}text"):
        assert 0 <= float(text.get("x")) < highest[0] and 0 < float(text.get("y")) < highest[1]


RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))


@pytest.mark.skipif(not RESULTS, reason="no run is committed yet: the figures are older")
def test_readme_and_picture_are_those_of_the_runs():
    assert tables.main(["--check"]) == 0
    assert plot.main(["--check"]) == 0


def test_readme_has_a_block():
    before, inside, after = tables.split((ROOT / "README.md").read_text(), "README.md")
    assert "### Training steps on GPUs" in before and "|" in inside and "## More" in after


def test_labels_are_of_models():
    import models

    assert set(step_tables.LABELS) <= set(models.MODELS)
    assert set(models.STANDARD) <= set(step_tables.LABELS)
