"""Small models at random: what the programs of engine_programs.py train. A model is a chain of
blocks (engine_blocks.py), and a way to give outputs."""

from __future__ import annotations

import collections

import torch
from engine_blocks import BLOCKS, UNRECORDED, Nested, Record, linear
from torch import nn

Named = collections.namedtuple("Named", "rows sums")

OUTPUTS = {
    "tensor": lambda net, h, x: h,
    "tuple": lambda net, h, x: (h, h.sum(1), None),
    "list": lambda net, h, x: [h[:, :2], h[:, 2:], h.argmax(1)],
    "dictionary": lambda net, h, x: {"rows": h, "fixed": h.detach(), "again": h, "none": None},
    "record": lambda net, h, x: Record(h * 2, {"sums": h.sum(1), "input": x + 0}),
    "named": lambda net, h, x: Named(h, (h.sum(), h.detach().mean())),
    "loss": lambda net, h, x: h.square().mean(),
    "views": lambda net, h, x: (h, h.t().contiguous().t(), h.view(-1, 2, 2), h.unsqueeze(1)),
    "constants": lambda net, h, x: (h, net.head.weight.detach().sum().expand(h.shape[0])),
    "parameters": lambda net, h, x: (h, net.head.weight[:1] * 1, net.head.bias.unsqueeze(0) * 1),
    "lazy": lambda net, h, x: (
        h,
        torch.complex(h, h * 2).conj(),
        torch.complex(h, x * 1).conj().imag,
    ),
    "aside": lambda net, h, x: (h, net.aside(x), "text", 3),
}


class Net(nn.Module):
    def __init__(self, blocks, output):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = linear()
        self.aside = linear()
        self.output, self.explodes = output, False

    def forward(self, x, ids=None, *, scale=1.0, extra=None):
        h = x * scale
        for block in self.blocks:
            h = block(h, ids)
        if extra is not None:
            h = h + extra["shift"]
        if self.explodes:
            raise ValueError("the forward fails")
        return OUTPUTS[self.output](self, self.head(h), x)


def net_of(rng, tame=True):
    """(a model, the names of what is in it)."""
    torch.manual_seed(rng.randrange(10**6))
    names = [rng.choice(list(BLOCKS)) for _ in range(rng.randint(1, 5))]
    if not tame:
        names.insert(rng.randrange(len(names) + 1), rng.choice(list(UNRECORDED)))
    blocks = [{**BLOCKS, **UNRECORDED}[name]() for name in names]
    if rng.random() < 0.3:
        blocks = [Nested(blocks[:2]), *blocks[2:]]
    if rng.random() < 0.3:
        blocks.append(blocks[0])  # one module in two places
    output = rng.choice(list(OUTPUTS))
    net = Net(blocks, output)
    found = [m for m in net.modules() if isinstance(m, nn.Linear) and "weight" in m._parameters]
    if len(found) > 2 and rng.random() < 0.3:
        found[0].weight = found[-1].weight
        names.append("tied")
    for parameter in net.parameters():
        if rng.random() < 0.1:
            parameter.requires_grad_(False)
    return net, (*names, output)
