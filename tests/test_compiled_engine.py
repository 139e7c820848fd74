"""Recorded steps of compiled replicas: recorded once what is compiled has run, without compiling
again, and equal to steps that are neither."""

import copy

import pytest
import torch
from compiled_cases import Breaking, Net, refuses
from engine_cases import SETTLED, WATCHED, Pair, noise, reasons, steps
from fastdp import recordings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]

BACKEND = {"backend": "aot_eager"}


class Recorded(Pair):
    """A compiled wrapper whose steps are recorded, and an eager one."""

    def __init__(self, means, module, engine="auto", compile=BACKEND, lr=1e-2):
        module = module.double()
        twin = copy.deepcopy(module)
        self.recorded = means.wrap(module, engine, compile=compile)
        self.eager = means.wrap(twin, "eager")
        super().__init__((self.recorded, self.eager), lr, atol=1e-10)

    @property
    def count(self):
        return self.recorded._fastdp_compiled.count


def devices_of(means):
    return len(set(means.ids))


def test_a_compiled_step_is_recorded_and_not_compiled_again(means):
    twins = Recorded(means, Net())
    for seed in range(SETTLED + 4):
        twins.step(noise(means, 6, 4, seed=seed))
    assert twins.count == devices_of(means)
    (forward,) = twins.recorded.report()["forwards"]
    assert forward["engine"] == "graph", str(twins.recorded.report())
    assert steps(twins.recorded)["graph"] >= 4


def test_recording_waits_until_nothing_is_compiled(means):
    """A step that compiles is none of those that are watched."""
    twins = Recorded(means, Net(), "graph")
    for seed in range(WATCHED["graph"]):
        twins.step(noise(means, 6, 4, seed=seed))
    twins.each(lambda module: setattr(module, "rate", 2.0))
    for seed in range(WATCHED["graph"] + 2):
        twins.step(noise(means, 6, 4, seed=seed))
    assert steps(twins.recorded)["graph"] > 0
    assert twins.count == 2 * devices_of(means)


def test_evaluation_between_steps(means):
    twins = Recorded(means, Net())
    for seed in range(SETTLED + 2):
        for dp in twins.both:
            dp.train()
        twins.step(noise(means, 6, 4, seed=seed))
        for dp in twins.both:
            dp.eval()
        twins.look(noise(means, 12, 4, seed=seed))
    assert twins.count == 2 * devices_of(means)
    assert [f["engine"] for f in twins.recorded.report()["forwards"]] == ["graph"] * 2


def test_warmup_compiles_and_records(means):
    twins = Recorded(means, Net())
    before = copy.deepcopy(dict(twins.recorded.state_dict()))
    twins.recorded.warmup(noise(means, 6, 4))
    assert all(torch.equal(v, before[k]) for k, v in twins.recorded.state_dict().items())
    compiled = twins.count
    assert compiled == devices_of(means)
    for seed in range(3):
        twins.step(noise(means, 6, 4, seed=seed))
    assert twins.count == compiled


def test_a_forward_with_graph_breaks_is_recorded_as_it_was_compiled(means):
    twins = Recorded(means, Breaking())
    for seed in range(SETTLED + 3):
        twins.step(noise(means, 6, 4, seed=seed))
    assert steps(twins.recorded)["graph"] > 0, str(twins.recorded.report())


def test_what_does_not_fit_while_it_is_recorded_is_not_recorded(means, monkeypatch):
    """The warm-ups of a recording may compile; its captures may not."""
    attempt = recordings.Recording._attempt

    def changing(recording, source, rows, named, record, recorder, keep=False):
        if keep:
            torch._dynamo.reset()  # as if all that was compiled were for something else
        return attempt(recording, source, rows, named, record, recorder, keep)

    monkeypatch.setattr(recordings.Recording, "_attempt", changing)
    twins = Recorded(means, Net())
    for seed in range(SETTLED):
        twins.step(noise(means, 6, 4, seed=seed))
    assert "what was compiled of it does not fit" in reasons(twins.recorded)
    assert steps(twins.recorded)["graph"] == 0


def test_a_replica_that_cannot_be_compiled_is_recorded_all_the_same(means):
    twins = Recorded(means, Net(), compile={"backend": refuses})
    for seed in range(SETTLED + 2):
        twins.step(noise(means, 6, 4, seed=seed))
    assert steps(twins.recorded)["graph"] > 0
    assert "this compiler can nothing" in twins.recorded.report()["compiled"]["reasons"][0]


def test_a_new_size_each_step_stays_eager_and_is_compiled_for_any(means):
    twins = Recorded(means, Net())
    counts = []
    for length in (6, 12, 18, 24, 30, 36):
        twins.step(noise(means, length, 4))
        counts.append(twins.count)
    assert counts[-1] == counts[3]
    assert steps(twins.recorded)["graph"] == 0


def test_the_compiler_of_the_device_and_the_graph_engine(means):
    if means.on_host:
        pytest.skip("needs 1 GPU: the compiler of the host is in test_compiled.py")
    for dtype, atol in ((torch.float32, 1e-3), (torch.float64, 1e-10)):
        twins = Recorded(means, Net(), compile=True, lr=1e-3)
        for dp in twins.both:
            dp.to(dtype)
        twins.atol = atol
        for seed in range(SETTLED + 20):
            twins.step(noise(means, 6, 4, seed=seed, dtype=dtype))
        assert steps(twins.recorded)["graph"] >= 20, str(twins.recorded.report())
        report = twins.recorded.report()["compiled"]
        assert report["reasons"] == []
        assert all("again" not in form for form in report["forms"]), str(report)
