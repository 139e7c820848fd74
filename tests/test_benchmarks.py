"""The benchmarks run, and say what they promise to say. How fast anything is, is not tested here: a
busy machine must not fail the suite."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import measure  # noqa: E402


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
        *("cpu", "cores", "load", "python", "torch", "fastdp", "compiler", "date")
    }


def test_host_cost_measures_every_cost_beside_a_rival(host_cost):
    ways = {}
    for result in host_cost["results"]:
        ways.setdefault(result["cost"], []).append(result["way"])
        assert 0 < result["low_us"] <= result["median_us"] <= result["high_us"]
        assert result["times_fastdp"] > 0
    assert len(ways) == 10
    for cost, found in ways.items():
        assert found.count("fastdp") == 1, cost
        assert any("fastdp" not in way and not way.startswith("floor") for way in found), cost


def test_host_cost_has_four_bars(host_cost):
    medians = {(r["cost"], r["way"]): r["median_us"] for r in host_cost["results"]}
    for bar in host_cost["bars"]:
        base = 0 if bar["beyond"] is None else medians[bar["cost"], bar["beyond"]]
        ours = medians[bar["cost"], "fastdp"] - base
        ratio = (medians[bar["cost"], bar["rival"]] - base) / max(ours, 1e-3)
        assert bar["measured"] == pytest.approx(ratio)
        assert bar["holds"] == (ratio >= bar["factor"])
    assert [bar["factor"] for bar in host_cost["bars"]] == [10, 50, 1, 3]


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
