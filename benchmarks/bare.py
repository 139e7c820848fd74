"""The floor of benchmarks/step.py --floor: a bare copy of the model for each of --devices, with its
share of the batch on its own device, and nothing around them.

There is no wrapper, no scatter, no communication and no sum, and the optimizer steps the first copy
with its gradients alone: it is no way to train. It is what eager steps of so many replicas take of
the host and of the GPUs in one process, whoever wraps them.

Forwards run at once, each on a thread of its own but the first, which is the caller's; or in turn,
all on the caller's: whichever was faster while it warmed up, as threads hand the GIL to and fro.
Backward is one call from the caller's thread for all losses, as a wrapper's is.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import queue
import threading
from typing import Any, Callable, ContextManager, Dict, List

import torch
from models import Model
from rivals import Block, Devices, Memory, MemoryWatch, Trainer, take

AT_ONCE, IN_TURN = "at once", "in turn"
# Of each way, to find the faster one.
TRIES = 3
# A thread that hangs in its forward ends with the process.
END_S = 5.0


class Worker:
    """A thread that runs what it is given, one thing at a time."""

    def __init__(self) -> None:
        self._jobs: Any = queue.SimpleQueue()
        self._results: Any = queue.SimpleQueue()
        arguments = self._jobs, self._results
        self._thread = threading.Thread(target=_serve, args=arguments, daemon=True)
        self._thread.start()

    def start(self, job: Callable[[], Any]) -> None:
        self._jobs.put(job)

    def result(self) -> Any:
        """Of what was started. Its error is raised here."""
        found, error = self._results.get()
        if error is not None:
            raise error
        return found

    def end(self) -> None:
        self._jobs.put(None)
        self._thread.join(END_S)


def _serve(jobs: Any, results: Any) -> None:
    for job in iter(jobs.get, None):
        try:
            results.put((job(), None))
        except BaseException as error:  # whoever waits is told
            results.put((None, error))
        del job  # what it holds must not outlive a rival


class Bare:
    """The rival. `gpus` times the batch of one GPU is the batch of all copies."""

    def __init__(self, model: Model, devices: Devices, per_gpu: int, part: str, gpus: int) -> None:
        self._watch = MemoryWatch(devices)
        # As scatter cuts it: where there are too few rows, into fewer shares.
        shares = model.batch(per_gpu * gpus, devices[0]).chunk(len(devices))
        self._devices = devices[: len(shares)]
        self._trainers: List[Trainer] = []
        for device, share in zip(self._devices, shares):
            torch.manual_seed(0)  # copies are alike
            module, is_first = model.make(device), not self._trainers
            own_part = part if is_first else "backward"
            self._trainers.append(Trainer(model, module, module, share.to(device), own_part))
        self._others = [p for each in self._trainers[1:] for p in each.module.parameters()]
        pairs = zip(self._trainers, self._devices)
        self._forwards = [functools.partial(_forward, *pair) for pair in pairs]
        self._workers = [Worker() for _ in self._forwards[1:]]
        self.way = AT_ONCE

    def step(self) -> None:
        first = self._trainers[0]
        first.clear()
        for parameter in self._others:
            parameter.grad = None
        torch.autograd.backward(self._losses())
        first.update()

    def _losses(self) -> List[torch.Tensor]:
        if self.way == IN_TURN:
            return [forward() for forward in self._forwards]
        for worker, forward in zip(self._workers, self._forwards[1:]):
            worker.start(forward)
        return [self._forwards[0](), *(worker.result() for worker in self._workers)]

    def warm_up(self, steps: int) -> Memory:
        """Each way, and then the faster is kept."""
        taken_ms: Dict[str, List[float]] = {AT_ONCE: [], IN_TURN: []}
        for _ in range(1 + TRIES):
            for way in taken_ms:
                self.way = way
                taken_ms[way].append(take(self.step, steps, self._devices).step_ms)
        self.way = min(taken_ms, key=lambda way: min(taken_ms[way][1:]))
        memory = self._watch.read()
        self._rest()
        return memory

    def block(self, steps: int) -> Block:
        result = take(self.step, steps, self._devices)
        self._rest()
        return result

    def _rest(self) -> None:
        for trainer in self._trainers:
            trainer.rest()

    def facts(self) -> Dict[str, Any]:
        return {"forward": self.way}

    def end(self) -> None:
        for worker in self._workers:
            worker.end()
        del self._trainers, self._forwards, self._others
        gc.collect()


def _forward(trainer: Trainer, device: torch.device) -> torch.Tensor:
    with _current(device):
        return trainer.loss()


def _current(device: torch.device) -> ContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
