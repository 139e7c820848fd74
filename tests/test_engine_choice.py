"""What an engine remembers of signatures, and for how long; what report() and the log say."""

import gc
import logging
import random
import weakref

import pytest
import torch
from engine_cases import WATCHED, Twins, noise, steps
from nets import Apply
from torch import nn

import fastdp
from fastdp import engines

AHEAD = WATCHED["graph"]

pytestmark = pytest.mark.parametrize("means", ["cpu", "cpu-twice"], indirect=True)


def rows(means, seed=0, batch=6):
    return noise(means, batch, 3, seed=seed)


def test_recordings_are_few(means):
    """The least recently used goes, and comes back when its shape does."""
    twins = Twins(means, Apply(lambda m, x: m.lin(x)), lr=1e-6)
    sizes = range(6, 6 + engines.MAX_RECORDINGS + 1)
    for batch in sizes:
        for seed in range(AHEAD + 1):
            twins.step(rows(means, seed, batch))
    kinds = [forward["engine"] for forward in twins.recorded.report()["forwards"]]
    assert kinds == ["eager"] + ["graph"] * engines.MAX_RECORDINGS
    dropped = twins.recorded.report()["forwards"][0]
    assert dropped["reason"] == (
        f"more than {engines.MAX_RECORDINGS} signatures were recorded since"
    )
    for seed in range(AHEAD + 1):
        twins.step(rows(means, seed, 6))
    kinds = [forward["engine"] for forward in twins.recorded.report()["forwards"]]
    assert kinds == ["graph", "eager"] + ["graph"] * (engines.MAX_RECORDINGS - 1)


def test_the_number_of_recordings_can_be_set(means, monkeypatch):
    monkeypatch.setattr(engines, "MAX_RECORDINGS", 1)
    twins = Twins(means, Apply(lambda m, x: m.lin(x)), lr=1e-6)
    for batch in (6, 8):
        for seed in range(AHEAD + 1):
            twins.step(rows(means, seed, batch))
    assert [f["engine"] for f in twins.recorded.report()["forwards"]] == ["eager", "graph"]


def test_signatures_are_told_in_the_order_in_which_they_were_met(means):
    dp = means.wrap(Apply(lambda m, x: m.lin(x)), "auto")
    for batch in (6, 8, 6, 9, 6, 6, 8):
        dp(rows(means, batch, batch)).sum().backward()
    assert [sum(f["steps"].values()) for f in dp.report()["forwards"]] == [4, 2, 1]


def test_the_arguments_of_a_step_that_comes_back_are_not_cut_first(means, monkeypatch):
    """But for one step that is cut, by which uncut arguments are known from then on."""
    whole, run = [], engines.Recording.run_whole
    monkeypatch.setattr(
        engines.Recording, "run_whole", lambda self, *args: whole.append(1) or run(self, *args)
    )
    twins = Twins(means, Apply(lambda m, x: m.lin(x)), lr=1e-6)
    for batch in (6, 8, 9):
        for seed in range(AHEAD + 3):
            twins.step(rows(means, seed, batch))
        assert len(whole) == 2
        whole.clear()


@pytest.mark.parametrize("way", ["chunk_sizes", "own scatter"])
def test_arguments_that_are_cut_otherwise_are_another_step(means, way):
    """Though they are what they were: nothing is replayed by uncut arguments then."""
    if means.replicas == 1:
        pytest.skip("needs 2 replicas")
    sizes = [2, 4]

    class Own(fastdp.DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            return [(piece.clone(),) for piece in inputs[0].split(sizes)], [{}, {}]

    options = {"cls": Own}
    if way == "chunk_sizes":
        options = {"chunk_sizes": lambda batch, n: list(sizes)}
    twins = Twins(means, Apply(lambda m, x: m.lin(x) * x.size(0)), lr=1e-6, **options)
    for seed in range(AHEAD + 3):
        twins.step(rows(means, seed))
    sizes.reverse()
    for seed in range(AHEAD + 3):
        twins.step(rows(means, seed))
    assert [f["engine"] for f in twins.recorded.report()["forwards"]] == ["graph"] * 2


def test_few_uncut_arguments_are_known(means, monkeypatch):
    """All of these have one signature once they are cut."""
    monkeypatch.setattr(engines, "_MAX_SIGNATURES", 2)
    dp = means.wrap(Apply(lambda m, x: m.lin(x)))
    for seed in range(AHEAD + 1):
        dp(rows(means, seed)).sum().backward()
    engine, known = dp._fastdp_get_runtime()._engine, []
    for width in range(3, 9):
        batch = torch.zeros(6, width, dtype=torch.float64, device=means.home)[:, :3]
        dp(batch).sum().backward()
        known.append(len(engine._whole))
    assert known == [1, 2, 1, 2, 1, 2] and steps(dp)["graph"] == 7


def test_a_dropped_recording_gives_its_memory_back(means, monkeypatch):
    monkeypatch.setattr(engines, "MAX_RECORDINGS", 1)
    dp = means.wrap(Apply(lambda m, x: m.lin(x)))
    for seed in range(AHEAD + 1):
        output = dp(rows(means, seed))
        output.sum().backward()
    (entry,) = dp._fastdp_get_runtime()._engine._entries.values()
    reference = weakref.ref(entry.recording)
    for seed in range(AHEAD + 1):
        dp(rows(means, seed, 8)).sum().backward()
    del output
    gc.collect()
    assert reference() is None


def test_a_backward_of_a_recording_that_is_dropped(means, monkeypatch):
    """Between forward and backward: the graph holds what it needs."""
    monkeypatch.setattr(engines, "MAX_RECORDINGS", 1)
    twins = Twins(means, Apply(lambda m, x: m.lin(x) ** 2), optimizer=False)
    for seed in range(AHEAD + 1):
        outputs = [dp(rows(means, seed)) for dp in twins.both]
    with torch.no_grad():
        for seed in range(AHEAD + 1):
            twins.recorded(rows(means, seed, 8))
    assert twins.recorded.report()["forwards"][0]["engine"] == "eager"
    for output in outputs:
        output.sum().backward()
    twins.check_gradients()


# Words.


def test_each_reason_is_logged_once(means, caplog):
    caplog.set_level(logging.INFO, "fastdp")

    def draws(module, x):
        if len(x) == 1:
            module.calls = getattr(module, "calls", 0) + 1
        print("step")
        return module.lin(x)

    dp = means.wrap(Apply(draws), "auto")
    for batch in (4, 6, 8):
        for _ in range(12):
            dp(rows(means, 0, batch))
    said = [record.getMessage() for record in caplog.records if record.name == "fastdp"]
    assert said == ["engine: the forward is not recorded: it writes to sys.stdout: 'step'"]
    assert dp.report()["reasons"] == ["it writes to sys.stdout: 'step'"]
    assert [f["reason"] for f in dp.report()["forwards"]] == dp.report()["reasons"] * 3


def test_a_log_handler_may_ask_for_the_report(means):
    """It is called when nothing is locked."""
    reports = []

    class Reporting(logging.Handler):
        def emit(self, record):
            reports.append(str(dp.report()))

    def draws(module, x):
        return module.lin(x) * random.random()

    log, handler = logging.getLogger("fastdp"), Reporting()
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        dp = means.wrap(Apply(draws), "auto")
        for _ in range(4):
            dp(rows(means))
        dp.gather_outputs = False
        dp(rows(means))
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert len(reports) == 2 and "it draws from Python's random" in reports[0]
    assert "gather_outputs=False" in reports[1]


def test_the_memory_of_a_recording(means):
    """Arguments, parameters and buffers of all replicas but the first, gradients of outputs and
    parameters: 8 bytes each, some padded in their buckets."""
    dp = means.wrap(nn.BatchNorm1d(1000).double())
    for seed in range(AHEAD + 1):
        dp(noise(means, 6, 1000, seed=seed)).sum().backward()
    held = dp.report()["forwards"][0]["bytes"]
    replicas, others = means.replicas, means.replicas - 1
    least = 8 * (6 * 1000 + others * 4 * 1000 + 6 * 1000 + replicas * 2 * 1000)
    assert least <= held < 1.1 * least
    assert f"holds {held / 2**20:.1f} MiB" in str(dp.report())
    dp.engine = "auto"
    dp(noise(means, 6, 1000))
    assert "bytes" not in dp.report()["forwards"][0]


def test_a_wrapper_that_has_not_run(means):
    dp = means.wrap(Apply(lambda m, x: m.lin(x)), "auto")
    report = dp.report()
    assert (report["engine"], report["forwards"], report["reasons"]) == ("auto", [], [])
    assert report["devices"] == ["cpu"] * means.replicas
    assert means.wrap(Apply(None), "eager").report()["engine"] == "eager"


def test_the_environment_decides_where_nobody_did(means, monkeypatch):
    monkeypatch.setenv("FASTDP_ENGINE", "graph")
    module, ids = nn.Linear(3, 2), list(means.ids)
    assert fastdp.DataParallel(module, ids).engine == "graph"
    assert fastdp.DataParallel(module, ids, engine="eager").engine == "eager"
    monkeypatch.setenv("FASTDP_ENGINE", "")
    assert fastdp.DataParallel(module, ids).engine == "eager"
    monkeypatch.setenv("FASTDP_ENGINE", "fast")
    with pytest.raises(ValueError, match="FASTDP_ENGINE is 'fast': it must be one of"):
        fastdp.DataParallel(module, ids)
    with pytest.raises(ValueError, match="engine is 'quick': it must be one of"):
        fastdp.DataParallel(module, ids, engine="quick")
