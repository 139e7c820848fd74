"""How much memory an optimizer's state will take that is not there yet."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, Dict

import torch

# What asks for real devices; the state is the same without.
_ON_DEVICE = ("fused", "foreach", "capturable")


def missing_bytes(optimizer: Any) -> Dict[torch.device, int]:
    """By device, what the optimizer's first step would add for parameters that have no state yet:
    the step is taken by a twin, on tensors without memory."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}: it must be a torch Optimizer")
    devices: Dict[torch.Tensor, torch.device] = {}
    groups = []
    for group in optimizer.param_groups:
        twins = []
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                twin = torch.empty_like(parameter, device="meta", requires_grad=True)
                twin.grad = torch.empty_like(twin)
                devices[twin] = parameter.device
                twins.append(twin)
        plain = {name: False for name in _ON_DEVICE if name in group}
        groups.append({**group, **plain, "params": twins})
    if not devices:
        return {}
    twin_optimizer = object.__new__(type(optimizer))
    twin_optimizer.__dict__.update(optimizer.__dict__)
    twin_optimizer.__dict__.update(
        param_groups=groups,
        state=defaultdict(dict),
        _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
    )
    try:
        twin_optimizer.step()
    except Exception as error:
        raise RuntimeError(
            f"optimizer is a {type(optimizer).__name__}, whose state cannot be foreseen ({error}): "
            "leave it out; on GPUs its state counts as held once it has taken a step"
        ) from error
    found: Dict[torch.device, int] = {}
    for twin, device in devices.items():
        for value in twin_optimizer.state.get(twin, {}).values():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                size_bytes = value.numel() * value.element_size()
                found[device] = found.get(device, 0) + size_bytes
    return found
