"""What a forward reads that it neither was given nor made: tensors in globals, closures and plain
attributes. A recording bakes in their addresses, so it has to hold them; a value on the host would
be baked in itself; and gradients reach only what the recording gives them back for.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, Iterator, List, Sequence, Set, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import _torch_state
from .cuts import find_tensors
from .signatures import NotRecordable
from .versions import memory_of, nodes_below


class Reads(TorchDispatchMode):
    """`around` a replica's forward on `device`, which is given `known` tensors; `own` are those of
    the module itself. Afterwards `held` are the tensors of others that it read, `kept` those of
    others and its own that it wrote, with what was in them.

    Raises:
        NotRecordable: in the forward, where it reads a tensor on another device, or on the host, or
            resizes one of `known`.
    """

    def __init__(
        self, device: torch.device, known: List[torch.Tensor], own: Iterable[torch.Tensor] = ()
    ) -> None:
        super().__init__()
        self._device, self._known = device, known
        self._made: Set[int] = {memory_of(tensor) for tensor in known}
        self._own = {memory_of(tensor) for tensor in own}
        self._held: Dict[int, torch.Tensor] = {}
        self.kept: List[Tuple[torch.Tensor, torch.Tensor]] = []

    def around(self, act: Callable[[], Any]) -> Any:
        """act() in this mode, which also ends where an interrupt strikes as torch has just entered
        it, and no `with` would leave it."""
        was_active = _torch_state.dispatch_mode_active()
        try:
            with self:
                return act()
        finally:
            if not was_active and _torch_state.dispatch_mode_active():
                self.__exit__(None, None, None)

    @property
    def held(self) -> List[torch.Tensor]:
        return list(self._held.values())

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        fresh = function is torch.ops.aten.lift_fresh.default  # of torch.tensor(...), just now
        for tensor in find_tensors((args, kwargs)):
            if not fresh and tensor.layout == torch.strided and memory_of(tensor) not in self._made:
                self._note(tensor, function)
            elif fresh:
                self._made.add(memory_of(tensor))
        written = [(tensor, tensor.shape) for tensor in _written(function, args, kwargs)]
        for tensor, _ in written:
            if memory_of(tensor) in self._held or memory_of(tensor) in self._own:
                self.kept.append((tensor, tensor.detach().clone()))
        result = function(*args, **kwargs)
        for tensor, shape in written:
            if tensor.numel() != shape.numel():  # else another view of the same, as of unsqueeze_
                self._check_resized(tensor, shape)
        for tensor in find_tensors((result,)):
            if tensor.layout == torch.strided and memory_of(tensor) not in self._held:
                self._made.add(memory_of(tensor))
        return result

    def _check_resized(self, tensor: torch.Tensor, shape: torch.Size) -> None:
        if any(tensor is known for known in self._known):
            resized = tuple(tensor.shape)
            tensor.resize_(shape)  # what is put back afterwards is of this shape
            raise NotRecordable(
                f"it resizes a tensor of shape {tuple(shape)} that it was given to {resized}"
            )

    def _note(self, tensor: torch.Tensor, function: Any) -> None:
        if tensor.device != self._device:
            raise NotRecordable(
                f"{function} reads a tensor of shape {tuple(tensor.shape)} on {tensor.device} that "
                "is no argument, parameter or buffer: its value would be frozen"
            )
        self._held[memory_of(tensor)] = tensor

    def check_leaves(self, outputs: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> None:
        """After the forward.

        Raises:
            NotRecordable: the outputs depend on a leaf that is none of `own`, nor the forward's
                work: nobody would get its gradient.
        """
        for leaf in _leaves(outputs):
            stranger = isinstance(leaf, torch.nn.Parameter) or memory_of(leaf) not in self._made
            if stranger and all(leaf is not known for known in own):
                raise NotRecordable(
                    f"it reads a tensor of shape {tuple(leaf.shape)} that needs gradients and is "
                    "no parameter of its replica: they would be lost. Register it in the module, "
                    "and read it from self"
                )


def _written(function: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """What an operator writes of its arguments. That of norms does not say so."""
    schema = function._schema
    if "batch_norm" in schema.name:
        yield from find_tensors((args, kwargs))
    elif schema.is_mutable:
        for place, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                yield from find_tensors(given)


def _leaves(outputs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The leaves of autograd's graph below these."""
    yield from (t for t in outputs if t.grad_fn is None and t.requires_grad)
    for node in nodes_below(outputs):
        if node.name() == "torch::autograd::AccumulateGrad":
            yield node.variable
