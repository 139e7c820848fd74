"""fastdp: `fastdp.DataParallel(model)`, torch.nn.DataParallel without its price.

Importing starts no thread and opens no device.
"""

import torch  # noqa: F401  (first: the core finds its libraries through torch's)

from . import comm
from ._C import build_info
from .apply import parallel_apply
from .doctor import PreflightError, preflight
from .functional import data_parallel
from .losses import sum_losses
from .marks import Replicated
from .patch import patch
from .replicas import replicate
from .signatures import EngineError
from .surprises import DataParallelWarning
from .trees import gather, scatter, scatter_kwargs
from .wrapper import DataParallel

__all__ = [
    "DataParallel",
    "DataParallelWarning",
    "EngineError",
    "PreflightError",
    "Replicated",
    "build_info",
    "comm",
    "data_parallel",
    "gather",
    "parallel_apply",
    "patch",
    "preflight",
    "replicate",
    "scatter",
    "scatter_kwargs",
    "sum_losses",
]

__version__ = build_info()["version"]
