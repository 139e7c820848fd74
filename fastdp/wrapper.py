"""`DataParallel`: torch's class with the price taken off. The four steps of a forward (scatter,
replicate, parallel_apply, gather) are methods, as there, and a subclass may override any of them.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, TypeVar, Union

import torch
from torch import nn

from . import _torch_protocol, compile_options, environment, options
from .apply import apply_modules
from .attributes import TORCH_CLASS, add_attributes
from .compile_seam import OF_THIS_PROCESS, is_seen, see
from .cuts import PLAIN, Rules, scatter_call
from .deadlines import Watched
from .devices import parse_device, parse_devices
from .engine_choice import warm_up
from .grad_health import GradHealth
from .placement import check_one_device, choose_devices, public_device
from .replicas import replicate
from .report import Reporting
from .runtime import MAKING, Runtime
from .stepping import Stepping
from .surprises import Surprises
from .trees import gather_tree

__all__ = ["DataParallel"]

Wrapped = TypeVar("Wrapped", bound=nn.Module)  # as torch's class, DataParallel[Net] is a type


class DataParallel(nn.DataParallel[Wrapped], Stepping, GradHealth, Reporting, Watched):
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
        chunk_sizes: samples for each replica: a list with one size per replica, filled from its
            start (a short batch leaves later replicas less, or nothing), or a callable of batch
            size and number of replicas that gives such a list. Default: torch.chunk's sizes.
        split_lists: True: every list (not tuple) in the arguments is a list of samples; it is cut
            like a tensor, and what is in it goes whole to its sample's replica.
        replicate_scalars: True: 0-dim tensors go whole to every replica; they are refused else.
        gather_outputs: False: a call gives a list of the replicas' outputs, left where they are,
            also where there is but one replica. See `sum_losses`.
        loss_weighting: "chunk": 0-dim floating point outputs are weighted by their replica's share
            of the samples, so that the mean of the vector is the mean over the batch also where
            chunks are unequal. Default: None, no weights.
        sequential: True: no threads; the replicas run in order on the caller's, so that random
            numbers are reproducible and code that is not made for threads is safe.
        forward_attributes: True: attributes that the wrapper does not have are read from the
            module, but for names that begin with an underscore. Writing sets the wrapper's own.
        unused_grad: what `.grad` becomes for a parameter that took part in nothing: "zero", as in
            nn.DataParallel, or "none", as without a wrapper. Default: FASTDP_UNUSED_GRAD, else
            "zero".
        bucket_bytes: parameters travel in buckets of at most this many bytes. Default:
            FASTDP_BUCKET_BYTES, else 25 MiB; then 4 MiB for the first bucket where moves run beside
            compute, as nothing hides it, and 64 MiB for replicas on one device.
        transport: what carries parameters and gradients between devices: "auto", "local", "peer",
            "nccl" or "host". Default: FASTDP_TRANSPORT, else "auto".
        engine: "eager" runs the model's Python at every step. "auto" records a step that comes back
            (CUDA graphs) and replays it if that is faster; what cannot be recorded stays eager, for
            a reason that `report` and the log name. "graph" insists on recording and raises where
            it cannot. See docs/engines.md for what a recording freezes. Default: FASTDP_ENGINE,
            else "eager".
        timeout_s: seconds, 0.001 to 86400: a step's communication on GPUs that takes longer is an
            error, see docs/failures.md. Default: None; waits on the host end at FASTDP_TIMEOUT_MS.
        compile: True, or a dictionary of torch.compile's arguments: the replicas are compiled when
            they first run; the CUDA graphs are those of `engine`. What cannot be compiled runs as
            it is, for a reason that `report` and the log name, or is an error with
            {"fullgraph": True}. Default: only a module that came of torch.compile, or whose
            `compile` was called. See docs/engines.md.

    An argument in `Replicated(...)` goes whole to every replica. `call` runs another method than
    forward. What may be a mistake is a `DataParallelWarning`, once for each place.

    Shapes: tensors of shape (N, ...) are cut into pieces as `torch.chunk(n, dim)` cuts them;
    outputs are joined along `dim`; 0-dim outputs become a vector with one entry per replica.

    Raises:
        TypeError: device_ids that is no list, what is no module, a flag that is no bool.
        ValueError: unknown devices or options, a module that spans devices.
        RuntimeError: at a forward, when parameters or buffers are not on device_ids[0].
        EngineError: at a forward, when engine is "graph" and it cannot be recorded.
        CommunicationTimeoutError: at a forward or in a backward, with `timeout_s`.

    An error in a replica is raised after all have finished, with its own type, the replica and its
    device in the text, and the original as `__cause__`; the wrapper stays usable.

    >>> dp = DataParallel(torch.nn.Linear(8, 2), device_ids=["cpu", "cpu"])
    >>> dp(torch.randn(5, 8)).shape
    torch.Size([5, 2])
    """

    def __init__(
        self,
        module: Wrapped,
        device_ids: Optional[Sequence[Any]] = None,
        output_device: Any = None,
        dim: int = 0,
        *,
        chunk_sizes: Union[Sequence[int], Callable[[int, int], Sequence[int]], None] = None,
        split_lists: bool = False,
        replicate_scalars: bool = False,
        gather_outputs: bool = True,
        loss_weighting: Optional[str] = None,
        sequential: bool = False,
        forward_attributes: bool = False,
        unused_grad: Optional[str] = None,
        bucket_bytes: Optional[int] = None,
        transport: Optional[str] = None,
        engine: Optional[str] = None,
        timeout_s: Optional[float] = None,
        compile: Union[bool, Dict[str, Any], None] = None,
    ) -> None:
        # Past nn.DataParallel.__init__, which without a GPU knows no device, to what that calls.
        super(TORCH_CLASS, self).__init__()
        _torch_protocol.log_use("fastdp.DataParallel")
        self.module = module
        self.dim = dim
        self._fastdp_unused_grad = environment.unused_grad(unused_grad)
        self._fastdp_bucket_bytes = environment.bucket_bytes(bucket_bytes)
        self._fastdp_transport = environment.transport(transport)
        self._fastdp_engine = environment.engine(engine)
        self._fastdp_timeout_s = options.timeout_s(timeout_s)
        self._fastdp_compile = compile_options.parse(compile)
        devices = choose_devices(device_ids)
        self._fastdp_chunk_sizes = options.chunk_sizes(chunk_sizes, len(devices))
        self._fastdp_split_lists = options.flag("split_lists", split_lists)
        self._fastdp_replicate_scalars = options.flag("replicate_scalars", replicate_scalars)
        self._fastdp_gather_outputs = options.flag("gather_outputs", gather_outputs)
        self._fastdp_loss_weighting = options.loss_weighting(loss_weighting)
        self._fastdp_sequential = options.flag("sequential", sequential)
        self._fastdp_forward_attributes = options.flag("forward_attributes", forward_attributes)
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
            _torch_protocol.check_balance([device.index for device in devices])
        if len(devices) == 1:
            self.module.to(self.src_device_obj)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self._fastdp_called(None, inputs, kwargs)

    def call(self, method: str, /, *inputs: Any, **kwargs: Any) -> Any:
        """Another method of the module than forward, on the replicas.

        Args:
            method: its name, such as "generate"; a dotted one is a part's, such as "encoder.embed".
            inputs, kwargs: its arguments, cut as those of a forward are.

        Returns:
            The replicas' results, joined as those of a forward are.

        Raises:
            TypeError: a name that is no string, or not one of something to call.
            AttributeError: the module has no such method.
            All else as a forward.

        Hooks of the wrapper and of the module are for forward, and do not run.
        """
        if not isinstance(method, str):
            raise TypeError(f"method is {method!r}: it must be the name of a method of the module")
        if not callable(attrgetter(method)(self.module)):
            kind = type(self.module).__name__
            raise TypeError(f"method is {method!r}, an attribute of {kind} that cannot be called")
        return self._fastdp_called(method, inputs, kwargs)

    def warmup(self, *inputs: Any, **kwargs: Any) -> None:
        """Prepares for forwards like this one, whose outputs are dropped: libraries make their
        handles, and with engine "auto" or "graph" the step is recorded now instead of some steps
        into the run. Buffers and random numbers are left as they were.

        Args:
            inputs, kwargs: example arguments, of the shapes, dtypes and devices to come. Grad mode,
                autocast and train or eval are as they are at the call.

        Raises:
            What a forward raises.
        """
        warm_up(self, inputs, kwargs)

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> List[nn.Module]:
        """The replicas of this forward, one per device, filled with copies of the module's tensors
        as they are now. For the wrapped module on the wrapper's own devices they are kept and
        refreshed; for anything else they are new. Without devices there are none."""
        if not len(device_ids):
            return []
        runtime = self._fastdp_get_runtime()
        devices = runtime.parsed(device_ids)
        if runtime.serves(module, devices, self._fastdp_move_options()):
            return runtime.replicas(len(devices))
        return replicate(module, device_ids, not torch.is_grad_enabled())

    def scatter(
        self, inputs: Tuple[Any, ...], kwargs: Optional[Dict[str, Any]], device_ids: Sequence[Any]
    ) -> Tuple[Tuple[Any, ...], Tuple[Dict[str, Any], ...]]:
        """One tuple of arguments and one dictionary of keyword arguments per used replica."""
        runtime = self.__dict__.get("_fastdp_runtime")
        if runtime is None:
            devices = parse_devices(device_ids, "device_ids")
        else:
            devices = runtime.parsed(device_ids)
        surprises = None
        if len(devices) > 1:
            surprises = self.__dict__.get("_fastdp_surprises")
            if surprises is None:
                surprises = self.__dict__.setdefault("_fastdp_surprises", Surprises())
        return scatter_call(inputs, kwargs, devices, self.dim, self._fastdp_rules(), surprises)

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any
    ) -> List[Any]:
        """Each replica's output, run on the wrapper's own threads."""
        runtime = self._fastdp_get_runtime()
        devices = runtime.parsed(self.device_ids[: len(replicas)])
        return apply_modules(
            runtime.teams, replicas, inputs, kwargs, devices, self._fastdp_sequential
        )

    def gather(self, outputs: Sequence[Any], output_device: Any) -> Any:
        """The replicas' outputs joined on one device."""
        device = parse_device(output_device, "output_device")
        return gather_tree(list(outputs), device, self.dim, self._fastdp_get_runtime().tokens())

    def _fastdp_rules(self) -> Rules:
        if (
            self._fastdp_chunk_sizes is None
            and self._fastdp_loss_weighting is None
            and not self._fastdp_split_lists
            and not self._fastdp_replicate_scalars
        ):
            return PLAIN
        sized = self._fastdp_loss_weighting is not None
        flags = self._fastdp_split_lists, self._fastdp_replicate_scalars
        return Rules(self._fastdp_chunk_sizes, *flags, sized)

    def _fastdp_move_options(self) -> Tuple[int, str, Optional[str]]:
        return self._fastdp_bucket_bytes, self._fastdp_unused_grad, self._fastdp_transport

    def _fastdp_get_runtime(self) -> Runtime:
        module, runtime = self.module, self.__dict__.get("_fastdp_runtime")
        if runtime is None:
            devices = parse_devices(self.device_ids, "device_ids")
        elif runtime.is_for(module, self) and is_seen(self, module):
            return runtime  # asked for several times in a step
        else:
            devices = runtime.parsed(self.device_ids)
        options = self._fastdp_move_options()
        if runtime is None or not runtime.serves(module, devices, options):
            with MAKING:
                runtime = self.__dict__.get("_fastdp_runtime")
                if runtime is None or not runtime.serves(module, devices, options):
                    runtime = Runtime(module, devices, options)
                    runtime.device_ids = list(self.device_ids)
                    runtime.replicator.watch(self.__dict__.get("_fastdp_witness"))
                    see(self, runtime, True)
                    self.__dict__["_fastdp_runtime"] = runtime
        if not is_seen(self, module):
            with MAKING:
                see(self, self.__dict__.get("_fastdp_runtime", runtime))
        return runtime

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__.get("_modules")
        if modules is not None and name in modules:
            return modules[name]
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            # Not through self: a copy or an unpickled wrapper may have nothing yet.
            module = (modules or {}).get("module")
            forwards = self.__dict__.get("_fastdp_forward_attributes", False) and module is not None
            if not forwards or name.startswith("_"):
                raise
            try:
                return getattr(module, name)
            except AttributeError as inner:
                raise error from inner

    def __getstate__(self) -> Dict[str, Any]:
        """Threads, streams and replicas stay out of copies and files."""
        state = self.__dict__.copy()
        for name in OF_THIS_PROCESS:
            state.pop(name, None)
        return state


add_attributes(DataParallel)
