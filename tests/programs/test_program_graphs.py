"""Graphs of unequal size: a subclass that takes lists of them, as torch_geometric has one."""

import dataclasses
from itertools import chain, pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from programs.sides import check, weights


@dataclasses.dataclass
class Graph:
    """`nodes` (n, features), `edges` (2, m) of node numbers, and one label; a batch has the number
    of each node's graph beside them."""

    nodes: torch.Tensor
    edges: torch.Tensor
    label: torch.Tensor
    owner: torch.Tensor = None

    @staticmethod
    def joined(graphs):
        counts = torch.tensor([len(graph.nodes) for graph in graphs])
        starts = (counts.cumsum(0) - counts).tolist()
        return Graph(
            torch.cat([graph.nodes for graph in graphs]),
            torch.cat([g.edges + start for g, start in zip(graphs, starts, strict=True)], dim=1),
            torch.stack([graph.label for graph in graphs]),
            torch.arange(len(graphs)).repeat_interleave(counts),
        )

    def to(self, device):
        return Graph(*(part.to(device) for part in vars(self).values()))


def data_list_parallel(parent, places):
    """The wrapper over `parent`: takes a list of graphs, gives each device consecutive graphs of
    about equally many nodes, and walks the four steps by hand."""

    class DataParallel(parent):
        def __init__(self, module, device_ids=None, output_device=None):
            super().__init__(module, device_ids=device_ids, output_device=output_device)
            self.src_device = places[0]

        def forward(self, data_list):
            if len(data_list) == 0:
                return None
            if not self.device_ids or len(self.device_ids) == 1:
                return self.module(Graph.joined(data_list).to(self.src_device))
            for tensor in chain(self.module.parameters(), self.module.buffers()):
                assert tensor.device == self.src_device
            inputs = self.scatter(data_list, self.device_ids)
            replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
            outputs = self.parallel_apply(replicas, inputs, None)
            return self.gather(outputs, self.output_device)

        def scatter(self, data_list, device_ids):
            devices = min(len(device_ids), len(data_list))
            ends = torch.tensor([len(data.nodes) for data in data_list]).cumsum(0)
            starts = functional.pad(ends[:-1], (1, 0))
            device = (devices * (starts + ends) / (2.0 * ends[-1])).long()
            cuts = functional.pad(device.bincount().cumsum(0), (1, 0)).unique().tolist()
            pairs = pairwise(cuts)
            return [
                Graph.joined(data_list[start:end]).to(place)
                for (start, end), place in zip(pairs, places, strict=False)
            ]

    return DataParallel


class Plain(nn.Module):
    """The same interface with no replicas."""

    def __init__(self, module, home):
        super().__init__()
        self.module = module
        self.home = home

    def forward(self, data_list):
        return self.module(Graph.joined(data_list).to(self.home)) if data_list else None


class Convolution(nn.Module):
    """Each node's mean of its neighbours, then a linear map of both."""

    def __init__(self, width_in, width_out):
        super().__init__()
        self.own = nn.Linear(width_in, width_out)
        self.others = nn.Linear(width_in, width_out, bias=False)

    def forward(self, nodes, edges):
        sums = torch.zeros_like(nodes).index_add(0, edges[1], nodes[edges[0]])
        counts = edges[1].bincount(minlength=len(nodes)).clamp(min=1)
        return self.own(nodes) + self.others(sums / counts[:, None])


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Convolution(3, 12), Convolution(12, 12)])
        self.last = nn.Linear(12, 10)

    def forward(self, data):
        nodes = data.nodes
        for layer in self.layers:
            nodes = functional.elu(layer(nodes, data.edges))
        shape = (len(data.label), nodes.size(1))
        pooled = nodes.new_zeros(shape).index_add(0, data.owner, nodes)
        return self.last(pooled / 8)


def strokes(image, label):
    """An image's inked pixels as nodes (ink, row, column); neighbours on the grid share edges."""
    where = (image > 0.25).nonzero()
    features = torch.cat([image[image > 0.25][:, None], where / 8], dim=1)
    apart = (where[:, None] - where[None]).abs().amax(-1)
    return Graph(features, (apart == 1).nonzero().t(), label)


def wrapped(side, model):
    if side.parent is None:
        return Plain(model.to(side.home), side.home)
    parallel = data_list_parallel(side.DataParallel, side.places)
    return parallel(model.to(side.home))


def train(side, digits, batch_size):
    torch.manual_seed(0)
    graphs = [strokes(image, label) for image, label in zip(*(t[:60] for t in digits), strict=True)]
    assert len({len(graph.nodes) for graph in graphs}) >= 10
    model = wrapped(side, Classifier().double())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for start in [*range(0, len(graphs), batch_size)] * 3:
        data_list = graphs[start : start + batch_size]
        labels = torch.stack([data.label for data in data_list]).to(side.home)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(data_list), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-3:]) < sum(losses[:3])
    assert model([]) is None
    with torch.no_grad():
        last = model(graphs[:1]), model(graphs[::7])
    return losses, last, weights(model)


@pytest.mark.row("B18", "L3")
@pytest.mark.parametrize("batch_size, n", [(10, 2), (13, 3)])
def test_lists_of_graphs(fast, digits, batch_size, n):
    check(lambda side: train(side, digits, batch_size), fast, n, used={1, n})
