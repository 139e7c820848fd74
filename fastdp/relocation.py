"""What was compiled for one GPU, made to serve another.

Inductor writes the number of the device into the code that it generates, and else nothing that
depends on which of several equal GPUs it is. So for another GPU of the same kind that code is
written again with another number: nothing is traced, differentiated, scheduled or tuned a second
time, and Triton finds its kernels in its cache. Where that does not work out (an Inductor that
writes other code than this file knows), the graph is compiled for that GPU from its start.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Callable, Dict, List, Sequence

import torch

from . import _torch_compiler

_log = logging.getLogger("fastdp")

# Where generated code says which GPU it is for; the number is replaced.
_NUMBERS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(\bcuda:)(\d+)\b",
        r"(\btype='cuda', index=)(\d+)\b",
        r"(\b_DeviceGuard\()(\d+)(?=\))",
        r"(\btorch\.cuda\.device\()(\d+)(?=\))",
        r"(\bset_device\()(\d+)(?=\))",
        r"(\bget_(?:raw|cuda)_stream\()(\d+)(?=\))",
        r"(\bdefault_generators\[)(\d+)(?=\])",
    )
)


def device_of(inputs: Sequence[Any], where: Any = None) -> torch.device:
    """Where a graph runs that is given these. `where`: the call of a replica that it is part of, on
    whose GPU it runs though all of these may lie on the host, or one of them elsewhere."""
    if where is not None and where.device.type != "cpu":
        return where.device
    found = (tensor.device for tensor in inputs if isinstance(tensor, torch.Tensor))
    return next((device for device in found if device.type != "cpu"), torch.device("cpu"))


class Shared:
    """The parts that Inductor made of one graph, its forward and its backward, and the same for
    other devices."""

    def __init__(self, home: torch.device) -> None:
        self.reason = ""  # why it could not serve another device
        self._home = home
        self._parts: List[_Part] = []
        _torch_compiler.share_kernels(home.index)

    def note(self, compile_inner: Any, graph: Any, inputs: Any, **options: Any) -> Any:
        """Takes part in Inductor's work (`CompileOptions.compile`)."""
        made = compile_inner(graph, inputs, **options)
        # What AOTAutograd is given stays torch's own object; what it calls passes here.
        part = _Part(made, self._home, device_of(inputs) != self._home)
        if part.call is not None:
            made.current_callable = part
        self._parts.append(part)
        return made

    def extend(self, device: torch.device) -> bool:
        """Whether from now on the compiled graph runs on `device`, too."""
        try:
            if not self._parts:
                raise ValueError("it came from a cache of another compiler's")
            if not are_alike(self._home, device):
                raise ValueError("they are GPUs of different kinds")
            made = [part.on(device) for part in self._parts]
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self.reason = f"what is for {self._home} was compiled again for {device}: {reason}"
            _log.info("compile: %s", self.reason)
            return False
        for part, call in zip(self._parts, made):
            part.calls[device] = call
        return True


class _Part:
    """Stands for the code of one compiled graph, and runs that of the device of its inputs.
    `is_blind`: all of these lie on the host, and whose they are a backward could not tell."""

    def __init__(self, made: Any, home: torch.device, is_blind: bool) -> None:
        self.call = getattr(made, "current_callable", None)
        self.calls: Dict[torch.device, Callable[[List[Any]], Any]] = {home: self.call}
        self._home = home
        self._is_blind = is_blind
        self._source = getattr(made, "source_code", "")
        self._constants = dict(getattr(made, "constants", None) or {})
        self._checked = list(getattr(made, "inputs_to_check", ()) or ())
        self._mutated = getattr(made, "mutated_input_idxs", ())
        self._devices = set(getattr(made, "device_idxs", ()) or ())

    def __call__(self, inputs: List[Any]) -> Any:
        device = self._home if self._is_blind else device_of(inputs)
        return self.calls[device](inputs)

    def on(self, device: torch.device) -> Callable[[List[Any]], Any]:
        """The same code, on another device.

        Raises:
            ValueError: it is for several GPUs, or not of the kind that can be written again.
        """
        if self._is_blind and (self._devices or any(p.search(self._source) for p in _NUMBERS)):
            raise ValueError("a part of it has no input on the GPU")
        if self.call is None or not self._source or self._devices - {self._home.index}:
            raise ValueError("its code is not Python that runs on one GPU")
        if self._is_blind:  # and on the host
            return self.call
        source = text_for(self._source, self._home.index, device.index)
        constants = {
            name: value.to(device) if getattr(value, "device", None) == self._home else value
            for name, value in self._constants.items()
        }
        with torch.cuda.device(device):
            module = _torch_compiler.loaded(source, constants)
        return _torch_compiler.aligned(module.call, self._checked, self._mutated)


def text_for(source: str, home: int, target: int) -> str:
    """Generated code for GPU `home`, written for GPU `target`.

    Raises:
        ValueError: it speaks of a third one.
    """

    def renumbered(match: "re.Match[str]") -> str:
        if int(match.group(2)) != home:
            raise ValueError(f"its code speaks of GPU {match.group(2)}, too")
        return f"{match.group(1)}{target}"

    for pattern in _NUMBERS:
        source = pattern.sub(renumbered, source)
    return source


def are_alike(one: torch.device, other: torch.device) -> bool:
    """Whether code for the one is right, and well tuned, for the other."""
    first, second = (torch.cuda.get_device_properties(device) for device in (one, other))
    names = ("name", "major", "minor", "multi_processor_count")
    return all(getattr(first, name) == getattr(second, name) for name in names)


def graph_on(graph: Any, home: torch.device, device: torch.device) -> Any:
    """An fx.GraphModule that was traced on `home`, in place for `device`."""

    def moved(value: Any) -> Any:
        if value == home and isinstance(value, torch.device):
            return device
        return str(device) if isinstance(value, str) and value == str(home) else value

    for part in graph.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                node.args = torch.fx.node.map_aggregate(node.args, moved)
                node.kwargs = torch.fx.node.map_aggregate(node.kwargs, moved)
            part.recompile()
        for members in (part._buffers, part._parameters):
            for name, tensor in list(members.items()):
                if tensor is not None and tensor.device == home:
                    members[name] = tensor.detach().to(device)
        for name, value in list(vars(part).items()):
            if isinstance(value, torch.Tensor) and value.device == home:
                setattr(part, name, value.detach().to(device))
    return graph
