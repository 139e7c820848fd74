"""Order on the streams of real GPUs: whole training steps under seeded delays, with NaN in all
memory that is free, give the bits of a fully synchronised run (cuda_segments.py)."""

import contextlib
import functools
import warnings

import pytest
import torch
from conftest import no_cuda_reason
from cuda_segments import Delayed, Synchronised, hook_layers, ordered
from gpu_lists import EIGHT, on_way
from torch import nn
from torch.nn import functional as F

import fastdp
from fastdp.streams import Communication, Snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("same_kernels"),
    pytest.mark.skipif(no_cuda_reason() is not None, reason=str(no_cuda_reason())),
]

STEPS, BATCH, WIDTH = 3, 8, 64


WAYS = [("auto", 0, 0), ("always", 0, 1), ("always", 1, 0), ("never", 0, 1)]
WAYS += [("always", 3, 1), ("always", 3, 2, 1, 0), ("always", *EIGHT[2]), ("never", *EIGHT[0])]


@pytest.fixture(params=WAYS, ids=str)
def ids(request, monkeypatch):
    """Two replicas or more, moves of their parameters hidden or not."""
    return on_way(request.param, monkeypatch)


@pytest.fixture
def pair(monkeypatch):
    """Two GPUs, moves hidden."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.setenv("FASTDP_OVERLAP", "always")
    return [0, 1]


# Models. Buckets are so small that each has six or more.


def mlp(activation=nn.ReLU):
    layers = [layer for _ in range(7) for layer in (nn.Linear(WIDTH, WIDTH), activation())]
    return nn.Sequential(*layers)


def cnn():
    layers, channels = [], 3
    for _ in range(4):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
        channels = 16
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 8 * 8, 10))


class Tied(nn.Module):
    """The embedding's weight is also the last layer's, which is read past its owner."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, WIDTH)
        self.body = mlp(nn.Tanh)

    def forward(self, x):
        return F.linear(self.body(self.words(x)), self.words.weight)


MODELS = {
    # name: (model, one batch on the host, bucket_bytes)
    "mlp": (mlp, lambda: torch.randn(BATCH, WIDTH), 20_000),
    "cnn": (cnn, lambda: torch.randn(BATCH, 3, 8, 8), 4_000),
    "tied": (Tied, lambda: torch.randint(0, 50, (BATCH, 5)), 20_000),
    "smooth": (functools.partial(mlp, nn.Softplus), lambda: torch.randn(BATCH, WIDTH), 20_000),
}

SPOILT = {torch.float32: float("nan"), torch.int64: 0}


def on_gpu(batch, home):
    return batch.to(home, copy=True)


def pinned(batch, home):
    return batch.clone().pin_memory()


def pageable(batch, home):
    return batch.clone()


class Training:
    """Some steps of one model; `trace` has all that must be the same bits in every run."""

    def __init__(self, name, ids, place=on_gpu, penalty=None, micro_batches=1):
        make, self._batch, limit_bytes = MODELS[name]
        torch.manual_seed(0)
        self.home = torch.device("cuda", ids[0])
        self.module = make().to(self.home)
        self.dp = fastdp.DataParallel(self.module, device_ids=ids, bucket_bytes=limit_bytes)
        self._place, self._penalty, self._micro_batches = place, penalty, micro_batches
        self._batches = [self._batch() for _ in range(STEPS * micro_batches)]
        self.trace = []

    def keep(self, tensors):
        self.trace += [tensor.detach().clone() for tensor in tensors]

    def forward(self, k):
        """The input is overwritten, where that is allowed, and freed before anything has run."""
        x = self._place(self._batches[k], self.home)
        if self._penalty == "input":
            x.requires_grad_()
            return self.dp(x), x
        out = self.dp(x)
        kind, shape, dtype = self._place, x.shape, x.dtype
        if kind is not pinned:
            x.fill_(SPOILT[dtype])
        del x
        if kind is pinned:
            # The same memory, if it was let go too early.
            for _ in range(2):
                torch.empty(shape, dtype=dtype, pin_memory=True).fill_(SPOILT[dtype])
        return out, None

    def step(self, way, optimizer, k):
        way.segment()
        optimizer.zero_grad(set_to_none=True)
        for i in range(self._micro_batches):
            out, x = self.forward(k * self._micro_batches + i)
            self.keep([out])
            loss = out.square().mean()
            if self._penalty == "input":
                (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
                loss = loss + gradient.square().mean()
            elif self._penalty == "some weights":
                found = torch.autograd.grad(loss, [*self.module.parameters()], create_graph=True)
                loss = loss + sum(gradient.square().mean() for gradient in found[::-2])
                del found
            loss.backward()
            del out, loss
        self.keep([parameter.grad for parameter in self.module.parameters()])
        way.segment()
        optimizer.step()
        with torch.no_grad():
            for _ in range(2):  # one behind the other, with nothing in between
                self.keep([self.dp(self._place(self._batches[k], self.home))])

    def run(self, way):
        hook_layers(self.module, way)
        optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.9)
        for k in range(STEPS):
            self.step(way, optimizer, k)
        self.keep(self.module.state_dict().values())
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
        return [tensor.cpu() for tensor in self.trace]


def trained(monkeypatch, way, around=contextlib.nullcontext, **options):
    training = Training(**options)
    for device in set(options["ids"]):
        torch.cuda.synchronize(device)
    with ordered(monkeypatch, way), around():
        trace = training.run(way)
    assert buckets_of(training.dp) >= 6, "the buckets are too large for this test"
    return trace


def buckets_of(dp):
    plans = dp._fastdp_get_runtime().replicator._plans.values()
    return max(len(plan.buckets) for plan in plans)


def distinct(ids):
    return [torch.device("cuda", index) for index in dict.fromkeys(ids)]


def differing(trace, reference):
    assert len(trace) == len(reference)
    return [k for k, (x, y) in enumerate(zip(trace, reference)) if not torch.equal(x, y)]


def check(monkeypatch, ids, seeds=(1, 2), around=contextlib.nullcontext, **options):
    devices = distinct(ids)
    options["ids"] = ids
    reference = trained(monkeypatch, Synchronised(devices), **options)
    for tensor in reference:
        assert not tensor.is_floating_point() or tensor.isfinite().all()
    again = trained(monkeypatch, Synchronised(devices), **options)
    assert not differing(again, reference), "two synchronised runs differ: kernels of this machine"
    for seed in seeds:
        trace = trained(monkeypatch, Delayed(devices, seed), around, **options)
        wrong = differing(trace, reference)
        assert not wrong, f"seed {seed}: of {len(trace)} tensors, these differ: {wrong}"


@pytest.mark.row("H8")
@pytest.mark.parametrize("name", ["mlp", "cnn", "tied"])
def test_steps_under_delays(monkeypatch, ids, name):
    check(monkeypatch, ids, name=name)


@pytest.mark.parametrize("penalty", ["input", "some weights"])
def test_gradient_penalty_under_delays(monkeypatch, ids, penalty):
    """On some of the weights' gradients: those of the others are zeros in a second backward."""
    check(monkeypatch, ids, name="smooth", penalty=penalty)


def test_accumulated_gradients_under_delays(monkeypatch, ids):
    check(monkeypatch, ids, seeds=(3,), name="mlp", micro_batches=2)


@pytest.mark.row("B19")
@pytest.mark.parametrize("place", [pinned, pageable])
def test_host_inputs_that_are_freed_at_once(monkeypatch, ids, place):
    check(monkeypatch, ids, name="mlp", place=place)


@pytest.mark.row("H8")
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_a_caller_on_streams_of_its_own(monkeypatch, ids, name):
    streams = [torch.cuda.Stream(device) for device in distinct(ids)]

    @contextlib.contextmanager
    def around():
        with contextlib.ExitStack() as stack:
            for stream in reversed(streams):  # the home's last: its device stays the current one
                stack.enter_context(torch.cuda.stream(stream))
            yield

    check(monkeypatch, ids, seeds=(4, 5), around=around, name=name)


@pytest.mark.row("H8")
def test_streams_that_change_between_forward_and_backward(monkeypatch, ids):
    """The backward of a forward on other streams is right on the caller's streams."""
    devices = distinct(ids)

    def results(way):
        torch.manual_seed(0)
        module = mlp().to(devices[0])
        hook_layers(module, way)
        dp = fastdp.DataParallel(module, device_ids=ids, bucket_bytes=20_000)
        x = torch.randn(BATCH, WIDTH).to(devices[0])
        torch.cuda.synchronize(devices[0])
        kept = []
        with ordered(monkeypatch, way):
            for _ in range(2):
                side = torch.cuda.Stream(devices[0])
                side.wait_stream(torch.cuda.current_stream(devices[0]))
                with torch.cuda.stream(side):
                    out = dp(x)
                torch.cuda.current_stream(devices[0]).wait_stream(side)
                out.square().mean().backward()
                kept += [parameter.grad.clone() for parameter in module.parameters()]
                module.zero_grad(set_to_none=True)
                side.wait_stream(torch.cuda.current_stream(devices[0]))
        return [tensor.cpu() for tensor in kept]

    reference = results(Synchronised(devices))
    for seed in (6, 7):
        assert not differing(results(Delayed(devices, seed)), reference)


# That a missing wait shows: the same runs without it.


LATE = (6_000_000,)  # 3 ms: Python has enqueued all that a test is about


class LateCommunication(Delayed):
    """Layers are not held up."""

    def segment(self, device=None):
        if device is None:
            super().segment()


class LateCompute(Delayed):
    """Communication is not held up."""

    def segment(self, device=None):
        if device is not None:
            super().segment(device)


def evaluated(monkeypatch, ids, way, forwards=1, change=None):
    """Outputs of forwards without a graph, `change(module)` before each."""
    torch.manual_seed(0)
    home = torch.device("cuda", ids[0])
    module = mlp().to(home)
    hook_layers(module, way)
    dp = fastdp.DataParallel(module, device_ids=ids, bucket_bytes=20_000)
    x = torch.randn(BATCH, WIDTH).to(home)
    outputs = []
    with torch.no_grad():
        dp(x)
        for device in distinct(ids):
            torch.cuda.synchronize(device)
        with ordered(monkeypatch, way):
            for _ in range(forwards):
                if change is not None:
                    way.segment(home)
                    change(module)
                outputs.append(dp(x))
        return [out.cpu() for out in outputs]


def double(module):
    """Between forwards: what an earlier one left in memory must not pass for the new weights."""
    for parameter in module.parameters():
        parameter.mul_(2)


def test_a_read_that_does_not_wait_shows(monkeypatch, pair):
    want = evaluated(monkeypatch, pair, Synchronised(distinct(pair)), change=double)
    late = LateCommunication(distinct(pair), delays=LATE)
    assert not differing(evaluated(monkeypatch, pair, late, change=double), want)
    monkeypatch.setattr(Communication, "arrived", lambda self, device: [])
    assert differing(evaluated(monkeypatch, pair, late, change=double), want)


def test_a_broadcast_that_does_not_wait_shows(monkeypatch, pair):
    want = evaluated(monkeypatch, pair, Synchronised(distinct(pair)), change=double)
    late = LateCompute(distinct(pair), delays=LATE)
    assert not differing(evaluated(monkeypatch, pair, late, change=double), want)
    monkeypatch.setattr(Communication, "begin", lambda self, *compute: Snapshot(self.devices))
    assert differing(evaluated(monkeypatch, pair, late, change=double), want)


def test_forwards_in_deterministic_mode(monkeypatch, ids):
    """There torch fills new memory, on the stream that is current where it is taken: that stream
    may not have waited yet for those that still read what the memory held before."""
    want = evaluated(monkeypatch, ids, Synchronised(distinct(ids)), forwards=4)
    late = LateCompute(distinct(ids), delays=LATE)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # cuBLAS has to be told before its start
            assert not differing(evaluated(monkeypatch, ids, late, forwards=4), want)
    finally:
        torch.use_deterministic_algorithms(False)
