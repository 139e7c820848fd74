"""What this torch can, asked of it and not told by its version. Tests of what it cannot are
skipped; the reasons name a torch that can."""

import inspect

import pytest
import torch


def exports(dtype):
    try:
        torch.zeros(1, dtype=dtype).__dlpack__()
    except (BufferError, RuntimeError):
        return False
    return True


# Which of them cross by DLPack. Others are refused, by torch itself.
FLOAT8 = [each for each in (torch.float8_e4m3fn, torch.float8_e5m2) if exports(each)]

HAS_TABLE = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
needs_exchange_table = pytest.mark.skipif(
    not HAS_TABLE,
    reason="needs torch 2.11: tensors by DLPack's exchange table",
)
needs_dlpack_1 = pytest.mark.skipif(
    "copy" not in inspect.signature(torch.from_dlpack).parameters,
    reason="needs torch 2.9: DLPack 1.0, and copies by it",
)
needs_total_norm = pytest.mark.skipif(
    not hasattr(torch.nn.utils, "get_total_norm"), reason="needs torch 2.6: get_total_norm"
)
needs_safe_globals = pytest.mark.skipif(
    not hasattr(torch.serialization, "safe_globals"), reason="needs torch 2.5: safe_globals"
)
