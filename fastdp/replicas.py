"""Replicas of a module: made once, refreshed for every forward, lent out one set per call.

A `ReplicaSet` holds one replica per rank. Before a forward it is refreshed (each module's
attributes as the base has them now, its parameters and buffers this step's copies), afterwards
emptied. A set of which user code still holds a module (checkpointing does, until backward has run)
is left alone, and
another is taken: see `_C.Replica.idle`.

Modules with their own `_replicate_for_data_parallel` (scripted, fx, lazy, a user's) get new objects
at every forward, as in nn.DataParallel.
"""

from __future__ import annotations

import os
import threading
import weakref
from operator import itemgetter
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import torch
from torch import nn

from . import _C, _torch_compat
from .awaited import AwaitedDict, Gate
from .buckets import Bucket, make_buckets, resolved
from .devices import parse_devices
from .flat_weights import RnnWeights
from .functions import Broadcast
from .streams import Communication

__all__ = ["replicate"]

# Sets that user code held when their call ended; looked at again at the next.
_MAX_LENT = 2

Tensors = Tuple[torch.Tensor, ...]


class Plan:
    """How the tensors of a module travel: buckets, what no bucket can hold (sparse tensors, which
    torch copies), and the order to put their copies back in."""

    def __init__(
        self,
        description: bytes,
        buckets: List[Bucket],
        alone: List[int],
        parameter_count: int,
        devices: Sequence[torch.device],
    ) -> None:
        self.description = description
        self.buckets = buckets
        self._alone = alone
        self.parameter_count = parameter_count
        self._devices = devices
        places = [place for bucket in buckets for place in bucket.places] + alone
        order = sorted(range(len(places)), key=places.__getitem__)
        self._in_order = order != list(range(len(order)))
        self._reorder = itemgetter(*order) if len(order) > 1 else tuple
        self.bucket_of = {place: k for k, bucket in enumerate(buckets) for place in bucket.places}

    def copies(
        self, tensors: Tensors, differentiable: bool, communication: Communication
    ) -> Tuple[List[Tuple[Tensors, Tensors]], Tensors]:
        """(parameters, buffers) of each rank, and the tokens of the broadcasts."""
        rows: List[List[torch.Tensor]] = [[] for _ in self._devices]
        tokens = []
        communication.open()
        with communication.current():
            flats = [bucket.take(True) for bucket in self.buckets]
        compute = communication.begin()
        for k, bucket in enumerate(self.buckets):
            chosen = [tensors[place] for place in bucket.places]
            with communication.current():
                if differentiable and bucket.requires_grad or _torch_compat.forward_mode_active():
                    copies = Broadcast.apply(bucket, True, flats[k], compute, *chosen)
                    tokens.append(copies[-1])
                    _torch_compat.run_early(copies[-1].grad_fn)
                else:
                    copies = bucket.copies(chosen, True, flats[k])
            communication.mark(k)
            for rank, row in enumerate(rows):
                row.extend(copies[rank * bucket.count : (rank + 1) * bucket.count])
        for place in self._alone:
            for rank, (row, device) in enumerate(zip(rows, self._devices)):
                tensor = tensors[place]
                row.append(tensor.to(device, copy=True) if rank > 0 else tensor)
        ordered = [self._reorder(row) if self._in_order else tuple(row) for row in rows]
        cut = self.parameter_count
        keeps_none = any(bucket.keeps_none for bucket in self.buckets)
        return [(row[:cut], row[cut:]) for row in ordered], () if keeps_none else tuple(tokens)


class ReplicaSet:
    """One replica per rank of one tree, grown as more ranks are used. Its methods want the tree
    held (`_C.Tree.hold`); it keeps no module of the base alive."""

    def __init__(self, tree: Any, root: nn.Module, devices: Sequence[torch.device]) -> None:
        self.tree = tree
        # On one device there is nothing to wait for. Elsewhere replica 0 waits too, though its
        # tensors are the base's own: what it writes in place must have been read before.
        apart = len(set(devices)) > 1
        self._gates = [Gate(device) if apart else None for device in devices]
        self._devices = devices
        self._plan: Optional[Plan] = None
        self._repairs = [
            (m, repair)
            for m, module in enumerate(root.modules())
            for repair in _repairs_of(module)
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
            modules = tuple(_blank_replica(module, gate) for module in root.modules())
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
        for replica in self._replicas:
            replica.settle()
        return [replica.modules[0] for replica in used]

    def _tell_buckets(self, plan: Plan) -> None:
        """Each dictionary that waits learns what for."""
        self._plan = plan
        if self._gates[0] is None:
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


def _blank_replica(module: nn.Module, gate: Optional[Gate]) -> nn.Module:
    replica = type(module).__new__(type(module))
    parameters, buffers = ({}, {}) if gate is None else (AwaitedDict(gate), AwaitedDict(gate))
    # Past __setattr__, which a class may have made its own; the rest is filled in by refresh.
    replica.__dict__.update(_parameters=parameters, _buffers=buffers, _modules={})
    return replica


def _repairs_of(module: nn.Module) -> List[Any]:
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


def _replicates_itself(module: nn.Module) -> bool:
    own = type(module)._replicate_for_data_parallel
    ordinary = (nn.Module._replicate_for_data_parallel, nn.RNNBase._replicate_for_data_parallel)
    return own not in ordinary


class _WalkedTree:
    """`_C.Tree` for modules that are more than an attribute dictionary (scripted ones): walked in
    Python, through torch's own iterators."""

    def __init__(self, base: Tuple[nn.Module, ...]) -> None:
        self._modules = [(weakref.ref(module), type(module)) for module in base]
        self._root: Optional[nn.Module] = None

    def hold(self, root: nn.Module) -> bool:
        found = tuple(root.modules())
        if len(found) != len(self._modules) or any(
            module is not known() or type(module) is not kind
            for module, (known, kind) in zip(found, self._modules)
        ):
            return False
        self._root = root
        return True

    def collect(self) -> Tuple[Tensors, Tensors, bytes]:
        parameters, buffers = tuple(self._root.parameters()), tuple(self._root.buffers())
        return parameters, buffers, len(parameters).to_bytes(4, "little")

    def release(self) -> None:
        self._root = None


class Lease:
    """Replicas lent to one call, with the tokens that its gather hands on."""

    __slots__ = ("replicas", "tokens")

    def __init__(self, replicas: Optional[ReplicaSet], tokens: Tensors) -> None:
        self.replicas = replicas
        self.tokens = tokens


class Replicator:
    """The replicas of one module on one list of devices, and their plans.

    With `weak` idle replicas hold nothing that came from the module, so that they can stand in a
    weak table beside it. Several threads may use one: a lock covers taking a set and making its
    copies, never a forward.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        bucket_bytes: int,
        unused_grad: str,
        weak: bool = False,
    ) -> None:
        self._weak = weak
        self._busy = False
        self._module = weakref.ref(module)
        self._devices = tuple(devices)
        self._communication = Communication(devices)
        self._bucket_bytes = bucket_bytes
        self._unused_grad = unused_grad
        self._lock = threading.RLock()
        self._tree: Optional[Any] = None
        self._rnn_weights = RnnWeights(())
        self._fresh = False
        self._plans: Dict[Tuple[int, bool], Plan] = {}
        self._idle: List[ReplicaSet] = []
        self._lent: List[ReplicaSet] = []
        _all_replicators.add(self)

    def take(
        self, ranks: int, detach: bool, early: bool = False
    ) -> Tuple[List[nn.Module], Lease]:
        """The first `ranks` replicas, with copies of the tensors as they are now. With `early` the
        copies may still be on their way when this returns: readers wait (awaited.py), and the
        caller promises `give_back` before the parameters are written."""
        root = self._module()
        return self._held(root, True, lambda same: self._make(root, ranks, detach, early))

    def _make(
        self, root: nn.Module, ranks: int, detach: bool, early: bool
    ) -> Tuple[List[nn.Module], Lease]:
        parameters, buffers, pattern = self._tree.collect()
        tensors = parameters + buffers
        differentiable = not detach and torch.is_grad_enabled()
        plan = self._plan(root, tensors, pattern, len(parameters), ranks, differentiable)
        with torch.set_grad_enabled(differentiable):
            rows, tokens = plan.copies(tensors, differentiable, self._communication)
        if self._fresh or not early:
            self._communication.deliver()
        if self._fresh:
            return _fresh_replicas(root, parameters, buffers, rows), Lease(None, tokens)
        replicas = self._take_set(root)
        roots = replicas.refresh(root, rows, plan, self._communication)
        return roots, Lease(replicas, tokens)

    def give_back(self, lease: Lease) -> None:
        """The end of a lease's replicas; its tokens stay. Replicas that somebody still holds are
        kept apart, and looked at again before new ones are made."""
        self._communication.deliver()
        replicas, lease.replicas = lease.replicas, None
        root = self._module()
        if replicas is None or root is None:
            return
        self._held(root, False, lambda same: self._put_away(replicas, same))

    def _put_away(self, replicas: ReplicaSet, same: bool) -> None:
        if not same or replicas.tree is not self._tree:
            return
        if replicas.empty_if_idle(self._weak):
            self._idle.append(replicas)
        elif not self._weak:
            self._lent.append(replicas)
            del self._lent[:-_MAX_LENT]

    def _held(self, root: nn.Module, rebuild: bool, act: Callable[[bool], Any]) -> Any:
        """act(same) with the tree held, where `same` says whether it is the one that replicas were
        made of. The lock lets its own thread in again: a destructor or a signal handler that gets
        here is told so.

        No context manager made of a generator: an interrupt behind its first half would leave the
        second to whoever drops the traceback, and an interactive session keeps it."""
        with self._lock:
            if self._busy:
                raise RuntimeError(
                    "a forward of this wrapper was started from inside the making of its replicas, "
                    "by a destructor or a signal handler: start it from ordinary code"
                )
            try:
                self._busy = True
                same = self._tree is not None and self._tree.hold(root)
                if not same and rebuild:
                    self._rebuild(root)
                return act(same)
            finally:
                self._busy = False
                if self._tree is not None:
                    self._tree.release()

    def _rebuild(self, root: nn.Module) -> None:
        """The module tree is new, or not what it was: forget all that was made of the old one."""
        _check_scripted(root)
        base = tuple(root.modules())
        fresh = any(_replicates_itself(each) for each in base)
        tree = _WalkedTree(base) if fresh else _C.Tree(base)
        self._fresh, self._tree, self._rnn_weights = fresh, tree, RnnWeights(base)
        self._plans, self._idle, self._lent = {}, [], []
        if not self._tree.hold(root):
            raise RuntimeError("the module was changed by another thread while it was replicated")

    def _plan(
        self,
        root: nn.Module,
        tensors: Tensors,
        pattern: bytes,
        parameter_count: int,
        ranks: int,
        differentiable: bool,
    ) -> Plan:
        description = _described(tensors, root, self._devices[0]) + pattern
        description += self._rnn_weights.describe()
        plan = self._plans.get((ranks, differentiable))
        if plan is None or plan.description != description:
            check_tensors(root)
            check_home(tensors, self._devices[0])
            devices = self._devices[:ranks]
            alone = [place for place, tensor in enumerate(tensors) if _is_sparse(tensor)]
            buckets = make_buckets(
                tensors,
                set(alone),
                parameter_count,
                devices,
                self._communication,
                self._bucket_bytes,
                self._unused_grad,
                self._rnn_weights.find(tensors),
            )
            plan = Plan(description, buckets, alone, parameter_count, devices)
            self._plans[ranks, differentiable] = plan
        return plan

    def _take_set(self, root: nn.Module) -> ReplicaSet:
        # Even where one is idle: a set that was let go late would keep its copies for ever.
        for replicas in list(self._lent):
            if replicas.empty_if_idle(self._weak):
                self._lent.remove(replicas)
                self._idle.append(replicas)
        if self._idle:
            return self._idle.pop()
        return ReplicaSet(self._tree, root, self._devices)

    def forget(self) -> None:
        """In a forked child: another thread of the parent may have been at work here."""
        self._lock = threading.RLock()
        self._busy = False
        self._tree = None
        self._plans, self._idle, self._lent = {}, [], []


_all_replicators: "weakref.WeakSet[Replicator]" = weakref.WeakSet()


def _forget_all() -> None:
    for replicator in list(_all_replicators):
        replicator.forget()


os.register_at_fork(after_in_child=_forget_all)


def check_tensors(root: nn.Module) -> None:
    """torch's own methods keep all else out of these dictionaries; other code may write there."""
    for prefix, module in root.named_modules():
        for kind, members in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, value in members.items():
                if value is not None and not isinstance(value, torch.Tensor):
                    path = f"{prefix}.{name}" if prefix else f"{name}"
                    raise TypeError(
                        f"{kind} {path!r} must be a tensor or None, got {type(value).__name__}"
                    )


def check_home(tensors: Iterable[torch.Tensor], home: torch.device) -> None:
    for tensor in tensors:
        if tensor.device != home:
            raise RuntimeError(
                "module must have its parameters and buffers "
                f"on device {home} (device_ids[0]) but found one of "
                f"them on device: {tensor.device}"
            )


def _described(tensors: Tensors, root: nn.Module, home: torch.device) -> bytes:
    try:
        return _C.describe(tensors)
    except Exception:
        check_tensors(root)
        check_home(tensors, home)
        # A lazy module that has not run yet says so itself, in torch's words.
        for module in root.modules():
            if _replicates_itself(module):
                module._replicate_for_data_parallel()
        found = [resolved(tensor) for tensor in tensors if not _is_sparse(tensor)]
        alone = [
            (t.layout, t.dtype, t.requires_grad) if _is_sparse(t) else None for t in tensors
        ]
        try:
            return _C.describe(tuple(found)) + repr(alone).encode()
        except Exception:
            _name_what_cannot_travel(root)
            raise


def _name_what_cannot_travel(root: nn.Module) -> None:
    for kind, named in (("parameter", root.named_parameters()), ("buffer", root.named_buffers())):
        for name, tensor in named:
            try:
                _C.describe((resolved(tensor),))
            except Exception as error:
                if not _is_sparse(tensor):
                    raise TypeError(f"{kind} {name!r} cannot be replicated: {error}") from error


def _is_sparse(tensor: torch.Tensor) -> bool:
    return tensor.layout != torch.strided


def _check_scripted(module: nn.Module) -> None:
    scripted = torch.jit.ScriptModule
    for each in module.modules():
        if isinstance(each, scripted):
            if not all(isinstance(below, scripted) for below in each.modules()):
                raise RuntimeError(
                    "Cannot replicate network where python modules are children of ScriptModule"
                )


def _fresh_replicas(
    root: nn.Module,
    parameters: Tensors,
    buffers: Tensors,
    rows: Sequence[Tuple[Tensors, Tensors]],
) -> List[nn.Module]:
    """New replica modules, each made by its module's own `_replicate_for_data_parallel`."""
    roots = []
    base = tuple(root.modules())
    for parameter_copies, buffer_copies in rows:
        copy_of = {id(t): copy for t, copy in zip(parameters, parameter_copies)}
        copy_of.update((id(t), copy) for t, copy in zip(buffers, buffer_copies))
        replica_of = {id(module): module._replicate_for_data_parallel() for module in base}
        for module in base:
            _fill_fresh(module, replica_of[id(module)], replica_of, copy_of)
        roots.append(replica_of[id(root)])
    return roots


def _fill_fresh(
    module: nn.Module,
    replica: nn.Module,
    replica_of: Dict[int, nn.Module],
    copy_of: Dict[int, torch.Tensor],
) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        # Its dictionaries are views of C++ state: attributes are the only way in.
        for name, child in module._modules.items():
            setattr(replica, name, None if child is None else replica_of[id(child)])
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                setattr(replica, name, None if tensor is None else copy_of[id(tensor)])
        if hasattr(module, "_flat_weights_names"):  # an RNN
            weights = [getattr(replica, name) for name in module._flat_weights_names]
            setattr(replica, "_flat_weights", weights)
        return
    attributes = replica.__dict__
    attributes["_modules"] = {
        name: None if child is None else replica_of[id(child)]
        for name, child in module._modules.items()
    }
    for kind in ("_parameters", "_buffers"):
        attributes[kind] = {
            name: None if tensor is None else copy_of[id(tensor)]
            for name, tensor in getattr(module, kind).items()
        }
    attributes["_is_replica"] = True
    attributes["_former_parameters"] = attributes["_parameters"]
    for repair in _repairs_of(module):
        repair(replica)


def replicate(network: nn.Module, devices: Sequence[Any], detach: bool = False) -> List[nn.Module]:
    """Replicas of a module, one per device, new at every call.

    Args:
        network: the module; its parameters and buffers lie on devices[0].
        devices: int, str or torch.device each; "cpu" is a replica on the host; any may repeat.
        detach: True gives copies without autograd.

    Returns:
        A list of modules of the same types. Their parameters are `nn.Parameter`s with a `grad_fn`:
        what is done with them gives gradients to the network's own. Replica 0 shares memory with
        the network, so its in-place buffer updates are the network's.

    Raises:
        RuntimeError: lazy modules that have not run yet; Python modules below a ScriptModule.
    """
    from .environment import bucket_bytes

    if not devices:
        return []
    found = parse_devices(devices, "devices")
    replicator = Replicator(network, found, bucket_bytes(None), "zero")
    return replicator.take(len(found), detach)[0]
