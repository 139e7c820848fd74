"""Where a wrapper's replicas are, and whether the module is there too."""

from __future__ import annotations

from itertools import chain
from typing import Any, Iterator, Optional, Sequence, Tuple

import torch
from torch import nn

from .devices import MAX_REPLICAS, parse_devices
from .plans import check_tensors


def choose_devices(device_ids: Optional[Sequence[Any]]) -> Tuple[torch.device, ...]:
    """The devices of a wrapper; none means: call the module directly."""
    if isinstance(device_ids, Iterator):
        device_ids = list(device_ids)  # to be looked at more than once
    if not torch.cuda.is_available() and (device_ids is None or not _names_host(device_ids)):
        return ()
    if device_ids is None:
        device_ids = list(range(torch.cuda.device_count()))
    elif isinstance(device_ids, (list, tuple)) and tuple(device_ids) == (None,):
        device_ids = ["cuda"]  # [args.gpu] of a script whose --gpu was not given: the current one
    devices = parse_devices(device_ids, "device_ids")
    if len(devices) > MAX_REPLICAS:
        raise ValueError(
            f"device_ids has {len(devices)} entries, one for each replica: at most {MAX_REPLICAS} "
            "are possible"
        )
    return devices


def _names_host(device_ids: Any) -> bool:
    """Whether the ids are meant on a machine without a GPU, where torch ignores all ids."""
    if isinstance(device_ids, (str, bytes, int, torch.device)):
        return True  # no list: parse_devices says so
    host = ("cpu", "cpu:0", -1)
    return any(getattr(device, "type", device) in host for device in device_ids)


def public_device(device: torch.device) -> Any:
    """As nn.DataParallel shows it: an index. The host has none."""
    return device if device.type == "cpu" else device.index


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    return chain(module.parameters(), module.buffers())


def check_one_device(module: nn.Module) -> None:
    if isinstance(module, type) or not hasattr(module, "named_modules"):
        raise TypeError(f"module is {module!r}: it must be an instance of torch.nn.Module")
    check_tensors(module)
    found = {tensor.device for tensor in tensors_of(module)}
    if len(found) > 1:
        raise ValueError(
            f"module spans the devices {', '.join(sorted(map(str, found)))}: its parameters and "
            "buffers must lie on one device, device_ids[0]"
        )
