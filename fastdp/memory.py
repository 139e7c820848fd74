"""What a wrapper holds on each of its devices, in bytes: what is known of the module and its plan,
what torch's allocator and the core's scratch pools say, and what the system has free.

Reading waits for no GPU and changes nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

import torch

from . import _C
from .devices import HOST, device_of_pair, parse_device, parse_devices
from .diagnosis import size_text
from .placement import tensors_of
from .shown import Shown

Row = Dict[str, Optional[int]]

_COLUMNS = (
    "parameters",
    "gradients",
    "replicas",
    "buckets",
    "graphs",
    "others",
    "activations_peak",
    "left_by_validation",
    "free",
)


class Memory(Shown, Dict[str, Row]):
    """By device, such as "cuda:0" or "cpu": a dictionary of bytes. Prints as a table.

    - `parameters`: the module's own parameters and buffers.
    - `gradients`: the memory that their `.grad` keeps. One that a backward left keeps its bucket.
    - `replicas`: the copies of parameters and buffers that a step makes for the replicas on the
      device. In eager steps they come and go with a step; of recorded ones `graphs` has them. 0
      before the first forward or `dp.fits`.
    - `buckets`: what the core's scratch pools hold: gradients and copies on their way. All wrappers
      of the process share them. For the host, pinned memory is counted too.
    - `graphs`: recorded steps: their fixed memory and their pools.
    - `others`: all else that torch has allocated here in this process: the optimizer's state,
      inputs, outputs that are kept, other models.
    - `activations_peak`: by how much torch's peak was above what is held now, the gradients and the
      replicas' copies aside: activations, outputs, gradients in the making. The peak counts from
      `torch.cuda.reset_peak_memory_stats`, or the start.
    - `left_by_validation`: by how much the last `fastdp.validation` has left the device's memory
      fuller than it was; 0 without one.
    - `free`: what can still be taken: free for the system, and what torch keeps without using it,
      as far as `torch.cuda.set_per_process_memory_fraction` lets torch go.
    - `total`, `allocated`, `reserved`, `allocated_peak`: the device's memory, and torch's own
      figures.

    Where nothing counts it is None: on the host `others`, `activations_peak`, and torch's figures.
    """

    def __str__(self) -> str:
        shown = [name for name in _COLUMNS if any(row[name] for row in self.values())]
        width = max(len(name) for name in shown) if shown else 0
        cells = [[_text(row[name]) for name in shown] for row in self.values()]
        columns = [max(map(len, (device, *row))) for device, row in zip(self, cells)]
        heads = [device.rjust(column) for device, column in zip(self, columns)]
        lines = ["  ".join([" " * width, *heads])]
        for k, name in enumerate(shown):
            row = [texts[k].rjust(column) for texts, column in zip(cells, columns)]
            lines.append("  ".join([name.ljust(width), *row]))
        return "\n".join(lines)


def _text(size_bytes: Optional[int]) -> str:
    return "-" if size_bytes is None else size_text(size_bytes)


def devices_of(wrapper: Any) -> List[torch.device]:
    """Where the wrapper has something, each once: the replicas' devices, the output's, and without
    replicas the module's."""
    if not wrapper.device_ids:
        return list(dict.fromkeys(tensor.device for tensor in tensors_of(wrapper.module))) or [HOST]
    found = list(parse_devices(wrapper.device_ids, "device_ids"))
    found.append(parse_device(wrapper.output_device, "output_device"))
    return list(dict.fromkeys(found))


def make_memory(wrapper: Any) -> Memory:
    from .validations import left_bytes

    devices = devices_of(wrapper)
    parameters = held_by(tensors_of(wrapper.module))
    gradients = held_by(gradients_of(wrapper.module))
    copies = copies_bytes(wrapper)
    scratch = scratch_bytes()
    graphs = make_graphs(wrapper)
    left = left_bytes(wrapper)
    memory = Memory()
    for device in devices:
        whole, allocated = graphs.get(device, (0, 0))
        row: Row = {
            "parameters": parameters.get(device, 0),
            "gradients": gradients.get(device, 0),
            "replicas": copies.get(device, 0),
            "buckets": scratch.get(device, 0),
            "graphs": whole,
            "left_by_validation": left.get(device, 0),
            **usage(device),
        }
        row["others"] = row["activations_peak"] = None
        if row["allocated"] is not None and row["allocated_peak"] is not None:
            known = parameters.get(device, 0) + gradients.get(device, 0) + allocated
            row["others"] = max(0, row["allocated"] - known)
            settled = row["allocated"] - gradients.get(device, 0) + copies.get(device, 0)
            row["activations_peak"] = max(0, row["allocated_peak"] - settled)
        memory[str(device)] = row
    return memory


def usage(device: torch.device) -> Row:
    """What torch and the system say of a device."""
    if device.type != "cuda":
        total, free = host_bytes()
        return {
            "total": total,
            "free": free,
            "allocated": None,
            "reserved": None,
            "allocated_peak": None,
        }
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    reserved = torch.cuda.memory_reserved(device)
    room = int(_fraction(device) * total) - allocated
    return {
        "total": total,
        "free": max(0, min(free + reserved - allocated, room)),
        "allocated": allocated,
        "reserved": reserved,
        "allocated_peak": torch.cuda.max_memory_allocated(device),
    }


def _fraction(device: torch.device) -> float:
    """Of a GPU's memory, what torch was told that it may take; 1 where this torch does not tell."""
    told = getattr(torch.cuda.memory, "get_per_process_memory_fraction", None)
    return 1.0 if told is None else told(device)


def free_bytes(device: torch.device) -> Optional[int]:
    return usage(device)["free"]


def scratch_bytes(trim: bool = False) -> Dict[torch.device, int]:
    """What the core's scratch pools hold, by device, after what is idle was given back if it is to
    be. Pinned memory is the host's."""
    held: Dict[torch.device, int] = {}
    for (kind, ordinal), device_bytes, pinned_bytes in _C.scratch(trim):
        device = device_of_pair(kind, ordinal)
        held[device] = held.get(device, 0) + device_bytes
        held[HOST] = held.get(HOST, 0) + pinned_bytes
    return held


def copies_bytes(wrapper: Any) -> Dict[torch.device, int]:
    """The flat buffers of one step's copies. Replica 0 reads the module's own tensors."""
    runtime = wrapper.__dict__.get("_fastdp_runtime")
    plan = None if runtime is None else runtime.replicator.plan_in_use()
    held: Dict[torch.device, int] = {}
    for bucket in plan.buckets if plan else ():
        for device in bucket.devices[1:]:
            held[device] = held.get(device, 0) + bucket.length * bucket.dtype.itemsize
    return held


def make_graphs(wrapper: Any) -> Dict[torch.device, Tuple[int, int]]:
    """What recorded steps hold: all of it, and what of it torch counts as allocated."""
    runtime = wrapper.__dict__.get("_fastdp_runtime")
    held: Dict[torch.device, Tuple[int, int]] = {}
    for recording in [] if runtime is None else runtime.recordings():
        for device, (whole, allocated) in recording.held_bytes().items():
            before = held.get(device, (0, 0))
            held[device] = before[0] + whole, before[1] + allocated
    return held


def gradients_of(module: torch.nn.Module) -> List[torch.Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def held_by(tensors: Iterable[torch.Tensor]) -> Dict[torch.device, int]:
    """The memory that tensors keep alive, by device: storages, each once."""
    seen = set()
    held: Dict[torch.device, int] = {}
    for tensor in tensors:
        for part in _parts(tensor):
            storage = part.untyped_storage()
            key = part.device, storage.data_ptr()
            if key not in seen:
                seen.add(key)
                held[part.device] = held.get(part.device, 0) + storage.nbytes()
    return held


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """What of a tensor has memory of its own."""
    if torch.nn.parameter.is_lazy(tensor):
        return ()
    if tensor.layout == torch.strided:
        return (tensor,)
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return (tensor.values(),)


# The host


def host_bytes() -> Tuple[Optional[int], Optional[int]]:
    """(total, free) of the host's memory for this process: the system's, or what its control group
    leaves of it, if that is less. None where the system does not tell."""
    total, free = _meminfo()
    for limit_name, used_name, stat_name in _GROUPS:
        try:
            limit = Path(limit_name).read_text().strip()
            used = int(Path(used_name).read_text())
            stat = dict(line.split() for line in Path(stat_name).read_text().splitlines())
        except (OSError, ValueError):
            continue
        if not limit.isdigit() or (total is not None and int(limit) >= total):
            continue  # "max", or version 1's number for no limit
        # Files that were read are counted as used, and go when memory is wanted.
        idle = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
        left = max(0, int(limit) - used + idle)
        total = int(limit)
        free = left if free is None else min(free, left)
    return total, free


_GROUPS = (
    (
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory.current",
        "/sys/fs/cgroup/memory.stat",
    ),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


def _meminfo() -> Tuple[Optional[int], Optional[int]]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None, None
    rows = dict(line.split(":", 1) for line in lines if ":" in line)

    def of(name: str) -> Optional[int]:
        return int(rows[name].split()[0]) * 1024 if name in rows else None

    return of("MemTotal"), of("MemAvailable")
