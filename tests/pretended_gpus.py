"""Two GPUs, or more, where there is none: tensors lie on the host, and what torch.cuda knows of
streams and events is pretended. Nothing is ever late in it unless a test says so: a GPU that is
stalled finishes nothing that is enqueued on it from then on, and nothing that waits for that, until
it is resumed."""

import pytest
import torch

from fastdp import _torch_cuda, awaited, plans, replica_sets, replicas, runtime, streams

GPUS = [torch.device("cuda", index) for index in range(2)]


def can_pretend(count=2):
    """A mark: a torch that was built for CUDA asks the driver for each GPU that it is told of."""
    return pytest.mark.skipif(
        torch.backends.cuda.is_built() and torch.cuda.device_count() < count,
        reason=f"needs {count} GPUs, or a torch without CUDA: this one asks the driver for them",
    )


class Stream:
    stream_id = -1  # torch's own number for it

    def __init__(self, name, device):
        self.name, self.device, self.cuda_stream = name, device, id(name)
        self.log = []
        self.clock = {}  # of each stream, how many of its records this one comes after
        self.stuck = set()  # the stalls that it comes after

    def wait_event(self, event):
        event = getattr(event, "of", lambda device: event)(self.device)  # one of several GPUs
        self.log.append(event.seen)
        self.merge(event.clock)
        self.stuck |= event.stuck

    def merge(self, clock):
        for name, count in clock.items():
            self.clock[name] = max(self.clock.get(name, 0), count)

    def step(self):
        """What is enqueued from now on comes after this."""
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.clock[self.name]


class Gpus:
    """Pretended GPUs, two unless `count` says more, whose compute streams are "c0", "c1" and so on,
    for the replicas of a wrapper on ["cpu", "cpu"] and so on. `places` are the numbers of the GPUs
    of its ranks, if they are others than 0, 1 and so on. With `hidden` parameters travel beside
    compute, on "s0", "s1" and so on."""

    def __init__(self, monkeypatch, hidden, count=2, places=None):
        self.places = list(range(count)) if places is None else list(places)
        count = max(count, 1 + max(self.places))
        self.devices = [torch.device("cuda", index) for index in range(count)]
        self.ranks = [self.devices[place] for place in self.places]
        self.home = self.ranks[0]
        self.node = None  # the device of the node whose backward runs, where that is known
        self.elsewhere = []  # GPUs on which a batch or its output is, if they are others than home
        self.current = {device: Stream(f"c{device.index}", device) for device in self.devices}
        self.streams = list(self.current.values())
        self.records = 0
        self.stalls_at = 0  # a number of a record: the GPU stalls before it; 0: none
        self.stalled = None
        gpus = self

        class Event:
            def record(self, stream):
                gpus.records += 1
                if gpus.records == gpus.stalls_at:
                    gpus.stall(stream.device)
                stream.step()
                self.seen, self.clock = stream.name, dict(stream.clock)
                self.stuck = set(stream.stuck)

            def query(self):
                return gpus.stalled not in self.stuck

        class OwnStream(Stream):
            def __init__(self, device, priority):
                super().__init__(f"s{device.index}", device)
                if gpus.stalled == device:
                    self.stuck.add(device)
                gpus.streams.append(self)

        def current_stream(device):
            return self.current[device if device in self.current else self.home]

        def raw_stream(index):
            device = self.home if index is None else self.devices[index]
            return self.current[device].cuda_stream

        def distinct(devices):
            given = list(devices)
            are_placed = bool(given) and given[0].type == "cuda"
            return list(dict.fromkeys(given if are_placed else self.ranks[: len(given)]))

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
        monkeypatch.setattr(_torch_cuda, "raw_stream", raw_stream)
        monkeypatch.setattr(streams, "_known", {})
        monkeypatch.setattr(streams, "_events", {})
        monkeypatch.setattr(streams, "_users", {})
        monkeypatch.setattr(streams, "open_peers", lambda devices: None)
        for module in (streams, runtime):
            monkeypatch.setattr(module, "distinct", distinct)
        monkeypatch.setattr(
            replicas,
            "is_worth_hiding",
            lambda tensors, devices, transport: hidden and len(distinct(devices)) > 1,
        )
        self._place(monkeypatch)

    def stall(self, device):
        self.stalled = device
        for stream in self.streams:
            if stream.device == device:
                stream.stuck.add(device)

    def resume(self):
        self.stalled, self.stalls_at = None, 0
        for stream in self.streams:
            stream.stuck.clear()

    def _place(self, monkeypatch):
        """What is told of a device of the host is told of the GPU of its rank."""
        make, make_set = streams.Communication.__init__, replica_sets.ReplicaSet.__init__
        make_plan, gpus = plans.Plan.__init__, self.ranks
        look = streams.Snapshot.__init__

        def looking(snapshot, devices):
            # A node's own devices are the host's, a communication's are GPUs.
            are_placed = devices[0].type == "cuda"
            look(snapshot, devices if are_placed else [*streams.distinct(devices), *self.elsewhere])

        def placed(communication, devices, beside=True):
            make(communication, devices, beside)
            communication.home = self.home

        def placed_set(replica_set, tree, root, devices, *rest):
            make_set(replica_set, tree, root, devices, *rest)
            replica_set._devices = gpus
            if len(set(gpus)) > 1:
                replica_set._gates = [awaited.make_gate(device) for device in gpus]

        def placed_plan(plan, description, buckets, alone, count, devices, communication):
            # Which ranks land is told by GPUs, what is copied by the host's devices.
            make_plan(plan, description, buckets, alone, count, gpus, communication)
            plan.devices = devices

        in_backward = streams.Snapshot.in_backward
        monkeypatch.setattr(streams.Snapshot, "__init__", looking)
        monkeypatch.setattr(
            streams.Snapshot,
            "in_backward",
            lambda snapshot, home: in_backward(snapshot, self.node or self.home),
        )
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
        return [self.current[device].name for device in self.devices]
