"""What some operators take beside what their shapes tell: workspaces for as long as they run, and
results whose size only their library knows. Each such operator is run once, by itself, on zeros of
the shapes that it is to get; where that fails it is taken to take nothing."""

from __future__ import annotations

from typing import Any, Dict, Hashable, List, NamedTuple, Optional, Tuple

import torch

from .cuts import find_tensors

# torch's CUDA allocator hands memory out in multiples of this.
CUDA_GRAIN_BYTES = 512

# By kind of device. The workspace of a convolution may be larger than its result; of recurrent
# layers what they keep for backward is unknown to torch's fake tensors.
_RUN = {
    "cuda": ("convolution", "convolution_backward", "cudnn_batch_norm", "_cudnn_rnn"),
    "cpu": ("mkldnn_rnn_layer",),
}


class Probe(NamedTuple):
    """In bytes: what the operator takes while it runs, and each tensor of its result."""

    workspace: int
    results: Tuple[int, ...]


class Probes:
    """What is known of operators.

    Args:
        constant: workspaces that are known, by overload packet.
    """

    def __init__(self, constant: Dict[Any, int]) -> None:
        self._constant = {packet: Probe(size, ()) for packet, size in constant.items()}
        self._run = {
            getattr(torch.ops.aten, name, None): kind
            for kind, names in _RUN.items()
            for name in names
        }
        self._known: Dict[Hashable, Optional[Probe]] = {}

    def look(self, func: Any, args: Any, kwargs: Dict[str, Any], device: Any) -> Optional[Probe]:
        """Of a call on fake tensors on that device; None: nothing beside the shapes."""
        packet = func.overloadpacket
        constant = self._constant.get(packet)
        if constant is not None or self._run.get(packet) != device.type:
            return constant
        key = func, _spec(args), _spec(kwargs)
        if key not in self._known:
            self._known[key] = _run(func, args, kwargs, device)
        return self._known[key]


def _run(func: Any, args: Any, kwargs: Any, device: torch.device) -> Optional[Probe]:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    try:
        with unset_fake_temporarily():  # in the grad mode of the call, which some look at
            args, kwargs = _zeros(args), _zeros(kwargs)
            # Libraries make their handles, and choose.
            sizes = _sizes_of(func(*args, **kwargs))
            # A workspace is gone when the next part begins.
            parts = _parts(func.overloadpacket, args)
            workspace = max(_workspace(func, part, kwargs, device) for part in parts)
    except Exception:
        return None
    return Probe(workspace, sizes)


def _workspace(func: Any, args: Any, kwargs: Any, device: torch.device) -> int:
    before = ever_allocated(device)
    sizes = _sizes_of(func(*args, **kwargs))
    taken = ever_allocated(device) - before
    return max(0, taken - sum(map(rounded, sizes)))


def _sizes_of(results: Any) -> Tuple[int, ...]:
    return tuple(result.untyped_storage().nbytes() for result in find_tensors(results))


def _parts(packet: Any, args: Tuple[Any, ...]) -> List[Tuple[Any, ...]]:
    """Arguments that make the operator do what it does one after another one by one."""
    if packet is not torch.ops.aten.convolution_backward or not any(args[-1]):
        return [args]
    mask = args[-1]
    return [
        (*args[:-1], [k == chosen for k in range(len(mask))])
        for chosen in range(len(mask))
        if mask[chosen]
    ]


def ever_allocated(device: torch.device) -> int:
    """All bytes that torch has ever allocated on a GPU, given back or not."""
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_stats(device).get("allocated_bytes.all.allocated", 0)


def rounded(size_bytes: int) -> int:
    """As torch allocates on GPUs."""
    return -(-size_bytes // CUDA_GRAIN_BYTES) * CUDA_GRAIN_BYTES


def _spec(tree: Any) -> Hashable:
    if isinstance(tree, torch.Tensor):
        return tree.shape, tree.stride(), tree.dtype, tree.device
    if isinstance(tree, (tuple, list)):
        return tuple(map(_spec, tree))
    if isinstance(tree, dict):
        return tuple((name, _spec(value)) for name, value in tree.items())
    return tree if isinstance(tree, Hashable) else id(tree)


def _zeros(tree: Any) -> Any:
    """The arguments of a call with real tensors, of which none has a value that matters."""
    if isinstance(tree, torch.Tensor):
        zeros = torch.empty_strided(
            tree.shape, tree.stride(), dtype=tree.dtype, device=tree.device
        )
        return zeros.zero_()
    if isinstance(tree, dict):
        return {name: _zeros(value) for name, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        found: List[Any] = [_zeros(item) for item in tree]
        return found if isinstance(tree, list) else tuple(found)
    return tree
