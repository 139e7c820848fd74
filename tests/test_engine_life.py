"""The wrapper itself: options and engines that change, copies, and what is left when it is gone."""
import copy
import gc
import pickle
import weakref

import pytest
import torch
from engine_cases import (
    SETTLED,
    SEVERAL,
    WATCHED,
    Recorder,
    Scaled,
    graph_steps,
    identical,
    recorded_twins,
    steps,
)
from engine_cases import rows_of_four as rows
from nets import Apply

AHEAD = WATCHED["graph"]


@pytest.mark.parametrize("means", SEVERAL, indirect=True)
@pytest.mark.parametrize(
    "name, value", [("dim", 0), ("sequential", True), ("unused_grad", "none"), ("bucket_bytes", 8)]
)
def test_options_of_the_wrapper(means, name, value):
    twins = recorded_twins(means, "graph")
    for dp in twins.both:
        setattr(dp, name, value)
    if means.on_host:
        twins.recorded._fastdp_get_runtime().recorder = Recorder()
    for seed in range(AHEAD + 1):
        twins.step(rows(means, seed))
    assert twins.recorded.report()["forwards"][-1]["engine"] == "graph"


def test_the_engine_is_changed(means):
    twins = recorded_twins(means, "graph")
    before = graph_steps(twins)
    twins.recorded.engine = "eager"
    twins.step(rows(means))
    twins.recorded.engine = "graph"
    twins.step(rows(means))
    assert graph_steps(twins) == before + 1
    twins.recorded.engine = "auto"  # an engine of its own, which starts anew
    for seed in range(SETTLED + 1):
        twins.step(rows(means, seed))
    twins.ran(eager=SETTLED - 2, graph=3)
    with pytest.raises(ValueError, match="engine is 'fast': it must be one of eager, auto, graph"):
        twins.recorded.engine = "fast"
    assert twins.recorded.engine == "auto"


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_have_no_recordings(means, way):
    twins = recorded_twins(means)
    dp = twins.recorded
    made = copy.deepcopy(dp) if way == "deepcopy" else pickle.loads(pickle.dumps(dp))
    assert made.engine == "auto" and made.report()["forwards"] == []
    if means.on_host:
        made._fastdp_get_runtime().recorder = Recorder()
    other = means.wrap(copy.deepcopy(twins.eager.module), "eager")
    for seed in range(SETTLED + 1):
        identical(made(rows(means, seed)), other(rows(means, seed)))
    assert steps(made)["graph"] == 3
    twins.step(rows(means))


def test_a_dropped_wrapper_takes_its_recordings_along(means):
    dp = means.wrap(Scaled())
    for seed in range(AHEAD + 1):
        dp(rows(means, seed)).sum().backward()
    (entry,) = dp._fastdp_get_runtime()._engine._entries.values()
    references = [weakref.ref(entry.recording), weakref.ref(dp), weakref.ref(dp.module)]
    del dp, entry
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_a_backward_after_its_wrapper_is_gone(means):
    module = Scaled()
    dp = means.wrap(module)
    plain = means.wrap(copy.deepcopy(module), "eager")
    for seed in range(AHEAD + 1):
        output = dp(rows(means, seed))
    del dp
    gc.collect()
    output.square().sum().backward()
    plain(rows(means, AHEAD)).square().sum().backward()
    for got, want in zip(module.parameters(), plain.module.parameters()):
        identical(got.grad, want.grad)


def test_a_module_that_is_replaced(means):
    """dp.module = another: nothing of the first one's recording may run."""
    twins = recorded_twins(means, "graph")
    for dp in twins.both:
        torch.manual_seed(6)
        dp.module = Apply(lambda m, x: m.lin(x[:, :3])).to(means.home)
    if means.on_host:
        twins.recorded._fastdp_get_runtime().recorder = Recorder()
    for seed in range(AHEAD + 2):
        identical(*[dp(rows(means, seed)) for dp in twins.both])
    twins.ran(eager=AHEAD, graph=2)
