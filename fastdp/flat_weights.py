"""The weights of RNNs, which cuDNN wants in one buffer, where `flatten_parameters` has put them.

cuDNN is given the storage of an RNN's first weight, if that is large enough and every weight lies
in it where cuDNN would put it; else torch warns and compacts the weights at every call. So the
weights of each RNN travel in a bucket of their own, at the base's offsets. What stands behind the
weights of an RNN without biases is read as its biases: zeros must stand there. And where such
weights are not in one buffer, they must not be at the start of a bucket by chance, with other
tensors behind them.
"""

from __future__ import annotations

import weakref
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn


class FlatWeights(NamedTuple):
    """Tensors that have a bucket of their own."""

    # Where each stands in the list that it was taken from; they are in the order of their offsets.
    places: Tuple[int, ...]
    # In elements, from the start of the buffer; None: it does not matter.
    offsets: Optional[Tuple[int, ...]]
    # Elements of the buffer: behind the last tensor are zeros.
    length: int


class RnnWeights:
    """The weights of the RNNs among some modules. Keeps no module alive."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._rnns = [weakref.ref(module) for module in modules if _is_rnn(module)]

    def describe(self) -> bytes:
        """Where they lie in their storages, which is not in `_C.describe`. Weights that change
        storage and keep these offsets could go on as they are."""
        if not self._rnns:
            return b""
        weights = [weight for rnn in self._living() for weight in _weights_of(rnn).values()]
        return repr([weight.storage_offset() for weight in weights]).encode()

    def find(self, tensors: Sequence[torch.Tensor]) -> List[FlatWeights]:
        """What has to be kept apart of `tensors`, for each RNN. Of RNNs that share weights the
        first has them."""
        if not self._rnns:
            return []
        places = {id(tensor): place for place, tensor in enumerate(tensors)}
        found = []
        for rnn in self._living():
            flat = _find_flat(rnn, places)
            if flat is not None:
                found.append(flat)
                for place in flat.places:
                    del places[id(tensors[place])]
        return found

    def _living(self) -> List[nn.Module]:
        return [rnn for rnn in (known() for known in self._rnns) if rnn is not None]


def _is_rnn(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return hasattr(module, "_flat_weights_names")
    return isinstance(module, nn.RNNBase)


def _weights_of(rnn: Any) -> Dict[str, torch.Tensor]:
    """Those that are parameters. Not by getattr: a parametrization would run."""
    parameters = rnn._parameters
    found = {n: parameters[n] for n in rnn._flat_weights_names if n in parameters}
    return {name: weight for name, weight in found.items() if weight is not None}


def _find_flat(rnn: Any, places: Dict[int, int]) -> Optional[FlatWeights]:
    weights = _weights_of(rnn)
    if len(weights) < len(rnn._flat_weights_names) or len(set(map(id, weights.values()))) < 2:
        return None
    if any(id(weight) not in places for weight in weights.values()):
        return None
    if len({(weight.dtype, weight.requires_grad) for weight in weights.values()}) > 1:
        return None
    lying = sorted(weights.values(), key=torch.Tensor.storage_offset)
    found = tuple(places[id(weight)] for weight in lying)
    room = _room_for_biases(weights)
    if _is_one_buffer(lying, room):
        offsets = tuple(weight.storage_offset() for weight in lying)
        return FlatWeights(found, offsets, _storage_elems(lying[0]))
    return FlatWeights(found, None, 0) if room > 0 else None


def _room_for_biases(weights: Dict[str, torch.Tensor]) -> int:
    """Elements that cuDNN takes for biases where there are none: two for each row."""
    if any(name.startswith("bias") for name in weights):
        return 0
    return sum(2 * w.shape[0] for name, w in weights.items() if name.startswith("weight_ih"))


def _is_one_buffer(lying: Sequence[torch.Tensor], room: int) -> bool:
    """Whether the weights fill one storage, but for `room` elements at its end."""
    end = 0
    for weight in lying:
        if weight.storage_offset() != end or not weight.is_contiguous():
            return False
        end += weight.numel()
    storages = {weight.untyped_storage().data_ptr() for weight in lying}
    return len(storages) == 1 and _storage_elems(lying[0]) == end + room


def _storage_elems(weight: torch.Tensor) -> int:
    return weight.untyped_storage().nbytes() // weight.element_size()
