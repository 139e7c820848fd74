"""One step of a wrapper: its forward from whole arguments to the joined output."""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import Any, Dict, List, Optional, Sequence, Tuple

from . import _torch_autograd, environment, options
from .compile_seam import target_of, untraced
from .deadlines import Watched
from .engine_choice import NOTHING, cuts_alike, find_obstacle
from .losses import anchored, weigh
from .marks import unmarked
from .phases import forward_phase, phase
from .placement import tensors_of
from .plans import check_home
from .workers import check_threads_run


class Stepping:
    """The part of `DataParallel` that runs a step, by the engine that was asked for and through the
    wrapper's own scatter, replicate, parallel_apply and gather."""

    module: Any
    device_ids: Any
    dim: Any
    output_device: Any
    src_device_obj: Any
    scatter: Any
    replicate: Any
    parallel_apply: Any
    gather: Any
    _fastdp_run: Any
    _fastdp_get_runtime: Any
    _fastdp_engine: Any
    _fastdp_gather_outputs: Any
    _fastdp_loss_weighting: Any

    def _fastdp_called(
        self, method: Optional[str], inputs: Tuple[Any, ...], kwargs: Dict[str, Any]
    ) -> Any:
        if "torch._dynamo" in sys.modules:
            return untraced(Watched._fastdp_run)(self, method, inputs, kwargs)
        return self._fastdp_run(method, inputs, kwargs)

    def _fastdp_step(
        self, method: Optional[str], inputs: Tuple[Any, ...], kwargs: Dict[str, Any]
    ) -> Any:
        with forward_phase():
            if not self.device_ids or self.__dict__.get("_is_replica"):
                # As a part of a replica of something else, this wrapper's work is done already.
                return self._fastdp_direct(method, unmarked(inputs), unmarked(kwargs))
            if _torch_autograd.inside_function_transform():
                raise RuntimeError(
                    "DataParallel cannot run inside a torch.func transform (grad, vjp, jvp, vmap): "
                    "copies between devices have no rules for them. Call the module itself there, "
                    "or use torch.autograd"
                )
            runtime = None
            if len(self.device_ids) > 1:
                check_threads_run()
                runtime = self._fastdp_get_runtime()
                runtime.check_capture()
            whole, obstacle = None, ""
            if self._fastdp_engine != "eager":
                obstacle = find_obstacle(self, method)
                if not obstacle and cuts_alike(self):
                    # A recorded step that is known by its arguments as they are cuts them itself.
                    engine = self._fastdp_get_engine()
                    whole = engine.whole_of(self.module, inputs, kwargs, self.dim)
                    if whole is not None:
                        outputs = engine.shortcut(whole, self.dim)
                        if outputs is not NOTHING:
                            return outputs
            with phase("scatter"):
                rows, named = self.scatter(inputs, kwargs, self.device_ids)
            if not rows and not named:
                # A forward without arguments runs once, on the first device.
                rows, named = ((),), ({},)
            if len(self.device_ids) == 1:
                check_home(tensors_of(self.module), self.src_device_obj)
                if self._fastdp_engine == "eager":
                    return self._fastdp_direct(method, rows[0], named[0])

            def eager() -> Any:
                if len(self.device_ids) == 1:
                    return self._fastdp_alone(rows, named, method)
                return self._fastdp_get_runtime().forward(
                    lambda: self._fastdp_gathered(rows, named, method)
                )

            if self._fastdp_engine == "eager":
                outputs = eager()
            else:
                outputs = self._fastdp_get_engine().forward(
                    self.module, rows, named, self.dim, obstacle, eager, whole
                )
            if runtime is not None:
                runtime.balance.look(self.module, outputs, runtime.surprises)
            return outputs

    def _fastdp_get_engine(self) -> Any:
        return self._fastdp_get_runtime().engine_of(environment.engine(self._fastdp_engine))

    def _fastdp_alone(self, rows: Any, named: Any, method: Optional[str]) -> Any:
        with self._fastdp_get_runtime().watching([self.module]):
            return self._fastdp_direct(method, rows[0], named[0])

    def _fastdp_direct(self, method: Optional[str], inputs: Any, kwargs: Any) -> Any:
        """By the module itself, as the only replica."""
        output = target_of(self, method)(*inputs, **kwargs)
        return output if self._fastdp_gather_outputs else [output]

    def _fastdp_gathered(
        self, rows: Sequence[Any], named: Sequence[Any], method: Optional[str]
    ) -> Any:
        """From cut arguments to the joined output; the replicas' `method`, or their forward."""
        return self._fastdp_joined(self._fastdp_run_replicas(rows, named, method), rows, named)

    def _fastdp_run_replicas(
        self, rows: Sequence[Any], named: Sequence[Any], method: Optional[str]
    ) -> List[Any]:
        """In a frame of its own: none but user code holds a replica once it returns."""
        with phase("replicate"):
            replicas = self.replicate(self.module, self.device_ids[: len(rows)])
        if method is not None:
            with phase("parallel_apply"):
                return self.parallel_apply(list(map(attrgetter(method), replicas)), rows, named)
        with self._fastdp_get_runtime().watching(replicas), phase("parallel_apply"):
            return self.parallel_apply(replicas, rows, named)

    def _fastdp_joined(self, outputs: List[Any], rows: Sequence[Any], named: Sequence[Any]) -> Any:
        if options.loss_weighting(self._fastdp_loss_weighting) is not None:
            outputs = weigh(outputs, rows, named, self.dim)
        if self._fastdp_gather_outputs:
            with phase("gather"):
                return self.gather(outputs, self.output_device)
        return anchored(list(outputs), self._fastdp_get_runtime().tokens())
