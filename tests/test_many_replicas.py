"""Eight replicas on the host and on one GPU; and lists of more than two GPUs, in several orders and
without the first. Numbers are those of one module, to the bit."""

import threading

import pytest
import torch
from conftest import no_cuda_reason
from cuda_sums import all_wrong_sums, wrong_training
from engine_cases import SETTLED, WATCHED, Means, Twins, noise, settings
from gpu_lists import MANY, ON_ONE, need
from nets import Apply, Net, exact, grads, ints, linear, ranked, same
from torch import nn

import fastdp

# A bucket that between three GPUs goes in shards.
LARGE = 300_007


@pytest.fixture(params=[("cpu",) * 8, ON_ONE, *MANY], ids=lambda ids: "-".join(map(str, ids)))
def ids(request):
    if request.param[0] == "cpu":
        return list(request.param)
    if no_cuda_reason():
        pytest.skip(no_cuda_reason())
    return need(request.param)


def place(ids, rank):
    return torch.device("cpu" if ids[0] == "cpu" else f"cuda:{ids[rank]}")


def wrapped(module, ids, **options):
    return fastdp.DataParallel(module.to(place(ids, 0)), ids, **options)


def step(call, x, power=2):
    out = call(x)
    out.pow(power).sum().backward()
    return out


class Wide(nn.Module):
    """Every element of a large weight counts in the output and in the gradients."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.empty(LARGE))
        self.narrow = nn.Linear(3, 2)
        exact(self)

    def forward(self, x):
        part = self.wide * torch.arange(LARGE, device=x.device).remainder(101)
        return self.narrow(x) * part.sum()


def test_training_is_exact(ids):
    assert wrong_training(ids) == []
    assert wrong_training(ids, bucket_bytes=1) == []


def test_sums_are_in_the_order_of_ranks(ids):
    assert all_wrong_sums(ids, sizes=(4096,)) == {}


@pytest.mark.parametrize("transport", [None, "peer", "nccl", "host"])
def test_large_buckets(ids, transport):
    plain, module = Wide(), Wide()
    dp = wrapped(module, ids, transport=transport)
    for k in range(3):
        x = ints(2 * len(ids), 3, seed=k)
        try:
            out = step(dp, x, 1)
        except NotImplementedError as error:
            assert transport in ("peer", "nccl")
            pytest.skip(f"needs GPUs that can: {error}")
        same(out, step(plain, x, 1))
        same(grads(module), grads(plain))
        with torch.no_grad():
            for parameter in (*plain.parameters(), *module.parameters()):
                parameter -= parameter.grad.sign()


@pytest.mark.parametrize("engine", ["eager", "graph"])
@pytest.mark.filterwarnings("ignore:.*(replicas|parts|chunks)")
def test_batches_that_do_not_fill_all_replicas(ids, engine, monkeypatch):
    """Of 8 replicas 8, 5, 3 and 1 run."""
    with settings(monkeypatch):
        plain, module = Net(), Net()
        means = Means(tuple(ids))
        dp = means.wrap(module, engine)
        for rows in (2 * len(ids) - 1, len(ids) + 1, 3, 1):
            for k in range(WATCHED["graph"] + 2):
                plain.zero_grad()
                dp.zero_grad()
                x = ints(rows, 3, seed=k)
                same(step(dp, x.to(means.home)), step(plain, x))
                same(grads(module), grads(plain))


@pytest.mark.parametrize("engine", ["auto", "graph"])
def test_recorded_steps_are_those_of_the_eager_engine(ids, engine, monkeypatch):
    torch.manual_seed(3)
    module = nn.Sequential(
        *(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    )
    with settings(monkeypatch):
        means = Means(tuple(ids))
        twins = Twins(means, module.double(), engine, bucket_bytes=256)
        for seed in range(SETTLED + 3):
            twins.step(noise(means, 3 * len(ids), 2, 5, 5, seed=seed))
        watched = {"graph": WATCHED["graph"], "auto": SETTLED - 2}[engine]
        twins.ran(eager=watched, graph=SETTLED + 3 - watched)


def test_second_derivatives(ids):
    plain, module = Net(), Net()
    found = []
    for call in (wrapped(module, ids), plain):
        x = ints(2 * len(ids), 3, grad=True)
        (slope,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        found.append(x.grad)
    same(*found)
    # Those of the last bias do not depend on it.
    both = [grads(module).values(), grads(plain).values()]
    same(*([g for g in each if g is not None and g.any()] for each in both))


def test_every_replica_runs_where_its_rank_says(ids):
    seen = {}

    def forward(self, x):
        rank = int(x[0, 0])
        seen[rank] = x.device, self.lin.weight.device, threading.current_thread().name
        return self.lin(x)

    dp = wrapped(Apply(forward), ids)
    for _ in range(3):
        seen.clear()
        dp(ranked(len(ids)))
        assert sorted(seen) == list(range(len(ids)))
        for rank, (device, weight, thread) in seen.items():
            assert device == weight == place(ids, rank)
            assert rank == 0 or thread == f"fastdp-replica-{rank}"


def test_an_error_in_the_last_replica_leaves_all_usable(ids):
    last = len(ids) - 1

    def forward(self, x):
        if self.raises and x[0, 0] == last:
            raise KeyError("lost")
        return self.lin(x)

    module = Apply(forward)
    module.raises = True
    dp = wrapped(module, ids)
    words = f"(?s)in replica {last} on device {place(ids, last)}.*lost"
    for _ in range(3):
        with pytest.raises(KeyError, match=words):
            dp(ranked(len(ids)))
    module.raises = False
    same(dp(ranked(len(ids))), linear()(ranked(len(ids))))
    kept = sum(each.name.startswith("fastdp-replica-") for each in threading.enumerate())
    for _ in range(10):
        dp(ranked(len(ids)))
    after = sum(each.name.startswith("fastdp-replica-") for each in threading.enumerate())
    assert after <= kept  # those of earlier tests may end meanwhile


def test_batches_are_prefetched(ids):
    plain, module = Net(), Net()
    dp = wrapped(module, ids)
    loader = [ints(2 * len(ids), 3, seed=k) for k in range(4)]
    for x, cut in zip(loader, fastdp.prefetch(loader, dp)):
        same(step(dp, cut), step(plain, x))
    same(grads(module), grads(plain))
