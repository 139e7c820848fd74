"""Where a compiled graph is cut: by what has come when a piece begins, and an estimate of compute.
That the pieces are right, and wait, is in test_compiled_graphs.py."""

import pytest
import torch
from compiled_cases import seen_graph
from fastdp import compile_cuts
from torch import nn

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]


def sizes_of(*megabytes):
    return {bucket: size * 10**6 for bucket, size in enumerate(megabytes)}


@pytest.mark.parametrize(
    "compute_ms, parts",
    [
        ([0.0] * 6, [0, 1, 2, 3, 4, 5]),  # nothing hides anything
        ([9.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0, 1, 1, 1, 1, 1]),
        # A copy of 20 MB takes 0.1 ms and 15 us: what has come when a part begins is part of it.
        ([0.3] * 6, [0, 1, 1, 2, 2, 2]),
        ([0.12] * 6, [0, 1, 2, 3, 4, 5]),
        ([0.0, 0.5, 0.0, 0.0, 0.0, 0.0], [0, 1, 2, 2, 2, 2]),
    ],
)
def test_a_part_takes_in_what_has_come_when_it_begins(compute_ms, parts):
    compute_s = {bucket: ms / 1000 for bucket, ms in enumerate(compute_ms)}
    found = compile_cuts.parts(sizes_of(*[20] * 6), compute_s, 200e9, 8)
    assert list(found.values()) == parts


def test_the_last_part_takes_in_the_rest():
    found = compile_cuts.parts(sizes_of(*[20] * 6), {}, 200e9, 3)
    assert list(found.values()) == [0, 1, 2, 2, 2, 2]
    assert compile_cuts.parts({}, {}, 200e9, 3) == {}
    assert compile_cuts.parts({4: 10, 7: 10}, {}, 1e-3, 1) == {4: 0, 7: 0}


def test_long_layers_of_few_parameters_hide_all_that_follows():
    """As in a convolutional net: two parts, whatever the number of buckets."""

    class Images(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(3, 64, 7, padding=3)
            self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(5)])

        def forward(self, x):
            x = self.convolution(x).mean((2, 3))
            for layer in self.layers:
                x = layer(x)
            return x

    module = Images()
    graph, inputs, names = seen_graph(module, torch.randn(64, 3, 128, 128))
    layers = {name: n for n, name in enumerate(dict(module.named_parameters()))}
    buckets = [None if name is None else layers[name] // 2 for name in names]
    assert sorted({b for b in buckets if b is not None}) == [0, 1, 2, 3, 4, 5]
    nodes = compile_cuts.inputs_of(graph)
    compute_s = compile_cuts._compute_s(graph, dict(zip(nodes, buckets)), dict(zip(nodes, inputs)))
    pixels, weights = 64 * 128 * 128, 3 * 64 * 7 * 7
    least = 2 * pixels * weights / 4e14 + 4 * 64 * pixels / 2.5e12
    assert least <= compute_s[0] < 1.1 * least and compute_s[1] < least / 20
    assert len(list(compile_cuts.cut(graph, inputs, buckets, 8, 300e9).children())) == 2


def test_words_that_are_looked_up_are_no_multiplication():
    module = nn.Sequential(nn.Embedding(50_000, 64), nn.Linear(64, 8))
    graph, inputs, names = seen_graph(module, torch.zeros(4, 16, dtype=torch.long))
    buckets = [None if name is None else int(name.split(".")[0]) for name in names]
    nodes = compile_cuts.inputs_of(graph)
    found = compile_cuts._compute_s(graph, dict(zip(nodes, buckets)), dict(zip(nodes, inputs)))
    rows = 4 * 16
    assert found[0] == pytest.approx(rows * 64 * 4 / 2.5e12)
    assert found[1] == pytest.approx(rows * 8 * 4 / 2.5e12 + 2 * rows * 64 * 8 / 4e14)
