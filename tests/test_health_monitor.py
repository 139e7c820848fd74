"""fastdp.HealthMonitor: what it records, and of what it warns."""

import doctest
import importlib
import logging
import math

import fastdp
import pytest
import torch
from nets import Net, ints, linear
from torch import nn


@pytest.fixture
def dp():
    return fastdp.DataParallel(nn.Linear(3, 2).double(), ["cpu"] * 2)


@pytest.fixture
def watch(dp, caplog):
    """watch(norms, **options): a monitor that has seen gradients of these norms, and the log."""
    caplog.set_level(logging.INFO, "fastdp")

    def run(norms, **options):
        monitor = fastdp.HealthMonitor(dp, **options)
        for norm in norms:
            gradient = torch.zeros(2, 3, dtype=torch.float64)
            gradient[0, 0] = norm
            dp.module.weight.grad = gradient
            monitor.check()
        monitor.close()
        warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        return monitor, warned

    return run


def step(dp, optimizer):
    optimizer.zero_grad()
    dp(ints(4, 3)).square().sum().backward()
    optimizer.step()


def test_it_records_the_norm_of_each_step(watch, caplog):
    monitor, warned = watch([1.0, 2.0, 0.5])
    assert [(r.step, r.norm) for r in monitor.records] == [(0, 1.0), (1, 2.0), (2, 0.5)]
    assert not any(r.warning or r.overflow or r.update_ratio for r in monitor.records)
    assert warned == [] and "health: step 1: gradient norm 2" in caplog.text


def test_a_step_is_recorded_one_later(dp):
    seen = []
    monitor = fastdp.HealthMonitor(dp, on_record=seen.append)
    for k in range(3):
        dp.module.weight.grad = torch.full((2, 3), float(k + 1)).double()
        monitor.check()
        assert len(seen) == k
    monitor.close()
    assert [record.step for record in seen] == [0, 1, 2] and seen == list(monitor.records)


@pytest.mark.parametrize(
    "norms, options, step, text",
    [
        ([1.0] * 5 + [10.5], {}, 5, r"the gradient norm is 10.5, over 10 times the running median"),
        ([1.0] * 5 + [3.5], {"spike_factor": 3}, 5, "over 3 times the running median of 1"),
        ([1001.0], {}, 0, "the gradient norm is 1001, above 1000"),
        ([2.0, 6.0], {"spike_norm": 5}, 1, "the gradient norm is 6, above 5"),
        ([1.0, 1e-9], {}, 1, "the gradient norm is 1e-09, below 1e-07"),
        ([1.0, 0.0], {}, 1, "the gradient norm is 0, below"),
        ([1.0, math.nan], {}, 1, "the gradient norm is nan; dp.nonfinite"),
        ([math.inf], {}, 0, "the gradient norm is inf; dp.nonfinite"),
    ],
)
def test_warnings(watch, norms, options, step, text):
    monitor, warned = watch(norms, **options)
    assert [bool(r.warning) for r in monitor.records] == [k == step for k in range(len(norms))]
    assert len(warned) == 1 and warned[0].startswith(f"health: step {step}: ")
    assert text in monitor.records[step].warning and text in warned[0]


def test_what_is_in_line_is_no_warning(watch):
    """A norm that is large among few, one that grows slowly, and one just below the bounds."""
    assert watch([1.0] * 4 + [50.0])[1] == []
    assert watch([1.2**k for k in range(20)])[1] == []
    assert watch([9.99, 1.0, 1.0, 1.0, 1.0, 9.99])[1] == []


def test_the_median_runs(watch):
    monitor, warned = watch([1.0] * 6 + [8.0] * 6 + [70.0], window=6)
    assert warned == []
    assert "running median of 8" in watch([1.0] * 6 + [8.0] * 6 + [81.0], window=6)[1][0]


def test_a_warning_is_not_given_at_every_step(watch):
    monitor, warned = watch([2000.0] * 201)
    assert len(warned) == 3
    assert all(record.warning for record in monitor.records)


def test_overflows_are_a_scalers_way(watch):
    scaler = torch.amp.GradScaler("cpu")
    monitor, warned = watch([1.0, math.inf, 1.0] + [math.nan] * 9, scaler=scaler)
    assert monitor.overflows == 10 and warned == []
    assert [r.overflow for r in monitor.records] == [False, True, False] + [True] * 9
    monitor, warned = watch([math.inf] * 10, scaler=scaler)
    assert len(warned) == 1 and "10 steps in a row: no scale helps" in warned[0]
    off = torch.amp.GradScaler("cpu", enabled=False)
    assert watch([math.inf], scaler=off)[0].records[0].warning


def test_every_nth_step(watch):
    monitor, _ = watch([float(k + 1) for k in range(7)], every=3)
    assert [(r.step, r.norm) for r in monitor.records] == [(0, 1.0), (3, 4.0), (6, 7.0)]


# As a context.


def test_the_optimizers_steps_are_watched():
    dp = fastdp.DataParallel(Net(), ["cpu"] * 4)
    optimizer = torch.optim.SGD(dp.parameters(), lr=2.0**-20)
    norms = []
    with fastdp.HealthMonitor(dp, optimizer, update_every=0, spike_norm=math.inf) as monitor:
        for _ in range(3):
            step(dp, optimizer)
            norms.append(dp.grad_norm().item())
    assert [record.norm for record in monitor.records] == norms
    step(dp, optimizer)
    monitor.close()
    assert len(monitor.records) == 3


@pytest.mark.parametrize("named", [False, True], ids=["", "by name"])
def test_a_step_with_a_closure_has_the_gradients_that_it_left(named):
    dp = fastdp.DataParallel(linear(), ["cpu", "cpu"])
    optimizer = torch.optim.SGD(dp.parameters(), lr=2.0**-10)
    norms, ratios = [], []

    def closure():
        optimizer.zero_grad()
        loss = (dp(ints(4, 3)) ** 2).sum()
        loss.backward()
        norms.append(dp.grad_norm().item())
        before = torch.cat([p.detach().flatten() for p in dp.parameters()])
        ratios.append(2.0**-10 * norms[-1] / before.norm().item())
        return loss

    with fastdp.HealthMonitor(dp, optimizer, update_every=2) as monitor:
        for _ in range(3):
            optimizer.step(**{"closure": closure}) if named else optimizer.step(closure)
    assert [record.norm for record in monitor.records] == norms and norms[0] > 0
    found = [record.update_ratio for record in monitor.records]
    assert found == [pytest.approx(ratios[0]), None, pytest.approx(ratios[2])]


def test_a_check_of_ones_own_counts_once():
    dp = fastdp.DataParallel(linear(), ["cpu"] * 2)
    optimizer = torch.optim.SGD(dp.parameters(), lr=1e-3)
    with fastdp.HealthMonitor(dp, optimizer) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            dp(ints(4, 3)).square().sum().backward()
            monitor.check()
            dp.clip_grad_norm_(1e-3)
            optimizer.step()
    assert len(monitor.records) == 3
    assert all(record.norm > 1 for record in monitor.records), "the norm before clipping"


def test_update_ratios():
    dp = fastdp.DataParallel(linear(), ["cpu"] * 2)
    optimizer = torch.optim.SGD(dp.parameters(), lr=1e-3)
    wanted = []
    with fastdp.HealthMonitor(dp, optimizer, every=2, update_every=2) as monitor:
        for k in range(9):
            before = torch.cat([p.detach().flatten().clone() for p in dp.parameters()])
            step(dp, optimizer)
            after = torch.cat([p.detach().flatten() for p in dp.parameters()])
            wanted.append(((after - before).norm() / before.norm()).item() if k % 4 == 0 else None)
    assert [record.step for record in monitor.records] == [0, 2, 4, 6, 8]
    assert [record.update_ratio for record in monitor.records] == [
        None if want is None else pytest.approx(want, rel=1e-5) for want in wanted[::2]
    ]


def test_weights_that_are_frozen_or_added_in_a_step():
    net = nn.Sequential(nn.Linear(3, 2))
    dp = fastdp.DataParallel(net, ["cpu"] * 2)
    optimizer = torch.optim.SGD(dp.parameters(), lr=1e-3)

    def change(*step):
        net[0].bias.requires_grad_(False)
        net.append(nn.Linear(2, 2))

    optimizer.register_step_post_hook(change)
    before = torch.cat([p.detach().flatten() for p in net.parameters()])
    with fastdp.HealthMonitor(dp, optimizer, update_every=1) as monitor:
        dp(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    after = torch.cat([p.detach().flatten() for p in net[0].parameters()])
    ratio = ((after - before).norm() / before.norm()).item()
    assert monitor.records[0].update_ratio == pytest.approx(ratio, rel=1e-4)


def test_the_scale_of_a_fused_step_is_no_part_of_the_norm():
    """A GradScaler leaves it to a fused optimizer to unscale."""
    dp = fastdp.DataParallel(nn.Linear(3, 2), ["cpu"] * 2)
    optimizer = torch.optim.SGD(dp.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = ints(4, 3).float()
    dp(x).square().sum().backward()
    want = dp.grad_norm().item()
    optimizer.zero_grad()
    with fastdp.HealthMonitor(dp, optimizer, scaler=scaler) as monitor:
        scaler.scale(dp(x).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert monitor.records[0].norm == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"dp": linear()}, TypeError, "dp is a Linear: it must be a fastdp.DataParallel"),
        ({"optimizer": 3}, TypeError, "optimizer is a int: it must be a torch.optim.Optimizer"),
        ({"scaler": 3}, TypeError, "scaler is a int: it must be a torch.amp.GradScaler"),
        ({"on_record": 3}, TypeError, "on_record is 3: it must be callable"),
        ({"every": 0}, ValueError, "every is 0: it must be at least 1"),
        ({"every": 1.5}, TypeError, "every is 1.5: it must be a whole number"),
        ({"update_every": -1}, ValueError, "update_every is -1: it must be at least 0"),
        ({"window": True}, TypeError, "window is True"),
        ({"spike_norm": -1.0}, ValueError, "spike_norm is -1.0: it must be at least 0"),
        ({"vanished_norm": math.nan}, ValueError, "vanished_norm is nan"),
        ({"spike_norm": "1e3"}, TypeError, "spike_norm is '1e3': it must be a number"),
        ({"spike_factor": None}, TypeError, "spike_factor is None: it must be a number"),
    ],
)
def test_mistakes_are_named(dp, options, error, text):
    with pytest.raises(error, match=text):
        fastdp.HealthMonitor(**{"dp": dp, **options})


@pytest.mark.parametrize("name", ["health_monitor", "prefetch", "scattered"])
def test_examples_in_docstrings(name):
    result = doctest.testmod(importlib.import_module(f"fastdp.{name}"))
    assert result.failed == 0 and result.attempted > 1
