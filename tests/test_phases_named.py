"""The names of a step's phases in torch.profiler, and that they cost nothing where none listens."""

from collections import Counter

import pytest
import torch
from conftest import no_cuda_reason
from engine_cases import WATCHED, noise
from nets import linear
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fastdp
from fastdp import _torch_state, phases

PREFIX = "fastdp: "


def names(act):
    """How often each name of ours is in a profile of act(), without the prefix."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        act()
    found = (event.name for event in profiled.events())
    return Counter(name.removeprefix(PREFIX) for name in found if name.startswith(PREFIX))


def step(dp, x):
    return lambda: dp(x).sum().backward()


def model():
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double()


VERBS = ("scatter", "replicate", "parallel_apply", "gather")


def test_each_phase_has_its_name(devices):
    ids = devices(2)
    home = torch.device("cpu" if ids[0] == "cpu" else "cuda")
    dp = fastdp.DataParallel(model().to(home), ids, bucket_bytes=20 * 8)  # a Linear is 20 elements
    x = torch.ones(4, 4, dtype=torch.float64)
    want = dict.fromkeys([*VERBS, "replica 0"], 1)  # other replicas' threads are not looked at
    for k in range(3):
        want |= {f"broadcast of bucket {k}": 1, f"reduce of bucket {k}": 1}
    assert names(step(dp, x)) == want
    with torch.no_grad():
        assert names(lambda: dp(x)) == {n: 1 for n in want if not n.startswith("reduce")}


def test_other_methods_and_outputs_that_stay(devices):
    dp = fastdp.DataParallel(nn.Identity(), devices(2), gather_outputs=False)
    assert names(lambda: dp.call("forward", torch.ones(2))) == {
        "scatter": 1,
        "replicate": 1,
        "parallel_apply": 1,
        "replica 0": 1,
    }


def test_a_recorded_step_has_its_own(means):
    dp = means.wrap(model())
    x = noise(means, 6, 4)
    for _ in range(WATCHED["graph"] + 1):
        step(dp, x)()
    assert dp.report()["forwards"][0]["steps"]["graph"] == 1
    found = names(step(dp, x))
    assert found["replay of forwards"] == found["replay of backwards"] == 1
    assert found["gather"] == 1 and found["scatter"] >= 1
    assert "replicate" not in found and "parallel_apply" not in found
    for verb in ("broadcast", "reduce"):
        assert found[f"{verb} of bucket 0"] == (1 if means.replicas > 1 or verb == "reduce" else 0)


def test_nothing_is_made_where_none_listens(monkeypatch):
    def record_function(name):
        raise AssertionError(name)

    monkeypatch.setattr(phases, "record_function", record_function)
    dp = fastdp.DataParallel(linear(), ["cpu", "cpu"])
    x = torch.ones(4, 3, dtype=torch.float64)
    step(dp, x)()
    with pytest.raises(AssertionError, match="DataParallel.forward"):
        names(step(dp, x))


def test_a_torch_that_does_not_tell_who_listens(monkeypatch):
    monkeypatch.delattr(torch.autograd.profiler, "_is_profiler_enabled")
    assert _torch_state.profiler_listens() is False


@pytest.mark.filterwarnings("ignore::fastdp.DataParallelWarning")
def test_the_report_tells_of_buckets(devices):
    ids = devices(2)
    home = torch.device("cpu" if ids[0] == "cpu" else "cuda")
    module = model().to(home)
    module.register_buffer("count", torch.ones(3, device=home))
    dp = fastdp.DataParallel(module, ids, bucket_bytes=40 * 8)
    before = dp.report()
    assert before["buckets"] == [] and before["hidden"] is None and "buckets" not in str(before)
    dp(torch.ones(4, 4, dtype=torch.float64))
    with torch.no_grad():
        dp(torch.ones(1, 4, dtype=torch.float64))  # one replica has a plan of its own
    report = dp.report()
    float32, float64 = "torch.float32", "torch.float64"
    # Slots begin at multiples of 64 bytes.
    assert [tuple(bucket.values()) for bucket in report["buckets"]] == [
        (1, 12, float32, False),
        (4, 384, float64, True),
        (2, 192, float64, True),
    ]
    assert report["hidden"] is False
    assert "buckets    3 with 7 tensors, 0.00 MiB, moved in line with compute" in str(report)


def test_nvtx():
    if no_cuda_reason():
        pytest.skip(no_cuda_reason())
    dp = fastdp.DataParallel(model().cuda(), [0, 0])
    with torch.autograd.profiler.emit_nvtx():
        assert _torch_state.profiler_listens()
        step(dp, torch.ones(4, 4, dtype=torch.float64))()
    assert not _torch_state.profiler_listens()
