"""Parts of the models of engine_nets.py, of all that a forward may do: each makes (rows, WIDTH) of
the same, and may read the ids of words."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

WIDTH = 4
WORDS = 5


@dataclasses.dataclass
class Record:
    rows: Any
    rest: Any = None


def linear(bias=True):
    return nn.Linear(WIDTH, WIDTH, bias=bias).double()


class Layer(nn.Module):
    """A linear layer that is used `times`, or not at all."""

    def __init__(self, times=1, bias=True):
        super().__init__()
        self.linear, self.times = linear(bias), times

    def forward(self, h, ids):
        for _ in range(self.times):
            h = torch.tanh(self.linear(h))
        return h


class Plain(nn.Module):
    """A module of torch's own."""

    def __init__(self, module):
        super().__init__()
        self.inner = module.double()

    def forward(self, h, ids):
        return self.inner(h)


class Words(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, **options).double()

    def forward(self, h, ids):
        return h if ids is None else h + self.table(ids)


class Loose(nn.Module):
    """Parameters of many kinds, some of which get no gradient."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.none = nn.Parameter(torch.zeros(0, WIDTH, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.fixed = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64).t())
        self.small = nn.Parameter(torch.ones(WIDTH))
        self.parts = nn.ParameterList([torch.randn(WIDTH, dtype=torch.float64) for _ in range(2)])
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))
        self.register_parameter("nothing", None)

    def forward(self, h, ids):
        h = h @ self.turned * self.gain * self.small.to(h.dtype) + self.fixed.to(h.dtype)
        h = h + self.parts[0] * self.parts[1] + self.none.sum()
        return torch.tanh((h * self.phase).real.to(h.dtype))


class Buffers(nn.Module):
    """Buffers that the forward writes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("mask", torch.ones(WIDTH, dtype=torch.bool), persistent=False)

    def forward(self, h, ids):
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.mean.mul_(0.5).add_(h.mean(0), alpha=0.5)
                self.mask.logical_not_()
        return h * self.mask + self.mean.clone() + self.count


class Rebinds(nn.Module):
    """A buffer that is bound anew: lost in a replica, kept where the module itself runs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, h, ids):
        self.shift = self.shift + 1
        return h + self.shift


class Counts(nn.Module):
    """An attribute that the forward changes."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, h, ids):
        self.calls += 1
        return h * (1 + self.calls % 3)


class Reads(nn.Module):
    """Attributes that the user may change."""

    def __init__(self):
        super().__init__()
        self.rate, self.deep, self.items = 1.0, False, {"gain": [1, 2.0], "set": {1}}
        self.first, self.second = linear(), linear()
        self.plain = torch.linspace(0, 1, WIDTH, dtype=torch.float64)

    def forward(self, h, ids):
        h = self.second(self.first(h)) if self.deep else self.first(h)
        h = torch.tanh(h * self.rate) * self.items["gain"][0]
        return h + len(self.items["set"]) + self.plain.to(h)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight):
        ctx.save_for_backward(h, weight)
        signs = h.sign()
        ctx.mark_non_differentiable(signs)
        return h * weight, signs

    @staticmethod
    def backward(ctx, gradient, _):
        h, weight = ctx.saved_tensors
        return gradient * weight * 2, (gradient * h).sum(0) if ctx.needs_input_grad[1] else None


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))

    def forward(self, h, ids):
        h, signs = _Double.apply(h, self.weight)
        return h.add_(signs)


class Recomputed(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.linear, self.options = linear(), options

    def forward(self, h, ids):
        return checkpoint(lambda h: torch.tanh(self.linear(h)), h, **self.options)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, h, ids):
        h = self.linear(h)
        h.mul_(2)
        h[:, 0] += 1
        h[:, 1:].add_(h[:, :1].detach())
        return h.relu_()


class Detached(nn.Module):
    """Parts without a gradient, a hook on a tensor, and a gradient inside."""

    def __init__(self):
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, h, ids):
        with torch.no_grad():
            fixed = torch.tanh(self.first(h))
        if h.requires_grad:
            h = h * 1
            h.register_hook(lambda gradient: gradient * 0.5)
        return torch.tanh(self.second(h)) + fixed + self.first.weight.detach().sum(0)


class Force(nn.Module):
    """A gradient inside of the forward, as of an energy."""

    def __init__(self):
        super().__init__()
        self.energy = linear()

    def forward(self, h, ids):
        with torch.enable_grad():
            place = h.detach().requires_grad_()
            energy = torch.tanh(self.energy(place)).square().sum()
            (force,) = torch.autograd.grad(energy, place, create_graph=self.training)
        return h - force


class Halved(nn.Module):
    def forward(self, weight):
        return weight * 0.5


def parametrized():
    module = linear()
    parametrize.register_parametrization(module, "weight", Halved())
    return Plain(module)


class Nested(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.parts = nn.ModuleDict({f"part {k}": block for k, block in enumerate(blocks)})

    def forward(self, h, ids):
        return functools.reduce(lambda h, part: part(h, ids), self.parts.values(), h)


class Gru(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True).double()

    def forward(self, h, ids):
        return self.cell(h.unsqueeze(1))[0].squeeze(1)


class Soft(nn.Module):
    """Buffers that get gradients, that lie in each other, and that several names have."""

    def __init__(self):
        super().__init__()
        whole = torch.ones(2, WIDTH, dtype=torch.float64)
        self.register_buffer("whole", whole)
        self.register_buffer("part", whole[1])
        self.register_buffer("same", whole)
        self.register_buffer("soft", torch.ones(WIDTH, dtype=torch.float64, requires_grad=True))

    def forward(self, h, ids):
        if self.training:
            with torch.no_grad():
                self.part.mul_(-0.5)
        return torch.tanh(h * self.soft + self.whole.sum(0) + self.same[0])


class Lean(nn.Module):
    """Settings in objects, methods that are bound, and a branch on the batch."""

    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace(scale=0.5, names=["a", "b"])
        self.record = Record(2.0, {"deep": [1.0]})
        self.act = self._first
        self.linear = linear()

    def _first(self, h):
        return torch.tanh(h)

    def _second(self, h):
        return torch.relu(h) * 0.5

    def forward(self, h, ids):
        h = self.act(self.linear(h) * self.config.scale) * self.record.rows
        if h.shape[0] % 2:
            h = h + len(self.config.names)
        return h * self.record.rest["deep"][0]


class Follows(nn.Module):
    """Parameters that the forward writes, as a key encoder's momentum."""

    def __init__(self, other_memory=False):
        super().__init__()
        self.query, self.key = linear(), linear().requires_grad_(False)
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.other_memory = other_memory

    def forward(self, h, ids):
        with torch.no_grad():
            self.key.weight.mul_(0.75).add_(self.query.weight, alpha=0.25)
            if self.other_memory:
                self.mean.data = self.mean.data * 0.5 + h.mean(0)
        return torch.tanh(self.query(h) * self.key(h.detach()) + self.mean)


class Holds(nn.Module):
    """A part that is not registered."""

    def __init__(self):
        super().__init__()
        self.linear, self.held = linear(), [Reads().requires_grad_(False)]

    def forward(self, h, ids):
        return self.linear(h) + self.held[0].double()(h.double(), ids).to(h.dtype)


class Foreign(nn.Module):
    """A tensor that needs gradients and is no parameter."""

    def __init__(self):
        super().__init__()
        self.held = [torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)]

    def forward(self, h, ids):
        return h * self.held[0].to(h.device)


def _norm(track):
    return Plain(nn.BatchNorm1d(WIDTH, track_running_stats=track))


BLOCKS = {
    "layer": Layer,
    "without bias": lambda: Layer(bias=False),
    "twice": lambda: Layer(2),
    "unused": lambda: Layer(0),
    "norm": lambda: _norm(True),
    "stateless norm": lambda: _norm(False),
    "layer norm": lambda: Plain(nn.LayerNorm(WIDTH)),
    "words": Words,
    "padded words": lambda: Words(padding_idx=0),
    "loose": Loose,
    "buffers": Buffers,
    "reads": Reads,
    "custom": Custom,
    "checkpoint": lambda: Recomputed(use_reentrant=False, preserve_rng_state=False),
    "in place": InPlace,
    "detached": Detached,
    "force": Force,
    "parametrized": parametrized,
    "weight norm": lambda: Plain(nn.utils.parametrizations.weight_norm(linear())),
    "spectral norm": lambda: Plain(nn.utils.parametrizations.spectral_norm(linear())),
    "gru": Gru,
    "lean": Lean,
    "follows": Follows,
    "holds": Holds,
    "relu": lambda: Plain(nn.Sequential(nn.Identity(), linear(), nn.ReLU(inplace=True))),
}
# What is never recorded, or not from some point on: the numbers are to be right all the same.
UNRECORDED = {
    "rebinds": Rebinds,
    "counts": Counts,
    "foreign": Foreign,
    "soft": Soft,
    "other memory": lambda: Follows(True),
    "dropout": lambda: Plain(nn.Dropout(0.5)),
    "old weight norm": lambda: Plain(nn.utils.weight_norm(linear())),
    "sparse words": lambda: Words(sparse=True),
    "checkpoint, reentrant": lambda: Recomputed(use_reentrant=True),
    "checkpoint, random": lambda: Recomputed(use_reentrant=False),
}
