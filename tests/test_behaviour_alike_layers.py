"""BEHAVIOUR A and E, side by side with torch's own: torch's layers, in training and evaluation."""

import pytest
import torch
from alike import check, trained
from nets import ints
from torch import nn

row = pytest.mark.row


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(3, 2)

    def forward(self, x):
        state = None
        for _ in range(3):
            state = self.cell(x, state)
        return state


class Carried(nn.Module):
    """An LSTM that is given the state of the sequence before, samples along dimension 1."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 2, 2)

    def forward(self, x, *state):
        out, (h, c) = self.rnn(x, state or None)
        return out, h, c


IMAGES, ROWS, WORDS = (4, 2, 4, 4), (6, 3), (4, 3, 4)
LAYERS = {
    "embedding": (lambda: nn.Embedding(6, 3, scale_grad_by_freq=True, padding_idx=0), (4, 2), {}),
    "bag": (lambda: nn.EmbeddingBag(6, 3, mode="max"), (4, 2), {}),
    "attention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), [WORDS] * 3, {}),
    "transformer": (lambda: nn.Transformer(4, 2, 1, 1, 8, 0.0, batch_first=True), [WORDS] * 2, {}),
    "batch norm": (lambda: nn.BatchNorm1d(3, momentum=None), ROWS, {}),
    "batch norm, no statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), ROWS, {}),
    "instance norm": (lambda: nn.InstanceNorm2d(2, 1e-5, 0.1, True, True), IMAGES, {}),
    "group norm": (lambda: nn.GroupNorm(2, 2), IMAGES, {}),
    "rms norm": (lambda: nn.RMSNorm(3), ROWS, {}),
    "transposed convolution": (lambda: nn.ConvTranspose2d(2, 3, 2), IMAGES, {}),
    "circular padding": (lambda: nn.Conv2d(2, 4, 3, padding_mode="circular"), IMAGES, {}),
    "bilinear": (lambda: nn.Bilinear(3, 3, 2), [ROWS] * 2, {}),
    "prelu": (lambda: nn.PReLU(), ROWS, {}),
    "cells": (Cells, ROWS, {}),
    "state carried over": (Carried, [(5, 4, 3), (2, 4, 2), (2, 4, 2)], {"dim": 1}),
}


@row("A14", "A22", "D13", "E7")
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, fast):
    make, shapes, options = LAYERS[name]

    def case(wrap):
        module = make().double()
        inputs = [ints(*shape, seed=k) for k, shape in
                  enumerate(shapes if isinstance(shapes, list) else [shapes])]  # fmt: skip
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            inputs = [x.abs().long() for x in inputs]
        dp = wrap(module, **options)
        results = [trained(module, dp, *inputs) for _ in range(2)]
        dp.eval()
        with torch.no_grad():
            return results, dp(*inputs)

    check(case, fast)
