"""The rivals of benchmarks/step.py: each takes a turn of some training steps when told to, on GPUs
or, to try the benchmark itself, on the host.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
import traceback
from multiprocessing import connection
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.multiprocessing as mp
from meeting import meet, meeting_point
from models import MODELS, Model
from torch import nn

# How long the processes of DDP may take to answer: compiling is slow.
ANSWER_S = 400.0
# Each compiling process would start a worker for every core.
COMPILE_WORKERS = "4"

# As an engine of fastdp: recorded steps of compiled replicas.
COMPILED = "compiled"

Devices = Sequence[torch.device]


class Block(NamedTuple):
    """One turn of one rival: ms per step, ms of host time per step."""

    step_ms: float
    host_ms: float


class Memory(NamedTuple):
    """What a rival added to the peaks of torch's allocator, and took of the devices' free memory
    (scratch and communicators outside the allocator too), in MB, one figure for each device."""

    allocated_mb: List[float]
    reserved_mb: List[float]
    taken_mb: List[float]


class NoAnswer(RuntimeError):
    """A process has not answered in its time."""


def distinct(devices: Devices) -> List[torch.device]:
    return list(dict.fromkeys(devices))


def wait(devices: Devices) -> None:
    for device in distinct(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def take(step: Callable[[], None], steps: int, devices: Devices) -> Block:
    """So many steps on devices that are idle before and afterwards."""
    wait(devices)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    host = time.perf_counter()
    wait(devices)
    end = time.perf_counter()
    return Block((end - start) * 1e3 / steps, (host - start) * 1e3 / steps)


class MemoryWatch:
    """Peaks of some devices from now on. The host has none that torch would count."""

    def __init__(self, devices: Devices) -> None:
        self._devices = [device for device in distinct(devices) if device.type == "cuda"]
        if self._devices:
            torch.cuda.init()  # torch has no statistics before
        for device in self._devices:
            # Under its own device: another one's memory may not be given back.
            with torch.cuda.device(device):
                torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        self._before = [self._now(device, peaks=False) for device in self._devices]

    @staticmethod
    def _now(device: torch.device, peaks: bool) -> Tuple[int, int, int]:
        allocated = torch.cuda.max_memory_allocated if peaks else torch.cuda.memory_allocated
        reserved = torch.cuda.max_memory_reserved if peaks else torch.cuda.memory_reserved
        free, total = torch.cuda.mem_get_info(device)
        return allocated(device), reserved(device), total - free

    def read(self) -> Memory:
        figures: List[List[float]] = [[], [], []]
        for device, before in zip(self._devices, self._before):
            for figure, old, new in zip(figures, before, self._now(device, peaks=True)):
                figure.append(round((new - old) / 2**20, 1))
        return Memory(*figures)


class Trainer:
    """Takes steps with one module, wrapped or not. `part` "backward" leaves the optimizer out."""

    def __init__(self, model: Model, base: nn.Module, wrapped: nn.Module, batch: Any, part: str):
        self._model = model
        self.module = wrapped
        self.batch = batch
        self._optimizer = model.fused_optimizer(base) if part == "step" else None
        self._kind = next(base.parameters()).device.type
        self._scaler = torch.amp.GradScaler(self._kind) if model.scales else None
        self._base = base

    def step(self) -> None:
        self.clear()
        self.loss().backward()
        self.update()

    def clear(self) -> None:
        if self._optimizer is None:
            self._base.zero_grad(set_to_none=True)
        else:
            self._optimizer.zero_grad(set_to_none=True)

    def loss(self) -> torch.Tensor:
        with self._model.precision(self._kind):
            loss = self.module(self.batch).float().mean()
        return loss if self._scaler is None else self._scaler.scale(loss)

    def update(self) -> None:
        if self._optimizer is None:
            return
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()

    def block(self, steps: int, devices: Devices) -> Block:
        return take(self.step, steps, devices)

    def rest(self) -> None:
        """Leaves no gradients behind for the next rival's memory."""
        self._base.zero_grad(set_to_none=True)


class Local:
    """A rival in this process. `gpus` times the batch of one GPU is its batch."""

    def __init__(
        self,
        model: Model,
        devices: Devices,
        per_gpu: int,
        part: str,
        wrap: Callable[[nn.Module], nn.Module],
        gpus: int,
        silent: bool = False,
    ) -> None:
        self._watch = MemoryWatch(devices)
        torch.manual_seed(0)
        base = model.make(devices[0])
        batch = model.batch(per_gpu * gpus, devices[0])
        self._devices = devices
        self._is_silent = silent
        self._trainer = Trainer(model, base, wrap(base), batch, part)

    def warm_up(self, steps: int) -> Memory:
        before = {id(bucket) for bucket in _buckets()}
        self._trainer.block(steps, self._devices)
        if self._is_silent:
            for bucket in _buckets():
                if id(bucket) not in before:
                    bucket.core = _Silent(bucket.core)
            self._trainer.block(2, self._devices)
        memory = self._watch.read()
        self._trainer.rest()
        return memory

    def block(self, steps: int) -> Block:
        result = self._trainer.block(steps, self._devices)
        self._trainer.rest()
        return result

    def facts(self) -> Dict[str, Any]:
        """Of fastdp: what ran, how it travelled, and why."""
        report = getattr(self._trainer.module, "report", None)
        if report is None:
            return {}
        found = report()
        return {key: found[key] for key in ("transport", "hidden", "forwards", "reasons")}

    def end(self) -> None:
        del self._trainer
        gc.collect()


def _buckets() -> List[Any]:
    from fastdp.buckets import Bucket

    return [each for each in gc.get_objects() if type(each) is Bucket]


class _Silent:
    """A bucket's core that moves nothing: replicas and sums are what their memory held before, of
    an earlier step as a rule. All else of the step is as it was."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def broadcast(self, sources: Any, flats: Any) -> None:
        pass

    def reduce(self, gradients: Any, flat: Any) -> None:
        pass


def fastdp_wrap(devices: Devices, transport: str, engine: str) -> Callable[[nn.Module], nn.Module]:
    import fastdp

    options: Dict[str, Any] = {} if engine == "eager" else {"engine": engine}
    if engine == COMPILED:
        options = {"engine": "graph", "compile": True}
    ids = [str(device) for device in devices]
    return lambda module: fastdp.DataParallel(module, ids, transport=transport, **options)


def torch_wrap(devices: Devices) -> Callable[[nn.Module], nn.Module]:
    if devices[0].type == "cuda":
        return lambda module: nn.DataParallel(module, [device.index for device in devices])
    import torch_on_host

    return lambda module: torch_on_host.DataParallel(module, list(range(len(devices))))


# DDP, a process per GPU.


def _ddp_process(
    rank: int, name: str, devices: Devices, per_gpu: int, mode: str, where: str, pipe: Any
) -> None:
    try:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", COMPILE_WORKERS)
        device = devices[rank]
        is_gpu = device.type == "cuda"
        if is_gpu:
            torch.cuda.set_device(device)
        meet(where, device, rank, len(devices))
        watch = MemoryWatch([device])
        torch.manual_seed(0)
        model = MODELS[name]
        base = model.make(device)
        inner = base
        if mode != "eager":
            inner = torch.compile(base, mode=None if mode == "default" else mode)
        wrapped = nn.parallel.DistributedDataParallel(inner, [device.index] if is_gpu else None)
        trainer = Trainer(model, base, wrapped, model.batch(per_gpu, device), "step")
        while True:  # until it is killed, or whom it serves is no more
            pipe.send((trainer.block(pipe.recv(), [device]), watch.read()))
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send(traceback.format_exc())


class Distributed:
    """torch's DistributedDataParallel: a process per GPU. A step takes as long as its slowest."""

    def __init__(self, name: str, devices: Devices, per_gpu: int, mode: str):
        context, where = mp.get_context("spawn"), meeting_point()
        self._pipes: List[Any] = []
        self._processes: List[Any] = []
        self._is_warming = False
        for rank in range(len(devices)):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_ddp_process,
                args=(rank, name, list(devices), per_gpu, mode, where, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()  # so that a process that dies is seen as one
            self._pipes.append(ours)
            self._processes.append(process)

    def _named(self, ranks: List[int]) -> str:
        """Of whom an error speaks."""
        return f"DDP's rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

    def _answers(self, answer_s: float) -> List[Any]:
        """Of all processes, in the order of their ranks. The first error ends the wait: the others
        may hang in a collective without the one that has failed."""
        answers: Dict[int, Any] = {}
        ends_at = time.monotonic() + answer_s
        while len(answers) < len(self._pipes):
            missing = [rank for rank in range(len(self._pipes)) if rank not in answers]
            waited_s = max(0.0, ends_at - time.monotonic())
            ready = connection.wait([self._pipes[rank] for rank in missing], waited_s)
            if not ready:
                who = self._named(missing)
                raise NoAnswer(f"{who} did not answer in {answer_s:.0f} s")
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    raise RuntimeError(f"{self._named([rank])} has died") from None
                if isinstance(answers[rank], str):
                    raise RuntimeError(f"{self._named([rank])}: {answers[rank]}")
        return [answers[rank] for rank in range(len(self._pipes))]

    def _ask(self, steps: int) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # what a dead one said last is read with its answer
                pipe.send(steps)

    def _turn(self, answer_s: float) -> Tuple[Block, Memory]:
        answers = self._answers(answer_s)
        block = Block(*(max(times) for times in zip(*(block for block, _ in answers))))
        memory = Memory(*(sum(sizes, []) for sizes in zip(*(memory for _, memory in answers))))
        return block, memory

    def begin(self, steps: int) -> None:
        """Warms up meanwhile; `warm_up` then waits for it."""
        self._ask(steps)
        self._is_warming = True

    def warm_up(self, steps: int, answer_s: float = ANSWER_S) -> Memory:
        if not self._is_warming:
            self.begin(steps)
        self._is_warming = False
        return self._turn(answer_s)[1]

    def block(self, steps: int) -> Block:
        self._ask(steps)
        return self._turn(ANSWER_S)[0]

    def facts(self) -> Dict[str, Any]:
        return {}

    def end(self) -> None:
        """Kills them: an orderly end takes seconds, beside which other rivals would run."""
        for pipe, process in zip(self._pipes, self._processes):
            process.kill()
            pipe.close()


def wire_ms(model: Model, devices: Devices) -> Optional[Dict[str, float]]:
    """The bytes of all parameters there and back once, by bare copies between two devices."""
    if devices[0].type != "cuda" or len(distinct(devices)) < 2:
        return None
    size_bytes = sum(p.numel() * p.element_size() for p in model.make(devices[0]).parameters())
    there = torch.empty(size_bytes, dtype=torch.uint8, device=distinct(devices)[1])
    here = torch.empty_like(there, device=devices[0])
    times = []
    for _ in range(6):
        wait(devices)
        start = time.perf_counter()
        there.copy_(here, non_blocking=True)
        here.copy_(there, non_blocking=True)
        wait(devices)
        times.append((time.perf_counter() - start) * 1e3)
    return {"parameter_mb": size_bytes / 2**20, "there_and_back_ms": min(times)}
