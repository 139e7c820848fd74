"""A step's bytes go through the core: its counters are the plan's bytes, and a core verb that fails
fails the step, after which the wrapper goes on."""

import pytest
import torch
from nets import Net, grads, ints, same
from torch import nn

VERBS = ["scatter", "gather", "bucket_broadcast", "bucket_reduce"]


@pytest.fixture
def core():
    _C = pytest.importorskip("fastdp._C")
    _C.reset_counters()
    yield _C
    for verb in VERBS:
        _C.arm_fault(verb, 0)


def size_bytes(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def moved(core):
    return {verb: core.counters()[verb]["bytes"] for verb in VERBS}


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_counters_are_the_bytes_of_the_plan(core, fast, n, bucket_bytes):
    """fp64 throughout, so that no slot needs padding: the bytes are the tensors' own."""
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)).double()
    module.register_buffer("extra", torch.zeros(5).double())
    dp = fast.wrap(module, n, bucket_bytes=bucket_bytes)
    x = ints(4 * n, 3, grad=True)
    weights = size_bytes(module.parameters())

    out = dp(x)
    # Replica 0 has the base's own tensors: the others are copied.
    forward = moved(core)
    assert forward["scatter"] == size_bytes([x]) and forward["gather"] == size_bytes([out])
    assert forward["bucket_broadcast"] == (n - 1) * (weights + size_bytes(module.buffers()))
    assert forward["bucket_reduce"] == 0

    out.sum().backward()
    step = moved(core)
    # Backward turns the arrows: gather scatters, scatter gathers, broadcast reduces.
    assert step["scatter"] == step["gather"] == size_bytes([x, out])
    assert step["bucket_broadcast"] == forward["bucket_broadcast"]
    assert step["bucket_reduce"] == weights


def test_evaluation_reduces_nothing(core, fast):
    with torch.no_grad():
        fast.wrap(Net(), 2)(ints(4, 3))
    assert core.counters()["bucket_reduce"]["calls"] == 0


def test_frozen_weights_cost_no_reduction(core, fast):
    module = Net()
    module.first.requires_grad_(False)
    fast.wrap(module, 2)(ints(4, 3)).sum().backward()
    assert moved(core)["bucket_reduce"] == size_bytes(module.second.parameters())


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("nth_call", [1, 2])
def test_a_core_verb_that_fails_fails_the_step(core, fast, verb, nth_call):
    module, plain = Net(), Net()
    dp = fast.wrap(module, 2, bucket_bytes=1)
    x = ints(4, 3, grad=True)
    core.arm_fault(verb, nth_call)
    with pytest.raises(core.FaultInjected):
        dp(x).sum().backward()
    module.zero_grad()
    same(out := dp(x), want := plain(ints(4, 3)))
    out.sum().backward()
    want.sum().backward()
    same(grads(module), grads(plain))


# Which tensors share a bucket.


def plan_of(dp, n):
    return dp._fastdp_get_runtime().replicator.plan_for(n, True)


def test_buckets_are_filled_to_their_limit_and_no_further(fast):
    """One dtype and one requires_grad each; with buffers first, then by their first tensors."""
    module = nn.Module()
    for name, length in (("a", 4), ("b", 4), ("c", 1), ("d", 20), ("e", 1), ("frozen", 2)):
        parameter = nn.Parameter(torch.zeros(length).double(), name != "frozen")
        module.register_parameter(name, parameter)
    module.single = nn.Parameter(torch.zeros(3))
    module.register_buffer("buffer", torch.zeros(5).double())
    module.register_buffer("last", torch.zeros(9).double())
    buckets = plan_of(fast.wrap(module, 2, bucket_bytes=64), 2).buckets
    # The numbers are of a, b, c, d, e, frozen, single, buffer, last.
    places = [sorted(bucket.places) for bucket in buckets]
    assert places == [[5, 7], [8], [0, 1], [2], [3], [4], [6]]
    kinds = [dict(zip(bucket.places, bucket.parameters)) for bucket in buckets]
    assert {place: is_parameter for kind in kinds for place, is_parameter in kind.items()} == {
        place: place < 7 for place in range(9)
    }
    assert [bucket.number for bucket in buckets] == list(range(7))


def test_alike_tensors_are_side_by_side(fast):
    module = nn.Module()
    for name, shape in (("a", (2, 3)), ("b", (4,)), ("c", (5, 3)), ("d", (2,))):
        module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    [bucket] = plan_of(fast.wrap(module, 2), 2).buckets
    assert bucket.places == (1, 3, 0, 2)
