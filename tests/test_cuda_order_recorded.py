"""As test_cuda_order.py, of recorded steps: delays inside the graphs, which are chosen when they
are recorded, and around them, at every step; NaN in all memory that a step fills anew."""

import contextlib

import pytest
import torch
from conftest import no_cuda_reason
from cuda_segments import Delayed, Synchronised
from gpu_lists import EIGHT, need, on_way
from test_cuda_order import SPOILT, differing, distinct
from torch import nn
from torch.nn import functional as F

import fastdp
from fastdp import backwards, recordings, tapes
from fastdp.recordings import Recording

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("same_kernels"),
    pytest.mark.skipif(no_cuda_reason() is not None, reason=str(no_cuda_reason())),
]

STEPS, WIDTH, LAYERS = 8, 64, 9
# Rows of a batch. The larger one's slices are moved by a copy engine (FDP_PEER_DIRECT_BYTES).
SMALL, LARGE = 8, 160_000

WAYS = [("auto", 0, 0), ("always", 0, 1), ("always", 1, 0), ("never", 0, 1)]
WAYS += [("always", 3, 1), ("always", 3, 2, 1, 0), ("always", *EIGHT[2])]


@pytest.fixture(params=WAYS, ids=str)
def ids(request, monkeypatch):
    return on_way(request.param, monkeypatch)


@pytest.fixture(params=["packed", "where they are made"])
def gradients(request, monkeypatch):
    """Where a recorded backward leaves them."""
    monkeypatch.setattr(tapes, "_LARGE_BYTES", 2**40 if request.param == "packed" else 0)


class Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, way):
        ctx.way = way
        way.segment(x.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.way.segment(gradient.device)
        return gradient, None


class Net(nn.Module):
    """Layers of a bucket each, with a delay before each of their forwards and backwards. The first
    weight is also the last one's, so its gradient is added up from two. `wide`: before them all one
    of which a few rows are used, so large that its gradient is copied to the first GPU before it is
    summed (FDP_PEER_FETCH_BYTES)."""

    def __init__(self, wide=False):
        super().__init__()
        rows = 2**25 // (4 * WIDTH) + 1000
        self.wide = nn.Parameter(torch.ones(rows, WIDTH)) if wide else None
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.way = None

    def forward(self, x):
        if self.wide is not None:
            x = x * self.wide[5:6] + self.wide[-1:]
        for layer in self.layers:
            if not torch.cuda.is_current_stream_capturing() or not isinstance(
                self.way, Synchronised
            ):
                x = Hold.apply(x, self.way)
            x = torch.tanh(layer(x))
        return F.linear(self.norm(x), self.layers[0].weight)


@contextlib.contextmanager
def late(monkeypatch, way):
    """Inside, what a recorded step does around its graphs goes through `way`."""
    send, forward = Recording._send, Recording.forward
    backward, into = Recording.backward, backwards.Sums.into

    @contextlib.contextmanager
    def late_phase(*args):
        way.segment()
        yield
        way.segment()

    def late_send(self, tensors):
        with self._communication.current():
            for flat in [flat for flats in self._flats for flat in flats]:
                way.poison(flat)
        send(self, tensors)

    def poison_all(gradients):
        with torch.no_grad():
            for gradient in gradients:
                if gradient is not None:
                    way.poison(gradient)

    def late_forward(self, call):
        # What a backward made may lie where the next forward has its activations: it is read no
        # longer when that begins, and may be spoilt then, not later.
        made = [rows for each in self._backwards for rows in each.made]
        poison_all([gradient for rows in made for row in rows for gradient in row])
        way.segment()
        return forward(self, call)

    def late_backward(self, call, gradients):
        poison_all([packed for tape in self._tapes for packed in tape.packed])
        way.segment()
        return backward(self, call, gradients)

    def late_into(self, flat, among):
        way.poison(flat)
        return into(self, flat, among)

    with monkeypatch.context() as patch:
        patch.setattr(recordings, "phase", late_phase)
        patch.setattr(recordings, "bucket_phase", late_phase)
        patch.setattr(Recording, "_send", late_send)
        patch.setattr(Recording, "forward", late_forward)
        patch.setattr(Recording, "backward", late_backward)
        patch.setattr(backwards.Sums, "into", late_into)
        yield


def trained(monkeypatch, ids, way, size, wide=False, pinned=False):
    """All outputs, gradients and weights of some steps. Each batch is overwritten at once."""
    torch.manual_seed(0)
    home = torch.device("cuda", ids[0])
    module = Net(wide).to(home)
    module.way = way
    dp = fastdp.DataParallel(module, ids, bucket_bytes=20_000, engine="graph")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    trace = []
    with late(monkeypatch, way):
        for k in range(STEPS):
            generator = torch.Generator(device=home).manual_seed(k)
            x = torch.randn(size, WIDTH, generator=generator, device=home)
            optimizer.zero_grad(set_to_none=True)
            if pinned:
                out = dp(x.cpu().pin_memory())
                # The same memory, if it was let go too early.
                torch.empty(x.shape, pin_memory=True).fill_(SPOILT[x.dtype])
            else:
                out = dp(x)
                x.fill_(SPOILT[x.dtype])
            trace.append(out.detach()[:: max(size // 8, 1)].clone())
            out.square().mean().backward()
            del out, x
            trace += [parameter.grad.clone() for parameter in module.parameters()]
            optimizer.step()
        trace += [tensor.clone() for tensor in module.state_dict().values()]
    for device in distinct(ids):
        torch.cuda.synchronize(device)
    (forward,) = dp.report()["forwards"]
    assert forward["steps"]["graph"] >= STEPS - 4, dp.report()["reasons"]
    assert len(dp.report()["buckets"]) >= LAYERS
    return [tensor.cpu() for tensor in trace]


def check(monkeypatch, ids, *options, **more):
    reference = trained(monkeypatch, ids, Synchronised(distinct(ids)), *options, **more)
    for tensor in reference:
        assert not tensor.is_floating_point() or tensor.isfinite().all()
    for seed in (1, 2, 3):
        trace = trained(monkeypatch, ids, Delayed(distinct(ids), seed), *options, **more)
        wrong = differing(trace, reference)
        assert not wrong, f"seed {seed}: of {len(trace)} tensors, these differ: {wrong}"


@pytest.mark.row("H8")
@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_recorded_steps_under_delays(monkeypatch, ids, gradients, size):
    check(monkeypatch, ids, size)


@pytest.mark.row("H8")
def test_a_very_large_gradient_under_delays(monkeypatch, ids):
    check(monkeypatch, ids, SMALL, wide=True)


@pytest.mark.row("H8")
def test_pinned_arguments_under_delays(monkeypatch, ids):
    check(monkeypatch, ids, LARGE, pinned=True)


def test_a_gradient_that_is_not_waited_for_shows(monkeypatch):
    """Of the test itself."""
    ids = need([0, 1])
    monkeypatch.setenv("FASTDP_OVERLAP", "always")
    monkeypatch.setattr(tapes, "_LARGE_BYTES", 0)
    reference = trained(monkeypatch, ids, Synchronised(distinct(ids)), SMALL)
    init = backwards.Sums.__init__

    def deaf(self, *args):
        init(self, *args)
        self._ready = []

    monkeypatch.setattr(backwards.Sums, "__init__", deaf)
    found = [trained(monkeypatch, ids, Delayed(distinct(ids), s), SMALL) for s in (1, 2, 3)]
    assert any(differing(trace, reference) for trace in found)
