"""What a machine is and has, as `doctor` looks at it: one function for each kind of fact.

`gather` calls them all and guards each: one that fails leaves None in its place and its error in
`facts["failed"]`, and hides none of the others. Nothing is judged here (diagnosis.py).

What the driver has is asked of nvidia-smi, in a process of its own, before torch opens a GPU: what
is in use then is in use by others.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import resource
import subprocess
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from . import _C, buses, overlap
from .buckets import find_transport, transport_or_lack

Facts = Dict[str, Any]

# Of torch, CUDA, NCCL and Python: what changes how replicas run, or what a driver shows.
OTHERS_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "NVIDIA_TF32_OVERRIDE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_SHM_DISABLE",
    "NCCL_DEBUG",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
)
_SMI_TIMEOUT_S = 30.0
_PINNED_BYTES = 64 * 2**20


def gather(devices: Sequence[torch.device]) -> Facts:
    """All facts; those of GPUs, peers and transport are about `devices`, which may be empty."""
    facts: Facts = {"failed": {}, "devices": [str(device) for device in devices]}
    gpus = list(dict.fromkeys(device for device in devices if device.type == "cuda"))
    probes: Tuple[Tuple[str, Callable[[], Any]], ...] = (
        ("driver", lambda: driver()),
        ("processes", lambda: processes()),
        ("links", lambda: links()),
        ("visible", lambda: visible()),
        ("versions", lambda: versions()),
        ("gpus", lambda: [gpu(device) for device in gpus]),
        ("peers", lambda: peers(gpus)),
        ("transport", lambda: transport(devices)),
        ("nccl", lambda: nccl()),
        ("buses", lambda: buses.look()),
        ("limits", lambda: limits()),
        ("pinned", lambda: pinned() if gpus else None),
        ("variables", lambda: variables()),
    )
    for name, probe in probes:
        facts[name] = None
        try:
            facts[name] = probe()
        except Exception as error:
            facts["failed"][name] = told(error)
    return facts


def told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip()


def versions() -> Dict[str, Any]:
    """`cuda` is what torch was built for, `driver_cuda` the newest that the driver can run; None
    where there is none."""
    build = _C.build_info()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "fastdp": build["version"],
        "fastdp_cuda": build["cuda_toolkit"] if build["cuda"] else None,
        "driver_cuda": _driver_cuda(),
        "system": f"{platform.system()} {platform.release()}",
    }


def _driver_cuda() -> Optional[str]:
    """Asked of the driver's library; the question opens no GPU."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _smi(*words: str) -> Optional[str]:
    """What nvidia-smi prints; None where there is none."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *words], capture_output=True, text=True, timeout=_SMI_TIMEOUT_S
        )
    except FileNotFoundError:
        return None
    if done.returncode != 0:
        words_said = (done.stdout + done.stderr).strip()
        raise RuntimeError(f"nvidia-smi ended with {done.returncode}: {words_said[:300]}")
    return done.stdout


def _smi_rows(query: str, columns: str) -> Optional[List[List[str]]]:
    text = _smi(f"--query-{query}={columns}", "--format=csv,noheader,nounits")
    if text is None:
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == columns.count(",") + 1]


def _mib(cell: str) -> Optional[int]:
    return int(cell) * 2**20 if cell.isdigit() else None  # "[N/A]" in some containers


def driver() -> Dict[str, Any]:
    """The driver's version and all of its GPUs, in its own order. `gpus` is None where only their
    number is known, `count` where not even that is."""
    rows = _smi_rows("gpu", "index,uuid,name,driver_version,memory.total,memory.used")
    if rows is None:
        return {"version": _kernel_module(), "count": _listed_gpus(), "gpus": None}
    gpus = [
        {
            "index": int(index),
            "uuid": uuid,
            "name": name,
            "total_bytes": _mib(total),
            "used_bytes": _mib(used),
        }
        for index, uuid, name, _, total, used in rows
    ]
    return {"version": rows[0][3] if rows else _kernel_module(), "count": len(gpus), "gpus": gpus}


def _kernel_module() -> Optional[str]:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", text)
    return found[1] if found else None


def _listed_gpus() -> Optional[int]:
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else None


def processes() -> Optional[List[Dict[str, Any]]]:
    """Those that hold memory of a GPU, ours aside; None where nvidia-smi cannot tell."""
    rows = _smi_rows("compute-apps", "gpu_uuid,pid,process_name,used_memory")
    if rows is None:
        return None
    return [
        {"uuid": uuid, "pid": int(pid), "name": name, "bytes": _mib(used)}
        for uuid, pid, name, used in rows
        if pid.isdigit() and int(pid) != os.getpid()
    ]


def links() -> Optional[Dict[str, str]]:
    """The driver's numbers of two GPUs, such as "0-1", to what joins them: "NV18" is NVLink, all
    that does not begin with NV a way through PCIe."""
    text = _smi("topo", "-m")
    if text is None:
        return None
    rows = [re.sub(r"\x1b\[[\d;]*m", "", line).split() for line in text.splitlines()]
    # Not the line of names; behind the columns of the GPUs come those of network cards.
    rows = [row for row in rows if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0])]
    rows = [row for row in rows if not row[1].startswith("GPU")]
    found = {}
    for row in rows:
        for k, cell in enumerate(row[1 : len(rows) + 1]):
            if re.fullmatch(r"NV\d+|SYS|NODE|PHB|PXB|PIX", cell):
                found[f"{row[0][3:]}-{k}"] = cell
    return found


def visible() -> Dict[str, Any]:
    """CUDA_VISIBLE_DEVICES as it is now, what torch sees, and why it sees nothing."""
    started = torch.cuda.is_initialized()
    error = None
    count = torch.cuda.device_count()
    if count == 0 and torch.version.cuda is not None and not started:
        try:
            torch.cuda.init()
        except Exception as failure:
            error = told(failure)
    return {
        "variable": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "order": os.environ.get("CUDA_DEVICE_ORDER") or None,
        "started": started,
        "count": count,
        "uuids": [_uuid(index) for index in range(count)] if started else None,
        "error": error,
    }


def _uuid(index: int) -> Optional[str]:
    """As nvidia-smi writes it; None on a torch that does not tell."""
    found = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if found is None:
        return None
    text = str(found)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def gpu(device: torch.device) -> Dict[str, Any]:
    """`ours_bytes` is what torch has taken of it for this process, `cached_bytes` the part of that
    which holds nothing. Opens the GPU."""
    index = device.index
    properties = torch.cuda.get_device_properties(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    return {
        "index": index,
        "name": properties.name,
        "uuid": _uuid(index),
        "capability": f"{properties.major}.{properties.minor}",
        "total_bytes": total_bytes,
        "free_bytes": free_bytes,
        "ours_bytes": (ours_bytes := torch.cuda.memory_reserved(index)),
        "cached_bytes": ours_bytes - torch.cuda.memory_allocated(index),
    }


def peers(gpus: Sequence[torch.device]) -> List[Dict[str, Any]]:
    """Each two GPUs: the check of peer copies by the core, and the rate each way by whatever
    carries parameters between them. What is wrong with a pair hides no other."""
    found = []
    for k, first in enumerate(gpus):
        for second in gpus[k + 1 :]:
            pair = (first, second)
            row: Dict[str, Any] = {"gpus": [first.index, second.index]}
            row["check"], row["reason"] = _peer_check(pair)
            row["transport"], row["gb_per_s"], row["error"] = None, None, None
            try:
                row["transport"] = find_transport(pair, None)[0]
                row["gb_per_s"] = [_gb_per_s(pair), _gb_per_s(pair[::-1])]
            except Exception as error:
                row["error"] = told(error)
            found.append(row)
    return found


def _peer_check(pair: Tuple[torch.device, ...]) -> Tuple[str, str]:
    """("passed" | "failed" | "no access" | "unknown", why). The core copies a pattern both ways,
    by copy engine and by kernels, under a deadline (csrc/peer_check.h)."""
    try:
        find_transport(pair, "peer")
        return "passed", ""
    except NotImplementedError as error:
        reason = str(error).split("does not join the devices: ", 1)[-1]
        return ("failed" if "failed the check of peer copies" in reason else "no access"), reason
    except Exception as error:
        return "unknown", told(error)


def _gb_per_s(pair: Tuple[torch.device, ...]) -> float:
    return overlap.measured_bytes_per_s(tuple(pair), None) / 1e9


def transport(devices: Sequence[torch.device]) -> Optional[Tuple[Optional[str], str]]:
    """(name, reason) of what joins all devices; (None, what is missing) where FASTDP_TRANSPORT asks
    for what cannot."""
    return transport_or_lack(devices, None)


def nccl() -> Dict[str, Any]:
    """torch's NCCL and the libraries of that name that this process has loaded. fastdp loads it
    only where it is needed, so there may be none yet; `installed` is the wheel that would be."""
    loaded = _loaded("libnccl")
    return {
        "torch": ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None,
        "loaded": {path: _nccl_version(path) for path in loaded},
        "installed": _wheel("nvidia.nccl"),
    }


def _loaded(name: str) -> List[str]:
    maps = Path("/proc/self/maps").read_text()
    pattern = re.compile(rf"(/\S*{re.escape(name)}[^/\s]*\.so[.\d]*)$", re.MULTILINE)
    return sorted(set(pattern.findall(maps)))


def _nccl_version(path: str) -> Optional[str]:
    number = ctypes.c_int(0)
    if ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number)) != 0:
        return None
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def _wheel(name: str) -> Optional[str]:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return str(places[0]) if places else None


def limits() -> Dict[str, Optional[int]]:
    """Bytes; None is no limit, or no such thing."""
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "shm_bytes": shared.f_frsize * shared.f_blocks if shared else None,
        "shm_free_bytes": shared.f_frsize * shared.f_bavail if shared else None,
        "memlock_bytes": None if memlock == resource.RLIM_INFINITY else memlock,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def pinned() -> int:
    """Takes pinned memory, and gives how much."""
    return torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True).numel()


def variables() -> List[Dict[str, Any]]:
    """Ours, of the core's table, set or not; of others', and of those that only look like ours,
    those that are set."""
    rows = [
        {"name": name, "value": os.environ.get(name) or None, "kind": kind, "default": default}
        for name, kind, default, _ in _C.env_table()
    ]
    known = {row["name"] for row in rows}
    strange = sorted(n for n in os.environ if n.startswith("FASTDP_") and n not in known)
    return rows + [
        {"name": name, "value": os.environ[name], "kind": None, "default": None}
        for name in [*OTHERS_VARIABLES, *strange]
        if name in os.environ
    ]
