"""dp.watch_replicas: whose gradients were not finite."""

import copy
import math

import fastdp
import pytest
import torch
from engine_cases import Means
from nets import Net, grads, ints, same
from torch import nn


def run(fast, value, row, n=3, watch=True, module=None):
    """A backward of 2 n rows, of which one is not finite, and what is found."""
    dp = fast.wrap(Net() if module is None else module, n)
    if watch:
        dp.watch_replicas()
    x = ints(2 * n, 3)
    if row is not None:
        x[row, 1] = value
    dp(x.to(fast.home)).sum().backward()
    return dp, dp.nonfinite()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("row", range(6))
def test_it_is_the_replica_whose_row_it_is(fast, value, row):
    dp, found = run(fast, value, row)
    assert found and found.replicas == (row // 2,)


def test_finite_ones_and_unwatched_ones(fast):
    assert run(fast, 0, None)[1].replicas == ()
    dp, found = run(fast, math.nan, 0, watch=False)
    assert found and found.replicas is None
    dp.watch_replicas()
    dp.watch_replicas(False)
    assert dp.nonfinite().replicas is None


def test_it_begins_and_ends_between_steps(fast):
    """Also where replicas were made before: the next backward counts, not the next wrapper."""
    dp, found = run(fast, math.nan, 0, watch=False)
    assert found.replicas is None
    x = ints(6, 3)
    x[5] = math.inf
    dp.watch_replicas()
    dp(x.to(fast.home)).sum().backward()
    assert dp.nonfinite().replicas == (2,)
    dp.watch_replicas(False)
    dp(x.to(fast.home)).sum().backward()
    dp.watch_replicas()
    assert dp.nonfinite().replicas == ()


def test_backwards_add_up_until_it_is_asked(fast):
    dp = fast.wrap(Net(), 3)
    dp.watch_replicas()
    for row in (5, None, 0):
        x = ints(6, 3)
        if row is not None:
            x[row] = math.inf
        dp(x.to(fast.home)).sum().backward()
    dp.module.zero_grad()
    found = dp.nonfinite()
    assert found.replicas == (0, 2) and found.replicas == (0, 2)
    dp(ints(6, 3).to(fast.home)).sum().backward()
    assert dp.nonfinite().replicas == ()


def test_gradients_are_the_same(fast):
    plain, watched = run(fast, 0, None, watch=False)[0], run(fast, 0, None)[0]
    same(grads(watched.module), grads(plain.module))


def test_sparse_half_and_double_backward():
    dp = fastdp.DataParallel(nn.Embedding(6, 3, sparse=True), ["cpu"] * 2)
    dp.watch_replicas()
    out = dp(torch.tensor([[0, 1], [1, 1]]))
    (out * torch.tensor([1.0, math.inf]).view(2, 1, 1)).sum().backward()
    assert dp.nonfinite().replicas == (1,)
    half = fastdp.DataParallel(nn.Linear(3, 2).half(), ["cpu"] * 2)
    half.watch_replicas()
    (half(torch.ones(4, 3).half()) * 6e4).sum().backward()
    assert half.nonfinite().replicas == (0, 1), "6e4 twice leaves float16"
    dp = fastdp.DataParallel(Net(), ["cpu"] * 2)
    dp.watch_replicas()
    (slope,) = torch.autograd.grad(dp(ints(4, 3)).sum(), dp.module.first.weight, create_graph=True)
    slope.square().sum().backward()
    assert dp.nonfinite().replicas == ()


def test_it_outlives_a_change_of_options_and_is_in_no_copy():
    dp = fastdp.DataParallel(Net(), ["cpu"] * 2)
    dp.watch_replicas()
    dp(ints(4, 3)).sum().backward()
    dp.bucket_bytes = 64
    x = ints(4, 3)
    x[3] = math.nan
    dp(x).sum().backward()
    twin = copy.deepcopy(dp)
    assert twin.nonfinite().replicas is None
    assert dp.nonfinite().replicas == (1,)


def test_no_step_is_recorded_meanwhile(monkeypatch):
    from engine_cases import settings, steps

    with settings(monkeypatch):
        means = Means(("cpu", "cpu"))
        dp = means.wrap(Net(), "graph")
        dp.watch_replicas()
        with pytest.raises(fastdp.EngineError, match=r"watch_replicas\(\) looks at each replica's"):
            dp(ints(4, 3))
        dp.watch_replicas(False)
        for _ in range(4):
            dp(ints(4, 3)).sum().backward()
        assert steps(dp)["graph"] == 2


@pytest.mark.parametrize("ids", [None, ["cpu"]])
def test_a_replica_that_is_alone(ids):
    if ids is None and torch.cuda.is_available():
        pytest.skip("GPUs are used by default here")
    dp = fastdp.DataParallel(Net(), ids)
    dp.watch_replicas()
    dp(ints(4, 3)).sum().backward()
    assert dp.nonfinite().replicas == ()
    dp.module.first.bias.grad[0] = math.nan
    assert dp.nonfinite().replicas == (0,)


def test_on_is_a_flag():
    dp = fastdp.DataParallel(Net(), ["cpu", "cpu"])
    with pytest.raises(TypeError, match="on is 'no': it must be True or False"):
        dp.watch_replicas("no")
    assert dp.nonfinite().replicas is None
