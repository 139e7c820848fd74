"""Finds a torchvision that runs beside this torch.

torchvision's wheels are built for torch's CUDA build: beside a CPU build their compiled operators
do not load, and the import fails for want of them. So build_tools/programs.py puts it where nothing
else sees it, and its one operator that the programs need is given in Python.
"""

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path

import torch

APART = Path(sys.prefix, "fastdp-apart")
# Kept, since an operator goes with its library.
_operators = []


def find():
    """The module torchvision; ImportError where there is none."""
    if importlib.util.find_spec("torchvision") is None and APART.is_dir():
        sys.path.append(str(APART))
    spec = importlib.util.find_spec("torchvision")
    if spec is None:
        raise ImportError(f"there is no torchvision, and none in {APART}")
    compiled = list(Path(spec.origin).parent.glob("_C*.so"))
    if not _operators and not _loads(compiled):
        _define_operators()
        _operators.append(importlib.import_module("torchvision.ops.boxes"))
        _operators[-1]._assert_has_ops = lambda: None
    return importlib.import_module("torchvision")


def _loads(libraries):
    for path in libraries:
        with contextlib.suppress(OSError):
            torch.ops.load_library(str(path))
            return True
    return False


def _define_operators():
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):  # the import wants both
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.impl("nms", suppress_overlaps, "CPU")
    _operators.append(library)


def suppress_overlaps(boxes, scores, threshold):
    """Non-maximum suppression: the numbers of the boxes that no better one overlaps by more than
    the threshold, the best first."""
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    left, kept = scores.sort(descending=True, stable=True).indices, []
    while len(left) > 0:
        best, left = left[0], left[1:]
        kept.append(best)
        corner = torch.maximum(boxes[best, :2], boxes[left, :2])
        other = torch.minimum(boxes[best, 2:], boxes[left, 2:])
        shared = (other - corner).clamp(min=0).prod(1)
        left = left[shared <= threshold * (areas[best] + areas[left] - shared)]
    return torch.stack(kept) if kept else left
