"""A set of replicas, one per rank: filled before a forward, emptied after it."""

from __future__ import annotations

import weakref
from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import nn

from . import _C, _torch_protocol
from .awaited import make_gate
from .plans import Plan, Tensors
from .streams import Communication


class ReplicaSet:
    """One replica per rank of one tree, grown as more ranks are used. Its methods want the tree
    held (`_C.Tree.hold`); it keeps no module of the base alive. With `compiled` the replicas' calls
    are compiled ones, which wait themselves for what they read."""

    def __init__(
        self, tree: Any, root: nn.Module, devices: Sequence[torch.device], compiled: Any = None
    ) -> None:
        _torch_protocol.show_weights_of_replicas()
        self.tree = tree
        self.compiled = compiled
        self._calls: List[Any] = []
        # On one device there is nothing to wait for. Elsewhere replica 0 waits too, though its
        # tensors are the base's own: what it writes in place must have been read before.
        apart = len(set(devices)) > 1
        self._gates = [make_gate(device) if apart else None for device in devices]
        self._devices = devices
        self._plan: Optional[Plan] = None
        self._repairs = [
            (m, repair)
            for m, module in enumerate(root.modules())
            for repair in repairs_of(module)
        ]
        self._replicas: List[Any] = []

    def refresh(
        self,
        root: nn.Module,
        rows: Sequence[Tuple[Tensors, Tensors]],
        plan: Plan,
        communication: Communication,
    ) -> List[nn.Module]:
        """Fills the first len(rows) replicas and gives their root modules."""
        while len(self._replicas) < len(rows):
            gate = self._gates[len(self._replicas)]
            waits = gate if self.compiled is None else None
            modules = tuple(_blank_replica(module, waits) for module in root.modules())
            if self.compiled is not None:
                device = self._devices[len(self._replicas)]
                self._calls.append(self.compiled.replica(modules[0], device, gate))
            self._replicas.append(_C.Replica(self.tree, modules))
            self._plan = None
        if plan is not self._plan:
            self._tell_buckets(plan)
        used = self._replicas[: len(rows)]
        apart = self._gates[0] is not None
        for rank, (replica, (parameters, buffers)) in enumerate(zip(used, rows)):
            replica.refresh(parameters, buffers)
            if apart:
                self._gates[rank].close(communication.arrived(self._devices[rank]))
            for m, repair in self._repairs:
                repair(replica.modules[m])
            if self._calls:
                replica.modules[0].__dict__["_compiled_call_impl"] = self._calls[rank]
        for replica in self._replicas:
            replica.settle()
        return [replica.modules[0] for replica in used]

    def _tell_buckets(self, plan: Plan) -> None:
        """Each dictionary that waits learns what for."""
        self._plan = plan
        for call in self._calls:
            call.plan = plan
        if self._gates[0] is None or self._calls:
            return
        for m, (parameters, buffers) in enumerate(self.tree.entries()):
            shifted = [plan.parameter_count + index for index in buffers if index >= 0]
            for name, places in (("_parameters", parameters), ("_buffers", shifted)):
                last = max((plan.bucket_of.get(place, -1) for place in places), default=-1)
                for replica in self._replicas:
                    replica.modules[m].__dict__[name].bucket = last

    def empty_if_idle(self, strip: bool) -> bool:
        """Drops copies and whatever the forward left behind, with `strip` also what came from the
        base; False if somebody holds a module."""
        if not all(replica.idle() for replica in self._replicas):
            return False
        for replica in self._replicas:
            replica.empty(strip)
        return True


def _blank_replica(module: nn.Module, gate: Optional[_C.Gate]) -> nn.Module:
    replica = type(module).__new__(type(module))
    parameters, buffers = {}, {}
    if gate is not None:
        parameters, buffers = _C.AwaitedDict(gate), _C.AwaitedDict(gate)
    # Past __setattr__, which a class may have made its own; the rest is filled in by refresh.
    replica.__dict__.update(_parameters=parameters, _buffers=buffers, _modules={})
    return replica


def repairs_of(module: nn.Module) -> List[Any]:
    """What a refresh cannot know: attributes that point into the module itself."""
    repairs = []
    if isinstance(module, nn.RNNBase):
        repairs.append(_point_flat_weights)
    if "_orig_mod" in module._modules and hasattr(type(module), "_initialize"):
        repairs.append(_call_original)
    return repairs


def _point_flat_weights(replica: nn.Module) -> None:
    """An RNN's list of its own weights."""
    attributes = replica.__dict__
    names = list(attributes["_flat_weights_names"])
    weights = [getattr(replica, name, None) for name in names]
    attributes["_flat_weights_names"] = names
    attributes["_flat_weights"] = weights
    attributes["_flat_weight_refs"] = [w if w is None else weakref.ref(w) for w in weights]


def _call_original(replica: nn.Module) -> None:
    """`torch.compile(module)` bound its forward to the base: a replica runs uncompiled."""
    replica.__dict__["forward"] = replica.__dict__["_modules"]["_orig_mod"].__call__
