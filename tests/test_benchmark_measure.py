"""benchmarks/measure.py by itself and in the scripts that it is all of: host_cost.py and
grad_health.py run, and say what they promise to say."""

import json
import statistics
import sys

import pytest
from benchmark_cases import BENCHMARKS, run
from torch_features import needs_total_norm

sys.path.insert(0, str(BENCHMARKS))

import measure  # noqa: E402


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


@needs_total_norm
def test_grad_health_measures_beside_torch():
    done = run("grad_health.py", "--repeats", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["command"].endswith("python benchmarks/grad_health.py --repeats 2")
    ways = {}
    for result in found["results"]:
        ways.setdefault(result["cost"], []).append(result["way"])
        assert 0 < result["low_us"] <= result["median_us"] <= result["high_us"]
    assert len(ways) == 6 and all("fastdp" in each and len(each) > 1 for each in ways.values())
    assert [bar["cost"] for bar in found["bars"]] == [
        *("norm of 161 tensors", "clipping of 161 tensors"),
        *("norm of 1,000 tensors", "clipping of 1,000 tensors"),
    ]


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
