"""Memory of training steps: what `dp.fits` estimates beside the peak that is then measured, and the
peaks of fastdp beside one GPU, torch's DataParallel and its DistributedDataParallel.

    python benchmarks/memory.py --devices 0,1                    four models
    python benchmarks/memory.py --devices 0,1 --models gpt2:16 --json memory.json
    python benchmarks/memory.py --devices cpu,cpu --models tiny  to try the script itself

Each way runs in a process of its own (DistributedDataParallel in one for each GPU), one after the
other, all models in it: what one leaves behind is no other's. The models and their steps are those
of benchmarks/step.py; batches are per GPU. Peaks are torch's, of allocated and of reserved memory,
since the model was made, and fastdp's since it has made its estimate.

"taken" is what the GPU has less, by the driver's count, at the end of the model's steps than when
the process had its CUDA context there and nothing else: no process group, no model. So every model
has in it what the process keeps for all of them and torch knows nothing of: NCCL's communicators,
fastdp's scratch, the libraries' code. Of torch's cache it has what this model filled: the cache is
emptied before. The driver counts all processes: nothing else may run on these GPUs. MB are 2**20
bytes.

Bars (--check exits with 1 where one does not hold): each estimate is within 10 % of the measured
peak; on the first GPU what fastdp's eager steps have allocated, and have taken, is no more than
DDP's and one set of buckets.

How long it takes, reckoned for two H200: 15 to 30 s for each way to start, a few seconds for each
model: about 3 minutes for all. On the host torch counts nothing: there are estimates, no peaks.
"""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import sys
import time
import traceback
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from markdown import shown_command  # noqa: E402
from measure import keep, machine_of  # noqa: E402
from meeting import meet, meeting_point  # noqa: E402
from memory_bars import DDP, OURS, bars_of, show  # noqa: E402
from models import MODELS, STANDARD, Model  # noqa: E402
from step import chosen_model, devices_of  # noqa: E402

# How long a process may take for one model: the first pays for the imports, and for CUDA.
ANSWER_S = 240.0

Chosen = Sequence[Tuple[str, int]]


class Way:
    """One way of training, in a process that it has for itself."""

    def __init__(self, name: str, devices: Sequence[torch.device], rank: int, where: str) -> None:
        self.name = name
        self.all_devices = list(devices)
        # Of this process.
        self.devices = [devices[rank]] if name == DDP else list(devices)
        if name == "one GPU":
            self.devices = [devices[0]]
        self.home = self.devices[0]
        self.on_gpu = self.home.type == "cuda"
        if self.on_gpu:
            torch.cuda.init()  # torch has no statistics before
            torch.cuda.set_device(self.home)
        # Before the process group, whose communicators are the way's own.
        self._free_at_first = self._free()
        if name == DDP:
            meet(where, self.home, rank, len(devices))

    @property
    def gpus(self) -> List[torch.device]:
        """Of this process, each once."""
        return list(dict.fromkeys(self.devices)) if self.on_gpu else []

    def _free(self) -> Dict[str, int]:
        """By device. Each has its context, if it had none, before the first is looked at."""
        for device in self.gpus:
            torch.cuda.synchronize(device)
        return {str(device): torch.cuda.mem_get_info(device)[0] for device in self.gpus}

    def taken(self) -> Dict[str, int]:
        """By device: what it has less than at first."""
        return {name: self._free_at_first[name] - free for name, free in self._free().items()}

    def wrap(self, module: nn.Module) -> nn.Module:
        import fastdp

        ids = [str(device) for device in self.devices]
        if self.name.startswith("fastdp"):
            return fastdp.DataParallel(module, ids, engine=self.name.split(" ")[1])
        if self.name == DDP:
            return nn.parallel.DistributedDataParallel(module, [self.home] if self.on_gpu else None)
        if self.name == "torch DP" and self.on_gpu:
            return nn.DataParallel(module, [device.index for device in self.devices])
        if self.name == "torch DP":
            import torch_on_host

            return torch_on_host.DataParallel(module, list(range(len(self.devices))))
        return module

    def counted(self, peaks: bool) -> Dict[str, Dict[str, int]]:
        """By device what torch counts; nothing on the host, where nobody does."""
        allocated, reserved = (
            (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
            if peaks
            else (torch.cuda.memory_allocated, torch.cuda.memory_reserved)
        )
        return {
            str(device): {"allocated": allocated(device), "reserved": reserved(device)}
            for device in self.gpus
        }

    def forget(self) -> None:
        gc.collect()
        for device in self.gpus:
            # Under its own device: another one's memory may not be given back.
            with torch.cuda.device(device):
                torch.cuda.empty_cache()
        self.reset()

    def reset(self) -> None:
        for device in self.gpus:
            torch.cuda.reset_peak_memory_stats(device)


def _step(module: nn.Module, model: Model, optimizer: Any, batch: Any, kind: str) -> None:
    optimizer.zero_grad(set_to_none=True)
    with model.precision(kind):
        loss = module(batch).float().mean()
    loss.backward()
    optimizer.step()


def _estimate(fit: Any, began: float) -> Dict[str, Any]:
    return {
        "seconds": round(time.perf_counter() - began, 2),
        "fits": bool(fit),
        "devices": {
            name: {**row._asdict(), "peak_bytes": row.peak_bytes}
            for name, row in fit.devices.items()
        },
    }


def _measured(way: Way, estimate: Dict[str, Any]) -> Dict[str, Any]:
    """The estimate with what was measured since."""
    for name, figures in way.counted(peaks=True).items():
        row = estimate["devices"][name]
        row["measured_bytes"] = figures["allocated"]
        row["ratio"] = row["peak_bytes"] / figures["allocated"]
    return estimate


def train(way: Way, name: str, per_gpu: int, steps: int) -> Dict[str, Any]:
    """One model's row: what was added to each device, with "taken" of all models so far, and for
    fastdp what was estimated before."""
    model = MODELS[name]
    way.forget()
    before = way.counted(peaks=False)
    torch.manual_seed(0)
    base = model.make(way.home)
    replicas = len(way.devices)
    batch = model.batch(per_gpu * (1 if way.name == DDP else replicas), way.home)
    module, optimizer = way.wrap(base), model.fused_optimizer(base)
    kind = way.home.type
    row: Dict[str, Any] = {"way": way.name}
    if way.name == OURS:
        began = time.perf_counter()
        with model.precision(kind):
            fit = module.fits(batch, optimizer=optimizer)
        row["train"] = _estimate(fit, began)
        way.forget()  # it runs some operators, whose memory is no step's
    for _ in range(steps):
        _step(module, model, optimizer, batch, kind)
    taken = way.taken()
    row["added"] = {
        device: {
            **{key: value - before[device][key] for key, value in figures.items()},
            "taken": taken[device],
        }
        for device, figures in way.counted(peaks=True).items()
    }
    if way.name == OURS:
        _measured(way, row["train"])
        row["bucket_bytes"] = sum(bucket["bytes"] for bucket in module.report()["buckets"])
        row["eval"] = _evaluate(way, module, model, batch)
    return row


def _evaluate(way: Way, module: Any, model: Model, batch: Any) -> Dict[str, Any]:
    module.zero_grad(set_to_none=True)
    module.eval()
    with torch.no_grad(), model.precision(way.home.type):
        began = time.perf_counter()
        fit = module.fits(batch, mode="eval")
        estimate = _estimate(fit, began)
        way.reset()
        for _ in range(3):
            module(batch)
    return _measured(way, estimate)


def _process(
    name: str,
    devices: Sequence[torch.device],
    rank: int,
    models: Chosen,
    steps: int,
    where: str,
    pipe: Any,
) -> None:
    try:
        way = Way(name, devices, rank, where)
        for model, per_gpu in models:
            try:
                pipe.send(train(way, model, per_gpu, steps))
            except Exception as error:
                traceback.print_exc()
                if name == DDP:
                    raise  # the others wait for it
                pipe.send({"way": name, "failed": f"{type(error).__name__}: {error}"[:300]})
        if name == DDP:
            torch.distributed.destroy_process_group()
    except BaseException as error:
        pipe.send({"way": name, "failed": f"{type(error).__name__}: {error}"[:300]})


def rows_of(
    name: str, devices: Sequence[torch.device], models: Chosen, steps: int
) -> List[Dict[str, Any]]:
    """One way's row of each model. DDP's processes each know of their own GPU."""
    context, where = mp.get_context("spawn"), meeting_point()
    ranks = len(devices) if name == DDP else 1
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_process,
            args=(name, list(devices), rank, list(models), steps, where, theirs),
            daemon=True,
        )
        process.start()
        theirs.close()  # so that a process that dies is seen as one
        pipes.append(ours)
        processes.append(process)
    rows: List[Dict[str, Any]] = []
    while len(rows) < len(models):
        answers = [_answer(pipe, name) for pipe in pipes]
        failed = [answer for answer in answers if "failed" in answer]
        row = dict(failed[0] if failed else answers[0])
        is_over = row.pop("is_over", False)
        if not failed:
            row["added"] = {k: v for answer in answers for k, v in answer["added"].items()}
        rows.append(row)
        if is_over or (failed and name == DDP):
            # A late answer would pass for the next model's, and DDP's other ranks hang.
            rows += [dict(row) for _ in range(len(models) - len(rows))]
            for process in processes:
                process.kill()
    for process in processes:
        process.join(20)
        if process.is_alive():
            process.kill()
    return rows


def _answer(pipe: Any, name: str) -> Dict[str, Any]:
    """With `is_over` nothing more is to be expected of its process."""
    over = {"way": name, "is_over": True}
    if not pipe.poll(ANSWER_S):
        return {**over, "failed": f"no answer in {ANSWER_S:g} s"}
    try:
        return pipe.recv()
    except EOFError:
        return {**over, "failed": "its process has died"}


def parse(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", default="0,1", help="such as 0,1 or cpu,cpu")
    parser.add_argument("--models", default=",".join(STANDARD), help="name or name:batch per GPU")
    parser.add_argument("--ways", default="", help="separated by , (default: all that can run)")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bar does not hold")
    args = parser.parse_args(arguments)
    if args.steps < 1:
        parser.error(f"--steps is {args.steps}: it must be at least 1")
    args.devices = devices_of(args.devices, parser)
    args.models = [chosen_model(entry, parser) for entry in args.models.split(",")]
    ways = ["one GPU", "torch DP", OURS, DDP]
    if args.devices[0].type == "cuda":
        ways.insert(3, "fastdp graph")
    if args.devices[0].type == "cuda" and len(set(args.devices)) < len(args.devices):
        ways.remove(DDP)  # it wants a GPU for each process
    args.ways = args.ways.split(",") if args.ways else ways
    unknown = set(args.ways) - set(ways)
    if unknown:
        parser.error(f"--ways: {sorted(unknown)[0]!r} is not one of {', '.join(ways)}")
    return args


def main(arguments: Optional[Sequence[str]] = None) -> int:
    args = parse(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    found: Dict[str, Any] = {
        "benchmark": "memory",
        "command": shown_command(shlex.join(["python", "benchmarks/memory.py", *given])),
        "machine": machine_of(args.devices),
        "devices": [d.index if d.type == "cuda" else "cpu" for d in args.devices],
        "models": [f"{name}:{per_gpu}" for name, per_gpu in args.models],
        "ways": args.ways,
    }
    began = time.strftime("%Y-%m-%d %H:%M:%S")
    by_way = [rows_of(way, args.devices, args.models, args.steps) for way in args.ways]
    tables = []
    first = str(args.devices[0])
    for k, (name, per_gpu) in enumerate(args.models):
        rows = [rows[k] for rows in by_way]
        bars = bars_of(rows, first)
        title = f"{name}, {per_gpu} per GPU, devices {', '.join(map(str, args.devices))}"
        show(title, rows, bars)
        head = {"title": title, "model": name, "per_gpu": per_gpu, "began": began}
        tables.append({**head, "rows": rows, "bars": bars})
    keep(args.json, {**found, "tables": tables})
    fails = [bar["bar"] for table in tables for bar in table["bars"] if not bar["holds"]]
    fails += [row["failed"] for table in tables for row in table["rows"] if "failed" in row]
    if fails and args.check:
        print(f"{len(fails)} do not hold or did not run", file=sys.stderr)
    return int(bool(fails) and args.check)


if __name__ == "__main__":
    sys.exit(main())
