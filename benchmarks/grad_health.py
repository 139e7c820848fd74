"""The norm of a wrapper's gradients, and clipping by it, beside torch.nn.utils.

    python benchmarks/grad_health.py [--repeats 60] [--json] [--check]    on the host
    FASTDP_BENCHMARK_DEVICES=0,1 python benchmarks/grad_health.py         on two GPUs

Gradients are those of a backward of two replicas: of 161 tensors (a ResNet-50's number of them, 2
million elements), and of 1,000 small ones. On the host in CPU time of one thread; on GPUs by the
wall, until the GPU is done. The floor is the norm of one tensor with all elements in it. --check
exits 1 when a bar (at the end) fails.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Callable, Dict, List

import torch
from measure import OURS, Bar, Cost, main
from torch import nn

import fastdp

DEVICES: List[Any] = [
    int(name) if name.isdigit() else name
    for name in os.environ.get("FASTDP_BENCHMARK_DEVICES", "cpu,cpu").split(",")
]
ON_GPUS = DEVICES[0] != "cpu"
TORCH, FLOOR = "torch.nn.utils", "floor: one tensor"
NORM, CLIP, CHECK = "norm of {} tensors", "clipping of {} tensors", "search of {} for NaN"
SIZES = ("161", "1,000")

BARS = tuple(Bar(name.format(size), TORCH, 1) for size in SIZES for name in (NORM, CLIP))


def _wrapped(size: str) -> Any:
    torch.manual_seed(0)
    if size == "161":
        blocks = [
            nn.Sequential(nn.Conv2d(64, 64, 3, bias=False, padding=1), nn.BatchNorm2d(64))
            for _ in range(53)
        ]
        module = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
        inputs = torch.randn(4, 64, 6, 6)
    else:
        module, inputs = nn.Sequential(*(nn.Linear(4, 4) for _ in range(500))), torch.randn(4, 4)
    if ON_GPUS:
        module.to(torch.device("cuda", DEVICES[0]))
    dp = fastdp.DataParallel(module, DEVICES)
    dp(inputs).sum().backward()
    return dp


def _cost(name: str, ways: Dict[str, Callable[[], Any]]) -> Cost:
    if not ON_GPUS:
        return Cost(name, ways)

    def waited(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            call()
            torch.cuda.synchronize(DEVICES[0])

        return run

    return Cost(name, {k: waited(call) for k, call in ways.items()}, time.perf_counter_ns)


def norm(size: str) -> Cost:
    dp = _wrapped(size)
    parameters = dp.module.parameters
    whole = torch.cat([p.grad.flatten() for p in parameters()])

    def torchs() -> Any:
        return torch.nn.utils.get_total_norm([p.grad for p in parameters()])

    ways = {
        FLOOR: lambda: torch.linalg.vector_norm(whole),
        OURS: dp.grad_norm,
        TORCH: torchs,
    }
    return _cost(NORM.format(size), ways)


def clip(size: str) -> Cost:
    dp = _wrapped(size)
    ways = {
        OURS: lambda: dp.clip_grad_norm_(1e-3),
        TORCH: lambda: torch.nn.utils.clip_grad_norm_(dp.module.parameters(), 1e-3),
    }
    return _cost(CLIP.format(size), ways)


def check(size: str) -> Cost:
    dp = _wrapped(size)

    def one_by_one() -> Any:
        return [p.grad.isfinite().all() for p in dp.module.parameters()]

    return _cost(CHECK.format(size), {OURS: dp.nonfinite, "isfinite of each": one_by_one})


COSTS = [
    lambda make=make, size=size: make(size) for size in SIZES for make in (norm, clip, check)
]

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(__doc__, COSTS, BARS, devices=DEVICES))
