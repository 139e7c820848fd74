"""Whether one process can keep many GPUs fed: what launching costs the host on 1, 2, 4, ... GPUs,
by one thread for all and by a thread for each.

    python benchmarks/launches.py --devices 0,1,2,3,4,5,6,7
    python benchmarks/launches.py --devices 0,0,0,0,0,0,0,0      eight streams of one GPU
    python benchmarks/launches.py --devices cpu,cpu              to try the script itself

"kernels" are additions to a small tensor, as an eager forward launches them: each takes the GIL.
"graphs" replay a recorded graph of 100 of them: torch lets go of the GIL meanwhile, so what stops
several threads there is a lock of the driver. "moves" are a broadcast and a sum of a bucket of
1 MB among all GPUs, which one thread makes. Nothing waits for a GPU while the clock runs.

Times are microseconds of the host until all is enqueued, for one launch on each of the GPUs;
"x first" is that over the same on the fewest GPUs: from one on, 1 where launches run side by side,
the number of GPUs where they run one after another. It takes some 20 s. --json writes the rows.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from measure import keep, machine_of  # noqa: E402
from rivals import wait  # noqa: E402
from scaling import counts_of  # noqa: E402
from step import devices_of  # noqa: E402

from fastdp import _C  # noqa: E402
from fastdp.peers import open_peers  # noqa: E402

KERNELS, REPLAYS, MOVES = 300, 20, 20  # in one turn
IN_GRAPH = 100
MOVED_BYTES = 2**20

Work = Callable[[], None]


def kernels(device: torch.device) -> Work:
    tensor = torch.zeros(256, device=device)

    def work() -> None:
        for _ in range(KERNELS):
            tensor.add_(1)

    return work


def graphs(device: torch.device) -> Work:
    tensor, graph = torch.zeros(256, device=device).add_(1), torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    # torch.cuda.graph has one stream for all devices.
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
        for _ in range(IN_GRAPH):
            tensor.add_(1)
    return functools.partial(replay, graph, tensor)


def replay(graph: torch.cuda.CUDAGraph, memory: torch.Tensor) -> None:
    """`memory` is what the graph writes to: a graph keeps nothing alive but what was made in it."""
    for _ in range(REPLAYS):
        graph.replay()


def on_stream(device: torch.device, make: Callable[[torch.device], Work]) -> Work:
    """On a stream of its own, as a replica's forward may be."""
    if device.type == "cpu":
        return make(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        act = make(device)

    def work() -> None:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            act()

    return work


def moves(devices: Sequence[torch.device]) -> Work:
    open_peers(devices)
    rows = tuple((torch.ones(MOVED_BYTES // 4, device=device),) for device in devices)
    bucket, sources = _C.Bucket(rows[0]), rows[0]
    flats = tuple(torch.empty_like(sources[0], device=device) for device in devices[1:])
    flat = torch.empty_like(sources[0])

    def work() -> None:
        for _ in range(MOVES):
            bucket.broadcast(sources, flats)
            bucket.reduce(rows, flat)

    return work


def in_turn(works: Sequence[Work], pool: Any) -> float:
    begin = time.perf_counter()
    for work in works:
        work()
    return time.perf_counter() - begin


def side_by_side(works: Sequence[Work], pool: Any) -> float:
    """From the moment at which all threads are there."""
    gate, begins = Barrier(len(works)), []

    def run(work: Work) -> None:
        gate.wait()
        begins.append(time.perf_counter())
        work()

    list(pool.map(run, works))
    return time.perf_counter() - min(begins)


def taken_us(works: Sequence[Work], way: Any, devices: Any, rounds: int, calls: int) -> List[float]:
    """Of each round, for one call of each."""
    times = []
    with ThreadPoolExecutor(len(works)) as pool:
        for _ in range(rounds + 1):  # the first warms up
            wait(devices)
            times.append(way(works, pool) * 1e6 / calls)
    wait(devices)
    return times[1:]


def measured(devices: Sequence[torch.device], rounds: int) -> List[Dict[str, Any]]:
    """One row for each way to launch on these devices."""
    kinds = {"kernels": (kernels, KERNELS)}
    if devices[0].type == "cuda":
        kinds["graphs"] = graphs, REPLAYS
    ways = {"one thread": in_turn, "a thread each": side_by_side}
    rows = []

    def add(name: str, works: Sequence[Work], way: Any, calls: int) -> None:
        times = sorted(taken_us(works, way, devices, rounds, calls))
        median_us = statistics.median(times)
        spread = {"low_us": times[0], "high_us": times[-1]}
        rows.append({"way": name, "gpus": len(devices), "host_us": median_us, **spread})

    for kind, (make, calls) in kinds.items():
        works = [on_stream(device, make) for device in devices]
        for title, way in ways.items():
            add(f"{kind}, {title}", works, way, calls)
    if len(devices) > 1:
        add("moves, one thread", [moves(devices)], in_turn, MOVES)
    return rows


def compare(rows: Sequence[Dict[str, Any]]) -> None:
    """Adds how many times as long each takes as on the fewest GPUs."""
    first: Dict[str, float] = {}
    for row in rows:
        row["times_first"] = row["host_us"] / first.setdefault(row["way"], row["host_us"])


def show(rows: Sequence[Dict[str, Any]]) -> None:
    head = "".join(f"{word:>10}" for word in ("median", "low", "high", "x first"))
    print(f"\n{'host us, one on each GPU':26}{'GPUs':>6}{head}")
    for row in sorted(rows, key=lambda row: row["way"]):
        figures = "".join(f"{row[key]:10.1f}" for key in ("host_us", "low_us", "high_us"))
        print(f"{row['way']:26}{row['gpus']:6}{figures}{row['times_first']:10.2f}", flush=True)


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", default="0,1", help="such as 0,1 or 0,0 or cpu,cpu")
    parser.add_argument("--counts", default="", help="of GPUs, such as 1,8; else 1,2,4,...")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(arguments)
    args.devices = devices_of(args.devices, parser)
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}: it must be at least 1")
    try:
        args.counts = counts_of(args.counts, len(args.devices))
    except ValueError as error:
        parser.error(f"--counts: {error}")
    return args


def main(arguments: Optional[Sequence[str]] = None) -> None:
    args = parse(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    found = {
        "benchmark": "launches",
        "command": shlex.join(["python", "benchmarks/launches.py", *given]),
        "machine": machine_of(args.devices),
        "devices": [d.index if d.type == "cuda" else "cpu" for d in args.devices],
        "rows": [],
    }
    print(json.dumps(found["machine"]), flush=True)
    for count in args.counts:
        found["rows"] += measured(args.devices[:count], args.rounds)
        compare(found["rows"])
        keep(args.json, found)
    show(found["rows"])


if __name__ == "__main__":
    main()
