"""Compiled replicas: `DataParallel(module, compile=...)`.

What is compiled is a function of a replica and its arguments (compile_forms.py), so that what was
compiled for one replica serves the others: modules are told apart by what they hold, not by which
object they are. Kinds of calls are told by their arguments and by the description of the
parameters; all else (attributes, autocast) torch guards itself, inside a form.

Steps only look up what is compiled. A call for which nothing is says `NotReady` (readiness.py), and
is made again where it may compile: one replica after the other.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Any, Dict, Hashable, List, Sequence

import torch
from torch import nn

from . import _torch_compiler, _torch_state, captures, readiness
from .compile_calls import Arguments, State, buffers_meet
from .compile_forms import MISSED, Family
from .compile_options import CompileOptions, is_compiled_module
from .compile_plain import plainly
from .readiness import NotReady
from .signals import is_from_handler

_log = logging.getLogger("fastdp")

# Kinds of calls (structures of arguments) that are compiled; others run uncompiled.
_MAX_FAMILIES = 32
# Seconds after which a compilation is spoken of.
_LONG_S = 15.0


class Compiled:
    """What a wrapper has compiled, for all its replicas."""

    def __init__(self, options: CompileOptions, devices: Sequence[torch.device]) -> None:
        self.options = options
        self.count = 0  # graphs compiled so far, each for a device
        self.reasons: List[str] = []
        self._families: Dict[Hashable, Family] = {}
        self._one_too_many = Family(self)
        self._one_too_many.reason = f"more than {_MAX_FAMILIES} kinds of arguments"
        # Of this wrapper only: a forward that compiles may wait for threads on which the replicas
        # of another wrapper inside of it compile theirs.
        self._lock = threading.RLock()
        self._devices = tuple(devices) or (torch.device("cpu"),)
        gpus = {device for device in devices if device.type == "cuda"}
        # What was compiled on one GPU is looked up from others only where torch lets us leave out
        # its guards on the device of each tensor; else each GPU has forms of its own.
        self._apart = len(gpus) > 1
        self.shares = self._apart and _torch_compiler.takes_guard_filter()
        self._refused = ""
        if options.reason:
            self.refuse(options.reason)

    @property
    def useless(self) -> bool:
        """Whether nothing will ever be compiled."""
        return bool(self._refused)

    def refuse(self, reason: str) -> None:
        """Nothing is compiled from now on."""
        self._refused = reason
        self._note(reason)

    def replica(self, root: nn.Module, device: torch.device, gate: Any) -> "ReplicaCall":
        """What a call of this replica is to do."""
        return ReplicaCall(self, weakref.ref(root), device, gate)

    def direct(self, module: nn.Module) -> "ReplicaCall":
        """The call of the module itself, as the only replica."""
        return ReplicaCall(self, weakref.ref(module), self._devices[0], None)

    def run(self, where: "ReplicaCall", root: nn.Module, args: Any, kwargs: Any) -> Any:
        module = _compiled_part(root)
        if self.useless or readiness.is_uncompiled():
            return plainly(where, module, args, kwargs)
        if any(_torch_state.global_module_hooks()):  # torch has no guards for these
            self._note("as long as there are hooks on all modules")
            return plainly(where, module, args, kwargs)
        arguments = Arguments(args, kwargs, where.device)
        family = self._family(where, module, arguments)
        form = family.form_of(arguments.sizes, where.device)
        if form is not None and form.whole:
            try:
                output = form.look_up(where, module, args, kwargs)
            except NotReady:  # compiled, but not for this device
                output = MISSED
            if output is not MISSED:
                return output
        if family.reason:
            return plainly(where, module, args, kwargs)
        breaks = form is not None and not form.whole
        if breaks and readiness.is_as_compiled():
            return form.look_up(where, module, args, kwargs)
        if not readiness.may_compile() or captures.under_way():
            raise NotReady
        if breaks:
            # Whether all of its parts are compiled cannot be asked: it may compile at any call.
            return form.compile(where, module, args, kwargs)
        return self._compile(family, where, module, arguments)

    def _family(self, where: "ReplicaCall", module: nn.Module, arguments: Arguments) -> "Family":
        # Without its guards on tensors a form knows the module's by this description alone.
        tensors = where.plan.description if self.shares and where.plan is not None else None
        device = None if self.shares or not self._apart else where.device
        key = (
            arguments.structure, type(module), tensors, device,
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), module.training,
        )  # fmt: skip
        family = self._families.get(key)
        if family is None:
            with self._lock:
                if len(self._families) >= _MAX_FAMILIES and key not in self._families:
                    self._note(self._one_too_many.reason)
                    return self._one_too_many  # and none is kept: they may be new at each step
                family = self._families.setdefault(key, Family(self))
        return family

    def _compile(
        self, family: "Family", where: "ReplicaCall", module: nn.Module, arguments: Arguments
    ) -> Any:
        """The output, of what is compiled now; without a compiler's help where it fails, unless the
        user has said that all of it must be compiled."""
        where.wait()
        if len(self._devices) > 1 and buffers_meet(module):
            # In the other replicas they lie apart, which what is compiled here does not ask.
            self._note(family.give_up("buffers that share memory"))
            return plainly(where, module, arguments.args, arguments.kwargs)
        with self._lock, _Progress(where.device):
            for form in family.forms_to_try(arguments.sizes, where.device):
                state = State(module, where.device)
                try:
                    output = form.compile(where, module, arguments.args, arguments.kwargs)
                except Exception as error:
                    state.restore()
                    if self.options.fullgraph or is_from_handler(error):
                        raise
                    if state.parameters_written():  # to run it again would write them twice
                        family.forgive()
                        raise
                    family.failed(form, error)
                    continue
                if output is not MISSED and form.graphs:
                    family.keep(form, arguments.sizes, where.device)
                    return output
                if output is not MISSED:  # all of it was left to Python
                    self._note(family.give_up(form.reason or "no operators were found in it"))
                    return output
                family.failed(form, None)
        try:
            output = plainly(where, module, arguments.args, arguments.kwargs)
        except BaseException:
            family.forgive()  # it was the model's own error, and none of the compiler's
            raise
        self._note(family.give_up())
        return output

    def _note(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)
            _log.warning("compile: replicas run uncompiled: %s", reason)

    def report(self) -> Dict[str, Any]:
        families = list(self._families.copy().values())
        forms = [form for family in families for form in family.made]
        return {
            "backend": self.options.name,
            "seconds": sum(sum(form.seconds.values()) for form in forms),
            "forms": [form.description() for form in forms],
            "reasons": list(self.reasons),
        }


class ReplicaCall:
    """Stands in a replica's root where `module.compile()` puts its function: the module's call."""

    __slots__ = ("device", "gate", "plan", "_compiled", "_root", "__weakref__")

    def __init__(
        self, compiled: Compiled, root: Any, device: torch.device, gate: Any, plan: Any = None
    ) -> None:
        self._compiled = compiled
        self._root = root
        self.device = device
        self.gate = gate  # what readers of the replica's tensors pass; None: all are there
        self.plan = plan  # of these tensors; None: as gate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled.run(self, self._root(), args, kwargs)

    def wait(self) -> None:
        """The current stream waits for all tensors of the replica."""
        if self.gate is not None and self.plan is not None:
            self.gate.wait_for(len(self.plan.buckets) - 1)

    def __reduce__(self) -> Any:
        return _nothing, ()  # a copy of a replica is a module like any other


def _nothing() -> None:
    return None


def _compiled_part(root: nn.Module) -> nn.Module:
    """Of torch.compile(module) the module."""
    return root._modules["_orig_mod"] if is_compiled_module(root) else root


class _Progress:
    """Around a compilation: says that it goes on, if it takes long."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started = time.perf_counter()
        self._timer = threading.Timer(_LONG_S, self._say)
        self._timer.daemon = True

    def _say(self) -> None:
        _log.warning(
            "compile: still compiling for %s after %.0f s. It is done once for each kind of "
            "arguments; dp.report() says how long it took",
            self._device, time.perf_counter() - self._started,
        )  # fmt: skip

    def __enter__(self) -> None:
        _log.info("compile: compiling for %s", self._device)
        self._timer.start()

    def __exit__(self, *error: Any) -> None:
        self._timer.cancel()
        seconds = time.perf_counter() - self._started
        _log.info("compile: %.1f s for %s", seconds, self._device)
