"""What a recorded step writes of the module's own tensors, and what may not be written between its
forward and its backward: as autograd counts and checks it for an eager step. A replay's writes are
kernels, which torch does not count, and what its backward reads was saved when it was recorded.
"""

from __future__ import annotations

from typing import Any, Iterator, List, Sequence, Set, Tuple

import torch

from . import _torch_tensors

Tensors = Tuple[torch.Tensor, ...]


class Versions:
    """Of the tensors of one recording's source, parameters first."""

    def __init__(self, tensors: Tensors, parameter_count: int) -> None:
        self._count = parameter_count
        self._before = [_version(tensor) for tensor in tensors]
        self._written: List[int] = []
        self._saved: List[int] = []  # buffers

    def learn(self, tensors: Tensors, saved: Set[int]) -> None:
        """After a forward of the first replica, which saved tensors at these addresses for its
        backward."""
        after = [_version(tensor) for tensor in tensors]
        self._written = [k for k, pair in enumerate(zip(self._before, after)) if len(set(pair)) > 1]
        self._saved = [
            place
            for place, tensor in enumerate(tensors)
            if place >= self._count and memory_of(tensor) in saved
        ]

    def after_forward(self, tensors: Tensors) -> Tuple[int, ...]:
        """Counts what it wrote; what `check` compares with."""
        if self._written:
            _torch_tensors.increment_versions([tensors[place] for place in self._written])
        return tuple([tensor._version for tensor in self._watched(tensors)])

    def check(self, tensors: Tensors, versions: Tuple[int, ...]) -> None:
        """In a backward.

        Raises:
            RuntimeError: one of them was written since, in the words of autograd.
        """
        watched = self._watched(tensors)
        if versions == tuple([tensor._version for tensor in watched]):
            return
        places = [*range(self._count), *self._saved]
        for place, tensor, version in zip(places, watched, versions):
            if tensor._version != version:
                name = f"parameter {place}" if place < self._count else "a buffer"
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: {name} of the module, of shape "
                    f"{list(tensor.shape)}, is at version {tensor._version}; expected version "
                    f"{version} instead. Call backward before what writes it, such as the "
                    "optimizer's step or another forward"
                )

    def _watched(self, tensors: Tensors) -> Sequence[torch.Tensor]:
        parameters = tensors[: self._count]
        if not self._saved:
            return parameters
        return [*parameters, *[tensors[place] for place in self._saved]]


def storages_of(tensors: Tensors) -> Tuple[torch.UntypedStorage, ...]:
    """What keeps their memory, wherever they point later."""
    return tuple([tensor.untyped_storage() for tensor in tensors])


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def nodes_below(outputs: Sequence[torch.Tensor]) -> Iterator[Any]:
    """Of autograd's graph, each once."""
    nodes = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


def saved_below(outputs: Sequence[torch.Tensor]) -> Set[int]:
    """The addresses of what is saved for their backward, but for what hooks take elsewhere: what
    checkpointing computes again reads what is there then. From now on these are not checked for
    writes: only for a backward of a warm-up."""
    found: Set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout == torch.strided:
            found.add(memory_of(tensor))
        return tensor

    for node in nodes_below(outputs):
        for name in dir(node):
            saved = getattr(node, name) if name.startswith("_raw_saved_") else ()
            for each in saved if isinstance(saved, (tuple, list)) else (saved,):
                try:
                    # Its first hook is called at once; where there is one already, this raises.
                    each.register_hooks(note, lambda tensor: tensor)
                except (AttributeError, RuntimeError):  # the former: nothing was saved
                    continue
    return found


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
