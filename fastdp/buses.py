"""What stands between GPUs on the PCIe bus: an IOMMU, and Access Control Services (ACS) of the
bridges. Either can make copies between GPUs slow, stall, or arrive changed."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, Dict, Iterator, Tuple

SYSTEM = Path("/sys")

# PCI Express: the extended capabilities, a list from byte 256 on.
_FIRST = 0x100
_ACS = 0x000D
_CONTROL = 6  # where the control word of that capability is
_REDIRECTS = 0b11100  # requests, completions, upstream forwarding: peers are sent to the root
_BRIDGE = "0x0604"  # class of a bridge between PCI buses


def look() -> Dict[str, Any]:
    """`iommu`: whether there is one in use. `acs`: the bridges that redirect what goes between
    peers; None where that cannot be read, since it needs root."""
    bridges = list(_bridges())
    readable = [(name, config) for name, config in bridges if len(config) > _FIRST]
    acs = [name for name, config in readable if acs_redirects(config)]
    unreadable = bool(bridges) and not readable
    return {"iommu": _has_entries(SYSTEM / "class" / "iommu"), "acs": None if unreadable else acs}


def _has_entries(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _bridges() -> Iterator[Tuple[str, bytes]]:
    for folder in sorted((SYSTEM / "bus" / "pci" / "devices").glob("*")):
        try:
            if (folder / "class").read_text().startswith(_BRIDGE):
                yield folder.name, (folder / "config").read_bytes()
        except OSError:
            continue  # a device that went away


def acs_redirects(config: bytes) -> bool:
    """Whether a device's configuration space has ACS, with any redirection on."""
    place, seen = _FIRST, 0
    while _FIRST <= place <= len(config) - 8 and seen < 64:
        (head,) = struct.unpack_from("<I", config, place)
        if head & 0xFFFF == _ACS:
            (control,) = struct.unpack_from("<H", config, place + _CONTROL)
            return bool(control & _REDIRECTS)
        place, seen = head >> 20, seen + 1
    return False
