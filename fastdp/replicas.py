"""Replicas of a module: made once, refreshed for every forward, lent out one set per call.

A `ReplicaSet` holds one replica per rank. Before a forward it is refreshed (each module's
attributes as the base has them now, its parameters and buffers this step's copies), afterwards
emptied. A set of which user code still holds a module (checkpointing does, until backward has run)
is left alone, and another is taken: see `_C.Replica.idle`.

Modules with their own `_replicate_for_data_parallel` (scripted, fx, lazy, a user's) get new objects
at every forward, as in nn.DataParallel.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import nullcontext
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn

from . import _C, _torch_protocol
from .buckets import is_sparse, make_buckets
from .devices import parse_devices
from .environment import DEFAULT_BUCKET_BYTES, bucket_bytes
from .flat_weights import RnnWeights
from .fresh_replicas import WalkedTree, check_scripted, fresh_replicas
from .overlap import is_worth_hiding
from .plans import Plan, Source, Tensors, alone_in_plan, check_home, check_tensors, described
from .replica_sets import ReplicaSet
from .signatures import NotRecordable
from .streams import Communication

__all__ = ["replicate"]

# The first of a module's buckets, where moves are hidden. It takes some 10 us between two H200.
_FIRST_BYTES = 4 * 2**20
# Of buckets on one device. GPT-2 twice on an H200, forward and backward: 63.3 ms, with 25 MiB 66.8.
_SHARED_BYTES = 64 * 2**20
# Sets that user code held when their call ended; looked at again at the next.
_MAX_LENT = 2


class Lease:
    """Replicas lent to one call, with the tokens that its gather hands on, and what brought them
    their copies."""

    __slots__ = ("replicas", "tokens", "communication")

    def __init__(
        self, replicas: Optional[ReplicaSet], tokens: Tensors, communication: Communication
    ) -> None:
        self.replicas = replicas
        self.tokens = tokens
        self.communication = communication


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
        transport: Optional[str] = None,
        weak: bool = False,
    ) -> None:
        self._weak = weak
        self._busy = False
        self._module = weakref.ref(module)
        self.devices = tuple(devices)
        self._communication = Communication(devices)  # beside compute
        self._in_line = Communication(devices, beside=False)
        self._bucket_bytes = bucket_bytes
        self._unused_grad = unused_grad
        self._transport = transport
        self._lock = threading.RLock()
        self._tree: Optional[Any] = None
        self._rnn_weights = RnnWeights(())
        self._fresh = False
        self._plans: Dict[Tuple[Any, ...], Plan] = {}
        self._idle: List[ReplicaSet] = []
        self._lent: List[ReplicaSet] = []
        self.compiled: Any = None  # what compiles the replicas, if anything does
        _all_replicators.add(self)

    def take(
        self, ranks: int, detach: bool, early: bool = False
    ) -> Tuple[List[nn.Module], Lease]:
        """The first `ranks` replicas, with copies of the tensors as they are now. With `early` the
        copies may still be on their way when this returns: readers wait (awaited.py), and the
        caller promises `give_back` before the parameters are written."""
        root = self._module()
        return self._held(root, True, lambda same: self._make(root, ranks, detach, early))

    def watch(self, witness: Any) -> None:
        """Shows each backward's gradients to a `Witness`, or to nobody."""
        self._communication.witness = self._in_line.witness = witness

    def parameters(self) -> Tensors:
        """The module's parameters as they are now, each once."""
        root = self._module()
        return self._held(root, True, lambda same: self._tree.collect()[0])

    def source(self, ranks: int, grad: bool, dim: int) -> Source:
        """The module as it is now, for a recording over the first `ranks` devices.

        Raises:
            NotRecordable: modules that make their own replicas; sparse parameters.
        """
        root = self._module()

        def collect(same: bool) -> Source:
            if self._fresh:
                raise NotRecordable("a module in it makes its own replicas (scripted, fx or lazy)")
            parameters, buffers, pattern = self._tree.collect()
            tensors = parameters + buffers
            plan = self._plan(root, tensors, pattern, len(parameters), ranks, grad)
            if plan.alone:
                plan = self._plan_of_recording(plan, tensors)
            devices, held = self.devices[:ranks], self._while_same(self._tree)
            gathered = len(self.devices) > 1
            return Source(
                root,
                self._tree,
                plan,
                tensors,
                devices,
                gathered,
                plan.communication,
                held,
                grad,
                dim,
                self._compiler(),
            )

        return self._held(root, True, collect)

    def tensors(self) -> Tuple[Tensors, Tensors]:
        """The module's parameters and buffers as they are now, each once."""
        root = self._module()
        return self._held(root, True, lambda same: self._tree.collect()[:2])

    def plan_for(self, ranks: int, differentiable: bool) -> Plan:
        """How the module as it is now would travel to the first `ranks` devices."""
        root = self._module()

        def make(same: bool) -> Plan:
            parameters, buffers, pattern = self._tree.collect()
            tensors = parameters + buffers
            return self._plan(root, tensors, pattern, len(parameters), ranks, differentiable)

        return self._held(root, True, make)

    def dressed(self, rows: Sequence[Tuple[Tensors, Tensors]]) -> List[nn.Module]:
        """New replicas with these (parameters, buffers), which wait for nothing and are not kept:
        for a forward that is only tried."""
        root = self._module()
        no_plan: Any = None  # where nothing is waited for, none is looked at

        def make(same: bool) -> List[nn.Module]:
            parameters, buffers, _ = self._tree.collect()
            if self._fresh:
                return fresh_replicas(root, parameters, buffers, rows)
            replicas = ReplicaSet(self._tree, root, self.devices[:1] * len(rows))
            return replicas.refresh(root, rows, no_plan, self._in_line)

        return self._held(root, True, make)

    def _while_same(self, tree: Any) -> Callable[[Callable[[], Any]], Any]:
        def held(act: Callable[[], Any]) -> Any:
            def checked(same: bool) -> Any:
                if not same or tree is not self._tree:
                    raise NotRecordable("its modules changed while it was recorded")
                tree.collect()  # a refresh wants to be told of what is there now
                return act()

            return self._held(self._module(), False, checked)

        return held

    def _make(
        self, root: nn.Module, ranks: int, detach: bool, early: bool
    ) -> Tuple[List[nn.Module], Lease]:
        parameters, buffers, pattern = self._tree.collect()
        tensors = parameters + buffers
        differentiable = not detach and torch.is_grad_enabled()
        plan = self._plan(root, tensors, pattern, len(parameters), ranks, differentiable)
        with torch.no_grad() if detach else nullcontext():
            rows, tokens = plan.copies(tensors, differentiable)
        if self._fresh or not early:
            plan.communication.deliver()
        if self._fresh:
            if self._compiler() is not None:
                self.compiled.refuse("a module in it makes its own replicas (scripted or fx)")
            roots = fresh_replicas(root, parameters, buffers, rows)
            return roots, Lease(None, tokens, plan.communication)
        replicas = self._take_set(root)
        roots = replicas.refresh(root, rows, plan, plan.communication)
        return roots, Lease(replicas, tokens, plan.communication)

    def plan_in_use(self) -> Optional[Plan]:
        """That of the most replicas, with gradients before one without; None before a forward."""
        plans = self._plans.copy()
        return plans[max(plans)] if plans else None

    def release(self) -> None:
        """Lets go of gradients that were summed and are held still, as the next forward would."""
        self._communication.release_reads()

    def give_back(self, lease: Lease) -> None:
        """The end of a lease's replicas; its tokens stay. Replicas that somebody still holds are
        kept apart, and looked at again before new ones are made. A second end does nothing."""
        if lease.replicas is None:
            return
        lease.communication.deliver()
        replicas, lease.replicas = lease.replicas, None
        root = self._module()
        if root is None:
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
        check_scripted(root)
        base = tuple(root.modules())
        fresh = any(_torch_protocol.replicates_itself(each) for each in base)
        tree = WalkedTree(base) if fresh else _C.Tree(base)
        self._fresh, self._tree, self._rnn_weights = fresh, tree, RnnWeights(base)
        self._plans, self._idle, self._lent = {}, [], []
        if not self._tree.hold(root):
            raise RuntimeError("the module was changed by another thread while it was replicated")

    def _plan(
        self,
        root: nn.Module,
        tensors: Tensors,
        pattern: bytes,
        cut: int,
        ranks: int,
        differentiable: bool,
    ) -> Plan:
        description = described(tensors, root, self.devices[0]) + pattern
        description += self._rnn_weights.describe()
        key = ranks, differentiable
        plan = self._plans.get(key)
        if plan is None or plan.description != description:
            check_tensors(root)
            check_home(tensors, self.devices[0])
            alone = alone_in_plan(tensors, cut)
            plan = self._plans[key] = self._new_plan(description, tensors, alone, cut, ranks)
        return plan

    def _plan_of_recording(self, plan: Plan, tensors: Tensors) -> Plan:
        if plan.recorded is None:
            if any(is_sparse(tensors[place]) for place in plan.alone):
                raise NotRecordable("it has sparse tensors")
            cut, ranks = plan.parameter_count, len(plan.devices)
            plan.recorded = self._new_plan(plan.description, tensors, [], cut, ranks)
        return plan.recorded

    def _new_plan(
        self, description: bytes, tensors: Tensors, alone: List[int], cut: int, ranks: int
    ) -> Plan:
        devices = self.devices[:ranks]
        communication, first_bytes, limit_bytes = self._way(tensors, devices)
        buckets = make_buckets(
            tensors,
            set(alone),
            cut,
            devices,
            communication,
            limit_bytes,
            self._unused_grad,
            self._rnn_weights.find(tensors),
            self._transport,
            first_bytes,
        )
        return Plan(description, buckets, alone, cut, devices, communication)

    def _way(
        self, tensors: Tensors, devices: Sequence[torch.device]
    ) -> Tuple[Communication, int, int]:
        """What the moves run on, and how large the first parameter's bucket and the others may be,
        where the limit is the default. Beside compute only that bucket is not hidden: the forward
        waits for it, and a backward mostly completes it last. In line nothing is gained by more
        buckets than one; but on one device it would hold the gradients of several replicas."""
        limit_bytes = self._bucket_bytes
        dense = [tensor for tensor in tensors if not is_sparse(tensor)]
        if is_worth_hiding(dense, devices, self._transport):
            first_bytes = _FIRST_BYTES if limit_bytes == DEFAULT_BUCKET_BYTES else limit_bytes
            return self._communication, first_bytes, limit_bytes
        if limit_bytes == DEFAULT_BUCKET_BYTES:
            size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in dense)
            most_bytes = _SHARED_BYTES if len(set(devices)) == 1 else size_bytes
            limit_bytes = max(limit_bytes, min(size_bytes, most_bytes))
        return self._in_line, limit_bytes, limit_bytes

    def _take_set(self, root: nn.Module) -> ReplicaSet:
        # Even where one is idle: a set that was let go late would keep its copies for ever.
        for replicas in list(self._lent):
            if replicas.empty_if_idle(self._weak):
                self._lent.remove(replicas)
                self._idle.append(replicas)
        compiled = self._compiler()
        self._idle = [replicas for replicas in self._idle if replicas.compiled is compiled]
        if self._idle:
            return self._idle.pop()
        return ReplicaSet(self._tree, root, self.devices, compiled)

    def _compiler(self) -> Any:
        return None if self.compiled is None or self.compiled.useless else self.compiled

    def forget(self) -> None:
        """In a forked child: another thread of the parent may have been at work here."""
        self._lock = threading.RLock()
        self._busy = False
        # Kept: a CUDA event or graph that is destroyed in a forked child ends the process.
        _left_by_parent.append((self._tree, self._plans, self._idle, self._lent))
        self._tree = None
        self._plans, self._idle, self._lent = {}, [], []


_left_by_parent: List[Any] = []


_all_replicators: "weakref.WeakSet[Replicator]" = weakref.WeakSet()


def _forget_all() -> None:
    for replicator in list(_all_replicators):
        replicator.forget()


os.register_at_fork(after_in_child=_forget_all)


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
    if not devices:
        return []
    found = parse_devices(devices, "devices")
    replicator = Replicator(network, found, bucket_bytes(None), "zero")
    return replicator.take(len(found), detach)[0]
