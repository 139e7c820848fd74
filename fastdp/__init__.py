"""fastdp: `fastdp.DataParallel(model)`, torch.nn.DataParallel without its price.

Importing starts no thread and opens no device.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, List

import torch  # first: the core finds its libraries through torch's

_OLDEST = (2, 4)
if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST:
    raise ImportError(
        f"fastdp needs torch 2.4 or newer, and this is torch {torch.__version__}: "
        "pip install 'torch>=2.4'"
    )

if importlib.util.find_spec("fastdp._C") is None:
    # Else Python blames a circular import.
    raise ImportError(
        f"{__file__} is fastdp's source, which was not compiled here. Run Python from another "
        "folder than the clone, to get the fastdp that `pip install .` installed; or compile it "
        "here: pip install -e ."
    )

from . import comm
from ._C import build_info
from .apply import parallel_apply
from .deadlines import CommunicationTimeoutError
from .functional import data_parallel
from .losses import sum_losses
from .marks import Replicated
from .patch import patch
from .prefetch import prefetch
from .replicas import replicate
from .scattered import Scattered
from .signatures import EngineError
from .surprises import DataParallelWarning
from .trees import gather, scatter, scatter_kwargs
from .wrapper import DataParallel

if TYPE_CHECKING:
    from .doctor import PreflightError, preflight
    from .health_monitor import HealthMonitor, HealthRecord
    from .validations import validation

__all__ = [
    "CommunicationTimeoutError",
    "DataParallel",
    "DataParallelWarning",
    "EngineError",
    "HealthMonitor",
    "HealthRecord",
    "PreflightError",
    "Replicated",
    "Scattered",
    "build_info",
    "comm",
    "data_parallel",
    "gather",
    "parallel_apply",
    "patch",
    "prefetch",
    "preflight",
    "replicate",
    "scatter",
    "scatter_kwargs",
    "sum_losses",
    "validation",
]

__version__ = build_info()["version"]

# What few programs use is imported when it is first asked for.
_LATER = {
    "HealthMonitor": "health_monitor",
    "HealthRecord": "health_monitor",
    "PreflightError": "doctor",
    "preflight": "doctor",
    "validation": "validations",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> List[str]:
    return sorted({*globals(), *_LATER})
