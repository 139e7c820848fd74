"""Recorded steps under the oracle of orders.py. The host's recorder computes again what a graph
would launch again (host_recorder.py); what that reads and writes of the recording's fixed memory is
declared here, on the streams that are current where it is replayed."""

import types

import torch
from host_recorder import HostRecorder
from pretended_gpus import Stream

from fastdp import _C, backwards, lending, recordings, replica_sets, tapes
from fastdp.graph_step import GraphStep

HOST = torch.device("cpu")


# An event that was never recorded: whoever waits for it goes on.
NEVER = types.SimpleNamespace(seen="nothing", clock={}, stuck=set())


class Crossing:
    """An event of a recording's: one on each GPU, as it has for each device."""

    def __init__(self, gpus):
        self._gpus, self._events = gpus, {}

    def record(self, stream):
        for device in set(self._gpus.ranks):
            event = self._events[device] = torch.cuda.Event()
            event.record(self._gpus.current[device])

    def of(self, device):
        return self._events.get(device, NEVER)


class Recorder(HostRecorder):
    def __init__(self, orders):
        super().__init__()
        self._orders = orders
        self.replaying = None  # (what is computed again, the place of its replica)

    def events(self, count):
        return [Crossing(self._orders.gpus) for _ in range(count)]

    def aside(self, act):
        """The host waits for all GPUs before and afterwards."""
        self._orders.synchronize()
        super().aside(act)
        self._orders.synchronize()

    def record(self, device, pool, act):
        return _Again(self, self._orders, super().record(device, pool, act))


class _Again:
    def __init__(self, recorder, orders, again):
        self._recorder, self._orders, self._again = recorder, orders, again
        self._gate = orders.gates.get(id(getattr(again, "_module", None)))

    def replay(self):
        orders, again = self._orders, self._again
        place = orders.places[again._tape.rank]
        stream = orders.current(place)
        if self._gate is not None:  # each replay waits anew
            gate, events = self._gate
            gate.close(events)
        if again._columns is not None:
            for column in again._wanted:
                orders.is_ready(column.gradients[again._tape.rank], place)
        self._recorder.replaying = again, place
        try:
            again.replay()
        finally:
            self._recorder.replaying = None
        for static in again._first:
            if static is not None:
                orders.write(stream, static, "a recorded act's result")
                orders.put(static, place)


def watch(orders, recorder, monkeypatch):
    """Has recorded steps tell the oracle what they do."""
    gpus = orders.gpus
    orders.gates = {}
    orders.wrap(GraphStep, monkeypatch)

    # Devices: those of the host stand for GPUs.
    arrived = recordings.Recording.arrived
    monkeypatch.setattr(recordings.Recording, "arrived", lambda own, device: arrived(own, HOST))
    make_sums, refresh = backwards.Sums.__init__, replica_sets.ReplicaSet.refresh
    make_tape = tapes.Tape.__init__

    def on_its_gpu(tape, source, rank, pieces):
        make_tape(tape, source, rank, pieces)
        for static in tape.static():
            orders.put(static, orders.places[rank])

    def placed(sums, bucket, all_tapes, keeps_none):
        make_sums(sums, bucket, all_tapes, keeps_none)
        sums._ready = [
            (gpus.ranks[tape.rank], event)
            for tape in all_tapes
            for event in tape.ready[bucket.number : bucket.number + 1]
        ]

    def refreshed(replica_set, root, rows, plan, communication):
        modules = refresh(replica_set, root, rows, plan, communication)
        for rank, module in enumerate(modules):
            gate, device = replica_set._gates[rank], replica_set._devices[rank]
            if gate is not None and isinstance(communication, recordings.Recording):
                orders.gates[id(module)] = gate, communication.arrived(device)
        return modules

    monkeypatch.setattr(tapes.Tape, "__init__", on_its_gpu)
    monkeypatch.setattr(backwards.Sums, "__init__", placed)
    monkeypatch.setattr(replica_sets.ReplicaSet, "refresh", refreshed)
    lent = Stream("arguments", gpus.home)
    gpus.streams.append(lent)
    monkeypatch.setattr(lending, "own_stream", lambda use, device: lent)

    # Moves that a recording makes by the core itself.
    def scatter(source, pieces, dim, handle=None):
        _C.scatter(source, pieces, dim)
        assert handle in (None, lent.cuda_stream)
        ready = None if handle is None else lent
        orders._spread([source], list(enumerate(pieces)), "scatter", ready)

    def gather(sources, result, dim):
        _C.gather(sources, result, dim)
        orders._collect(list(enumerate(sources)), result, "gather", orders.output)

    names = {name: getattr(_C, name) for name in dir(_C) if not name.startswith("__")}
    core = types.SimpleNamespace(**{**names, "scatter": scatter, "gather": gather})
    monkeypatch.setattr(recordings, "_C", core)

    # What a recorded backward does with gradients.
    take = tapes.Tape._take

    def told(tape, k, gradients):
        if recorder.replaying is not None:
            again, place = recorder.replaying
            stream = orders.current(place)
            for gradient in gradients:
                if gradient is not None:
                    orders.read(stream, gradient.detach(), "a recorded backward")
            kept = [tape.packed[k]] if tape.packed[k] is not None else again._made[k] or ()
            for static in kept:
                if static is not None:
                    orders.write(stream, static.detach(), "a recorded backward")
                    orders.put(static, place)
        take(tape, k, gradients)

    monkeypatch.setattr(tapes.Tape, "_take", told)
