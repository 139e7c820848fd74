"""Each verb of fastdp.comm, and buckets of 161 tensors, beside torch's own ways and a bare copy.

    python benchmarks/comm.py --devices 0,1                      two GPUs
    python benchmarks/comm.py --devices 0,1,2,3,4,5,6,7 --sizes 64M
    python benchmarks/comm.py --devices 0,0 --sizes 1M,64M       two replicas on one GPU
    FASTDP_TRANSPORT=host python benchmarks/comm.py              by another transport
    python benchmarks/comm.py --devices cpu,cpu --sizes 4K       to try the script itself

Every way moves the same bytes into memory that is there already (but for sums, whose results are
new in every way), in turn, round after round. Device time is between two events on the first GPU,
for some calls that were enqueued while all streams were held up: no host time is in it. Host time
is what enqueuing took meanwhile. "bare copy" copies what has to move, and nothing else: from GPU to
GPU, or within the one; with several others all through home's one link, which fastdp and NCCL do
not, so they may be faster. GB/s counts those bytes; "of bare" is the bare copy's time over the
way's. On the host a call is over when it returns: both times are the wall's.

The last verbs move the 161 parameters of a ResNet-50 (width 64: 102 MB; 32: 28 MB) as one bucket,
as a forward and a backward do. The kernels alone: benchmarks/kernels.c.

All of it takes about a minute on two GPUs. --json is written after each verb and size.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import torch
from torch.nn.parallel import comm as torch_comm

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from bars import at_least  # noqa: E402
from clocks import Clock, HostClock, Timing  # noqa: E402
from measure import keep, machine_of, reason_of  # noqa: E402

from fastdp import _C, comm  # noqa: E402

OURS, BARE, TORCH, NCCL = "fastdp", "bare copy", "torch.cuda.comm", "torch.cuda.nccl"
SIZES = "4K,16K,64K,256K,512K,1M,2M,4M,8M,16M,64M,256M"
MIB = 2**20
MAX_CALLS = 20  # enqueued together
TIMED_MS = 20.0  # as many calls as fill this, and no more


class Job(NamedTuple):
    """One verb on one size: name of the way -> call. `moved_bytes` is what must move."""

    verb: str
    size_bytes: int
    moved_bytes: int
    ways: Dict[str, Callable[[], Any]]


def race(job: Job, clock: Any, rounds: int) -> List[Dict[str, Any]]:
    """Each way once a round. One row per way; one that fails says so."""
    timings: Dict[str, List[Timing]] = {}
    plans, failed = {}, {}
    for way, call in job.ways.items():
        try:
            for _ in range(3):
                call()
            first = clock.time(call, 2, 1.0)
            calls = max(2, min(MAX_CALLS, round(TIMED_MS * 1e3 / max(first.device_us, 1.0))))
            plans[way] = calls, 2e-3 * calls * first.host_us + 0.3
            timings[way] = []
        except (RuntimeError, ValueError, NotImplementedError, MemoryError) as error:
            failed[way] = reason_of(error, 0)
    for _ in range(rounds):
        for way, (calls, held_ms) in plans.items():
            timings[way].append(clock.time(job.ways[way], calls, held_ms))
    rows = [_row(job, way, timings[way]) for way in plans]
    bare_us = next((row["device_us"] for row in rows if row["way"] == BARE), None)
    for row in rows:
        row["of_bare"] = None if bare_us is None else bare_us / row["device_us"]
    return rows + [_head(job, way) | {"failed": reason} for way, reason in failed.items()]


def _head(job: Job, way: str) -> Dict[str, Any]:
    return {"verb": job.verb, "size_bytes": job.size_bytes, "way": way}


def _row(job: Job, way: str, timings: Sequence[Timing]) -> Dict[str, Any]:
    device = sorted(timing.device_us for timing in timings)
    last = len(device) - 1
    median_us = statistics.median(device)
    return _head(job, way) | {
        "device_us": median_us,
        "low_us": device[round(last * 0.1)],
        "high_us": device[round(last * 0.9)],
        "host_us": statistics.median(timing.host_us for timing in timings),
        "gb_per_s": job.moved_bytes / median_us / 1e3,
    }


# The jobs. `devices[0]` is home.

Devices = Sequence[torch.device]


def _new(size_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.ones(size_bytes // 4, device=device)


def _copies(pairs: Sequence[Any]) -> Callable[[], None]:
    def call() -> None:
        for target, source in pairs:
            target.copy_(source, non_blocking=True)

    return call


def _are_gpus(devices: Devices) -> bool:
    return devices[0].type == "cuda"


def _are_distinct(devices: Devices) -> bool:
    return _are_gpus(devices) and len(set(devices)) == len(devices)


def broadcast(size_bytes: int, devices: Devices) -> Job:
    source = _new(size_bytes, devices[0])
    out = [_new(size_bytes, device) for device in devices[1:]]
    ways = {
        BARE: _copies([(target, source) for target in out]),
        OURS: lambda: comm.broadcast(source, out=out),
    }
    if _are_gpus(devices):
        ways[TORCH] = lambda: torch_comm.broadcast(source, out=out)
    if _are_distinct(devices):
        ways[NCCL] = lambda: torch.cuda.nccl.broadcast([source, *out])
    return Job("broadcast", size_bytes, size_bytes * len(out), ways)


def reduce_add(size_bytes: int, devices: Devices) -> Job:
    inputs = [_new(size_bytes, device) for device in devices]
    landing = [_new(size_bytes, devices[0]) for _ in devices[1:]]
    home = devices[0]
    ways = {
        BARE: _copies(list(zip(landing, inputs[1:]))),
        OURS: lambda: comm.reduce_add(inputs, home),
    }
    if _are_gpus(devices):
        ways[TORCH] = lambda: torch_comm.reduce_add(inputs, home.index)
    if _are_distinct(devices):
        ways[NCCL] = lambda: torch.cuda.nccl.reduce(inputs, torch.empty_like(inputs[0]), 0)
    return Job("reduce_add", size_bytes, size_bytes * len(landing), ways)


def scatter(size_bytes: int, devices: Devices) -> Job:
    """Every piece is written, that of the first GPU too."""
    whole = _new(size_bytes, devices[0])
    pieces = list(whole.chunk(len(devices)))
    out = [torch.empty_like(piece, device=d) for piece, d in zip(pieces, devices)]
    ways = {
        BARE: _copies(list(zip(out, pieces))),
        OURS: lambda: comm.scatter(whole, out=out),
    }
    if _are_gpus(devices):
        ways[TORCH] = lambda: torch_comm.scatter(whole, out=out)
    return Job("scatter", size_bytes, size_bytes, ways)


def gather(size_bytes: int, devices: Devices) -> Job:
    out = _new(size_bytes, devices[0])
    pieces = list(out.chunk(len(devices)))
    tensors = [torch.empty_like(piece, device=d) for piece, d in zip(pieces, devices)]
    ways = {
        BARE: _copies(list(zip(pieces, tensors))),
        OURS: lambda: comm.gather(tensors, out=out),
    }
    if _are_gpus(devices):
        ways[TORCH] = lambda: torch_comm.gather(tensors, out=out)
    return Job("gather", size_bytes, size_bytes, ways)


def resnet50_shapes(width: int) -> List[Sequence[int]]:
    """Those of the 161 parameters of torchvision's resnet50, whose width is 64."""
    shapes: List[Sequence[int]] = [(width, 3, 7, 7), (width,), (width,)]
    inputs = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner, outputs = width << stage, 4 * (width << stage)
        for block in range(blocks):
            for shape in ((inner, inputs, 1, 1), (inner, inner, 3, 3), (outputs, inner, 1, 1)):
                shapes += [shape, shape[:1], shape[:1]]
            if block == 0:
                shapes += [(outputs, inputs, 1, 1), (outputs,), (outputs,)]
            inputs = outputs
    return [*shapes, (1000, inputs), (1000,)]


def _parameters(width: int, device: torch.device) -> List[torch.Tensor]:
    return [torch.ones(shape, device=device) for shape in resnet50_shapes(width)]


def bucket_broadcast(width: int, devices: Devices) -> Job:
    """Packs a bucket and moves it: a replica's tensors are views of where it arrives."""
    tensors = tuple(_parameters(width, devices[0]))
    bucket = _C.Bucket(tensors)
    size_bytes = bucket.size_bytes
    flats = tuple(_new(size_bytes, device) for device in devices[1:])
    source = _new(size_bytes, devices[0])
    ids = [device.index for device in devices]
    ways = {
        BARE: _copies([(flat, source) for flat in flats]),
        OURS: lambda: bucket.broadcast(tensors, flats),
    }
    if _are_distinct(devices):
        ways[TORCH] = lambda: torch_comm.broadcast_coalesced(tensors, ids)
    moved_bytes = size_bytes * len(flats)
    return Job(f"bucket broadcast, {len(tensors)} tensors", size_bytes, moved_bytes, ways)


def bucket_reduce(width: int, devices: Devices) -> Job:
    """Moves the gradients of all ranks and sums them into one bucket."""
    rows = tuple(tuple(_parameters(width, device)) for device in devices)
    bucket = _C.Bucket(rows[0])
    size_bytes = bucket.size_bytes
    flat = _new(size_bytes, devices[0])
    others = [_new(size_bytes, device) for device in devices[1:]]
    landing = [_new(size_bytes, devices[0]) for _ in others]
    home = devices[0].index
    ways = {
        BARE: _copies(list(zip(landing, others))),
        OURS: lambda: bucket.reduce(rows, flat),
    }
    if _are_gpus(devices):
        ways[TORCH] = lambda: torch_comm.reduce_add_coalesced(rows, home)
    moved_bytes = size_bytes * len(others)
    return Job(f"bucket reduce, {len(rows[0])} tensors", size_bytes, moved_bytes, ways)


VERBS = {each.__name__: each for each in (broadcast, reduce_add, scatter, gather)}
BUCKETS = {each.__name__: each for each in (bucket_broadcast, bucket_reduce)}
WIDTHS = (32, 64)


# What is promised, of distinct GPUs.


def bars(rows: Sequence[Dict[str, Any]], gpus: int) -> List[Dict[str, Any]]:
    """Of two: at 64 MiB 85 % of the bare copy's rate; from 0.5 to 8 MiB faster than NCCL. Of more:
    a sum of 64 MiB in no more than NCCL's time."""
    found = {(row["verb"], row["size_bytes"], row["way"]): row for row in rows}
    results = []
    for (verb, size_bytes, way), row in found.items():
        if way != OURS or verb not in ("broadcast", "reduce_add") or "failed" in row:
            continue
        title = f"{verb} of {size_text(size_bytes)}"
        if gpus == 2 and size_bytes == 64 * MIB and row["of_bare"] is not None:
            share = f"{title}: share of the bare copy's rate"
            results.append(at_least(share, row["of_bare"], 0.85))
        nccl = found.get((verb, size_bytes, NCCL), {}).get("device_us")
        is_small = gpus == 2 and MIB // 2 <= size_bytes <= 8 * MIB
        is_large_sum = gpus > 2 and verb == "reduce_add" and size_bytes == 64 * MIB
        if nccl is not None and (is_small or is_large_sum):
            times = nccl / row["device_us"]
            results.append(at_least(f"{title}: NCCL's time over fastdp's", times, 1.0))
    return results


# What is printed.


def size_text(size_bytes: int) -> str:
    for unit, name in ((MIB, "MB"), (1024, "KB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.4g} {name}"
    return f"{size_bytes} B"


def show(rows: Sequence[Dict[str, Any]]) -> None:
    print(f"\n{rows[0]['verb']}, {size_text(rows[0]['size_bytes'])}")
    columns = ("device us", "10 %", "90 %", "host us", "GB/s", "of bare")
    print(f"{'':18}" + "".join(f"{column:>11}" for column in columns))
    for row in rows:
        if "failed" in row:
            print(f"{row['way']:18}failed: {row['failed']}")
            continue
        keys = ("device_us", "low_us", "high_us", "host_us", "gb_per_s")
        share = "" if row["of_bare"] is None else f"{100 * row['of_bare']:.0f} %"
        figures = "".join(f"{row[key]:11.1f}" for key in keys)
        print(f"{row['way']:18}{figures}{share:>11}", flush=True)


def parse_size(text: str) -> int:
    units = {"K": 1024, "M": MIB}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1)
    if not number.isdigit() or int(number) * unit % 1024:
        raise ValueError(f"{text!r} is no whole number of KB or MB, such as 4K, 64M")
    return int(number) * unit


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", default="0,1", help="such as 0,1 or 0,0; the first is home")
    parser.add_argument("--verbs", default=",".join([*VERBS, *BUCKETS]))
    parser.add_argument("--sizes", default=SIZES, help=f"of the plain verbs (default {SIZES})")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(arguments)
    names = args.devices.split(",")
    if not all(name == "cpu" or name.isdigit() for name in names):
        parser.error(f"--devices is {args.devices!r}: numbers of GPUs, or cpu,cpu")
    args.devices = [torch.device("cpu" if name == "cpu" else f"cuda:{name}") for name in names]
    args.verbs = args.verbs.split(",")
    for verb in args.verbs:
        if verb not in VERBS and verb not in BUCKETS:
            parser.error(f"--verbs: {verb!r} is not one of {', '.join([*VERBS, *BUCKETS])}")
    try:
        args.sizes = [parse_size(size) for size in args.sizes.split(",")]
    except ValueError as error:
        parser.error(f"--sizes: {error}")
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}: it must be at least 1")
    if len(args.devices) < 2 or len({device.type for device in args.devices}) > 1:
        parser.error("--devices: two or more are needed, all GPUs or all cpu")
    return args


def main(arguments: Optional[Sequence[str]] = None) -> None:
    args = parse(arguments)
    devices = args.devices
    where = machine_of(devices)
    clock: Any = HostClock()
    if _are_gpus(devices):
        torch.cuda.set_device(devices[0])
        clock = Clock(devices)
    numbers = tuple((2, d.index) if d.type == "cuda" else (1, 0) for d in devices)  # by DLPack
    where["transport"], where["since"] = _C.transport(numbers, None)
    print(json.dumps(where))
    rows: List[Dict[str, Any]] = []
    given = sys.argv[1:] if arguments is None else arguments
    wish = os.environ.get("FASTDP_TRANSPORT")
    found = {
        "benchmark": "comm",
        "command": (f"FASTDP_TRANSPORT={wish} " if wish else "")
        + shlex.join(["python", "benchmarks/comm.py", *given]),
        "machine": where,
        "devices": [d.index if d.type == "cuda" else "cpu" for d in devices],
        "rows": rows,
        "bars": [],
    }
    for verb in args.verbs:
        make = VERBS.get(verb) or BUCKETS[verb]
        for size in args.sizes if verb in VERBS else WIDTHS:
            taken = race(make(size, devices), clock, args.rounds)
            if _are_gpus(devices):
                torch.cuda.empty_cache()
            show(taken)
            rows += taken
            found["bars"] = bars(rows, len(devices)) if _are_distinct(devices) else []
            keep(args.json, found)
    print()
    for bar in found["bars"]:
        word = "holds" if bar["holds"] else "FAILS"
        print(f"{word}: {bar['bar']} is {bar['measured']:.2f}, at least {bar['least']:g}")


if __name__ == "__main__":
    main()
