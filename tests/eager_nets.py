"""More models for programs of eager_programs.py: blocks beside those of engine_nets.py, and a net
that takes and gives containers of all kinds, or nothing."""

from __future__ import annotations

import collections
import dataclasses

import torch
from engine_blocks import BLOCKS, UNRECORDED, WIDTH, Plain, linear
from engine_nets import Named, Net
from engine_nets import net_of as engine_net_of
from torch import nn
from torch.nn.utils import rnn


class Mine(dict):
    pass


class Row(list):
    pass


class Few(tuple):
    pass


@dataclasses.dataclass
class Held:
    """Goes whole to every replica."""

    gain: float
    fixed: torch.Tensor


class Lost(ValueError):
    pass


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, num_layers=2, bidirectional=True).double()

    def forward(self, h, ids):
        lengths = torch.arange(h.shape[0]) % 3 + 1
        steps = torch.stack([h, h * 0.5, -h])
        packed = rnn.pack_padded_sequence(steps, lengths, enforce_sorted=False)
        out, (hidden, _) = self.cell(packed)
        return rnn.pad_packed_sequence(out)[0].sum(0)[:, :WIDTH] + hidden[0]


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.jit.script(nn.Sequential(linear(), nn.Tanh()))

    def forward(self, h, ids):
        return self.inner(h)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(
            WIDTH, 2, 6, dropout=0.0, batch_first=True, dtype=torch.float64
        )

    def forward(self, h, ids):
        return self.inner(h.unsqueeze(1)).squeeze(1)


class Cast(nn.Module):
    """Autocast in a part, and off in another."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h, ids):
        rows = h.to(self.first.weight.dtype)
        with torch.autocast("cpu", torch.bfloat16):
            half = self.first(self.first(rows).float())
            with torch.autocast("cpu", enabled=False):
                rest = self.second(rows)
        return (half.to(rest.dtype) + rest).to(h.dtype)


class Kept(nn.Module):
    """Writes into a list that all replicas share, and binds what is lost."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen, self.last = linear(), [], None

    def forward(self, h, ids):
        self.last = h.detach()
        self.seen.append(h.shape[0])
        return self.linear(h) + self.last


class Clamps(nn.Module):
    """Writes its own weight. With gradients torch refuses that of replica 0."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, h, ids):
        if not torch.is_grad_enabled():
            self.linear.weight.clamp_(-0.2, 0.2)
        return self.linear(h)


class Teacher(nn.Module):
    """A moving average in a part without gradients."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = linear(), linear().requires_grad_(False)

    def forward(self, h, ids):
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.student.weight, 0.1)
        with torch.no_grad():
            aim = torch.tanh(self.teacher(h))
        return self.student(h) - aim


class Dictionary(nn.Module):
    def __init__(self):
        super().__init__()
        values = {name: torch.rand(WIDTH, dtype=torch.float64) for name in "ab"}
        self.parts = nn.ParameterDict(values)

    def forward(self, h, ids):
        for value in self.parts.values():
            h = h * value
        return h


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 1).double().to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(WIDTH, momentum=None).double()

    def forward(self, h, ids):
        return self.norm(self.conv(h[:, :, None, None].expand(-1, -1, 2, 3))).mean((2, 3))


class Renormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, max_norm=0.7).double()

    def forward(self, h, ids):
        self.table.max_norm = None if torch.is_grad_enabled() else 0.7
        return h if ids is None else h + self.table(ids)


class Extra(nn.Module):
    """State beside parameters and buffers."""

    def __init__(self):
        super().__init__()
        self.linear, self.note = linear(), 1

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state + 1

    def forward(self, h, ids):
        return self.linear(h) * (1 + self.note % 3)


class Walks(nn.Module):
    """Looks at its own parts, as losses and regularizers do."""

    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(linear(), nn.Tanh(), linear())
        self.register_buffer("mask", torch.tensor([True, False, True, True]))

    def forward(self, h, ids):
        total = sum(m.weight.square().sum() for m in self.modules() if isinstance(m, nn.Linear))
        for _, child in self.parts.named_children():
            h = child(h)
        return h * self.mask + total * 0.01


def old_spectral_norm():
    return Plain(nn.utils.spectral_norm(linear()))


def orthogonal():
    return Plain(nn.utils.parametrizations.orthogonal(linear()))


MORE = {
    "packed": Packed, "scripted": Scripted, "attention": Attention, "cast": Cast, "kept": Kept,
    "clamps": Clamps, "teacher": Teacher, "dictionary": Dictionary, "conv": Conv,
    "renormed": Renormed, "extra": Extra, "walks": Walks, "old spectral norm": old_spectral_norm,
    "orthogonal": orthogonal,
    "instance norm": lambda: Plain(nn.Sequential(nn.Unflatten(1, (1, WIDTH)),
        nn.InstanceNorm1d(1, track_running_stats=True, affine=True), nn.Flatten(1))),
}  # fmt: skip
# What draws at random does so in the order in which replicas come to it; the others' gradients are
# summed in another order: each replica's alone, or what is sparse.
LEFT_OUT = {"dropout", "checkpoint, reentrant", "sparse words"}
ALL = {**BLOCKS, **{k: v for k, v in UNRECORDED.items() if k not in LEFT_OUT}, **MORE}

GIVEN = {
    "ordered": lambda h: collections.OrderedDict(b=h, a=(h.sum(1), [h.detach()])),
    "default": lambda h: {"deep": {1: {"x": h}, (2, 3): [None, h * 2]}},
    "mine": lambda h: Mine(z=h, y=Named(h * 2, h.mean())),
    "row": lambda h: Row([h, Few([h.sum(1), h])]),
    "empty": lambda h: (h, [], {}, ()),
    "kinds": lambda h: (h, h > 0, h.argmax(1), h.float(), h.bfloat16(), torch.complex(h, h)),
    "scalars": lambda h: [h.mean(), h.sum(), h.detach().max()],
    "same": lambda h: [h, h, h.view(h.shape)],
    "turned": lambda h: (h.t(), h[:, :0], h.unsqueeze(-1)),
    "nothing": lambda h: None,
}


class Rich(Net):
    """`tree` may be anything with tensors of as many rows in it; without x there is a batch of its
    own. `who` says which rows these are, and those of `fails` fail."""

    def forward(self, x=None, ids=None, *, scale=1.0, extra=None, tree=None, who=None):
        if x is None and self.blank:
            x = self.head.weight.detach() * 1
        if who is not None and self.fails is not None and bool((who == self.fails[0]).any()):
            raise self.fails[1]
        x = x + sum(leaf.to(x.dtype).flatten(1).sum(1, True) for leaf in leaves(tree))
        if self.gain is not None:
            x = x * self.gain
        if self.flat:
            x = x.contiguous()
        given = super().forward(x, ids, scale=scale, extra=extra)
        if self.gives is None:
            return given
        return GIVEN[self.gives](given)


def leaves(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, Held):
        return [tree.fixed[:1] * tree.gain]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return (
        [leaf for child in tree for leaf in leaves(child)]
        if isinstance(tree, (list, tuple))
        else []
    )


def net_of(rng):
    """(a model, what is in it): one of engine_nets.py, or with other blocks."""
    tame, names = rng.random() < 0.3, []
    net, names = engine_net_of(rng, True)
    if not tame:
        blocks = list(net.blocks)
        for _ in range(rng.randint(1, 3)):
            name = rng.choice(list(ALL))
            block = ALL[name]()
            blocks.insert(rng.randrange(len(blocks) + 1), block)
            names = (*names, name)
        net.blocks = nn.ModuleList(blocks)
    net.__class__ = Rich
    net.register_parameter("gain", None)
    net.fails, net.gives, net.blank = None, None, False
    if net.output in ("record", "aside"):
        net.output = "tensor"  # torch's own joins no such
    # How products of what is turned are made depends on whether the weights need gradients, which
    # without a graph those of torch's replica 0 do alone.
    turning = (nn.RNNBase, nn.TransformerEncoderLayer)
    net.flat = any(isinstance(module, turning) for module in net.modules())
    if rng.random() < 0.5:
        net.output, net.gives = "tensor", rng.choice(list(GIVEN))
    return net, (*names, net.output, net.gives)
