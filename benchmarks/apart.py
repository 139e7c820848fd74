"""Rivals of benchmarks/compiled.py, each in a process of its own: so all of them compile side by
side, which takes most of a run, and one that fails takes nothing along. Turns they take as any
others do: one at a time.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from typing import Any, Callable, Dict, List, NamedTuple

import torch
import torch.multiprocessing as mp
from models import MODELS
from rivals import ANSWER_S, Block, Devices, Distributed, Local
from torch import nn

INDUCTOR = "inductor"
# Ways: modes of torch.compile, for the bare module, and fastdp's.
DEFAULT, LEAN = BARE = ("default", "reduce-overhead")
OURS, WHOLE = "fastdp", "fastdp whole"


class Spec(NamedTuple):
    """What a rival is. `gpus`: as many batches of one GPU are its batch. `devices`: of fastdp's
    replicas, or first the one of the bare module."""

    way: str
    model: str
    per_gpu: int
    devices: Devices
    gpus: int
    backend: str


def compiled_wrap(devices: Devices, backend: str) -> Callable[[nn.Module], nn.Module]:
    import fastdp

    ids = [str(device) for device in devices]
    engine = "eager" if devices[0].type == "cpu" else "auto"
    options = {"engine": engine, "compile": {"backend": backend}}
    return lambda module: fastdp.DataParallel(module, ids, **options)


def bare_wrap(mode: str, backend: str) -> Callable[[nn.Module], nn.Module]:
    named = {"mode": mode} if backend == INDUCTOR else {}  # others have no modes
    return lambda module: torch.compile(module, backend=backend, **named)


class Compiled(Local):
    def facts(self) -> Dict[str, Any]:
        found = super().facts()
        if found:
            found["compiled"] = self._trainer.module.report()["compiled"]
        return found


def _made(spec: Spec) -> Compiled:
    if spec.way == WHOLE:
        from fastdp import compile_graphs

        compile_graphs.MAX_PIECES = 1
    if spec.way in BARE:
        wrap = bare_wrap(spec.way, spec.backend)
    else:
        from fastdp import engine_entries

        engine_entries.AGAIN_AFTER = sys.maxsize  # no second trial among the turns
        wrap = compiled_wrap(spec.devices, spec.backend)
    model = MODELS[spec.model]
    return Compiled(model, spec.devices, spec.per_gpu, "step", wrap, spec.gpus)


def _serve(spec: Spec, pipe: Any) -> None:
    """Steps that are asked for; with None, the facts. First it warms up, twice: while others
    compile, too, and by itself."""
    try:
        began = time.monotonic()
        rival = _made(spec)
        rest = Block(0.0, 0.0)
        pipe.send((rest, rival.warm_up(pipe.recv())))
        took = {"warm_up_s": round(time.monotonic() - began, 1)}
        memory = rival.warm_up(pipe.recv())
        pipe.send((rest, memory))
        while True:  # until it is killed, or whom it serves is no more
            asked = pipe.recv()
            if asked is None:
                pipe.send({**rival.facts(), **took})
            else:
                pipe.send((rival.block(asked), memory))
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send(traceback.format_exc())


class Apart(Distributed):
    """One process that has a rival, and is asked as those of DDP are."""

    def __init__(self, spec: Spec) -> None:
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(spec, theirs), daemon=True)
        process.start()
        theirs.close()  # so that a process that dies is seen as one
        self._pipes, self._processes = [ours], [process]
        self._is_warming = False

    def _named(self, ranks: List[int]) -> str:
        return "its process"

    def facts(self) -> Dict[str, Any]:
        self._pipes[0].send(None)
        return self._answers(ANSWER_S)[0]


def share_cores(processes: int) -> None:
    """Each process that compiles starts workers: a few, since all do at once."""
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, cores // max(processes, 1))))
