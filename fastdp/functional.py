"""`data_parallel`: a forward on replicas without a wrapper object."""

from __future__ import annotations

import weakref
from typing import Any, Dict, Optional, Sequence

from torch import nn

from . import environment
from .apply import apply_modules
from .cuts import scatter_call
from .devices import parse_device
from .placement import choose_devices, tensors_of
from .plans import check_home
from .runtime import MAKING, Runtime
from .trees import gather_tree

__all__ = ["data_parallel"]

_runtimes: "weakref.WeakKeyDictionary[nn.Module, Runtime]" = weakref.WeakKeyDictionary()


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Optional[Sequence[Any]] = None,
    output_device: Any = None,
    dim: int = 0,
    module_kwargs: Optional[Dict[str, Any]] = None,
) -> Any:
    """`module(*inputs, **module_kwargs)` on replicas, without a wrapper object.

    Args:
        module: its parameters and buffers lie on device_ids[0].
        inputs: a tuple of arguments, one argument, or None for none.
        device_ids, output_device, dim: as for `DataParallel`.
        module_kwargs: keyword arguments.

    Returns:
        What `DataParallel(module, ...)` would return. Replicas are kept for the module's next call
        with the same devices, for as long as the module lives.

    Raises:
        RuntimeError: no devices; parameters or buffers that are not on device_ids[0].
    """
    if not isinstance(inputs, tuple):
        inputs = (inputs,) if inputs is not None else ()
    devices = choose_devices(device_ids)
    if not devices:
        raise RuntimeError("no available devices were found: device_ids=['cpu', ...] uses the host")
    output = devices[0] if output_device is None else parse_device(output_device, "output_device")
    if len(devices) == 1:
        rows, named = scatter_call(inputs, module_kwargs, devices, dim)
        check_home(tensors_of(module), devices[0])
        return module(*(rows[0] if rows else ()), **(named[0] if named else {}))
    options = environment.bucket_bytes(None), environment.unused_grad(None), None
    with MAKING:
        runtime = _runtimes.get(module)
        if runtime is None or not runtime.serves(module, devices, options):
            runtime = _runtimes[module] = Runtime(module, devices, options, weak=True)
    rows, named = scatter_call(
        inputs, module_kwargs, devices, dim, surprises=runtime.surprises
    )
    if not rows and not named:
        rows, named = ((),), ({},)

    def steps() -> Any:
        outputs = apply_modules(
            runtime.teams, runtime.replicas(len(rows)), rows, named, devices[: len(rows)]
        )
        return gather_tree(outputs, output, dim, runtime.tokens())

    return runtime.forward(steps)
