"""Devices as users write them, parsed once and in one place: for `fastdp.comm`, for the wrapper.

A device is an int (a CUDA index, as in torch; -1 is the host), a string ("cuda:1", "cuda", "cpu")
or a `torch.device`. The same device may stand in a list several times: each entry is a replica of
its own, on the GPU or, with "cpu", on the host.
"""

from __future__ import annotations

from typing import Any, List, Tuple

import torch

from .options import whole_number

HOST = torch.device("cpu")
_DLPACK_HOST, _DLPACK_CUDA = 1, 2  # pinned host memory (3) counts as host
MAX_REPLICAS = 64  # FDP_MAX_REPLICAS of csrc/limits.h


def parse_devices(devices: Any, name: str = "device_ids") -> Tuple[torch.device, ...]:
    """The devices of a list, each with an index (the host as `torch.device("cpu")`).

    `name` is what the caller calls the list: errors name the entry by it. Raises TypeError for what
    is no list or an entry that is no device, ValueError for an empty list, an unknown kind, an
    index without a GPU, and host and CUDA entries in one list.

    >>> parse_devices(["cpu", -1])
    (device(type='cpu'), device(type='cpu'))
    """
    if isinstance(devices, (str, bytes, int, torch.device)):
        listed = _listed(devices)
        raise TypeError(f"{name} must be a list of devices, not {devices!r}: write {listed}")
    try:
        entries = tuple(devices)
    except TypeError:
        raise TypeError(
            f"{name} must be a list of devices, not {type(devices).__name__}"
        ) from None
    if not entries:
        raise ValueError(f"{name} is empty: at least one device is needed")
    parsed = tuple(parse_device(entry, f"{name}[{i}]") for i, entry in enumerate(entries))
    for i, device in enumerate(parsed):
        if device.type != parsed[0].type:
            raise ValueError(
                f"{name}[{i}] is {device}, but {name}[0] is {parsed[0]}: "
                "host and CUDA devices cannot be mixed in one list"
            )
    return parsed


def _listed(devices: Any) -> List[Any]:
    """What was meant by no list: "0,1" is two devices."""
    if not isinstance(devices, str):
        return [devices]
    names = [name.strip() for name in devices.split(",")]
    return [int(name) if name.isdecimal() else name for name in names]


def parse_device(device: Any, name: str) -> torch.device:
    """One device; "cuda" without an index is the current one. Errors as `parse_devices`."""
    if isinstance(device, torch.device):
        parsed = device
    elif isinstance(device, str):
        try:
            parsed = torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"{name} is {device!r}, which torch does not know: {error}") from None
    else:
        parsed = _device_of_index(device, name)
    if parsed.type == "cpu":
        return HOST
    if parsed.type != "cuda":
        raise ValueError(f"{name} is {str(parsed)!r}: fastdp takes CUDA devices and 'cpu'")
    return _visible(parsed, name)


def dlpack_pair(device: torch.device) -> Tuple[int, int]:
    """A device as the core knows it: (kind, ordinal) by DLPack's numbers."""
    return (_DLPACK_CUDA, device.index) if device.type == "cuda" else (_DLPACK_HOST, 0)


def device_of_pair(kind: int, ordinal: int) -> torch.device:
    """The device of such a pair; of any kind but CUDA's, the host."""
    return torch.device("cuda", ordinal) if kind == _DLPACK_CUDA else HOST


def _device_of_index(value: Any, name: str) -> torch.device:
    try:
        index = whole_number(value)
    except TypeError:
        raise TypeError(
            f"{name} must be an int, a str or a torch.device, not {type(value).__name__}"
        ) from None
    if index == -1:
        return HOST
    if index < -1:
        raise ValueError(f"{name} is {index}: a CUDA index starts at 0, and -1 is the host")
    # Not torch.device("cuda", index): that wraps indices above 127 on some versions.
    return _visible_index(index, name)


def _visible(device: torch.device, name: str) -> torch.device:
    count = torch.cuda.device_count()
    if device.index is None and count > 0:
        return torch.device("cuda", torch.cuda.current_device())
    return _visible_index(0 if device.index is None else device.index, name)


def _visible_index(index: int, name: str) -> torch.device:
    count = torch.cuda.device_count()
    if count == 0:
        raise ValueError(
            f"{name} is cuda:{index}, but torch sees no CUDA device here; "
            "'cpu', given once for each replica, means replicas on the host"
        )
    if index >= count:
        raise ValueError(
            f"{name} is cuda:{index}, but the visible CUDA devices are {list(range(count))}"
        )
    return torch.device("cuda", index)
