"""What the tests of compiled replicas share: pairs of wrappers, one compiled and one not, that take
the same steps, and a count of what was compiled."""

import copy

import torch
from engine_cases import Pair
from torch import nn


class Twins(Pair):
    """A compiled wrapper and one that is not. Sums are in double precision, where compiling may
    change their order but little."""

    def __init__(self, fast, module, n=2, compile=None, lr=1e-2, atol=1e-12, **options):
        module = module.double()
        self.plain = fast.wrap(copy.deepcopy(module), n)
        asked = {"backend": "aot_eager"} if compile is None else compile
        self.compiled = fast.wrap(module, n, compile=asked, **options)
        super().__init__((self.compiled, self.plain), lr, atol=atol)
        self.home = fast.home

    def rows(self, count=6, width=4, seed=0):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(count, width, generator=generator, dtype=torch.float64)
        return rows.to(self.home)

    @property
    def count(self):
        """Graphs compiled so far, each for a device."""
        return self.compiled._fastdp_compiled.count

    @property
    def forms(self):
        return self.compiled.report()["compiled"]["forms"]

    @property
    def reasons(self):
        return self.compiled.report()["compiled"]["reasons"]


def count_for(fast, n):
    """How often one graph is compiled for n replicas: once for each device."""
    return len({fast.device(rank) for rank in range(n)})


class Net(nn.Module):
    """Has buffers that forwards write, and an attribute that the user may change."""

    def __init__(self, width=4):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm = nn.Linear(width, 8), nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 3)
        self.rate = 1.0

    def forward(self, x):
        return self.second(torch.relu(self.norm(self.first(x)))) * self.rate


class Breaking(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        x = torch.tanh(x)
        torch._dynamo.graph_break()
        return self.net(x)


def refuses(graph, inputs):
    raise RuntimeError("this compiler can nothing")


def seen_graph(module, x):
    """What torch.compile finds in a call: the graph, its inputs, and which parameter each is."""
    found = []

    def backend(graph, inputs):
        found.append((copy.deepcopy(graph), list(inputs)))
        return graph.forward

    torch.compile(module, backend=backend, fullgraph=True, dynamic=False)(x)
    (graph, inputs), = found
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return graph, inputs, [names.get(id(tensor)) for tensor in inputs]
