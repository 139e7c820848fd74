"""Whole steps of a wrapper on several GPUs where there is none: tensors lie on the host, and what
torch.cuda knows of streams is pretended. Not what is computed but what waits for what is looked at:
the ways of communication, gates, and nodes that only several devices have. (On real GPUs the order
itself is proved, test_cuda_order.py.)"""

import pytest
import torch
from torch import nn

import fastdp
from fastdp import awaited, functions, plans, replica_sets, replicas, streams

GPUS = [torch.device("cuda", index) for index in range(2)]

pytestmark = pytest.mark.skipif(
    torch.backends.cuda.is_built() and not torch.cuda.is_available(),
    reason="needs GPUs, or a torch without CUDA: this one asks the driver that is not there",
)


class Stream:
    def __init__(self, name, device):
        self.name, self.device, self.cuda_stream = name, device, id(name)
        self.log = []

    def wait_event(self, event):
        self.log.append(event.seen)


class Gpus:
    """Two pretended GPUs, whose compute streams are "c0" and "c1", for the replicas of a wrapper on
    ["cpu", "cpu"]."""

    def __init__(self, monkeypatch, hidden):
        self.current = {device: Stream(f"c{device.index}", device) for device in GPUS}
        self.streams = list(self.current.values())
        gpus = self

        class Event:
            def record(self, stream):
                self.seen = stream.name

        class OwnStream(Stream):
            def __init__(self, device, priority):
                super().__init__(f"s{device.index}", device)
                gpus.streams.append(self)

        def current_stream(device):
            return self.current[device if device in self.current else GPUS[0]]

        def set_stream(stream):
            self.current[stream.device] = stream

        for name, value in {
            "Event": Event,
            "Stream": OwnStream,
            "current_stream": current_stream,
            "set_stream": set_stream,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(streams, "_events", {})
        monkeypatch.setattr(streams, "open_peers", lambda devices: None)
        monkeypatch.setattr(
            streams, "distinct", lambda devices: GPUS[: min(len(list(devices)), 2)]
        )
        monkeypatch.setattr(replicas, "is_worth_hiding", lambda *args: hidden)
        self._place(monkeypatch)

    def _place(self, monkeypatch):
        """What is told of a device of the host is told of the GPU of its rank."""
        make, make_set = streams.Communication.__init__, replica_sets.ReplicaSet.__init__
        make_plan = plans.Plan.__init__

        def placed(communication, devices, beside=True):
            make(communication, devices, beside)
            communication.home = GPUS[0]

        def placed_set(replica_set, tree, root, devices):
            make_set(replica_set, tree, root, devices)
            replica_set._devices = GPUS
            replica_set._gates = [awaited.make_gate(device) for device in GPUS]

        def placed_plan(plan, description, buckets, alone, count, devices, communication):
            # Which ranks land is told by GPUs, what is copied by the host's devices.
            make_plan(plan, description, buckets, alone, count, GPUS, communication)
            plan._devices = devices

        monkeypatch.setattr(streams.Communication, "__init__", placed)
        monkeypatch.setattr(replica_sets.ReplicaSet, "__init__", placed_set)
        monkeypatch.setattr(plans.Plan, "__init__", placed_plan)

    def waits(self):
        """{stream: what it has waited for, in order} since the last call."""
        found = {stream.name: stream.log for stream in self.streams if stream.log}
        for stream in self.streams:
            stream.log = []
        return found

    def names(self):
        return [self.current[device].name for device in GPUS]


@pytest.fixture(params=[True, False], ids=["beside", "in line"])
def hidden(request):
    return request.param


@pytest.fixture
def gpus(monkeypatch, hidden):
    return Gpus(monkeypatch, hidden)


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
