"""Replicas of modules that make their own (scripted and fx modules, a user's
`_replicate_for_data_parallel`): new objects at every forward, as in nn.DataParallel.
"""

from __future__ import annotations

import weakref
from typing import Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn

from .plans import Tensors
from .replica_sets import repairs_of


class WalkedTree:
    """`_C.Tree` for modules that are more than an attribute dictionary (scripted ones): walked in
    Python, through torch's own iterators."""

    def __init__(self, base: Tuple[nn.Module, ...]) -> None:
        self._modules = [(weakref.ref(module), type(module)) for module in base]
        self._root: Optional[nn.Module] = None

    def hold(self, root: nn.Module) -> bool:
        found = tuple(root.modules())
        if len(found) != len(self._modules) or any(
            module is not known() or type(module) is not kind
            for module, (known, kind) in zip(found, self._modules)
        ):
            return False
        self._root = root
        return True

    def collect(self) -> Tuple[Tensors, Tensors, bytes]:
        parameters, buffers = tuple(self._root.parameters()), tuple(self._root.buffers())
        return parameters, buffers, len(parameters).to_bytes(4, "little")

    def release(self) -> None:
        self._root = None


def check_scripted(module: nn.Module) -> None:
    scripted = torch.jit.ScriptModule
    for each in module.modules():
        if isinstance(each, scripted):
            if not all(isinstance(below, scripted) for below in each.modules()):
                raise RuntimeError(
                    "Cannot replicate network where python modules are children of ScriptModule"
                )


def fresh_replicas(
    root: nn.Module,
    parameters: Tensors,
    buffers: Tensors,
    rows: Sequence[Tuple[Tensors, Tensors]],
) -> List[nn.Module]:
    """New replica modules, each made by its module's own `_replicate_for_data_parallel`."""
    roots = []
    base = tuple(root.modules())
    for parameter_copies, buffer_copies in rows:
        copy_of = {id(t): copy for t, copy in zip(parameters, parameter_copies)}
        copy_of.update((id(t), copy) for t, copy in zip(buffers, buffer_copies))
        replica_of = {id(module): module._replicate_for_data_parallel() for module in base}
        for module in base:
            _fill_fresh(module, replica_of[id(module)], replica_of, copy_of)
        roots.append(replica_of[id(root)])
    return roots


def _fill_fresh(
    module: nn.Module,
    replica: nn.Module,
    replica_of: Dict[int, nn.Module],
    copy_of: Dict[int, torch.Tensor],
) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        # Its dictionaries are views of C++ state: attributes are the only way in.
        for name, child in module._modules.items():
            setattr(replica, name, None if child is None else replica_of[id(child)])
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                setattr(replica, name, None if tensor is None else copy_of[id(tensor)])
        if hasattr(module, "_flat_weights_names"):  # an RNN
            weights = [getattr(replica, name) for name in module._flat_weights_names]
            setattr(replica, "_flat_weights", weights)
        return
    attributes = replica.__dict__
    attributes["_modules"] = {
        name: None if child is None else replica_of[id(child)]
        for name, child in module._modules.items()
    }
    for kind in ("_parameters", "_buffers"):
        attributes[kind] = {
            name: None if tensor is None else copy_of[id(tensor)]
            for name, tensor in getattr(module, kind).items()
        }
    attributes["_former_parameters"] = attributes["_parameters"]
    for repair in repairs_of(module):
        repair(replica)
