"""The environment variables that the Python layer reads. The table of all of them, with the
sentences that diagnostics print, is the core's (csrc/env.c, `fastdp._C.env_table`)."""

from __future__ import annotations

import os
from typing import Any, Optional, Tuple

UNUSED_GRADS = ("zero", "none")
OVERLAPS = ("auto", "always", "never")
TRANSPORTS = ("auto", "local", "peer", "nccl", "host")
ENGINES = ("eager", "auto", "graph")
DEFAULT_BUCKET_BYTES = 25 * 2**20


def unused_grad(option: Optional[str]) -> str:
    """The keyword `unused_grad`, else FASTDP_UNUSED_GRAD, else "zero"."""
    return _choice("unused_grad", option, "FASTDP_UNUSED_GRAD", UNUSED_GRADS, "zero")


def transport(option: Optional[str]) -> Optional[str]:
    """The keyword `transport`; None leaves the choice to FASTDP_TRANSPORT, which the core reads."""
    if option is not None and option not in TRANSPORTS:
        raise ValueError(
            f"transport is {option!r}: it must be one of {', '.join(TRANSPORTS)}, or None for what "
            "FASTDP_TRANSPORT says"
        )
    return option


def overlap() -> str:
    """FASTDP_OVERLAP, else "auto"."""
    return _choice("", None, "FASTDP_OVERLAP", OVERLAPS, "auto")


def engine(option: Optional[str]) -> str:
    """The keyword `engine`, else FASTDP_ENGINE, else "eager"."""
    return _choice("engine", option, "FASTDP_ENGINE", ENGINES, "eager")


def _choice(
    keyword: str, option: Optional[str], variable: str, allowed: Tuple[str, ...], standard: str
) -> str:
    name, value = keyword, option
    if value is None:
        name, value = variable, os.environ.get(variable) or standard
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}: it must be one of {', '.join(allowed)}")
    return value


def bucket_bytes(option: Optional[int]) -> int:
    """The keyword `bucket_bytes`, else FASTDP_BUCKET_BYTES, else 25 MiB."""
    value: Any
    name, value = "bucket_bytes", option
    if value is None:
        name, value = "FASTDP_BUCKET_BYTES", os.environ.get("FASTDP_BUCKET_BYTES") or None
        if value is None:
            return DEFAULT_BUCKET_BYTES
    try:
        size = int(value)
        if isinstance(value, bool) or (isinstance(value, float) and size != value):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} is {value!r}: it must be a whole number of bytes") from None
    if size < 1:
        raise ValueError(f"{name} is {size}: it must be at least 1 byte")
    return size
