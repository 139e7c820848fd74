"""A recorded step as autograd sees it: one node outside, and one node per bucket inside.

`GraphStep` is the node outside. Its inputs are the arguments that need gradients and the module's
parameters, its outputs the joined outputs. It is differentiable once: a second backward, and a
backward that is itself differentiated, raise.

`Boundary` stands inside a replica's recorded graph where `Broadcast` stands in eager mode: its
outputs are the replica's parameters, and it is reached in backward as soon as the gradients of its
bucket are complete.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Optional, Sequence, Tuple

import torch
from torch.autograd import Function

from . import _torch_autograd

Gradients = Sequence[Optional[torch.Tensor]]


class Call:
    """One forward of a recording, from its replay to its backward or to the end of its graph. While
    it is open the recording's memory is its own."""

    def __init__(self, recording: Any, fill: Any, tensors: Any) -> None:
        self.recording = recording
        self.fill = fill  # puts the arguments into the recording's memory
        self.tensors = tensors
        self.versions: Tuple[int, ...] = ()
        self.compute: Any = None
        self.over = False

    def run(self, step: Callable[[], Any]) -> Any:
        """The step's outputs; the recording's memory is this call's from now on. A step that raises
        is over: nobody has its outputs, but its graph may live on in the traceback of an interrupt,
        which an interactive session keeps."""
        try:
            self.recording.owner = weakref.ref(self)
            return step()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        self.over = True
        self.tensors = ()
        if self.recording.owner is not None and self.recording.owner() is self:
            self.recording.owner = None


class GraphStep(Function):
    """forward(call, *tensors): `tensors` are what needs gradients, in the recording's order."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        # Saved so that torch itself knows, and says, when this graph has been used up.
        ctx.save_for_backward(torch.empty(0))
        outputs = call.recording.forward(call)
        fixed = [out for out, needs in zip(outputs, call.recording.differentiable) if not needs]
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Optional[torch.Tensor]) -> Any:
        ctx.saved_tensors
        call = ctx.call
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: the backward of a recorded step cannot itself be "
                'differentiated. Use DataParallel(..., engine="eager") for this model'
            )
        if call.over:
            raise RuntimeError(
                "a recorded step was asked for a second backward (retain_graph=True): its "
                'activations are gone. Use DataParallel(..., engine="eager") for this model'
            )
        try:
            return (None, *call.recording.backward(call, gradients))
        finally:
            call.end()


def apply_step(call: Call, tensors: Sequence[torch.Tensor]) -> Tuple[torch.Tensor, ...]:
    """`GraphStep.apply` without its look at each tensor for torch.func's wrappers: a wrapper
    refuses to run below torch.func."""
    return super(Function, GraphStep).apply(call, *tensors)


class Boundary(Function):
    """forward(make, deliver, anchor): make() gives the replica's tensors of one bucket; deliver()
    takes their gradients. `anchor` is a leaf that makes the node part of the graph."""

    @staticmethod
    def forward(
        ctx: Any, make: Callable[[], Sequence[torch.Tensor]], deliver: Any, anchor: torch.Tensor
    ) -> Tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.deliver = deliver
        return tuple(make())

    @staticmethod
    def backward(ctx: Any, *gradients: Optional[torch.Tensor]) -> Any:
        ctx.deliver(gradients)
        return None, None, None


def behind_boundary(make: Any, deliver: Any, anchor: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    tensors = Boundary.apply(make, deliver, anchor)
    _torch_autograd.run_early(tensors[0].grad_fn)
    return tensors
