"""Recorded steps inside of what stands around a wrapper: checkpointing, other wrappers, patched
classes, data loaders that pin memory."""

import copy
import re
import threading

import pytest
import torch
from engine_cases import ON_GPUS, SETTLED, WATCHED, Recorder, Twins, identical, reasons
from engine_cases import squares, steps
from engine_cases import rows_of_four as rows
from pretended_gpus import Gpus, Stream
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp.recordings import Recording

AHEAD = WATCHED["graph"]


def layers():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_the_wrapper(means, reentrant):
    """The reentrant kind runs it without gradients, then with; the other under hooks, eagerly."""
    twins = Twins(means, layers(), "auto")
    for seed in range(SETTLED + 4):
        found = []
        for dp, optimizer in zip(twins.both, twins.optimizers):
            optimizer.zero_grad()
            x = rows(means, seed).requires_grad_()
            squares(checkpoint(dp, x, use_reentrant=reentrant)).backward()
            found.append(x.grad)
            optimizer.step()
        identical(*found)
        twins.check_gradients()
        twins.check_state()
    if reentrant:
        assert steps(twins.recorded)["graph"] > 4
        assert len(twins.recorded.report()["forwards"]) == 2
    else:
        assert steps(twins.recorded)["graph"] == 0
        assert "saved-tensors hooks are active" in reasons(twins.recorded)


def test_several_wrappers_in_one_model(means):
    """One behind the other, each with recordings of its own."""
    stacks = []
    for engine in ("graph", "eager"):
        stacks.append(
            nn.Sequential(*[means.wrap(copy.deepcopy(layers()), engine) for _ in range(3)])
        )
    optimizers = [torch.optim.SGD(stack.parameters(), 0.01) for stack in stacks]
    for seed in range(AHEAD + 4):
        outputs = []
        for stack, optimizer in zip(stacks, optimizers):
            optimizer.zero_grad()
            outputs.append(stack(rows(means, seed)))
            squares(outputs[-1]).backward()
            optimizer.step()
        identical(*outputs)
        identical(dict(stacks[0].state_dict()), dict(stacks[1].state_dict()))
    for k in range(3):
        # The first gets inputs without gradients, the others with.
        assert steps(stacks[0][k]) == {"eager": AHEAD, "graph": 4}


def test_a_wrapper_in_a_replica(means):
    """A wrapper that is a part of what another one replicates is just its module there."""
    inner = means.wrap(layers(), "auto")
    twins = Twins(means, nn.Sequential(inner, nn.Linear(4, 2).double()))
    for seed in range(AHEAD + 3):
        twins.step(rows(means, seed))
    assert steps(twins.recorded)["graph"] == 3
    # One device has no replicas: the inner wrapper is asked while the outer one is eager.
    assert steps(twins.recorded.module[0])["graph"] == 0
    if means.replicas > 1:
        assert twins.recorded.module[0].report()["forwards"] == []


def test_a_function_made_by_partial_steps(means):
    """The forward in two calls of one wrapper, the loss over both: the second one is eager."""
    twins = Twins(means, layers(), "auto")
    for seed in range(SETTLED + 3):
        for dp, optimizer in zip(twins.both, twins.optimizers):
            optimizer.zero_grad()
            x = rows(means, seed)
            torch.cat([dp(x[:3]), dp(x[3:])]).square().sum().backward()
            optimizer.step()
        twins.check_gradients()
    assert steps(twins.recorded)["eager"] >= SETTLED + 3


@pytest.mark.parametrize("means", ["cpu-twice", "gpu-twice", "gpus"], indirect=True)
def test_the_patched_class(means, monkeypatch):
    """Old code, made faster by the environment."""
    monkeypatch.setenv("FASTDP_ENGINE", "graph")
    with fastdp.patch():
        wrapped = nn.DataParallel(layers().to(means.home), list(means.ids))
        if means.on_host:
            wrapped._fastdp_get_runtime().recorder = Recorder()
        plain = means.wrap(copy.deepcopy(wrapped.module), "eager")
        for seed in range(AHEAD + 3):
            identical(wrapped(rows(means, seed)), plain(rows(means, seed)))
        report = fastdp.DataParallel.report(wrapped)
    assert report["forwards"][0]["steps"] == {"eager": AHEAD, "graph": 3}


@pytest.mark.parametrize("means", ON_GPUS, indirect=True)
def test_a_thread_that_pins_memory(means):
    """As a DataLoader's does, all through a capture."""
    over, pinned = threading.Event(), []

    def pin():
        size = 1 << 12
        while not over.is_set():
            pinned.append(torch.empty(size).pin_memory().numel())
            size += 1 << 10

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        for seed in range(3):
            twins = Twins(means, layers())
            for k in range(AHEAD + 2):
                twins.step(rows(means, seed + k))
            twins.ran(eager=AHEAD, graph=2)
    finally:
        over.set()
        thread.join()
    assert pinned


@pytest.mark.parametrize("means", ON_GPUS, indirect=True)
def test_checkpointing_that_keeps_the_random_state(means):
    """Inside, with dropout: its numbers are an eager step's. Another graph than the forward's would
    draw them from elsewhere, so it stays eager; some versions of torch refuse it themselves."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(4)
            self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)).double()

        def forward(self, x):
            return checkpoint(self.body, x * 2, use_reentrant=False)

    twins = Twins(means, Checkpointed(), "auto", optimizer=False, sequential=True)
    found = []
    for dp in twins.both:
        torch.manual_seed(90)
        gradients = []
        for seed in range(SETTLED + 3):
            dp.zero_grad()
            squares(dp(rows(means, seed))).backward()
            gradients.append([p.grad.clone() for p in dp.parameters()])
        found.append(gradients)
    identical(*found)
    twins.ran(eager=SETTLED + 3)
    assert re.search("random numbers from a state|current_seed", reasons(twins.recorded))


@pytest.mark.parametrize("means", ["cpu-twice"], indirect=True)
def test_a_step_waits_for_the_one_on_other_streams(means, monkeypatch):
    """Of pretended GPUs: the memory of a recording is used by one step at a time."""
    gpus = Gpus(monkeypatch, False)
    monkeypatch.setattr(Recording, "arrived", lambda recording, device: [])
    dp = means.wrap(layers())
    with torch.no_grad():
        for seed in range(AHEAD + 2):
            dp(rows(means, seed))
        gpus.waits()
        dp(rows(means))
        assert not {"c0", "c1"} & set(sum(gpus.waits().values(), []))
        first = list(gpus.current.values())
        others = [Stream(f"d{k}", stream.device) for k, stream in enumerate(first)]
        gpus.streams += others
        gpus.current.update({stream.device: stream for stream in others})
        dp(rows(means))
        waits = gpus.waits()
        assert waits["d0"][0] == "c0" and waits["d1"][0] == "c1"
        gpus.current.update({stream.device: stream for stream in first})
        dp(rows(means))
        assert gpus.waits()["c0"][0] == "d0"
    assert steps(dp)["graph"] == 5
