"""Whole training steps of real models: fastdp beside one GPU, torch's DataParallel and its
DistributedDataParallel, in turn in one run.

    python benchmarks/step.py --devices 0,1                      four models, whole steps
    python benchmarks/step.py --devices 0,0 --part backward      forward and backward only
    python benchmarks/step.py --devices 0,1 --models resnet50:512,gpt2:32
    python benchmarks/step.py --devices 0,1 --models resnet50-fp16,resnet50-fp32
    python benchmarks/step.py --devices 0,1 --ddp eager,reduce-overhead
    python benchmarks/step.py --devices cpu,cpu --models tiny    to try the script itself

A step is forward, loss (the mean of the output), backward, and a fused optimizer on the reduced
gradients, with zero_grad(set_to_none=True). Batches are per GPU: on one GPU listed twice, the
replicas share its batch. "one GPU" is the bare module on one GPU's batch: the floor. fastdp runs
over each of --transports, and as recorded graphs where it has them. "silent" is fastdp's step with
its communication switched off inside: what the step takes longer is communication not hidden. DDP
runs in processes that this script starts, one per GPU, which take their turns too.

Columns: ms per step, the median of the turns, the fastest and the slowest; host time, until the
step has returned, before the GPUs are waited for; seconds for 1,000 batches of all GPUs; times
fastdp (its first row) and times one GPU; MB that the rival added to the peaks of allocated and of
reserved memory, and took of the GPU's free memory, for each GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import traceback
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from measure import machine  # noqa: E402
from models import MODELS, STANDARD  # noqa: E402
from rivals import (  # noqa: E402
    Block,
    Devices,
    Distributed,
    Local,
    distinct,
    fastdp_wrap,
    has_graphs,
    torch_wrap,
    wire_ms,
)

OURS, ONE, SILENT = "fastdp", "one GPU", ", silent"


class Entry(NamedTuple):
    """`batches`: of those of one GPU, in one step."""

    make: Callable[[], Any]
    batches: int


def entries_of(name: str, per_gpu: int, args: argparse.Namespace) -> Dict[str, Entry]:
    """The rivals by name, in the order of their turns."""
    model, devices, n = MODELS[name], args.devices, args.gpus

    def local(wrap: Any, gpus: int, silent: bool = False) -> Entry:
        return Entry(lambda: Local(model, devices, per_gpu, args.part, wrap, gpus, silent), gpus)

    entries = {
        ONE: local(lambda module: module, 1),
        "torch DP": local(torch_wrap(devices), n),
    }
    for engine in args.engines:
        for transport in args.transports:
            title = f"{OURS} {transport}" if engine == "eager" else f"{OURS} {engine} {transport}"
            wrap = fastdp_wrap(devices, transport, engine)
            entries[title] = local(wrap, n)
            if transport == args.transports[0]:
                entries[title + SILENT] = local(wrap, n, silent=True)
    if args.part == "step" and len(devices) == n > 1:
        for i, mode in enumerate(args.ddp):
            entries["DDP" if mode == "eager" else f"DDP compiled {mode}"] = Entry(
                lambda mode=mode, i=i: Distributed(name, devices, per_gpu, mode, args.port + i), n
            )
    return {k: v for k, v in entries.items() if not args.only or k in args.only}


def race(entries: Dict[str, Entry], args: argparse.Namespace) -> List[Dict[str, Any]]:
    """Blocks of steps, rival after rival, round after round."""
    rivals: Dict[str, Any] = {}
    memories: Dict[str, Any] = {}
    blocks: Dict[str, List[Block]] = {}
    failed: Dict[str, str] = {}

    def fail(name: str, error: Exception) -> None:
        traceback.print_exc()
        failed[name] = str(error).strip().splitlines()[-1][:200]
        rival = rivals.pop(name, None)
        if rival is not None:
            rival.end()

    for name, entry in entries.items():
        try:
            rivals[name] = entry.make()
            memories[name] = rivals[name].warm_up(args.warmup)
            blocks[name] = []
        except Exception as error:
            fail(name, error)
    for _ in range(args.rounds):
        for name, rival in list(rivals.items()):
            try:
                blocks[name].append(rival.block(args.steps))
            except Exception as error:
                fail(name, error)
    rows = [_row(name, entries[name], blocks[name], memories[name], args.gpus) for name in rivals]
    for rival in rivals.values():
        rival.end()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    compare(rows)
    return rows + [{"rival": name, "failed": reason} for name, reason in failed.items()]


def _row(
    name: str, entry: Entry, blocks: Sequence[Block], memory: Any, gpus: int
) -> Dict[str, Any]:
    steps = sorted(block.step_ms for block in blocks)
    median_ms = statistics.median(steps)
    return {
        "rival": name,
        "step_ms": median_ms,
        "low_ms": steps[0],
        "high_ms": steps[-1],
        "host_ms": statistics.median(block.host_ms for block in blocks),
        "s_per_1000_batches": median_ms * gpus / entry.batches,
        **memory._asdict(),
    }


def compare(rows: List[Dict[str, Any]]) -> None:
    """Adds to each row how many times longer every rival takes for the same batches, and to
    fastdp's what of its communication is not hidden."""
    found = {row["rival"]: row for row in rows}
    for row in rows:
        own = row["s_per_1000_batches"]
        row["times_ours"] = {k: v["s_per_1000_batches"] / own for k, v in found.items()}
        silent = found.get(row["rival"] + SILENT)
        if silent is not None:
            row["not_hidden_ms"] = row["step_ms"] - silent["step_ms"]
            row["not_hidden_share"] = row["not_hidden_ms"] / row["step_ms"]


def first_of_ours(rows: Sequence[Dict[str, Any]]) -> Optional[Dict[str, Any]]:
    return next(
        (r for r in rows if r["rival"].startswith(OURS) and "failed" not in r), None
    )


def show(title: str, rows: Sequence[Dict[str, Any]], wire: Optional[Dict[str, float]]) -> None:
    print(f"\n{title}")
    columns = ("ms/step", "low", "high", "host", "s/1,000", "x fastdp", "x one")
    print(f"{'':28}" + "".join(f"{c:>9}" for c in columns) + "  MB allocated, reserved, taken")
    ours = first_of_ours(rows)
    floor = next((r for r in rows if r["rival"] == ONE and "failed" not in r), None)
    for row in rows:
        if "failed" in row:
            print(f"{row['rival']:28}failed: {row['failed']}")
            continue
        keys = ("step_ms", "low_ms", "high_ms", "host_ms", "s_per_1000_batches")
        figures = "".join(f"{row[key]:9.3f}" for key in keys)
        for base in (ours, floor):
            figures += f"{'':9}" if base is None else f"{base['times_ours'][row['rival']]:9.2f}"
        memory = ", ".join(str(row[f"{kind}_mb"]) for kind in ("allocated", "reserved", "taken"))
        print(f"{row['rival']:28}{figures}  {memory}")
    for row in rows:
        if "not_hidden_ms" in row:
            print(
                f"{row['rival']}: communication not hidden {row['not_hidden_ms']:.3f} ms, "
                f"{100 * row['not_hidden_share']:.1f} % of the step"
            )
    if wire is not None:
        print(
            f"bare copies of {wire['parameter_mb']:.1f} MB of parameters there and back: "
            f"{wire['there_and_back_ms']:.3f} ms",
        )
    sys.stdout.flush()


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--devices", default="0,1", help="such as 0,1 or 0,0 or cpu,cpu")
    parser.add_argument("--models", default=",".join(STANDARD), help="name or name:batch per GPU")
    parser.add_argument("--part", choices=("step", "backward"), default="step")
    parser.add_argument("--transports", default="", help="default: all that can join the devices")
    parser.add_argument("--engines", default="", help="eager,graph (default: all there are)")
    parser.add_argument("--ddp", default="eager", help="eager,default,reduce-overhead or none")
    parser.add_argument("--only", default="", help="rivals by name, separated by ;")
    parser.add_argument("--steps", type=int, default=10, help="steps in one turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--port", type=int, default=29511)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(arguments)
    for option in ("steps", "rounds", "warmup"):
        if getattr(args, option) < 1:
            parser.error(f"--{option} is {getattr(args, option)}: it must be at least 1")
    args.devices = [device_of(name, parser) for name in args.devices.split(",")]
    if len({device.type for device in args.devices}) > 1 or len(args.devices) < 2:
        parser.error("--devices: two or more are needed, all GPUs or all cpu")
    on_host = args.devices[0].type == "cpu"
    # Replicas on the host stand for GPUs of their own.
    args.gpus = len(args.devices) if on_host else len(distinct(args.devices))
    args.models = [chosen_model(entry, parser) for entry in args.models.split(",")]
    one_memory = on_host or args.gpus == 1
    args.transports = (args.transports or ("local" if one_memory else "peer,nccl,host")).split(",")
    args.engines = args.engines.split(",") if args.engines else _engines(on_host)
    args.ddp = [] if args.ddp == "none" else args.ddp.split(",")
    args.only = [title for title in args.only.split(";") if title]
    return args


def device_of(name: str, parser: argparse.ArgumentParser) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    if not name.isdigit():
        parser.error(f"--devices: {name!r} is neither the number of a GPU nor cpu")
    return torch.device("cuda", int(name))


def _engines(on_host: bool) -> List[str]:
    return ["eager", "graph"] if not on_host and has_graphs() else ["eager"]


def chosen_model(
    entry: str, parser: argparse.ArgumentParser, option: str = "--models"
) -> Tuple[str, int]:
    name, _, batch = entry.partition(":")
    if name not in MODELS:
        parser.error(f"{option}: {name!r} is not one of {', '.join(MODELS)}")
    if batch and not (batch.isdigit() and int(batch) > 0):
        parser.error(f"{option}: {batch!r} is no batch size; write {name}:{MODELS[name].per_gpu}")
    return name, int(batch) if batch else MODELS[name].per_gpu


def where_it_ran(devices: Devices) -> Dict[str, Any]:
    where = machine()
    if devices[0].type == "cuda":
        where["gpu"] = torch.cuda.get_device_name(devices[0])
        where["cuda"] = torch.version.cuda
    return where


def main(arguments: Optional[Sequence[str]] = None) -> None:
    args = parse(arguments)
    warnings.filterwarnings("ignore", message="Was asked to gather along dimension 0")
    if args.devices[0].type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; --devices cpu,cpu --models tiny tries the script")
    where = where_it_ran(args.devices)
    print(json.dumps(where))
    tables = []
    for name, per_gpu in args.models:
        shown = [d.index if d.type == "cuda" else "cpu" for d in args.devices]
        title = f"{name}, {per_gpu} per GPU, devices {shown}, {args.part}"
        rows = race(entries_of(name, per_gpu, args), args)
        wire = wire_ms(MODELS[name], args.devices)
        show(title, rows, wire)
        tables.append({"title": title, "rows": rows, "wire": wire})
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": where, "tables": tables}, file, indent=1)


if __name__ == "__main__":
    main()
