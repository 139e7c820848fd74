"""dp.memory(), dp.fits() and fastdp.validation on GPUs, beside what torch's allocator says."""

import gc
import warnings

import pytest
import torch
from conftest import no_cuda_reason
from gpu_lists import need
from torch import nn

import fastdp
from fastdp import memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(no_cuda_reason() is not None, reason=str(no_cuda_reason())),
]

MIB, GIB = 2**20, 2**30


@pytest.fixture(params=[(0,), (0, 0), (0, 1), (0, 1, 2, 3)], ids=str)
def ids(request):
    return need(request.param)


@pytest.fixture(autouse=True)
def _emptied():
    """Of what earlier tests of this process left."""
    gc.collect()
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
        with torch.cuda.device(index):
            torch.cuda.empty_cache()
    memory.scratch_bytes(trim=True)


def gpus_of(ids):
    return [torch.device("cuda", index) for index in dict.fromkeys(ids)]


def wait(ids):
    for device in gpus_of(ids):
        torch.cuda.synchronize(device)


def convolutions():
    def block(wide, out):
        return [nn.Conv2d(wide, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]

    layers = [*block(3, 64), *block(64, 64), nn.MaxPool2d(2), *block(64, 128), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 100))


def attention():
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def perceptron():
    return nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(20)))


MODELS = {
    "convolutions": (convolutions, (64, 3, 128, 128)),
    "attention": (attention, (16, 512, 512)),
    "perceptron": (perceptron, (64, 2048)),
}


def wrapped(model, ids, **options):
    make, shape = MODELS[model]
    dp = fastdp.DataParallel(make().to(ids[0]), ids, **options)
    return dp, torch.randn(shape, device=ids[0])


def wrapped_in_turn(model, ids):
    """How far the forwards of two replicas of one GPU overlap is chance, and with them what cuDNN
    takes meanwhile: some GB. So they run in turn."""
    return wrapped(model, ids, sequential=len(set(ids)) < len(ids))


def peaks_beside(fit, ids, act, rel=0.1):
    """Whether the peaks of act() are those of the estimate."""
    assert fit.fits and list(fit.devices) == list(map(str, gpus_of(ids)))
    for device in gpus_of(ids):
        torch.cuda.reset_peak_memory_stats(device)
    act()
    wait(ids)
    found = {
        name: (row.peak_bytes, torch.cuda.max_memory_allocated(name))
        for name, row in fit.devices.items()
    }
    ratios = {name: round(of / peak, 4) for name, (of, peak) in found.items()}
    print(f"estimate to peak: {ratios}")
    for of, peak in found.values():
        assert of == pytest.approx(peak, rel=rel), (ratios, found)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_training_takes_what_was_estimated(model, precision, ids):
    dp, x = wrapped_in_turn(model, ids)
    optimizer = torch.optim.AdamW(dp.parameters(), fused=True)

    def forward():
        with torch.autocast("cuda", precision, enabled=precision != torch.float32):
            return dp(x)

    def train():
        for _ in range(4):
            optimizer.zero_grad(set_to_none=True)
            forward().float().square().mean().backward()
            optimizer.step()

    with torch.autocast("cuda", precision, enabled=precision != torch.float32):
        fit = dp.fits(x, optimizer=optimizer)
    peaks_beside(fit, ids, train)


@torch.no_grad()
def evaluate(dp, x):
    for _ in range(3):
        dp(x)


@pytest.mark.parametrize("as_one", [True, False], ids=["as one operator", "plain"])
@pytest.mark.parametrize("model", MODELS)
def test_evaluation_takes_what_was_estimated(model, as_one, ids):
    if not as_one and model != "attention":
        pytest.skip("needs torch's layers of attention")
    dp, x = wrapped_in_turn(model, ids)
    dp.eval()
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(as_one)
    try:
        fit = dp.fits(x, mode="eval")
        peaks_beside(fit, ids, lambda: evaluate(dp, x))
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize("model", ["convolutions", "perceptron"])
def test_evaluation_after_training_takes_what_was_estimated(model, ids):
    """Gradients of some buckets are held until the next forward, and are gone in it."""
    dp, x = wrapped_in_turn(model, ids)
    for _ in range(3):
        dp(x).sum().backward()
    dp.zero_grad(set_to_none=True)
    dp.eval()
    fit = dp.fits(x, mode="eval")
    peaks_beside(fit, ids, lambda: evaluate(dp, x), rel=0.05 if model == "perceptron" else 0.1)


def test_gradients_of_one_replica_wait_for_those_of_the_other():
    """Of two on one GPU that run on threads: the whole of the first one's. Here they outweigh what
    the forwards take."""
    dp, x = wrapped("perceptron", [0, 0])

    def train():
        for _ in range(4):
            dp.zero_grad(set_to_none=True)
            dp(x).square().mean().backward()

    peaks_beside(dp.fits(x), [0, 0], train, rel=0.05)


def test_a_step_that_does_not_fit(ids):
    dp, x = wrapped("perceptron", ids)
    total = torch.cuda.mem_get_info(0)[1]  # what is free is for other processes, too
    rows = total // (2048 * 4)
    fit = dp.fits(x[:1].expand(rows, 2048))
    assert not fit and not fit.devices["cuda:0"].fits and "too little" in str(fit)
    dp(x).sum().backward()


def test_a_step_that_a_fraction_of_the_memory_has_no_room_for(ids):
    dp, x = wrapped("perceptron", ids)
    free = memory.free_bytes(gpus_of(ids)[0])
    assert dp.fits(x)
    total = torch.cuda.mem_get_info(0)[1]
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_allocated(0) / total, 0)
    try:
        told = hasattr(torch.cuda.memory, "get_per_process_memory_fraction")
        assert memory.free_bytes(torch.device("cuda", 0)) < (2 * MIB if told else free + 1)
        assert bool(dp.fits(x)) is not told
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
    dp(x).sum().backward()


def test_fits_leaves_only_the_libraries_workspaces(ids):
    dp, x = wrapped("attention", ids)
    dp.fits(x)
    gc.collect()
    before = [torch.cuda.memory_allocated(device) for device in gpus_of(ids)]
    states = [torch.cuda.get_rng_state(device) for device in gpus_of(ids)]
    for mode in ("train", "eval"):
        dp.fits(x, mode=mode)
    gc.collect()
    assert [torch.cuda.memory_allocated(device) for device in gpus_of(ids)] == before
    after = [torch.cuda.get_rng_state(device) for device in gpus_of(ids)]
    assert all(torch.equal(a, b) for a, b in zip(states, after, strict=True))


def test_what_a_wrapper_holds(ids):
    dp, x = wrapped("attention", ids)
    for device in gpus_of(ids):
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(3):
        dp.zero_grad(set_to_none=True)
        dp(x).sum().backward()
    wait(ids)
    found = dp.memory()
    size_bytes = sum(p.nbytes for p in dp.parameters())
    assert list(found) == list(map(str, gpus_of(ids)))
    for k, (device, row) in enumerate(zip(gpus_of(ids), found.values())):
        assert row["parameters"] == (size_bytes if k == 0 else 0)
        if k == 0:
            assert size_bytes <= row["gradients"] <= 1.1 * size_bytes
        else:
            assert row["gradients"] == 0
        copies = ids.count(device.index) - (k == 0)
        assert row["replicas"] == pytest.approx(copies * size_bytes, rel=0.01)
        assert row["allocated"] == torch.cuda.memory_allocated(device)
        known = row["parameters"] + row["gradients"] + row["others"]
        assert row["allocated"] == known or row["others"] == 0
        assert row["activations_peak"] > x.nbytes // len(ids)
        assert row["allocated"] < row["allocated_peak"] <= row["total"]
        free, total = torch.cuda.mem_get_info(device)
        assert row["total"] == total and 0 <= row["free"] <= total
    # Small gradients are packed where they are made; home reads them there.
    assert len(gpus_of(ids)) == 1 or found[str(gpus_of(ids)[1])]["buckets"] > 0
    assert str(found).splitlines()[0].split() == list(found)


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_validation_gives_back_what_it_took(ids, engine):
    if engine == "graph" and fastdp.captures.reason_against(gpus_of(ids)):
        pytest.skip("needs torch 2.8: external events")
    dp, x = wrapped("attention", ids, engine=engine)

    def train():
        dp.zero_grad(set_to_none=True)
        dp(x).sum().backward()

    def evaluate():
        with torch.no_grad():
            for _ in range(4):
                dp(torch.cat([x, x]))

    for _ in range(5):
        train()
    with fastdp.validation(dp):  # what libraries take at a first use is no question of this test
        evaluate()
    train()
    wait(ids)
    before = dp.memory()
    kept = []
    with fastdp.validation(dp, reserve_bytes=2**20) as context:
        evaluate()
        kept.append(torch.ones(5 * MIB, dtype=torch.uint8, device=ids[0]))
    after = dp.memory()
    for device, row in after.items():
        left = 5 * MIB if device == "cuda:0" else 0
        # A step's last gradients are held until the next forward: they may have gone back, too.
        assert row["allocated"] <= before[device]["allocated"] + left
        assert row["graphs"] == before[device]["graphs"] and row["buckets"] == 0
        assert row["left_by_validation"] == context.left_bytes[device] <= left + MIB
        # Segments are given back whole; the largest has room for what is in use in it.
        assert row["reserved"] - row["allocated"] <= before[device]["reserved"]
    kept.clear()
    train()


def test_too_little_for_a_validation(ids, monkeypatch):
    """On a GPU of which the system has nothing left, whatever other processes take meanwhile."""
    dp, _ = wrapped("perceptron", ids)
    last = gpus_of(ids)[-1]
    total = torch.cuda.mem_get_info(last)[1]

    def full(device):
        return (0 if device == last else total), total

    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    hold = torch.empty(256 * MIB, dtype=torch.uint8, device=last)
    free = memory.free_bytes(last)
    wanted = free + 200 * MIB
    with pytest.raises(MemoryError, match=rf"{last} has {free} bytes free .* but {wanted} \("):
        with fastdp.validation(dp, reserve_bytes=wanted):
            pytest.fail("the block was entered")
    del hold  # torch keeps it, which counts as free
    with fastdp.validation(dp, reserve_bytes=wanted):
        pass


def test_a_first_gpu_that_holds_more_is_told_of():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    dp, x = wrapped("perceptron", [0, 1])
    for device in gpus_of([0, 1]):
        torch.cuda.reset_peak_memory_stats(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            dp(x).sum().backward()
    dp = fastdp.DataParallel(dp.module, [0, 1])
    held = torch.empty(5 * GIB, dtype=torch.uint8, device="cuda:0")
    with pytest.warns(fastdp.DataParallelWarning, match="cuda:0 holds .* more than any other GPU"):
        for _ in range(3):
            dp(x).sum().backward()
    assert held.is_cuda
