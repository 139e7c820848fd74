"""fastdp.prefetch on GPUs: order under delays, memory, and no wait of the host."""

import copy
import threading
import time

import pytest
import torch
from conftest import no_cuda_reason
from gpu_lists import need
from nets import same
from torch import nn

import fastdp
from fastdp import staging

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(no_cuda_reason() is not None, reason=str(no_cuda_reason())),
]

HOLD_CYCLES = 20_000_000  # some 10 ms
STEPS, BATCH, WIDTH = 8, 10, 64


@pytest.fixture(params=[(0,), (0, 0), (0, 1), (1, 0), (3, 1, 2)], ids=str)
def ids(request):
    return need(request.param)


class Late(nn.Module):
    """Holds its GPU up before and after it reads its input."""

    def __init__(self, module, cycles=HOLD_CYCLES // 8):
        super().__init__()
        self.module = module
        self.cycles = cycles

    def forward(self, x):
        torch.cuda._sleep(self.cycles)
        out = self.module(x)
        torch.cuda._sleep(self.cycles)
        return out


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)).double()


def batches(pinned=False, home=None):
    generator = torch.Generator().manual_seed(5)
    for k in range(STEPS):
        rows = BATCH if k < STEPS - 1 else BATCH - 3
        pair = [torch.randn(rows, width, generator=generator).double() for width in (WIDTH, 2)]
        if home is not None:
            with torch.cuda.device(home):
                torch.cuda._sleep(HOLD_CYCLES // 4)
                pair = [tensor.to(home) for tensor in pair]
        yield {"x": pair[0].pin_memory() if pinned else pair[0], "y": pair[1]}


def train(dp, loader, scattered_targets):
    optimizer = torch.optim.SGD(dp.parameters(), lr=0.1)
    outputs = []
    home = next(dp.parameters()).device
    for batch in loader:
        out = dp(batch["x"])
        target = batch["y"].gathered() if scattered_targets else batch["y"]
        optimizer.zero_grad()
        ((out - target.to(home)) ** 2).sum().backward()
        optimizer.step()
        outputs.append(out.detach())
        del batch, target
    torch.cuda.synchronize()
    return outputs, list(dp.parameters())


@pytest.fixture
def late_copies(monkeypatch):
    """Each copy is held up, into memory full of NaN."""
    from_host = staging._from_host

    def late(part, device, sources):
        with torch.cuda.stream(staging._copy_stream(device)):
            spoilt = torch.empty_like(part, device=device).fill_(float("nan"))
            del spoilt
            torch.cuda._sleep(HOLD_CYCLES // 4)
        return from_host(part, device, sources)

    monkeypatch.setattr(staging, "_from_host", late)


@pytest.mark.parametrize("kind", ["pageable", "pinned", "gpu"])
@pytest.mark.parametrize("scatter", [None, "x"])
@pytest.mark.parametrize("held", [False, True])
def test_training_is_the_same_to_the_bit(ids, kind, scatter, held, late_copies):
    home = torch.device("cuda", ids[0])
    module = net().to(home)
    plain = fastdp.DataParallel(copy.deepcopy(module), ids)
    ours = fastdp.DataParallel(Late(module) if held else module, ids)
    source = {"pinned": kind == "pinned", "home": home if kind == "gpu" else None}
    want = train(plain, batches(), False)
    with torch.cuda.stream(torch.cuda.Stream(home)):
        fed = fastdp.prefetch(batches(**source), ours, depth=2, scatter=scatter)
        same(train(ours, fed, scatter is None), want)


def test_a_loader_that_writes_all_its_batches_into_one_tensor_on_a_gpu(ids, monkeypatch):
    """Each copy is held up."""
    broadcast = staging.moves.broadcast

    def late(family, source, devices):
        torch.cuda._sleep(HOLD_CYCLES // 4)
        return broadcast(family, source, devices)

    monkeypatch.setattr(staging.moves, "broadcast", late)
    home = torch.device("cuda", ids[0])
    dp = fastdp.DataParallel(nn.Identity().to(home), ids)
    batch = torch.empty(64, WIDTH, device=home)
    load = (batch.fill_(k) for k in range(STEPS))
    kept = [dp(each) for each in fastdp.prefetch(load, dp, depth=3)]
    for k, tensor in enumerate(kept):
        assert tensor.eq(k).all()


@pytest.mark.parametrize("engine", ["auto", "graph"])
def test_recorded_steps(ids, engine):
    home = torch.device("cuda", ids[0])
    module = net().to(home)
    plain = fastdp.DataParallel(copy.deepcopy(module), ids)
    ours = fastdp.DataParallel(module, ids, engine=engine)
    want = train(plain, batches(), False)
    same(train(ours, fastdp.prefetch(batches(), ours), True), want)
    if engine == "graph":
        assert sum(f["steps"]["graph"] for f in ours.report()["forwards"]) > 0


def test_copies_run_while_the_step_does(ids):
    """The next batch is there although the compute streams are busy, and the host did not wait."""
    dp = fastdp.DataParallel(net().to(ids[0]), ids)
    fed = iter(fastdp.prefetch(batches(), dp, depth=2))
    dp(next(fed)["x"])
    for index in set(ids):
        torch.cuda.synchronize(index)
        with torch.cuda.device(index):
            torch.cuda._sleep(100 * HOLD_CYCLES)
    start = time.perf_counter()
    batch = next(fed)["x"]
    arrived = list(batch._arrived.values())
    while not all(event.query() for event in arrived):
        assert time.perf_counter() - start < 0.4
    assert not torch.cuda.current_stream(ids[0]).query(), "compute was over before the copies"
    fed.close()
    torch.cuda.synchronize()


def test_the_host_runs_at_most_depth_batches_ahead_of_the_gpus(ids):
    """So memory does not grow with how far it might run."""
    home = torch.device("cuda", ids[0])
    rows, width = 4096, 1024
    module = Late(nn.Linear(width, 1), 2 * HOLD_CYCLES).to(home)
    dp = fastdp.DataParallel(module, ids)
    batch = torch.randn(rows, width).pin_memory()
    load = [batch] * 24  # a step takes the GPU 40 ms, a batch far less
    with torch.no_grad():
        dp(batch)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(home)
        before = torch.cuda.memory_allocated(home)
        for batch in fastdp.prefetch(load, dp, depth=2):
            dp(batch)
            del batch
        torch.cuda.synchronize()
    share = 4 * rows * width * ids.count(ids[0]) / len(ids)
    grown = torch.cuda.max_memory_allocated(home) - before
    assert grown < 5.5 * share, f"{grown / share:.1f} batches"


def test_slices_that_are_dropped_early_are_not_written_over(ids):
    """Their memory waits for the streams that read it."""
    home = torch.device("cuda", ids[0])
    dp = fastdp.DataParallel(nn.Identity().to(home), ids)
    kept = []
    load = (torch.full((64, 1024), float(k)) for k in range(12))
    for batch in fastdp.prefetch(load, dp, depth=3):
        side = torch.cuda.Stream(home)
        side.wait_stream(torch.cuda.current_stream(home))
        with torch.cuda.stream(side):
            torch.cuda._sleep(HOLD_CYCLES)
            kept.append(batch.gathered(home) + 0)
        del batch
    torch.cuda.synchronize()
    for k, tensor in enumerate(kept):
        assert tensor.eq(k).all()


def test_whole_tensors_come_to_the_output_device(ids, late_copies):
    output = torch.device("cuda", ids[-1])
    dp = fastdp.DataParallel(net().to(ids[0]), ids, output_device=output)
    for batch, plain in zip(fastdp.prefetch(batches(), dp, scatter="x"), batches()):
        assert batch["y"].device == output
        same(batch["y"] * 1, plain["y"])
        assert batch["x"].gathered().device == output
        same(batch["x"].gathered(), plain["x"])
        same(batch["x"].gathered("cpu"), plain["x"])


def test_no_thread_is_left():
    dp = fastdp.DataParallel(net().to(0), [0, 0])
    for _ in fastdp.prefetch(batches(), dp):
        break
    assert not [t for t in threading.enumerate() if t.name == "fastdp-prefetch"]
