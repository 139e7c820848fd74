"""Compiled replicas: `DataParallel(module, compile=...)`.

What is compiled is one function, `_run`, of a replica and its arguments, so that what was compiled
for one replica serves the others: modules are told apart by what they hold, not by which object
they are. A `Form` is such a function for one kind of call, with a code object of its own, since
torch keeps what it compiled by code object. Kinds of calls are told by their arguments and by the
description of the parameters; all else (attributes, grad mode, autocast, train or eval) torch
guards itself, inside a form.

Steps only look up what is compiled. A call for which nothing is says `NotReady` (readiness.py), and
is made again where it may compile: one replica after the other.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import threading
import time
import types
import weakref
from typing import Any, Callable, Dict, Hashable, List, Optional, Sequence, Tuple

import torch
from torch import nn

from . import captures, readiness
from .compile_calls import Arguments, State
from .compile_graphs import Graph, compiled
from .compile_options import CompileOptions, is_compiled_module
from .readiness import NotReady

_log = logging.getLogger("fastdp")

# Sizes that are compiled as they are, before one form has to do for all others.
_STATIC = 2
# Kinds of calls (structures of arguments) that are compiled; others run uncompiled.
_MAX_FAMILIES = 32
# Seconds after which a compilation is spoken of.
_LONG_S = 15.0

_lock = threading.RLock()  # the compiler is one for all

_numbers = itertools.count()  # torch keeps what it learns of sizes by a function's name
_MISSED = object()


def _run(module: Any, args: Any, kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        return _MISSED  # this line is not in what was compiled: nothing of that fits
    return module._call_impl(*args, **kwargs)


def _run_with_breaks(module: Any, args: Any, kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


class Compiled:
    """What a wrapper has compiled, for all its replicas."""

    def __init__(self, options: CompileOptions, devices: Sequence[torch.device]) -> None:
        self.options = options
        self.count = 0  # graphs compiled so far, each for a device
        self.reasons: List[str] = []
        self._families: Dict[Hashable, _Family] = {}
        self._devices = tuple(devices) or (torch.device("cpu"),)
        gpus = {device for device in devices if device.type == "cuda"}
        # What was compiled on one GPU is looked up from others only where torch lets us leave out
        # its guards on the device of each tensor; else each GPU has forms of its own.
        self._apart = len(gpus) > 1
        self.shares = self._apart and _takes_guard_filter()
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
            return _plainly(where, module, args, kwargs)
        arguments = Arguments(args, kwargs, where.device)
        family = self._family(where, module, arguments)
        form = family.form_of(arguments.sizes, where.device)
        if form is not None and form.whole:
            try:
                output = form.look_up(where, module, args, kwargs)
            except NotReady:  # compiled, but not for this device
                output = _MISSED
            if output is not _MISSED:
                return output
        if family.reason:
            return _plainly(where, module, args, kwargs)
        breaks = form is not None and not form.whole
        if breaks and readiness.is_as_compiled():
            return form.look_up(where, module, args, kwargs)
        if not readiness.may_compile() or captures.under_way():
            raise NotReady
        if breaks:
            # Whether all of its parts are compiled cannot be asked: it may compile at any call.
            return form.compile(where, module, args, kwargs)
        return self._compile(family, where, module, arguments)

    def _family(self, where: "ReplicaCall", module: nn.Module, arguments: Arguments) -> "_Family":
        # Without its guards on tensors a form knows the module's by this description alone.
        tensors = where.plan.description if self.shares and where.plan is not None else None
        device = None if self.shares or not self._apart else where.device
        key = (
            arguments.structure, type(module), tensors, device,
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), module.training,
        )  # fmt: skip
        family = self._families.get(key)
        if family is None:
            with _lock:
                family = self._families.setdefault(key, _Family(self))
            if len(self._families) > _MAX_FAMILIES:
                family.reason = f"more than {_MAX_FAMILIES} kinds of arguments were compiled before"
                self._note(family.reason)
        return family

    def _compile(
        self, family: "_Family", where: "ReplicaCall", module: nn.Module, arguments: Arguments
    ) -> Any:
        """The output, of what is compiled now; without a compiler's help where it fails."""
        where.wait()
        with _lock, _Progress(where.device):
            for form in family.forms_to_try(arguments.sizes, where.device):
                state = State(module, where.device)
                try:
                    output = form.compile(where, module, arguments.args, arguments.kwargs)
                except Exception as error:
                    state.restore()
                    family.failed(form, error)
                    continue
                if output is not _MISSED:
                    family.keep(form, arguments.sizes, where.device)
                    return output
                family.failed(form, None)
        try:
            output = _plainly(where, module, arguments.args, arguments.kwargs)
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


def _plainly(where: ReplicaCall, module: nn.Module, args: Any, kwargs: Any) -> Any:
    where.wait()
    return module._call_impl(*args, **kwargs)


def _compiled_part(root: nn.Module) -> nn.Module:
    """Of torch.compile(module) the module."""
    return root._modules["_orig_mod"] if is_compiled_module(root) else root


class _Family:
    """The forms for calls that differ in sizes only."""

    def __init__(self, owner: Compiled) -> None:
        self._owner = owner
        self._static: Dict[Hashable, _Form] = {}
        self._others: Dict[torch.device, _Form] = {}  # any sizes, or with graph breaks
        self._breaks = ""  # why one graph does not do
        self._error = ""
        self.made: List[_Form] = []
        self.reason = ""

    def form_of(self, sizes: Hashable, device: torch.device) -> Optional["_Form"]:
        form = self._static.get(sizes)
        return self._others.get(device) if form is None else form

    def forms_to_try(self, sizes: Hashable, device: torch.device) -> Any:
        """One after the other, as long as they fail."""
        known = self.form_of(sizes, device)
        if known is not None:
            yield known
            if known.kind == "breaks":
                return
        elif not self._breaks:
            dynamic = self._owner.options.dynamic
            fixed = dynamic is False or dynamic is None and len(self._static) < _STATIC
            yield _Form(self._owner, "one size" if fixed else "any size", device)
        if self._breaks and not self._owner.options.fullgraph:
            self._error = ""
            yield _Form(self._owner, "breaks", device, self._breaks)

    def keep(self, form: "_Form", sizes: Hashable, device: torch.device) -> None:
        if form not in self.made:
            self.made.append(form)
        if form.kind == "one size":
            self._static[sizes] = form
            return
        if form.kind == "breaks":
            self._static.clear()
        self._others[device] = form
    def failed(self, form: "_Form", error: Optional[Exception]) -> None:
        if error is None:
            self._error = "torch.compile is switched off here"
            return
        from torch._dynamo.exc import Unsupported

        text = str(error).strip().splitlines() or [""]
        self._error = f"{type(error).__name__}: {text[0]}"
        if form.whole and isinstance(error, Unsupported):
            self._breaks = self._error

    def give_up(self) -> str:
        self.reason, self._error = self._error, ""
        return self.reason

    def forgive(self) -> None:
        self._error = self._breaks = ""


class _Form:
    """One function, compiled. `kind` is "one size"; "any size", whose sizes are variables; or
    "breaks", of which the compiler leaves parts to Python."""

    def __init__(self, owner: Compiled, kind: str, device: torch.device, reason: str = "") -> None:
        self.kind = kind
        self.whole = kind != "breaks"
        self.reason = reason
        self.seconds: Dict[torch.device, float] = {}
        self.graphs: List[Any] = []
        self._owner = owner
        self._known: Tuple[int, ...] = ()
        original = _run if self.whole else _run_with_breaks
        code = original.__code__.replace(co_name=f"fastdp_{next(_numbers)}")
        function = types.FunctionType(code, original.__globals__, original.__name__)
        import torch._dynamo as dynamo

        dynamic = {"one size": False, "any size": True}.get(kind, owner.options.dynamic)
        filters: Dict[str, Any] = {}
        if kind == "one size" and owner.shares:
            filters["guard_filter_fn"] = self._kept_guards
        self._look_up = dynamo.run(function)
        self._compile = dynamo.optimize(
            backend=self._backend, nopython=self.whole, dynamic=dynamic, **filters
        )(function)
        self._now: Any = None  # (place, module) while it is compiled

    def look_up(self, where: ReplicaCall, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The output, or _MISSED: then nothing was run. Of a form with breaks what is not compiled
        runs as it is."""
        return self._call(self._look_up, where, module, args, kwargs)

    def compile(self, where: ReplicaCall, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._now = where, module
        known = [*module.parameters(), *module.buffers(), *Arguments.tensors(args, kwargs)]
        self._known = tuple(map(id, known))
        started, before = time.perf_counter(), self._owner.count
        try:
            with readiness.compiling():
                return self._call(self._compile, where, module, args, kwargs)
        finally:
            self._now, self._known = None, ()
            if self._owner.count > before:
                seconds = time.perf_counter() - started
                self.seconds[where.device] = self.seconds.get(where.device, 0.0) + seconds

    def _call(
        self, act: Callable[..., Any], where: ReplicaCall, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        if self.kind != "one size":
            where.wait()
        # Casts are part of what was compiled, and a replica's parameters are never in autocast's
        # cache; but torch's guards ask whether it is on, which differs while a step is recorded.
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            with readiness.place(where):
                return act(module, args, kwargs)
        finally:
            torch.set_autocast_cache_enabled(cached)

    def _backend(self, graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Takes what torch found in the function."""
        if self.kind != "one size":
            self._compiles()
            self.graphs.append(compiled(self._owner.options, graph, inputs))
            return self.graphs[-1]
        where, module = self._now
        place_of = {id(t): k for k, t in enumerate((*module.parameters(), *module.buffers()))}
        places = [place_of.get(id(tensor)) for tensor in inputs]
        # Where torch shows something that is none of the tensors that it may be, nobody knows which
        # bucket to wait for.
        strange = [isinstance(t, torch.Tensor) and id(t) not in self._known for t in inputs]
        plan = None if any(strange) else where.plan
        options = self._owner.options
        self.graphs.append(Graph(graph, inputs, places, plan, options, self._compiles))
        return self.graphs[-1].__call__

    def _compiles(self, device: Optional[torch.device] = None) -> None:
        self._owner.count += 1

    def _kept_guards(self, entries: Sequence[Any]) -> List[bool]:
        """All but those on tensors whose kind this form's key tells: these ask for a device."""
        return [
            entry.guard_type != "TENSOR_MATCH" or id(entry.value) not in self._known
            for entry in entries
        ]

    def description(self) -> Dict[str, Any]:
        result: Dict[str, Any] = {
            "kind": self.kind,
            "graphs": len(self.graphs),
            "seconds": {str(device): seconds for device, seconds in self.seconds.items()},
        }
        if self.kind == "one size":
            result["pieces"] = max((len(graph.pieces) for graph in self.graphs), default=0)
            again = [piece.again() for graph in self.graphs for piece in graph.pieces]
            if any(again):
                result["again"] = next(filter(None, again))
        if self.reason:
            result["reason"] = self.reason
        return result


def _takes_guard_filter() -> bool:
    try:
        from torch._dynamo.eval_frame import _optimize

        return "guard_filter_fn" in inspect.signature(_optimize).parameters
    except ImportError:
        return False


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
