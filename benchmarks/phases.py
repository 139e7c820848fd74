"""Where the host's time of one training step goes, phase by phase, in microseconds.

    python benchmarks/phases.py --devices 0,1 --models mlp,resnet18
    python benchmarks/phases.py --devices cpu,cpu --models tiny  to try the script itself

Nothing waits for the GPUs inside a step: a phase lasts until its call returns, whatever it has
enqueued. Steps begin with idle GPUs, so that no launch waits for room in a queue. Each phase's
median over the steps stands beside the same phase of the bare module on the first device, where it
has one. The replicas of parallel_apply run side by side. "nodes" are parts of the backward above
them: fastdp's autograd nodes, on the engine's threads. FASTDP_OVERLAP=always|never shows what
hiding the moves of the parameters costs.
--profile adds the functions in which the calling thread spends most (cProfile slows all down).
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import os
import pstats
import statistics
import sys
import time
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from measure import machine_line, machine_of  # noqa: E402
from models import MODELS, Model  # noqa: E402
from step import devices_of  # noqa: E402

import fastdp  # noqa: E402
from fastdp import functions  # noqa: E402

VERBS = ("scatter", "replicate", "parallel_apply", "gather")
NODES = ("Gather", "Land", "Broadcast")
FORWARD, REST = "forward", "rest of forward"
REPLICAS = tuple(f"replica {rank}" for rank in range(8))
PHASES = (
    *("zero_grad", FORWARD, "scatter", "replicate", "parallel_apply", *REPLICAS, "gather", REST),
    "loss and backward",
    *(f"node: {name}" for name in NODES),
    *("optimizer", "whole step"),
)
_INDENTED = {*VERBS, *REPLICAS, REST, *(f"node: {name}" for name in NODES)}


class Clock:
    """Adds up microseconds by phase; `steps` has one dictionary per step."""

    def __init__(self) -> None:
        self.steps: List[Dict[str, float]] = []

    def begin(self) -> None:
        self.steps.append({})

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start_ns = time.perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                taken_us = (time.perf_counter_ns() - start_ns) / 1e3
                self.steps[-1][phase] = self.steps[-1].get(phase, 0.0) + taken_us

        return run

    def medians(self) -> Dict[str, float]:
        for step in self.steps:
            if "scatter" in step:
                step[REST] = step[FORWARD] - sum(step[verb] for verb in VERBS)
        return {
            phase: statistics.median(step.get(phase, 0.0) for step in self.steps)
            for phase in PHASES
            if any(phase in step for step in self.steps)
        }


class Phased(fastdp.DataParallel):
    """A wrapper whose four steps are timed."""

    def time_by(self, clock: Clock) -> None:
        for verb in VERBS:
            self.__dict__[verb] = clock.timed(verb, getattr(super(), verb))
        apply = self.__dict__["parallel_apply"]

        def parallel_apply(replicas: Sequence[nn.Module], *arguments: Any) -> Any:
            timed = [clock.timed(*pair) for pair in zip(REPLICAS, replicas)]
            return apply(timed + list(replicas[len(timed) :]), *arguments)

        self.__dict__["parallel_apply"] = parallel_apply


class TimedNodes:
    """Inside, the backwards of fastdp's nodes are timed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __enter__(self) -> None:
        self._kept = {name: getattr(functions, name).backward for name in NODES}
        for name, backward in self._kept.items():
            timed = staticmethod(self._clock.timed(f"node: {name}", backward))
            getattr(functions, name).backward = timed

    def __exit__(self, *error: Any) -> None:
        for name, backward in self._kept.items():
            getattr(functions, name).backward = staticmethod(backward)


def wait(devices: Sequence[torch.device]) -> None:
    for device in dict.fromkeys(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def make_step(
    model: Model, base: nn.Module, wrapped: nn.Module, batch: Any, clock: Clock
) -> Callable[[], None]:
    optimizer = model.fused_optimizer(base)
    device_type = next(base.parameters()).device.type
    precision = model.precision
    zero_grad = clock.timed("zero_grad", lambda: optimizer.zero_grad(set_to_none=True))
    forward = clock.timed(FORWARD, wrapped)
    backward = clock.timed("loss and backward", lambda out: out.float().mean().backward())
    update = clock.timed("optimizer", optimizer.step)

    def step() -> None:
        zero_grad()
        with precision(device_type):
            out = forward(batch)
        backward(out)
        update()

    return clock.timed("whole step", step)


def measured(
    name: str, devices: Sequence[torch.device], per_replica: int, steps: int, profile: bool
) -> Tuple[Dict[str, float], Dict[str, float], str]:
    """(fastdp's medians, the bare module's, cProfile's text)."""
    model = MODELS[name]
    count = per_replica or model.per_gpu
    torch.manual_seed(0)
    base = model.make(devices[0])
    bare_clock, clock = Clock(), Clock()
    bare = make_step(model, base, base, model.batch(count, devices[0]), bare_clock)
    ids = [device.index if device.type == "cuda" else "cpu" for device in devices]
    wrapped = Phased(base, device_ids=ids)
    wrapped.time_by(clock)
    batch = model.batch(count * len(devices), devices[0])
    ours = make_step(model, base, wrapped, batch, clock)

    def run(step: Callable[[], None], its_clock: Clock, times: int) -> None:
        for _ in range(times):
            its_clock.begin()
            step()
            wait(devices)

    with TimedNodes(clock):
        for step, its_clock in ((bare, bare_clock), (ours, clock)):
            run(step, its_clock, max(5, steps // 5))
            its_clock.steps.clear()
            run(step, its_clock, steps)
    medians = clock.medians(), bare_clock.medians()
    text = profiled(lambda: run(ours, clock, steps)) if profile else ""
    return (*medians, text)


def profiled(call: Callable[[], None]) -> str:
    profiler = cProfile.Profile()
    profiler.runcall(call)
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(25)
    return text.getvalue()


def table(name: str, ours: Dict[str, float], bare: Dict[str, float]) -> str:
    lines = [f"| {name} | fastdp, us | bare module, us |", "|---|---:|---:|"]
    for phase, taken_us in ours.items():
        label = f"- {phase}" if phase in _INDENTED else phase
        other = f"{bare[phase]:,.0f}" if phase in bare else ""
        lines.append(f"| {label} | {taken_us:,.0f} | {other} |")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", default="0,1", help="such as 0,1 or cpu,cpu (default 0,1)")
    parser.add_argument("--models", default="mlp", help=f"of {', '.join(MODELS)} (default mlp)")
    parser.add_argument("--batch", type=int, default=0, help="per replica (default: the model's)")
    parser.add_argument("--steps", type=int, default=50, help="timed steps (default 50)")
    parser.add_argument("--profile", action="store_true", help="cProfile's first 25 functions too")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")
    options = parser.parse_args()
    for name in options.models.split(","):
        if name not in MODELS:
            parser.error(f"argument --models: {name!r} is none of {', '.join(MODELS)}")
    options.devices = devices_of(options.devices, parser, 2)
    for argument, value, least in (("batch", options.batch, 0), ("steps", options.steps, 1)):
        if value < least:
            parser.error(f"argument --{argument}: {value}, must be at least {least}")
    return options


def main() -> int:
    options = parse_arguments()
    devices = options.devices
    where = machine_of(devices)
    if all(device.type == "cpu" for device in devices):
        torch.set_num_threads(1)  # the host's own work is what is looked at
    results = {
        name: measured(name, devices, options.batch, options.steps, options.profile)
        for name in options.models.split(",")
    }
    if options.json:
        found = {n: {"fastdp_us": r[0], "bare_us": r[1]} for n, r in results.items()}
        print(json.dumps({"machine": where, "steps": options.steps, "models": found}, indent=1))
        return 0
    print(machine_line(where))
    for name, (ours, bare, text) in results.items():
        print(f"\n{table(name, ours, bare)}\n{text}", end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
