"""Training steps on inputs that lie on the host, and the copies alone: fastdp.prefetch beside a
loader of pageable and of pinned batches, and beside inputs that are on the GPUs already.

    python benchmarks/input.py --devices 0,1                     ResNet-50, 128 per GPU
    python benchmarks/input.py --devices 0,1 --model resnet18:64
    python benchmarks/input.py --devices cpu,cpu --model tiny    to try the script itself

The loader hands out a few batches over and over, which cost it nothing: all that is left is to
bring them to the GPUs. Every way takes its turns in one run. A turn of prefetch starts with its
batches staged, and ends with as many staged for nobody: the steps between are those of a long run.

Steps: ms, median of the turns, fastest and slowest; how much longer than on inputs that are there.
Copies: GB/s with nobody computing, and of what the bare copy of the same slices from pinned memory
reaches, all GPUs at once.

What is promised of GPUs: steps on prefetched batches take at most 3 % longer than on inputs that
are there; copies of pinned batches reach 90 % of the bare copy. Two H200: about 40 s for ResNet-50.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import statistics
import sys
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from bars import at_least, at_most  # noqa: E402
from measure import keep, machine_of  # noqa: E402
from models import MODELS  # noqa: E402
from rivals import Trainer, wait  # noqa: E402
from step import chosen_model, devices_of  # noqa: E402

import fastdp  # noqa: E402

THERE, PREFETCH, BARE = "inputs there", "prefetch", "bare pinned copy"
PINNED_PREFETCH = "prefetch, pinned loader"
DISTINCT_BATCHES = 4


class Fed:
    """A way to come by batches: `start` gives an iterator for each turn."""

    def __init__(self, start: Callable[[], Iterator[Any]], ahead: int = 0) -> None:
        self._start = start
        self._ahead = ahead

    def turn(
        self, act: Callable[[Any], None], steps: int, devices: Sequence[torch.device]
    ) -> float:
        """Seconds of one step."""
        batches = self._start()
        for _ in range(1 + self._ahead):
            act(next(batches))
        wait(devices)
        began = time.perf_counter()
        for _ in range(steps):
            act(next(batches))
        wait(devices)
        return (time.perf_counter() - began) / steps


def loaders(batches: Sequence[torch.Tensor], dp: Any, depth: int) -> Dict[str, Fed]:
    """The ways by name. On the host nothing can be pinned."""

    def endless(kept: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        return itertools.cycle(kept)

    def fed(kept: Sequence[torch.Tensor]) -> Fed:
        return Fed(lambda: iter(fastdp.prefetch(endless(kept), dp, depth)), depth)

    placed = list(fastdp.prefetch(batches, dp, depth))
    ways = {
        THERE: Fed(lambda: itertools.cycle(placed)),
        "pageable loader": Fed(lambda: endless(batches)),
    }
    pinned = [batch.pin_memory() for batch in batches] if torch.cuda.is_available() else []
    if pinned:
        ways["pinned loader"] = Fed(lambda: endless(pinned))
    ways[PREFETCH] = fed(batches)
    if pinned:
        ways[PINNED_PREFETCH] = fed(pinned)
    return ways


def race(turns: Dict[str, Callable[[], float]], rounds: int) -> Dict[str, List[float]]:
    """Seconds per step of each way, turn by turn, after one that is not counted."""
    taken: Dict[str, List[float]] = {way: [] for way in turns}
    for k in range(rounds + 1):
        for way, turn in turns.items():
            seconds = turn()
            if k > 0:
                taken[way].append(seconds)
    return taken


def step_rows(ways: Dict[str, Fed], trainer: Trainer, args: Any) -> List[Dict[str, Any]]:
    def act(batch: Any) -> None:
        trainer.batch = batch
        trainer.step()

    turns = {
        way: lambda fed=fed: fed.turn(act, args.steps, args.devices) for way, fed in ways.items()
    }
    rows = []
    for way, seconds in race(turns, args.rounds).items():
        ms = sorted(1e3 * s for s in seconds)
        rows.append(
            {"way": way, "step_ms": statistics.median(ms), "low_ms": ms[0], "high_ms": ms[-1]}
        )
    for row in rows:
        row["longer"] = row["step_ms"] / rows[0]["step_ms"] - 1
    return rows


def copy_rows(
    ways: Dict[str, Fed], batches: Sequence[torch.Tensor], args: Any
) -> List[Dict[str, Any]]:
    def read(batch: Any) -> None:
        if isinstance(batch, fastdp.Scattered):
            batch.slices  # noqa: B018  (the compute streams wait for the copies)

    turns: Dict[str, Callable[[], float]] = {BARE: lambda: bare_turn(batches, args)}
    for way, fed in ways.items():
        if way.startswith(PREFETCH):
            turns[way] = lambda fed=fed: fed.turn(read, args.steps, args.devices)
    size_bytes = batches[0].numel() * batches[0].element_size()
    rows = [
        {"way": way, "gb_per_s": size_bytes / statistics.median(seconds) / 1e9}
        for way, seconds in race(turns, args.rounds).items()
    ]
    for row in rows:
        row["of_bare"] = row["gb_per_s"] / rows[0]["gb_per_s"]
    return rows


def bare_turn(batches: Sequence[torch.Tensor], args: Any) -> float:
    """Into memory that is there, each slice by its GPU's current stream."""
    on_gpus = args.devices[0].type == "cuda"
    sources = [
        piece.pin_memory() if on_gpus else piece for piece in batches[0].chunk(len(args.devices))
    ]
    targets = [torch.empty_like(s, device=d) for s, d in zip(sources, args.devices)]
    wait(args.devices)
    began = time.perf_counter()
    for _ in range(args.steps):
        for source, target in zip(sources, targets):
            target.copy_(source, non_blocking=True)
    wait(args.devices)
    return (time.perf_counter() - began) / args.steps


def bars(found: Dict[str, Any]) -> List[Dict[str, Any]]:
    """Of steps on all that prefetch feeds, and of copies of pinned batches."""
    results = []
    for row in found["steps"]:
        if row["way"].startswith(PREFETCH):
            name = f"steps on {row['way']}: how much longer than on inputs that are there"
            results.append(at_most(name, row["longer"], 0.03))
    for row in found["copies"]:
        if row["way"] == PINNED_PREFETCH:
            name = f"copies by {row['way']}: share of the bare copy's rate"
            results.append(at_least(name, row["of_bare"], 0.9))
    return results


def show(found: Dict[str, Any]) -> None:
    print(f"\n{found['title']}, {found['batch_mb']:.1f} MB a batch")
    print(f"{'':28}{'ms/step':>9}{'low':>9}{'high':>9}{'longer':>9}")
    for row in found["steps"]:
        figures = "".join(f"{row[key]:9.2f}" for key in ("step_ms", "low_ms", "high_ms"))
        print(f"{row['way']:28}{figures}{100 * row['longer']:8.1f}%")
    print(f"{'':28}{'GB/s':>9}{'of bare':>9}")
    for row in found["copies"]:
        print(f"{row['way']:28}{row['gb_per_s']:9.2f}{100 * row['of_bare']:8.1f}%")
    for bar in found["bars"]:
        bound = f"at most {bar['most']:g}" if "most" in bar else f"at least {bar['least']:g}"
        word = "holds" if bar["holds"] else "FAILS"
        print(f"{word}: {bar['bar']} is {bar['measured']:.3f}, {bound}")


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", default="0,1", help="such as 0,1 or 0,0 or cpu,cpu")
    parser.add_argument("--model", default="resnet50", help="name or name:batch per replica")
    parser.add_argument("--depth", type=int, default=2, help="of prefetch")
    parser.add_argument("--engine", choices=("eager", "auto", "graph"), default="eager")
    parser.add_argument("--steps", type=int, default=12, help="steps in one turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(arguments)
    for option in ("depth", "steps", "rounds"):
        if getattr(args, option) < 1:
            parser.error(f"--{option} is {getattr(args, option)}: it must be at least 1")
    args.devices = devices_of(args.devices, parser)
    args.model, args.per_replica = chosen_model(args.model, parser, "--model")
    return args


def main(arguments: Optional[Sequence[str]] = None) -> None:
    args = parse(arguments)
    machine = machine_of(args.devices)
    model, home, n = MODELS[args.model], args.devices[0], len(args.devices)
    torch.manual_seed(0)
    base = model.make(home)
    dp = fastdp.DataParallel(base, args.devices, engine=args.engine)
    host = torch.device("cpu")
    batches = [model.batch(n * args.per_replica, host) for _ in range(DISTINCT_BATCHES)]
    ways = loaders(batches, dp, args.depth)
    trainer = Trainer(model, base, dp, batches[0], "step")
    shown = [d.index if d.type == "cuda" else "cpu" for d in args.devices]
    given = sys.argv[1:] if arguments is None else arguments
    found: Dict[str, Any] = {
        "benchmark": "input",
        "command": shlex.join(["python", "benchmarks/input.py", *given]),
        "machine": machine,
        "title": f"{args.model}, {args.per_replica} per replica, devices {shown}",
        **{"model": args.model, "per_gpu": args.per_replica, "engine": args.engine},
        "devices": shown,
        "batch_mb": batches[0].numel() * batches[0].element_size() / 1e6,
        "copies": copy_rows(ways, batches, args),
    }
    print(json.dumps(found["machine"]), flush=True)
    found["steps"] = step_rows(ways, trainer, args)
    found["bars"] = bars(found) if home.type == "cuda" else []
    show(found)
    keep(args.json, found)


if __name__ == "__main__":
    main()
