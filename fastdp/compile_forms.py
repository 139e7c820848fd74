"""Forms: what is compiled of one kind of call (`Form`), and which of them serves a call (`Family`).

A form is a function with a code object of its own, since torch keeps what it compiled by code
object. Inside, torch guards all that the form's key does not tell.
"""

from __future__ import annotations

import itertools
import time
import types
import weakref
from typing import Any, Callable, Dict, Hashable, List, Optional, Sequence, Tuple

import torch
from torch import nn

from . import _torch_compiler, readiness
from .compile_calls import Arguments
from .compile_graphs import Graph, compiled

# Sizes that are compiled as they are, before one form has to do for all others.
_STATIC = 2

_numbers = itertools.count()  # torch keeps what it learns of sizes by a function's name
MISSED = object()
_GLOBALS = ("__name__", "__builtins__", "torch", "MISSED")


def _run(module: Any, args: Any, kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        return MISSED  # this line is not in what was compiled: nothing of that fits
    return module._call_impl(*args, **kwargs)


def _run_with_breaks(module: Any, args: Any, kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


class Family:
    """The forms for calls that differ in sizes only."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._static: Dict[Hashable, Form] = {}
        self._others: Dict[torch.device, Form] = {}  # any sizes, or with graph breaks
        self._breaks = ""  # why one graph does not do
        self._error = ""
        self.made: List[Form] = []
        self.reason = ""

    def form_of(self, sizes: Hashable, device: torch.device) -> Optional["Form"]:
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
            yield Form(self._owner, "one size" if fixed else "any size", device)
        if self._breaks and not self._owner.options.fullgraph:
            self._error = ""
            yield Form(self._owner, "breaks", device, self._breaks)

    def keep(self, form: "Form", sizes: Hashable, device: torch.device) -> None:
        if form not in self.made:
            self.made.append(form)
        if form.kind == "one size":
            self._static[sizes] = form
            return
        if form.kind == "breaks":
            self._static.clear()
        self._others[device] = form

    def failed(self, form: "Form", error: Optional[Exception]) -> None:
        if error is None:
            self._error = "torch.compile is switched off here"
            return
        text = str(error).strip().splitlines() or [""]
        self._error = f"{type(error).__name__}: {text[0]}"
        if form.whole and _torch_compiler.may_break(error):
            self._breaks = self._error

    def give_up(self, reason: str = "") -> str:
        """Nothing more is compiled; the reason, which is the last error's unless it is given."""
        self.reason, self._error = reason or self._error, ""
        return self.reason

    def forgive(self) -> None:
        self._error = self._breaks = ""


class Form:
    """One function, compiled. `kind` is "one size"; "any size", whose sizes are variables; or
    "breaks", of which the compiler leaves parts to Python."""

    def __init__(self, owner: Any, kind: str, device: torch.device, reason: str = "") -> None:
        self.kind = kind
        self.whole = kind != "breaks"
        self.reason = reason
        self.seconds: Dict[torch.device, float] = {}
        self.graphs: List[Any] = []
        self._owner = owner
        self._known: Tuple[int, ...] = ()
        original = _run if self.whole else _run_with_breaks
        code = original.__code__.replace(co_name=f"fastdp_{next(_numbers)}")
        # torch puts what it compiled among the function's globals: its own, to go with it.
        names = {name: original.__globals__[name] for name in _GLOBALS}
        function = types.FunctionType(code, names, original.__name__)
        weakref.finalize(self, _torch_compiler.forget, code).atexit = False
        dynamic = {"one size": False, "any size": True}.get(kind, owner.options.dynamic)
        shares = kind == "one size" and owner.shares
        self._look_up = _torch_compiler.as_compiled(function)
        self._compile = _torch_compiler.compiling(
            function,
            _weakly(self._backend),
            self.whole,
            dynamic,
            _weakly(self._kept_guards) if shares else None,
        )
        self._now: Any = None  # (place, module) while it is compiled

    def look_up(self, where: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The output, or MISSED: then nothing was run. Of a form with breaks what is not compiled
        runs as it is."""
        return self._call(self._look_up, where, module, args, kwargs)

    def compile(self, where: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._now = where, module
        known = [*module.parameters(), *module.buffers(), *Arguments.tensors(args, kwargs)]
        self._known = tuple(map(id, known))
        started, before = time.perf_counter(), self._owner.count
        try:
            with _torch_compiler.messages_of_once_left_out(), _torch_compiler.hooks_guarded():
                return readiness.compiling(
                    lambda: self._call(self._compile, where, module, args, kwargs)
                )
        finally:
            self._now, self._known = None, ()
            if self._owner.count > before:
                seconds = time.perf_counter() - started
                self.seconds[where.device] = self.seconds.get(where.device, 0.0) + seconds

    def _call(
        self, act: Callable[..., Any], where: Any, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        if self.kind != "one size":
            where.wait()
        # Casts are part of what was compiled, and a replica's parameters are never in autocast's
        # cache; but torch's guards ask whether it is on, which differs while a step is recorded.
        cached = torch.is_autocast_cache_enabled()
        try:
            torch.set_autocast_cache_enabled(False)
            return readiness.placed(where, lambda: act(module, args, kwargs))
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
        compiles = _weakly(self._compiles)
        self.graphs.append(Graph(graph, inputs, places, plan, options, compiles))
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


def _weakly(method: Any) -> Callable[..., Any]:
    """The method, for torch, which keeps backends for ever, and for what torch keeps by a code
    object, where the garbage collector sees no cycles."""
    weak = weakref.WeakMethod(method)
    return lambda *args: weak()(*args)
