"""`DataParallel`: torch's class with the price taken off. The four steps of a forward (scatter,
replicate, parallel_apply, gather) are methods, as there, and a subclass may override any of them.
"""

from __future__ import annotations

import sys
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn

from . import _torch_compat, environment, trees
from .apply import apply_modules
from .devices import parse_device, parse_devices
from .placement import check_one_device, choose_devices, public_device, tensors_of
from .plans import check_home
from .replicas import replicate
from .runtime import MAKING, Runtime

__all__ = ["DataParallel"]


class DataParallel(nn.DataParallel):
    """Data parallelism in one process: `torch.nn.DataParallel` without its price.

    Cuts the inputs along `dim`, runs one replica of the module on each device, and joins the
    outputs. Gradients are summed into the module's own parameters, in rank order. Code written for
    nn.DataParallel runs unchanged; what differs is in the README.

    Args:
        module: the module. Its parameters and buffers must lie on device_ids[0].
        device_ids: one entry per replica: int (a CUDA index), str or torch.device. Any may repeat:
            [0, 0] is two replicas on one GPU, ["cpu", "cpu"] two on the host, each in a thread.
            None means all GPUs; without a GPU the module is then called directly, as in torch.
        output_device: where outputs are joined; -1 or "cpu" is the host. Default: device_ids[0].
        dim: dimension along which inputs are cut and outputs joined.
        unused_grad: what `.grad` becomes for a parameter that took part in nothing: "zero", as in
            nn.DataParallel, or "none", as without a wrapper. Default: FASTDP_UNUSED_GRAD, else
            "zero".
        bucket_bytes: parameters travel in buckets of at most this many bytes. Default:
            FASTDP_BUCKET_BYTES, else 25 MiB.

    Shapes: tensors of shape (N, ...) are cut into pieces as `torch.chunk(n, dim)` cuts them;
    outputs are joined along `dim`; 0-dim outputs become a vector with one entry per replica.

    Raises:
        ValueError: unknown devices or options, a module that spans devices.
        RuntimeError: at a forward, when parameters or buffers are not on device_ids[0].

    An error in a replica is raised after all have finished, with its own type, the replica and its
    device in the text, and the original as `__cause__`; the wrapper stays usable.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Optional[Sequence[Any]] = None,
        output_device: Any = None,
        dim: int = 0,
        *,
        unused_grad: Optional[str] = None,
        bucket_bytes: Optional[int] = None,
    ) -> None:
        # Not nn.DataParallel.__init__: without a GPU it knows no device at all.
        nn.Module.__init__(self)
        _torch_compat.log_use("fastdp.DataParallel")
        self.module = module
        self.dim = dim
        self.unused_grad = environment.unused_grad(unused_grad)
        self.bucket_bytes = environment.bucket_bytes(bucket_bytes)
        devices = choose_devices(device_ids)
        if not devices:
            self.device_ids = []
            return
        self.device_ids = [public_device(device) for device in devices]
        output = devices[0]
        if output_device is not None:
            output = parse_device(output_device, "output_device")
        self.output_device = public_device(output)
        self.src_device_obj = devices[0]
        check_one_device(module)
        if devices[0].type == "cuda":
            _torch_compat.check_balance([device.index for device in devices])
        if len(devices) == 1:
            self.module.to(self.src_device_obj)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            # torch.compile of something around this wrapper stops at its edge: neither the moves
            # nor replicas on several threads can be traced.
            return _untraced_forward()(self, *inputs, **kwargs)
        return self._forward(*inputs, **kwargs)

    def _forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with torch.autograd.profiler.record_function("DataParallel.forward"):
            if not self.device_ids or self.__dict__.get("_is_replica"):
                # As a part of a replica of something else, this wrapper's work is done already.
                return self.module(*inputs, **kwargs)
            if _torch_compat.inside_function_transform():
                raise RuntimeError(
                    "DataParallel cannot run inside a torch.func transform (grad, vjp, jvp, vmap): "
                    "copies between devices have no rules for them. Call the module itself there, "
                    "or use torch.autograd"
                )
            rows, named = self.scatter(inputs, kwargs, self.device_ids)
            if not rows and not named:
                # A forward without arguments runs once, on the first device.
                rows, named = ((),), ({},)
            if len(self.device_ids) == 1:
                check_home(tensors_of(self.module), self.src_device_obj)
                return self.module(*rows[0], **named[0])
            return self._runtime().forward(lambda: self._gathered(rows, named))

    def _gathered(self, rows: Sequence[Any], named: Sequence[Any]) -> Any:
        return self.gather(self._run_replicas(rows, named), self.output_device)

    def _run_replicas(self, rows: Sequence[Any], named: Sequence[Any]) -> List[Any]:
        """In a frame of its own: none but user code holds a replica once it returns."""
        replicas = self.replicate(self.module, self.device_ids[: len(rows)])
        return self.parallel_apply(replicas, rows, named)

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> List[nn.Module]:
        """The replicas of this forward, one per device, filled with copies of the module's tensors
        as they are now. For the wrapped module on the wrapper's own devices they are kept and
        refreshed; for anything else they are new."""
        runtime = self._runtime()
        devices = runtime.parsed(device_ids)
        if runtime.serves(module, devices, self._options()):
            return runtime.replicas(len(devices))
        return replicate(module, device_ids, not torch.is_grad_enabled())

    def scatter(
        self, inputs: Tuple[Any, ...], kwargs: Optional[Dict[str, Any]], device_ids: Sequence[Any]
    ) -> Tuple[Tuple[Any, ...], Tuple[Dict[str, Any], ...]]:
        """One tuple of arguments and one dictionary of keyword arguments per used replica."""
        return trees.scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any
    ) -> List[Any]:
        """Each replica's output, run on the wrapper's own threads."""
        runtime = self._runtime()
        devices = runtime.parsed(self.device_ids[: len(replicas)])
        return apply_modules(runtime.teams, replicas, inputs, kwargs, devices)

    def gather(self, outputs: Sequence[Any], output_device: Any) -> Any:
        """The replicas' outputs joined on one device."""
        device = parse_device(output_device, "output_device")
        return trees.gather_tree(list(outputs), device, self.dim, self._runtime().tokens())

    def _options(self) -> Tuple[int, str]:
        return self.bucket_bytes, self.unused_grad

    def _runtime(self) -> Runtime:
        runtime = self.__dict__.get("_fastdp_runtime")
        if runtime is None:
            devices = parse_devices(self.device_ids, "device_ids")
        else:
            devices = runtime.parsed(self.device_ids)
        options = self._options()
        if runtime is None or not runtime.serves(self.module, devices, options):
            with MAKING:
                runtime = self.__dict__.get("_fastdp_runtime")
                if runtime is None or not runtime.serves(self.module, devices, options):
                    runtime = Runtime(self.module, devices, options)
                    runtime.device_ids = list(self.device_ids)
                    self.__dict__["_fastdp_runtime"] = runtime
        return runtime

    def __getstate__(self) -> Dict[str, Any]:
        """Threads, streams and replicas stay out of copies and files."""
        state = self.__dict__.copy()
        state.pop("_fastdp_runtime", None)
        return state


_untraced: Any = None


def _untraced_forward() -> Any:
    global _untraced
    if _untraced is None:
        _untraced = torch.compiler.disable(DataParallel._forward)
    return _untraced
