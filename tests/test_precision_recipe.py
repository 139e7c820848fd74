"""The recipe for mixed precision of docs/operating.md: autocast, GradScaler, unscale, clipping, and
steps that are skipped since one replica alone overflowed. On host replicas and on GPUs, recorded
and not: the numbers of torch's own tools on the same wrapper, and of the bare module."""

import copy

import fastdp
import pytest
import torch
from conftest import no_cuda_reason
from engine_cases import Means, steps
from gpu_lists import need
from torch import nn

HUGE = 6e4  # times itself it is infinite in float16


class Squared(nn.Module):
    """Its output overflows float16 where an input is huge."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.body(x[:, :4]) * self.weight + (x[:, 4:] * x[:, 4:] * self.weight[:1])


def batch(means, seed, rows=6, huge=None):
    """The fifth column is 0, but for a row that is to overflow."""
    torch.manual_seed(seed)
    x = torch.cat([torch.randn(rows, 4), torch.zeros(rows, 1)], 1)
    if huge is not None:
        x[huge, 4] = HUGE
    return x.half().to(means.home)


def train(dp, means, dtype, clip, scale=2.0**10, huge=None, fused=False, count=6):
    """(weights, scales, norms) of the recipe. `huge`: the step whose last row overflows."""
    kind = means.home.type
    optimizer = torch.optim.SGD(dp.parameters(), lr=0.1, momentum=0.9, fused=fused)
    scaler = torch.amp.GradScaler(kind, init_scale=scale, enabled=dtype == torch.float16)
    scales, norms = [], []
    for k in range(count):
        x = batch(means, k, huge=5 if k == huge else None)
        optimizer.zero_grad()
        with torch.autocast(kind, dtype=dtype):
            loss = (dp(x).float() ** 2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(float(clip(dp, 0.1)))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [p.detach().cpu().clone() for p in dp.parameters()], scales, norms


def ours(dp, max_norm):
    return dp.clip_grad_norm_(max_norm)


def torchs(module, max_norm):
    return torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)


def near(got, want):
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.fixture(params=["eager", "graph"])
def engine(request):
    return request.param


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_it_trains_as_with_torchs_clipping(means, engine, dtype):
    module = Squared().to(means.home)
    dp = means.wrap(copy.deepcopy(module), engine)
    twin = means.wrap(module, "eager")
    got, want = train(dp, means, dtype, ours), train(twin, means, dtype, torchs)
    near(got[0], want[0])
    assert got[1] == want[1]
    assert got[2] == pytest.approx(want[2], rel=1e-3)
    if engine == "graph":
        assert steps(dp)["graph"] > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_it_trains_as_the_bare_module_does(means, dtype):
    """To what half precision rounds: the sum over replicas is another order."""
    module = Squared().to(means.home)
    bare = copy.deepcopy(module)
    got = train(means.wrap(module, "eager"), means, dtype, ours)
    want = train(bare, means, dtype, torchs)
    for one, other in zip(got[0], want[0], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    assert got[1] == want[1]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_is_skipped_where_one_replica_alone_overflows(means, engine, fused):
    """The last row is the last replica's: its infinity reaches the sum, and so the scaler."""
    dp = means.wrap(Squared().to(means.home), engine)
    weights, scales, norms = train(dp, means, torch.float16, ours, huge=3, fused=fused, count=4)
    twin = means.wrap(Squared().to(means.home), "eager")
    before = train(twin, means, torch.float16, ours, count=3)
    assert not torch.isfinite(torch.tensor(norms[3])) and norms[:3] == pytest.approx(before[2])
    assert scales == [*before[1], before[1][-1] / 2]
    assert steps(dp)["graph"] == (2 if engine == "graph" else 0)
    for one, other in zip(weights, before[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
        assert one.isfinite().all()


def test_the_overflow_is_of_one_replica_alone_and_is_named(means):
    module = Squared().to(means.home)
    dp = means.wrap(module, "eager", gather_outputs=False)
    x = batch(means, 0, huge=5)
    with torch.autocast(means.home.type, dtype=torch.float16):
        outputs = dp(x)
    finite = [bool(output.isfinite().all()) for output in outputs]
    assert finite == [True] * (len(finite) - 1) + [False]
    losses = [(output.float() ** 2).mean() for output in outputs]
    fastdp.sum_losses(losses).backward()
    found = dp.nonfinite()
    assert found and "weight" in found.parameters and found.count >= 1


def test_a_monitor_takes_an_overflow_for_the_scalers_way():
    means = Means(("cpu", "cpu"))
    dp = means.wrap(Squared(), "eager")
    scaler = torch.amp.GradScaler("cpu")
    monitor = fastdp.HealthMonitor(dp, scaler=scaler)

    def clip(dp, max_norm):
        monitor.check()
        return dp.clip_grad_norm_(max_norm)

    train(dp, means, torch.float16, clip, huge=2)
    monitor.close()
    assert [record.overflow for record in monitor.records] == [k == 2 for k in range(6)]
    assert not any(record.warning for record in monitor.records)


@pytest.mark.gpu
@pytest.mark.skipif(no_cuda_reason() is not None, reason=str(no_cuda_reason()))
@pytest.mark.parametrize("ids", [[0, 0], [0, 1], [3, 2, 1, 0]], ids=str)
def test_norms_and_clipping_wait_for_no_gpu(ids):
    need(ids)
    dp = fastdp.DataParallel(nn.Linear(64, 64).cuda(ids[0]), ids)
    dp(torch.randn(8, 64)).sum().backward()
    dp.clip_grad_norm_(1.0)
    torch.cuda.synchronize(ids[0])
    monitor = fastdp.HealthMonitor(dp)
    torch.cuda.set_sync_debug_mode("error")
    try:
        dp.grad_norm()
        dp.clip_grad_norm_(1.0)
        dp.nonfinite()
        monitor.check()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    monitor.close()
    assert monitor.records[0].norm == pytest.approx(1.0, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(no_cuda_reason() is not None, reason=str(no_cuda_reason()))
def test_gradients_of_buckets_on_a_gpu_are_few_tensors():
    from fastdp.flat_gradients import joined

    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(200))).cuda(0)
    dp = fastdp.DataParallel(module, [0, 0])
    dp(torch.randn(4, 4)).sum().backward()
    gradients = [p.grad for p in module.parameters()]
    parts = joined(module, gradients)
    assert len(parts) <= 4
    want = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]))
    torch.testing.assert_close(dp.grad_norm(), want, rtol=1e-5, atol=0)
