"""fastdp: `fastdp.DataParallel(model)`, torch.nn.DataParallel without its price.

Importing starts no thread and opens no device.
"""

import torch  # noqa: F401  (first: the core finds its libraries through torch's)

from . import comm
from ._C import build_info
from .apply import parallel_apply
from .doctor import PreflightError, preflight
from .functional import data_parallel
from .health_monitor import HealthMonitor, HealthRecord
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

__all__ = [
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
]

__version__ = build_info()["version"]
