"""Compiled replicas: how long they take to compile, whether they learn the same, and how fast they
are beside compiled rivals.

    python benchmarks/compiled.py --devices 0,1                       all three parts, four models
    python benchmarks/compiled.py --devices 0,1 --part steps --models mlp,resnet18 --together 2
    python benchmarks/compiled.py --devices 0,1 --part time --models gpt2
    python benchmarks/compiled.py --devices 0,1 --part losses --models mlp
    python benchmarks/compiled.py --devices cpu,cpu --models tiny --backend aot_eager
                                                                      to try the script itself

time: seconds that the first three steps take, in processes of their own with empty caches: one
replica, and all, with the compiler's part of it as `dp.report()` has it.
losses: 50 steps on one batch, without dropout. How far losses of a plain compiled module are from a
plain one's is the bound; how far those of fastdp compiled are from fastdp's own is what is to be
within twice that, since rounding differs both ways.
steps: the bare module on one GPU, compiled by default and with reduce-overhead; fastdp with
compile=True and engine="auto" on the first GPU and on all, also with graphs that are not cut into
pieces; and DDP, compiled in both ways. Steps and columns are those of benchmarks/step.py.

All rivals of a model are processes of their own (benchmarks/apart.py), which compile side by side;
with --together N those of N models do. When all have, each settles by itself, as "auto" chooses its
engine by real steps; then turns are taken, one at a time.
All must fit into the GPUs' memory: --together is for the small models.

--limit is for the whole run, and shared out between what is still to come: a rival that is not warm
in time is left out, and so are models when it is over. --json is written after each round of turns,
each model and each part: a run that is killed leaves what it had.

How long it takes on two H200 with 32 cores. steps, measured of the two small ones together: of the
MLP all are warm after 28 s, of ResNet-18 three of seven after 46 s, the others not yet; so 120 s
with the turns. steps, reckoned: 20 s to start, then the slowest rival's compilation and 16 s of
turns: GPT-2 100 s, ResNet-50 110 s. time, reckoned: 2 to 4 minutes a model, half of it for
ResNet-50 and GPT-2. losses: 1 to 2 minutes a model.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from apart import INDUCTOR, compiled_wrap  # noqa: E402
from bars import at_most  # noqa: E402
from compiled_contest import Title, say_bars, take_steps  # noqa: E402
from contest import say, spent_s  # noqa: E402
from measure import keep, machine_of  # noqa: E402
from models import MODELS, STANDARD  # noqa: E402
from rescue import end_children  # noqa: E402
from rivals import Devices, distinct  # noqa: E402
from step import chosen_model, devices_of  # noqa: E402

PARTS = ("time", "losses", "steps")
TIMED_STEPS = 3
TIMES = 1.3  # as long as for one replica compiling for all may take
LOSSES = 50
LEAST_APART = 1e-7  # of the size of losses: rounding alone
LEAST_S = 10.0  # that must be left to begin with anything


def take_time(model: Title, ends_at: float, args: argparse.Namespace, note: Any) -> None:
    """Each way in a process of its own, with caches of its own."""
    name, per_gpu = model
    found: Dict[str, Any] = {}
    for count in dict.fromkeys((1, len(args.devices))):
        devices = ",".join(args.names[:count])
        command = [sys.executable, __file__, "--devices", devices, "--part", "child"]
        command += ["--models", f"{name}:{per_gpu}", "--backend", args.backend]
        with tempfile.TemporaryDirectory() as folder:
            env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
            env.pop("TRITON_CACHE_DIR", None)
            left_s = max(ends_at - spent_s(), 1.0)
            try:
                done = subprocess.run(
                    command, env=env, capture_output=True, text=True, timeout=left_s
                )
            except subprocess.TimeoutExpired:
                say(f"{name}: {count} replicas: not done in {left_s:.0f} s")
                continue
        if done.returncode:
            say(f"{name}: {count} replicas failed: {done.stderr[-2000:]}")
            continue
        found[str(count)] = json.loads(done.stdout.strip().splitlines()[-1])
        say(f"{name}: {count} replicas: {found[str(count)]}")
        note(model, found)
    if len(found) > 1:
        one, every = found["1"], found[str(len(args.devices))]
        if not one["compile_s"]:
            say(f"{name}: nothing was compiled: {one['reasons']}")
            return
        times = every["compile_s"] / one["compile_s"]
        bar = f"compiling for {len(args.devices)} replicas by compiling for one"
        found["bars"] = [at_most(bar, times, TIMES)]
        say_bars(name, found["bars"])
        note(model, found)


def time_child(title: Title, devices: Devices, backend: str) -> Dict[str, Any]:
    name, per_gpu = title
    model = MODELS[name]
    base = model.make(devices[0])
    batch = model.batch(per_gpu * len(devices), devices[0])
    wrapped = compiled_wrap(devices, backend)(base)
    began, took = time.perf_counter(), []
    for _ in range(TIMED_STEPS):
        step_loss(model, wrapped, batch).backward()
        wait_for(devices)
        took.append(time.perf_counter() - began)
    report = wrapped.report()["compiled"]
    found = {"first_steps_s": took[-1], "compile_s": report["seconds"]}
    return {**found, "forms": report["forms"], "reasons": report["reasons"]}


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


def take_losses(model: Title, ends_at: float, args: argparse.Namespace, note: Any) -> None:
    import fastdp

    name, per_gpu = model
    devices, ids = args.devices, [str(device) for device in args.devices]
    first = devices[:1]
    losses: List[List[float]] = []
    for own, wrap in (
        (first, lambda module: module),
        (first, lambda module: torch.compile(module, backend=args.backend)),
        (devices, lambda module: fastdp.DataParallel(module, ids)),
        (devices, compiled_wrap(devices, args.backend)),
    ):
        if spent_s() > ends_at:
            say(f"{name}: losses of {len(losses)} of 4 ways, then the time was over")
            return
        losses.append(losses_of(name, per_gpu, own, wrap))
        note(model, {"losses": losses})
    plain, compiled, ours, both = losses
    bound, found = far(plain, compiled), far(ours, both)
    most = max(2 * bound, LEAST_APART)
    bars = [at_most("losses of fastdp compiled, from fastdp's", found, most)]
    say_bars(name, bars)
    note(model, {"plain": bound, "fastdp": found, "bars": bars, "losses": losses})


def far(one: List[float], other: List[float]) -> float:
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
    parser.add_argument("--backend", default=INDUCTOR, help="of torch.compile, but for DDP")
    parser.add_argument("--together", type=int, default=1, help="models that warm up together")
    # A recording comes after the watched steps, and the trial after it.
    parser.add_argument(
        "--warmup", type=int, default=30, help="steps of each rival, once all have compiled"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of turns for each rival")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for the whole run")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(arguments)
    for option in ("together", "warmup", "rounds", "limit"):
        if getattr(args, option) < 1:
            parser.error(f"--{option} is {getattr(args, option)}: it must be at least 1")
    args.names = args.devices.split(",")
    args.devices = devices_of(args.devices, parser)
    args.models = [chosen_model(entry, parser) for entry in args.models.split(",")]
    args.only = [title for title in args.only.split(";") if title]
    return args


def jobs_of(args: argparse.Namespace) -> List[Any]:
    """(part, models, what does it), in their order."""
    parts = PARTS if args.part == "all" else (args.part,)
    acts: Dict[str, Callable[..., None]] = {"time": take_time, "losses": take_losses}
    jobs: List[Any] = [
        (part, [model], lambda models, *rest, part=part: acts[part](models[0], *rest))
        for model in args.models
        for part in parts
        if part in acts
    ]
    if "steps" in parts:
        for k in range(0, len(args.models), args.together):
            jobs.append(("steps", args.models[k : k + args.together], take_steps))
    return jobs


def main(arguments: Optional[Sequence[str]] = None) -> None:
    args = parse(arguments)
    warnings.filterwarnings("ignore", message="Was asked to gather along dimension 0")
    if args.part == "child":
        (model,) = args.models
        print(json.dumps(time_child(model, args.devices, args.backend)))
        return
    given = list(sys.argv[1:] if arguments is None else arguments)
    found: Dict[str, Any] = {
        "benchmark": "compiled",
        "command": shlex.join(["python", "benchmarks/compiled.py", *given]),
        "machine": machine_of(args.devices),
        "devices": args.names,
        "models": {},
    }
    print(json.dumps(found["machine"]), flush=True)
    keep(args.json, found)
    jobs = jobs_of(args)
    for k, (part, models, act) in enumerate(jobs):
        titles = [f"{name}:{per_gpu}" for name, per_gpu in models]
        left_s = args.limit - spent_s()
        if left_s < LEAST_S:
            say(f"{part} of {', '.join(titles)}: left out, {args.limit:g} s are over")
            continue

        def note(model: Title, what: Dict[str, Any], part: str = part) -> None:
            found["models"].setdefault(f"{model[0]}:{model[1]}", {})[part] = what
            keep(args.json, found)

        # What one leaves of its share, the others have.
        act(models, spent_s() + left_s / (len(jobs) - k), args, note)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main()
    finally:
        end_children()
