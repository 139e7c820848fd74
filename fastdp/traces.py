"""`dp.trace("file.json")`: what ran on every thread, device and stream during a few steps, as a
file. trace_summary.py reads it again."""

from __future__ import annotations

import contextlib
import json
import os
from types import TracebackType
from typing import Any, Callable, Optional, Type, Union

import torch
from torch.profiler import ProfilerActivity, profile

from . import _torch_state

# The key of the wrapper's report in the file.
METADATA = "fastdp"


class Trace:
    """A context around some steps. The file is written at its end, unless they raised."""

    def __init__(self, path: Union[str, "os.PathLike[str]"], report: Callable[[], Any]) -> None:
        self._path = os.fspath(path)
        if not self._path.endswith((".json", ".json.gz")):
            raise ValueError(f"path is {self._path!r}: it must end with .json or .json.gz")
        folder = os.path.dirname(self._path) or "."
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"path is {self._path!r}, but there is no folder {folder!r}")
        self._report = report
        self._profile: Any = None
        self._listens = False

    def __enter__(self) -> "Trace":
        if self._profile is not None:
            raise RuntimeError("this trace was entered before: take a new one")
        if _torch_state.profiler_listens():
            raise RuntimeError(
                f"trace to {self._path!r}: a profiler of torch's, or another trace, is on, and "
                "torch runs one at a time in a process: end that first"
            )
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities, experimental_config=_torch_state.all_threads()
        )
        self._profile.__enter__()
        self._listens = _torch_state.profiler_listens()
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        # A profiler that ends ends whichever is on; to write what is then left of ours would crash.
        is_lost = self._listens and not _torch_state.profiler_listens()
        if kind is None and not is_lost:
            if torch.cuda.is_initialized():
                for index in range(torch.cuda.device_count()):
                    torch.cuda.synchronize(index)
            self._profile.add_metadata_json(METADATA, json.dumps(self._report()))
        with contextlib.suppress(*[RuntimeError] if is_lost else []):  # an older torch's "not on"
            self._profile.__exit__(kind, error, traceback)
        if kind is None and is_lost:
            raise RuntimeError(
                f"trace to {self._path!r}: a profiler of torch's was started and ended meanwhile, "
                "which ended the trace, too; no file is written"
            )
        if kind is None:
            self._profile.export_chrome_trace(self._path)
