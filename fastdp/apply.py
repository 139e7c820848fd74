"""Running modules side by side, each on its device, in a thread of its own."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

import torch
from torch import nn

from .cuts import find_tensors
from .devices import parse_device
from .readiness import NOT_READY, NotReady, only_ready
from .streams import current_stream
from .workers import Teams, run_jobs

__all__ = ["parallel_apply"]

_teams = Teams()


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Optional[Sequence[Dict[str, Any]]] = None,
    devices: Optional[Sequence[Any]] = None,
) -> List[Any]:
    """Applies modules[i] to inputs[i] on devices[i], all at once, and gives their outputs.

    Args:
        modules: one per device.
        inputs: for each, a tuple or list of arguments, or one argument.
        kwargs_tup: for each, keyword arguments.
        devices: int, str or torch.device each, or None: the device of the first tensor in its
            input.

    Raises:
        AssertionError: lists of different lengths.
        RuntimeError: no device given and no tensor to take it from.
        What a module raises: after all have finished, the first by rank, with its own type, the
        replica and its device in the text, and the original as `__cause__`.
    """
    for name, given in (("inputs", inputs), ("kwargs_tup", kwargs_tup), ("devices", devices)):
        if given is not None and len(given) != len(modules):
            raise AssertionError(
                f"The number of modules {len(modules)} is not equal to the number of {name} "
                f"{len(given)}"
            )
    found = [
        _device_of(i, None if devices is None else devices[i], inputs[i])
        for i in range(len(modules))
    ]
    return apply_modules(_teams, modules, inputs, kwargs_tup, found)


def _device_of(rank: int, device: Any, inputs: Any) -> torch.device:
    if device is not None:
        return parse_device(device, f"devices[{rank}]")
    tensors = find_tensors(inputs)
    if not tensors:
        raise RuntimeError(
            f"in replica {rank}, no device was provided and no tensor input was found; "
            "device cannot be resolved"
        )
    return tensors[0].device


def apply_modules(
    teams: Teams,
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs: Optional[Sequence[Dict[str, Any]]],
    devices: Sequence[torch.device],
    sequential: bool = False,
) -> List[Any]:
    """`parallel_apply` on given threads and checked arguments; with `sequential` on none."""
    if not len(modules) == len(inputs) == len(devices):
        raise AssertionError(
            f"{len(modules)} modules, {len(inputs)} inputs and {len(devices)} devices: "
            "there must be one of each per replica"
        )
    if kwargs is None:
        kwargs = [{} for _ in modules]
    runs = [
        _Call(module, given if isinstance(given, (list, tuple)) else (given,), named, device)
        for module, given, named, device in zip(modules, inputs, kwargs, devices)
    ]
    side_by_side = len(runs) > 1 and not sequential
    for run in runs:
        run.only_ready = side_by_side and run.is_compiled()
    results = run_jobs(teams, runs, devices, sequential)
    if not any(result is NOT_READY for result in results):
        return results
    again = [run.again(output) for run, output in zip(runs, results)]
    return run_jobs(teams, again, devices, in_turn=True)


class _Call:
    """One replica's forward, on its device and on the stream that is current there for the
    caller."""

    __slots__ = ("module", "inputs", "kwargs", "stream", "only_ready")

    def __init__(
        self, module: nn.Module, inputs: Any, kwargs: Dict[str, Any], device: torch.device
    ) -> None:
        self.module = module
        self.inputs = inputs
        self.kwargs = kwargs
        on_gpu = device.type == "cuda"
        self.stream = current_stream(device) if on_gpu else None
        self.only_ready = False  # where it would have to be compiled first, it is not run

    def is_compiled(self) -> bool:
        return getattr(self.module, "_compiled_call_impl", None) is not None

    def again(self, output: Any) -> Any:
        """What gives this output, or, if it was not ready, runs it: alone, and compiled first."""
        self.only_ready = False
        return self if output is NOT_READY else lambda: output

    def __call__(self) -> Any:
        if not self.only_ready:
            return self._run()
        try:
            return only_ready(self._run)
        except NotReady:
            return NOT_READY

    def _run(self) -> Any:
        if self.stream is None:
            return self.module(*self.inputs, **self.kwargs)
        with _On(self.stream):
            return self.module(*self.inputs, **self.kwargs)


class _On:
    """Around a replica's forward: its stream and that stream's device are current; afterwards what
    was current before, whatever the forward left. As `torch.cuda.device` and `torch.cuda.stream`
    do it, which make objects for what is current and set what is set already, at the cost of some
    launches for each replica."""

    __slots__ = ("_stream", "_before", "_device")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._device: Any = None  # where another device was current: what puts it back

    def __enter__(self) -> None:
        stream = self._stream
        self._before = current_stream(stream.device)
        try:
            if torch.cuda.current_device() != stream.device.index:
                # Not by set_device(), which would begin to use a GPU that is left alone.
                self._device = torch.cuda.device(stream.device.index)
                self._device.__enter__()
            if self._before is not stream:
                torch.cuda.set_stream(stream)
        except BaseException:  # an interrupt: __exit__ will not be called
            self.__exit__()
            raise

    def __exit__(self, *error: Any) -> None:
        device = self._stream.device
        if current_stream(device) is not self._before:
            torch.cuda.set_stream(self._before)
        if self._device is not None:
            self._device.__exit__(None, None, None)
        elif torch.cuda.current_device() != device.index:
            torch.cuda.set_device(device.index)
