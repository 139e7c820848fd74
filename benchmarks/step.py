"""Whole training steps of real models: fastdp beside one GPU, torch's DataParallel and its
DistributedDataParallel, in turn in one run.

    python benchmarks/step.py --devices 0,1                      four models, whole steps
    python benchmarks/step.py --devices 0,0 --part backward      forward and backward only
    python benchmarks/step.py --devices 0,1 --models resnet50:512,gpt2:32

A step is forward, loss (the mean of the output), backward, and a fused optimizer on the reduced
gradients, with zero_grad(set_to_none=True). Batches are per GPU: on one GPU listed twice, the
replicas share its batch. "one GPU" is the bare module on one GPU's batch: the floor.
DDP runs in processes that this script starts, one per GPU, which take their turns too. Host time is
until the step has returned, before the GPUs are waited for. FASTDP_TRANSPORT=peer|nccl|host forces
how fastdp moves its bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from measure import machine  # noqa: E402
from models import MODELS, Model  # noqa: E402

OURS = "fastdp"


class Block(NamedTuple):
    """One turn of one rival: ms per step, ms of host time per step."""

    step_ms: float
    host_ms: float


class Trainer:
    """Takes steps with one module, wrapped or not."""

    def __init__(self, model: Model, base: nn.Module, wrapped: nn.Module, batch: Any, part: str):
        self._model = model
        self._module = wrapped
        self._batch = batch
        self._optimizer = model.fused_optimizer(base) if part == "step" else None
        self._base = base

    def step(self) -> None:
        if self._optimizer is None:
            self._base.zero_grad(set_to_none=True)
        else:
            self._optimizer.zero_grad(set_to_none=True)
        with self._model.precision():
            loss = self._module(self._batch).float().mean()
        loss.backward()
        if self._optimizer is not None:
            self._optimizer.step()

    def block(self, steps: int, devices: Sequence[int]) -> Block:
        _wait(devices)
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        host = time.perf_counter()
        _wait(devices)
        end = time.perf_counter()
        return Block((end - start) * 1e3 / steps, (host - start) * 1e3 / steps)

    def rest(self) -> None:
        """Leaves no gradients behind for the next rival's memory."""
        self._base.zero_grad(set_to_none=True)


def _wait(devices: Sequence[int]) -> None:
    for device in dict.fromkeys(devices):
        torch.cuda.synchronize(device)


class Local:
    """A rival in this process."""

    def __init__(
        self,
        model: Model,
        devices: Sequence[int],
        per_gpu: int,
        part: str,
        wrap: Callable[[nn.Module], nn.Module],
        gpus: int,
    ) -> None:
        torch.manual_seed(0)
        home = torch.device("cuda", devices[0])
        base = model.make(home)
        batch = model.batch(per_gpu * gpus, home)
        self._devices = devices
        self._trainer = Trainer(model, base, wrap(base), batch, part)
        self.transient_mb: List[float] = []

    def block(self, steps: int) -> Block:
        for device in dict.fromkeys(self._devices):
            torch.cuda.reset_peak_memory_stats(device)
        before = [torch.cuda.memory_allocated(d) for d in dict.fromkeys(self._devices)]
        result = self._trainer.block(steps, self._devices)
        peaks = [torch.cuda.max_memory_allocated(d) for d in dict.fromkeys(self._devices)]
        self.transient_mb = [round((p - b) / 2**20, 1) for p, b in zip(peaks, before)]
        self._trainer.rest()
        return result

    def end(self) -> None:
        del self._trainer


def _ddp_process(
    rank: int, name: str, devices: Sequence[int], per_gpu: int, mode: str, port: int, pipe: Any
) -> None:
    try:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        device = torch.device("cuda", devices[rank])
        torch.cuda.set_device(device)
        torch.distributed.init_process_group("nccl", rank=rank, world_size=len(devices))
        torch.manual_seed(0)
        model = MODELS[name]
        base = model.make(device)
        inner = base
        if mode != "eager":
            inner = torch.compile(base, mode=None if mode == "default" else mode)
        wrapped = nn.parallel.DistributedDataParallel(inner, device_ids=[device.index])
        trainer = Trainer(model, base, wrapped, model.batch(per_gpu, device), "step")
        pipe.send("ready")
        while True:
            steps = pipe.recv()
            if steps == 0:
                break
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            result = trainer.block(steps, [device.index])
            peak = torch.cuda.max_memory_allocated(device)
            pipe.send((result, round((peak - before) / 2**20, 1)))
        torch.distributed.destroy_process_group()
    except BaseException:
        pipe.send(traceback.format_exc())


class Distributed:
    """torch's DistributedDataParallel: a process per GPU. A step takes as long as its slowest."""

    def __init__(self, name: str, devices: Sequence[int], per_gpu: int, mode: str, port: int):
        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(len(devices)):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_ddp_process,
                args=(rank, name, list(devices), per_gpu, mode, port, theirs),
                daemon=True,
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        self.transient_mb: List[float] = []
        for pipe in self._pipes:
            answer = pipe.recv()
            if answer != "ready":
                raise RuntimeError(answer)

    def block(self, steps: int) -> Block:
        for pipe in self._pipes:
            pipe.send(steps)
        answers = [pipe.recv() for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, str):
                raise RuntimeError(answer)
        self.transient_mb = [memory for _, memory in answers]
        return Block(
            max(block.step_ms for block, _ in answers), max(block.host_ms for block, _ in answers)
        )

    def end(self) -> None:
        for pipe, process in zip(self._pipes, self._processes):
            try:
                pipe.send(0)
            except OSError:
                pass
            process.join(20)
            if process.is_alive():
                process.kill()


def rivals_of(name: str, per_gpu: int, args: argparse.Namespace) -> Dict[str, Callable[[], Any]]:
    """Name -> maker, in the order of their turns."""
    import fastdp

    model, devices, n = MODELS[name], args.devices, len(set(args.devices))

    def local(wrap: Callable[[nn.Module], nn.Module], gpus: int) -> Callable[[], Any]:
        return lambda: Local(model, devices, per_gpu, args.part, wrap, gpus)

    makers: Dict[str, Callable[[], Any]] = {
        "one GPU": local(lambda m: m, 1),
        "torch DP": local(lambda m: nn.DataParallel(m, device_ids=devices), n),
    }
    makers[OURS] = local(lambda m: fastdp.DataParallel(m, device_ids=devices), n)
    if args.part == "step" and len(devices) == n > 1:
        for i, mode in enumerate(args.ddp):
            makers["DDP" if mode == "eager" else f"DDP compiled {mode}"] = (
                lambda mode=mode, i=i: Distributed(name, devices, per_gpu, mode, args.port + i)
            )
    return {k: v for k, v in makers.items() if not args.only or k in args.only}


def race(makers: Dict[str, Callable[[], Any]], args: argparse.Namespace) -> List[Dict[str, Any]]:
    """Blocks of steps, rival after rival, round after round."""
    rivals: Dict[str, Any] = {}
    blocks: Dict[str, List[Block]] = {}
    failed: Dict[str, str] = {}
    for name, make in makers.items():
        try:
            rivals[name] = make()
            rivals[name].block(args.warmup)
            blocks[name] = []
        except Exception as error:
            failed[name] = str(error).strip().splitlines()[-1][:200]
            rivals.pop(name, None)
            traceback.print_exc()
    for _ in range(args.rounds):
        for name, rival in rivals.items():
            blocks[name].append(rival.block(args.steps))
    rows = []
    for name, rival in rivals.items():
        steps = sorted(block.step_ms for block in blocks[name])
        rows.append(
            {
                "rival": name,
                "step_ms": statistics.median(steps),
                "low_ms": steps[0],
                "high_ms": steps[-1],
                "host_ms": statistics.median(block.host_ms for block in blocks[name]),
                "transient_mb": rival.transient_mb,
            }
        )
        rival.end()
    rows += [{"rival": name, "failed": reason} for name, reason in failed.items()]
    torch.cuda.empty_cache()
    return rows


def show(title: str, rows: Sequence[Dict[str, Any]]) -> None:
    print(f"\n{title}")
    print(f"{'':28}{'ms/step':>9}{'low':>9}{'high':>9}{'host':>9}{'x ours':>8}  transient MB")
    ours = next((row["step_ms"] for row in rows if row["rival"].startswith(OURS)), None)
    for row in rows:
        if "failed" in row:
            print(f"{row['rival']:28}failed: {row['failed']}")
            continue
        times = "" if ours is None else f"{row['step_ms'] / ours:8.2f}"
        print(
            f"{row['rival']:28}{row['step_ms']:9.3f}{row['low_ms']:9.3f}{row['high_ms']:9.3f}"
            f"{row['host_ms']:9.3f}{times:>8}  {row['transient_mb']}",
            flush=True,
        )


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--devices", default="0,1", help="such as 0,1 or 0,0")
    parser.add_argument("--models", default=",".join(MODELS), help="name or name:batch per GPU")
    parser.add_argument("--part", choices=("step", "backward"), default="step")
    parser.add_argument("--ddp", default="eager", help="eager,default,reduce-overhead or none")
    parser.add_argument("--only", default="", help="rivals by name, separated by commas")
    parser.add_argument("--steps", type=int, default=10, help="steps in one turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--port", type=int, default=29511)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(arguments)
    args.devices = [int(device) for device in args.devices.split(",")]
    args.ddp = [] if args.ddp == "none" else args.ddp.split(",")
    args.only = [t for t in args.only.split(",") if t]
    return args


def chosen(models: str) -> List[Tuple[str, int]]:
    pairs = []
    for entry in models.split(","):
        name, _, batch = entry.partition(":")
        if name not in MODELS:
            raise SystemExit(f"--models: {name!r} is not one of {', '.join(MODELS)}")
        pairs.append((name, int(batch) if batch else MODELS[name].per_gpu))
    return pairs


def main() -> None:
    args = parse()
    warnings.filterwarnings("ignore", message="Was asked to gather along dimension 0")
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; benchmarks/host_cost.py does not")
    where = machine()
    where["gpu"] = torch.cuda.get_device_name(args.devices[0])
    print(json.dumps(where))
    tables = []
    for name, per_gpu in chosen(args.models):
        title = f"{name}, {per_gpu} per GPU, devices {args.devices}, {args.part}"
        rows = race(rivals_of(name, per_gpu, args), args)
        show(title, rows)
        tables.append({"title": title, "rows": rows})
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": where, "tables": tables}, file, indent=1)


if __name__ == "__main__":
    main()
