"""One graph of a compiled forward, cut into pieces where a bucket of parameters begins.

A graph that is compiled as a whole reads all parameters at its start and gives all gradients at its
end: nothing could travel beside it. So it is cut (compile_cuts.py): a piece waits, when it runs,
for the last bucket that it reads, and in backward its gradients are there as soon as it has run.
Pieces are compiled one by one, at their first run, from the tensors that they are given then.

What was compiled for one device serves the others (relocation.py).
"""

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from . import _torch_compiler, relocation
from .compile_cuts import MAX_PIECES, cut, inputs_of
from .compile_options import CompileOptions
from .overlap import known_bytes_per_s
from .readiness import NotReady, current_place, is_compiling


class Graph:
    """What runs one graph that torch.compile found, on any of the wrapper's devices.

    Args:
        graph: an fx.GraphModule of fixed shapes.
        inputs: what it is called with now; the replica's parameters among them.
        places: where each input stands among the module's parameters and buffers, or None.
        plan: how these travel; None where that is not known: all are waited for.
        compiles: is told of a device before anything is compiled for it.
    """

    def __init__(
        self,
        graph: Any,
        inputs: Sequence[Any],
        places: Sequence[Optional[int]],
        plan: Any,
        options: CompileOptions,
        compiles: Callable[[torch.device], None],
    ) -> None:
        self.ready: List[torch.device] = []
        self._compiles = compiles
        self._waits = plan is None
        self.pieces: List[Piece] = []
        place_of = {node.name: place for node, place in zip(inputs_of(graph), places)}
        body = None
        if plan is not None and plan.communication.apart:
            buckets = [None if place is None else plan.bucket_of.get(place) for place in places]
            rate = known_bytes_per_s(plan.communication.devices)
            body = cut(graph, inputs, buckets, MAX_PIECES, rate)
        if body is None:
            self.pieces.append(Piece(graph, list(place_of.values()), options))
            self._body: Callable[..., Any] = self.pieces[0]
            return
        for name, part in list(body.named_children()):
            if not name.startswith("submod_"):
                continue
            own = [place_of.get(node.name) for node in inputs_of(part)]
            piece = Piece(part, own, options)
            self.pieces.append(piece)
            delattr(body, name)
            body.__dict__[name] = piece  # its code calls self.<name>(...)
        self._body = body.forward

    def __call__(self, *inputs: Any) -> Any:
        where = current_place()
        device = relocation.device_of(inputs, where)
        if self._waits and where is not None:
            where.wait()
        if device in self.ready:
            return self._body(*inputs)
        if not is_compiling():
            raise NotReady
        self._compiles(device)
        outputs = self._body(*inputs)
        self.ready.append(device)
        return outputs


class Piece:
    """A part of a graph, compiled for each device at its first run there."""

    def __init__(self, graph: Any, places: Sequence[Optional[int]], options: CompileOptions):
        self._options = options
        self._graph, self._single = with_tuple(graph)
        self._places = [place for place in places if place is not None]
        self._runs: Dict[torch.device, Callable[..., Any]] = {}
        self._last_bucket: Tuple[Any, int] = (None, -1)  # of a plan
        self._shared: Optional[relocation.Shared] = None
        self._strides: List[Any] = []  # of the first inputs: code is for these

    def __call__(self, *inputs: Any) -> Any:
        where = current_place()
        device = relocation.device_of(inputs, where)
        if where is not None and where.gate is not None and where.plan is not None:
            where.gate.wait_for(self._bucket_in(where.plan))
        run = self._runs.get(device)
        if run is None:
            run = self._runs[device] = self._compile(device, inputs)
        outputs = run(*inputs)
        return outputs[0] if self._single else outputs

    def again(self) -> str:
        """Why it had to be compiled again for another device, or ""."""
        return "" if self._shared is None else self._shared.reason

    def _bucket_in(self, plan: Any) -> int:
        """The last bucket that it reads: those before it have come, then."""
        known = self._last_bucket
        if known[0] is not plan:
            found = [plan.bucket_of.get(place, -1) for place in self._places]
            known = self._last_bucket = plan, max(found, default=-1)
        return known[1]

    def _compile(self, device: torch.device, inputs: Sequence[Any]) -> Callable[..., Any]:
        home = next(iter(self._runs), None)
        strides = [tensor.stride() if _is_tensor(tensor) else None for tensor in inputs]
        if home is None:
            self._strides = strides
            if device.type != "cuda" or not self._options.is_inductor:
                return compiled(self._options, copy.deepcopy(self._graph), inputs)
            self._shared = relocation.Shared(device)
            graph = copy.deepcopy(self._graph)
            return compiled(self._options, graph, inputs, self._shared.note)
        alike = self._shared is not None and strides == self._strides
        if alike and self._shared.extend(device):
            return self._runs[home]
        graph = relocation.graph_on(copy.deepcopy(self._graph), home, device)
        return compiled(self._options, graph, inputs)


def compiled(
    options: CompileOptions, graph: Any, inputs: Sequence[Any], inner: Any = None
) -> Callable[..., Any]:
    """Compiled now, its backward too; one at a time in this process."""
    with _torch_compiler.lock(), _torch_compiler.compiled_at_once(is_noted=inner is not None):
        return options.compile(graph, inputs, inner)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def with_tuple(graph: Any) -> Any:
    """(the graph with a tuple for its output, whether it had a single thing)."""
    (output,) = [node for node in graph.graph.nodes if node.op == "output"]
    if isinstance(output.args[0], (tuple, list)):
        return graph, False
    output.args = ((output.args[0],),)
    graph.recompile()
    return graph, True
