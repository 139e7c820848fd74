"""Compiled replicas: how long they take to compile, whether they learn the same, and how fast they
are beside compiled rivals.

    python benchmarks/compiled.py --devices 0,1                       all three parts, four models
    python benchmarks/compiled.py --devices 0,1 --part steps --models mlp,resnet18
    python benchmarks/compiled.py --devices 0,1 --part time --models gpt2
    python benchmarks/compiled.py --devices 0,1 --part losses --models mlp
    python benchmarks/compiled.py --devices cpu,cpu --models tiny     to try the script itself

time: seconds that the first three steps take, in processes of their own with empty caches: one
replica, and all, with the compiler's part of it as `dp.report()` has it.
losses: 50 steps on one batch, without dropout. How far losses of a plain compiled module are from a
plain one's is the bound; how far those of fastdp compiled are from fastdp's own is what is to be
within twice that, since rounding differs both ways.
steps: the bare module on one GPU, compiled by default and with reduce-overhead; fastdp with
compile=True and engine="auto" on the first GPU and on all, also with graphs that are not cut into
pieces; and DDP, compiled in both ways. Steps and columns are those of benchmarks/step.py.

How long it takes, reckoned for two H200: time, 2 to 4 minutes a model (half of it for ResNet-50 and
GPT-2); losses 1 to 2 minutes a model; steps 2 to 3 minutes a model. --json is written after each.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from contest import Bounds, Contest, Entry, say, show  # noqa: E402
from measure import keep, machine_of  # noqa: E402
from models import MODELS, STANDARD  # noqa: E402
from rivals import ANSWER_S, Devices, Distributed, Local, distinct  # noqa: E402
from step import chosen_model, device_of  # noqa: E402

PARTS = ("time", "losses", "steps")
TIMED_STEPS = 3
LOSSES = 50
# A recording comes after the watched steps, and the trial after it.
WARM_UP = 30


def compiled_wrap(devices: Devices) -> Callable[[nn.Module], nn.Module]:
    import fastdp

    ids = [str(device) for device in devices]
    engine = "eager" if devices[0].type == "cpu" else "auto"
    return lambda module: fastdp.DataParallel(module, ids, engine=engine, compile=True)


class Ours(Local):
    def facts(self) -> Dict[str, Any]:
        report = self._trainer.module.report()
        return {**super().facts(), "compiled": report["compiled"]}


class Whole(Ours):
    """Compiled without cuts. The number of pieces is read while it compiles, in its warm-up."""

    def warm_up(self, steps: int) -> Any:
        from fastdp import compile_graphs

        before, compile_graphs.MAX_PIECES = compile_graphs.MAX_PIECES, 1
        try:
            return super().warm_up(steps)
        finally:
            compile_graphs.MAX_PIECES = before


def entries_of(name: str, per_gpu: int, args: argparse.Namespace) -> Dict[str, Entry]:
    model, devices = MODELS[name], args.devices
    n = len(devices) if devices[0].type == "cpu" else len(distinct(devices))

    def local(wrap: Any, gpus: int, kind: str, cls: Any = Local) -> Entry:
        return Entry(
            lambda: cls(model, devices, per_gpu, "step", wrap, gpus), gpus, WARM_UP, {"kind": kind}
        )

    def plain(mode: Optional[str]) -> Callable[[nn.Module], nn.Module]:
        return lambda module: torch.compile(module, mode=mode)

    entries = {
        "one GPU, compiled": local(plain(None), 1, "one GPU compiled"),
        "one GPU, reduce-overhead": local(plain("reduce-overhead"), 1, "one GPU compiled"),
        "fastdp compiled, one": local(compiled_wrap(devices[:1]), 1, "fastdp compiled", Ours),
        "fastdp compiled": local(compiled_wrap(devices), n, "fastdp compiled", Ours),
        "fastdp compiled, whole": local(compiled_wrap(devices), n, "fastdp compiled", Whole),
    }
    for k, mode in enumerate(("default", "reduce-overhead")):
        if len(devices) == n > 1 and devices[0].type == "cuda":
            port = args.port + k
            args.port += 2
            entries[f"DDP, {mode}"] = Entry(
                lambda mode=mode, port=port: Distributed(name, devices, per_gpu, mode, port),
                n, WARM_UP, {"kind": "DDP compiled"}, is_apart=True,
            )  # fmt: skip
    return {k: v for k, v in entries.items() if not args.only or k in args.only}


def take_steps(name: str, per_gpu: int, args: argparse.Namespace) -> Dict[str, Any]:
    bounds = Bounds(args.rounds, 40, args.seconds, args.limit, ANSWER_S)
    entries = entries_of(name, per_gpu, args)
    contest = Contest(f"{name}:{per_gpu}", entries, bounds, len(distinct(args.devices)))
    contest.send_off()
    contest.warm_up()
    contest.take_turns()
    contest.end()
    rows = contest.rows()
    show(f"{name}, {per_gpu} per GPU", rows, None)
    return {"rows": rows}


def take_time(name: str, per_gpu: int, args: argparse.Namespace) -> Dict[str, Any]:
    """Each way in a process of its own, with caches of its own."""
    found: Dict[str, Any] = {}
    for count in dict.fromkeys((1, len(args.devices))):
        devices = ",".join(args.names[:count])
        with tempfile.TemporaryDirectory() as folder:
            env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
            env.pop("TRITON_CACHE_DIR", None)
            command = [sys.executable, __file__, "--devices", devices, "--part", "child"]
            command += ["--models", f"{name}:{per_gpu}"]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
        if done.returncode:
            say(f"{name}: {count} replicas failed: {done.stderr[-2000:]}")
            continue
        found[str(count)] = json.loads(done.stdout.strip().splitlines()[-1])
        say(f"{name}: {count} replicas: {found[str(count)]}")
    if len(found) > 1:
        one, every = found["1"], found[str(len(args.devices))]
        found["times"] = every["compile_s"] / one["compile_s"]
        say(f"{name}: {len(args.devices)} replicas take {found['times']:.2f} times one (bar 1.3)")
    return found


def time_child(name: str, per_gpu: int, devices: Devices) -> Dict[str, Any]:
    model = MODELS[name]
    base = model.make(devices[0])
    batch = model.batch(per_gpu * len(devices), devices[0])
    wrapped = compiled_wrap(devices)(base)
    began, took = time.perf_counter(), []
    for _ in range(TIMED_STEPS):
        step_loss(model, wrapped, batch).backward()
        wait_for(devices)
        took.append(time.perf_counter() - began)
    report = wrapped.report()["compiled"]
    return {"first_steps_s": took[-1], "compile_s": report["seconds"], "forms": report["forms"]}


def step_loss(model: Any, module: nn.Module, batch: Any) -> torch.Tensor:
    tensor = batch if isinstance(batch, torch.Tensor) else batch[0]
    with model.precision(tensor.device.type):
        return module(batch).float().mean()


def wait_for(devices: Devices) -> None:
    for device in distinct(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def losses_of(name: str, per_gpu: int, devices: Devices, wrap: Any) -> List[float]:
    model = MODELS[name]
    torch.manual_seed(0)
    base = model.make(devices[0])
    for module in base.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    batch = model.batch(per_gpu * len(distinct(devices)), devices[0])
    wrapped, optimizer, losses = wrap(base), model.fused_optimizer(base), []
    for _ in range(LOSSES):
        optimizer.zero_grad(set_to_none=True)
        loss = step_loss(model, wrapped, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def take_losses(name: str, per_gpu: int, args: argparse.Namespace) -> Dict[str, Any]:
    import fastdp

    devices, ids = args.devices, [str(device) for device in args.devices]
    first = devices[:1]
    plain = losses_of(name, per_gpu, first, lambda module: module)
    compiled = losses_of(name, per_gpu, first, torch.compile)
    ours = losses_of(name, per_gpu, devices, lambda m: fastdp.DataParallel(m, ids))
    both = losses_of(name, per_gpu, devices, compiled_wrap(devices))
    bound, found = apart(plain, compiled), apart(ours, both)
    holds = found <= 2 * bound or found < 1e-7
    word = "holds" if holds else "FAILS"
    say(f"{word}: {name}: fastdp compiled is {found:.3g} from fastdp; plain {bound:.3g} from plain")
    losses = [plain, compiled, ours, both]
    return {"plain": bound, "fastdp": found, "holds": holds, "losses": losses}


def apart(one: List[float], other: List[float]) -> float:
    """The largest difference, by the size of the losses."""
    scale = max(max(map(abs, one)), 1e-12)
    return max(abs(a - b) for a, b in zip(one, other)) / scale


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", default="0,1", help="such as 0,1 or cpu,cpu")
    parser.add_argument("--models", default=",".join(STANDARD), help="name or name:batch per GPU")
    parser.add_argument("--part", choices=(*PARTS, "all", "child"), default="all")
    parser.add_argument("--only", default="", help="rivals of the steps by name, separated by ;")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of turns for each rival")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for all turns")
    parser.add_argument("--port", type=int, default=29611)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(arguments)
    args.names = args.devices.split(",")
    args.devices = [device_of(name, parser) for name in args.names]
    args.models = [chosen_model(entry, parser) for entry in args.models.split(",")]
    args.only = [title for title in args.only.split(";") if title]
    return args


def main(arguments: Optional[Sequence[str]] = None) -> None:
    args = parse(arguments)
    warnings.filterwarnings("ignore", message="Was asked to gather along dimension 0")
    if args.part == "child":
        (name, per_gpu), = args.models
        print(json.dumps(time_child(name, per_gpu, args.devices)))
        return
    given = list(sys.argv[1:] if arguments is None else arguments)
    found: Dict[str, Any] = {
        "benchmark": "compiled",
        "command": shlex.join(["python", "benchmarks/compiled.py", *given]),
        "machine": machine_of(args.devices),
        "models": {},
    }
    print(json.dumps(found["machine"]), flush=True)
    acts = {"time": take_time, "losses": take_losses, "steps": take_steps}
    for name, per_gpu in args.models:
        for part in PARTS:
            if args.part in (part, "all"):
                title = f"{name}:{per_gpu}"
                found["models"].setdefault(title, {})[part] = acts[part](name, per_gpu, args)
                keep(args.json, found)


if __name__ == "__main__":
    main()
