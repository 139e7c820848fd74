"""Whole steps of a wrapper on several GPUs where there is none (pretended_gpus.py). Not what is
computed but what waits for what is looked at: the ways of communication, gates, and nodes that only
several devices have. (On real GPUs the order itself is proved, test_cuda_order.py.)"""

import torch
from pretended_gpus import Gpus, can_pretend
from torch import nn

import fastdp
from fastdp import functions

pytestmark = can_pretend()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.double()

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


def trained(steps=3):
    module = Net()
    dp = fastdp.DataParallel(module, device_ids=["cpu"] * 2, bucket_bytes=100)
    trace = []
    for k in range(steps):
        x = torch.linspace(-1, 1 + k, 18, dtype=torch.float64).view(6, 3).requires_grad_()
        module.zero_grad()
        out = dp(x)
        out.square().sum().backward()
        trace += [out.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]
        trace += [buffer.clone() for buffer in module.buffers()]
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.1 * parameter.grad
            dp(x)
    return trace


def test_steps_are_those_of_the_host(monkeypatch, hidden):
    want = trained()
    gpus = Gpus(monkeypatch, hidden)
    found = trained()
    assert len(found) == len(want) and all(map(torch.equal, found, want))
    assert gpus.names() == ["c0", "c1"]
    waits = gpus.waits()
    assert set(waits) == ({"c0", "c1", "s0", "s1"} if hidden else {"c1"})


def test_copies_are_waited_for_where_they_are_read(gpus, hidden):
    seen = []

    class Looking(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x):
            layers = list(self.net.children())
            assert all("weight" in layer._parameters for layer in layers)
            reads = [gpus.waits()]
            for layer in (*layers, *layers):
                layer.weight
                reads.append(gpus.waits())
            seen.append(reads)
            return x

    dp = fastdp.DataParallel(Looking(), ["cpu"] * 2, bucket_bytes=1, sequential=True)
    dp(torch.ones(4, 3).double())
    assert len(seen) == 2
    for rank, (before, *reads) in enumerate(seen):
        assert f"c{rank}" not in before  # names are no reads
        once = [{f"c{rank}": [f"s{rank}"]}] * 3 if hidden else [{}] * 3
        assert reads == [*once, {}, {}, {}]


def test_what_lands(gpus, hidden, monkeypatch):
    landed = []
    forward = functions.Land.forward

    def noted(ctx, copies, link):
        landed.append(len(copies))
        assert gpus.names() == ["c0", "c1"], "the node's stream is that of its readers"
        return forward(ctx, copies, link)

    def applied(ctx, *args):
        assert gpus.names() == (["s0", "s1"] if hidden else ["c0", "c1"])
        return broadcast(ctx, *args)

    broadcast = functions.Broadcast.forward
    monkeypatch.setattr(functions.Land, "forward", staticmethod(noted))
    monkeypatch.setattr(functions.Broadcast, "forward", staticmethod(applied))
    module = Net()
    dp = fastdp.DataParallel(module, device_ids=["cpu"] * 2, bucket_bytes=100)
    dp(torch.ones(4, 3).double()).sum().backward()
    assert sum(landed) == len(list(module.parameters())) * (2 if hidden else 1)
    landed.clear()
    with torch.no_grad():
        dp(torch.ones(4, 3).double())
    assert landed == []


def test_in_line_has_one_bucket_for_all(gpus, hidden):
    module = Net()
    dp = fastdp.DataParallel(module, device_ids=["cpu"] * 2)
    dp(torch.ones(4, 3).double())
    plan = dp._fastdp_get_runtime().replicator._plans[2, True]
    assert plan.communication.apart is hidden
    kinds = {(bucket.dtype, bucket.requires_grad) for bucket in plan.buckets}
    assert len(plan.buckets) == len(kinds) == 3
