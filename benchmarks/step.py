"""Whole training steps of real models: fastdp beside one GPU, torch's DataParallel and its
DistributedDataParallel, in turn in one run.

    python benchmarks/step.py --devices 0,1                      four models, whole steps
    python benchmarks/step.py --devices 0,0 --part backward      forward and backward only
    python benchmarks/step.py --devices 0,1 --models resnet50:512,gpt2:32 --silent
    python benchmarks/step.py --devices 0,1 --models resnet50-fp16,resnet50-fp32
    python benchmarks/step.py --devices 0,1 --ddp eager,reduce-overhead
    python benchmarks/step.py --devices 0,1 --transports peer,nccl,host --engines eager
    python benchmarks/step.py --devices 0,1 --models mlp --floor
    python benchmarks/step.py --devices 0,1,2,3,4,5,6,7 --scaling weak --models resnet50,gpt2
    python benchmarks/step.py --devices cpu,cpu --models tiny    to try the script itself

A step is forward, loss (the mean of the output), backward, and a fused optimizer on the reduced
gradients, with zero_grad(set_to_none=True). Batches are per GPU: on one GPU listed twice, the
replicas share its batch. "one GPU" is the bare module on one GPU's batch: the floor. fastdp runs
with each of --engines over each of --transports; --alone adds fastdp on the first GPU by itself.
--silent adds fastdp's step with its communication switched off inside: what the step takes longer
is communication not hidden. --floor adds "bare modules" (bare.py): a copy of the model for each of
--devices with its share of the batch, forwards on threads, one backward, one optimizer, and no
wrapper, scatter, communication or sum. It is no way to train; it is what n replicas cost any single
process in eager mode, and so it tells whether a ratio over torch DP can be reached by eager steps.
DDP runs in processes that this script starts, one per GPU, which take their turns too; they start
and compile while the rivals of the first model warm up, and no turn counts before all of them are
ready.

--scaling weak runs each model on the first 1, 2, 4, 8 of --devices (--counts names others), every
GPU with the batch of one; with --scaling strong they share it, and the batch in --models is that of
all. Each number of GPUs is a contest of its own, with fastdp on one GPU in turn (as --alone), and
DDP starts with its contest (--ahead 1). What share of one GPU's rate each rival reaches, and by
what it is told: benchmarks/scaling.py.

How long it takes, reckoned for two H200: 15 s to start; each model 5 to 10 s to warm up, and 2 s
of turns (--seconds) for each rival, 3 s where a step takes 0.2 s. Compiled DDP adds 60 to 90 s,
once for all models that start together (--ahead), and --ddp-wait gives up on it. Four models:
beside eager DDP 2 minutes, with compiled DDP 3 to 4; with --devices 0,0 --part backward 70 s. With
--scaling each model takes some 40 s for each number of GPUs, and as long again for DDP to compile.
--limit SECONDS ends the run in time: what was taken until then is shown and kept, as after Ctrl-C
and after SIGTERM. --json is written after each model; benchmarks/tables.py and benchmarks/plot.py
make tables and a picture of such files. A rival that fails, that leaves the GPUs unusable, or that
does not come back is left out, and the run goes on.

All rivals of a model hold their memory at once; those in this process share what is free, but each
recorded one has its own. For large batches name the rivals (--only) and use --ahead 1.

Columns: ms per step, the median of the turns, the fastest and the slowest; host time, until the
step has returned, before the GPUs are waited for; seconds for 1,000 batches of all GPUs; times
fastdp (its first row) and times one GPU; MB that the rival added to the peaks of allocated and of
reserved memory, for each GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
import warnings
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import scaling  # noqa: E402
import step_bars  # noqa: E402
from bare import Bare  # noqa: E402
from contest import ONE, OURS, SILENT, Bounds, Contest, Entry, say, show, spent_s  # noqa: E402
from measure import keep, machine_of  # noqa: E402
from models import MODELS, STANDARD  # noqa: E402
from rescue import Rescue, end_children  # noqa: E402
from rivals import (  # noqa: E402
    ANSWER_S,
    COMPILED,
    Distributed,
    Local,
    distinct,
    fastdp_wrap,
    torch_wrap,
    wire_ms,
)
from scaling import Case  # noqa: E402

# Of torch.compile, but for the first.
DDP_MODES = ("eager", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
# Steps before the first turn of a rival that neither records nor compiles.
EAGER_WARMUP = 3


def entries_of(case: Case, args: argparse.Namespace) -> Dict[str, Entry]:
    """The rivals by name, in the order of their turns."""
    model, devices, n = MODELS[case.name], case.devices, case.gpus
    few = min(args.warmup, EAGER_WARMUP)
    # On one GPU there is nothing to transport.
    transports = args.transports[:1] if case.scaling and n == 1 else args.transports

    def local(wrap: Any, gpus: int, warmup: int, silent: bool = False, **facts: Any) -> Entry:
        def make() -> Local:
            return Local(model, devices, case.per_gpu, args.part, wrap, gpus, silent)

        return Entry(make, gpus, warmup, facts)

    entries = {
        ONE: local(lambda module: module, case.lone_batches(), few, kind=ONE),
        step_bars.TORCH: local(torch_wrap(devices), n, few, kind=step_bars.TORCH),
    }
    if args.floor and len(devices) > 1:
        entries[step_bars.BARE] = Entry(floor_of(case, args.part), n, few, {"kind": step_bars.BARE})
    for engine in args.engines:
        warmup = few if engine == "eager" else args.warmup
        for transport in transports:
            title = f"{OURS} {engine}" + ("" if transport == "auto" else f" {transport}")
            wrap = fastdp_wrap(devices, transport, engine)
            facts = {"kind": f"{OURS} {engine}", "asked_transport": transport}
            entries[title] = local(wrap, n, warmup, **facts)
            if transport != transports[0] or len(devices) == 1:
                continue
            if args.alone:
                alone = fastdp_wrap(devices[:1], transport, engine)
                more = {**facts, "kind": facts["kind"] + step_bars.ALONE}
                entries[title + step_bars.ALONE] = local(
                    alone, case.lone_batches(), warmup, **more
                )
            if args.silent:
                facts["kind"] += SILENT
                entries[title + SILENT] = local(wrap, n, warmup, silent=True, **facts)
    if args.part == "step" and len(devices) == n and (n > 1 or case.scaling):
        for mode in args.ddp:
            is_eager = mode == "eager"
            entries["DDP" if is_eager else f"DDP compiled {mode}"] = Entry(
                ddp_of(case, mode),
                n,
                few if is_eager else args.warmup,
                {"kind": "DDP" if is_eager else "DDP compiled", "mode": mode},
                is_apart=True,
            )
    # The contest of one GPU does not have all that others have.
    return chosen(entries, args.only, may_lack=bool(case.scaling))


def chosen(
    entries: Dict[str, Entry], only: Sequence[str], may_lack: bool = False
) -> Dict[str, Entry]:
    """Those that --only names; all where it names none. Ends the program where one is unknown,
    unless some may be lacking."""
    unknown = [name for name in only if name not in entries]
    if unknown and not may_lack:
        raise SystemExit(f"--only: {unknown[0]!r} is not one of {'; '.join(entries)}")
    return {name: entry for name, entry in entries.items() if not only or name in only}


def ddp_of(case: Case, mode: str) -> Callable[[], Distributed]:
    return lambda: Distributed(case.name, case.devices, case.per_gpu, mode)


def floor_of(case: Case, part: str) -> Callable[[], Bare]:
    return lambda: Bare(MODELS[case.name], case.devices, case.per_gpu, part, case.gpus)


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", default="0,1", help="such as 0,1 or 0,0 or cpu,cpu")
    parser.add_argument("--models", default=",".join(STANDARD), help="name or name:batch per GPU")
    parser.add_argument("--part", choices=("step", "backward"), default="step")
    parser.add_argument("--transports", default="auto", help="such as peer,nccl,host")
    parser.add_argument("--engines", default="", help="of eager,auto,graph,compiled")
    parser.add_argument("--ddp", default="eager", help="eager,default,reduce-overhead or none")
    parser.add_argument("--only", default="", help="rivals by name, separated by ;")
    parser.add_argument("--scaling", choices=scaling.KINDS, help="on the first 1, 2, 4, ... GPUs")
    parser.add_argument("--counts", default="", help="of GPUs, for --scaling, such as 1,8")
    parser.add_argument("--silent", action="store_true", help="also without communication")
    parser.add_argument("--floor", action="store_true", help="also bare modules, without sums")
    parser.add_argument("--alone", action="store_true", help="fastdp also on one GPU by itself")
    parser.add_argument("--seconds", type=float, default=2.0, help="of turns for each rival")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each rival")
    parser.add_argument("--steps", type=int, default=40, help="at most, in one turn")
    parser.add_argument("--warmup", type=int, default=7, help="steps where graphs are recorded")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for the whole run")
    parser.add_argument("--ddp-wait", type=float, default=ANSWER_S, help="seconds, to compile")
    parser.add_argument("--ahead", type=int, help="contests whose DDP starts together")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--resume", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.ahead is None:
        args.ahead = 1 if args.scaling else 64
    for option in ("steps", "rounds", "warmup", "ahead", "limit"):
        if getattr(args, option) < 1:
            parser.error(f"--{option} is {getattr(args, option)}: it must be at least 1")
    if args.seconds <= 0:
        parser.error(f"--seconds is {args.seconds}: it must be above 0")
    args.devices = devices_of(args.devices, parser, 2)
    on_host = args.devices[0].type == "cpu"
    # Replicas on the host stand for GPUs of their own.
    args.gpus = len(args.devices) if on_host else len(distinct(args.devices))
    args.models = [chosen_model(entry, parser) for entry in args.models.split(",")]
    args.cases = cases_of(args, parser)
    args.alone = args.alone or bool(args.scaling)
    args.transports = args.transports.split(",")
    args.engines = args.engines.split(",") if args.engines else _engines(on_host)
    for engine in args.engines:
        if engine not in ("eager", "auto", "graph", COMPILED):
            parser.error(f"--engines: {engine!r} is not one of eager, auto, graph, {COMPILED}")
    args.ddp = [] if args.ddp == "none" else args.ddp.split(",")
    for mode in args.ddp:
        if mode not in DDP_MODES:
            parser.error(f"--ddp: {mode!r} is not one of {', '.join(DDP_MODES)}, none")
    args.only = [title for title in args.only.split(";") if title]
    return args


def cases_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> List[Case]:
    if not args.scaling:
        if args.counts:
            parser.error("--counts is for --scaling")
        return [Case(*model, args.devices, args.gpus) for model in args.models]
    if args.gpus < len(args.devices):
        parser.error("--devices: a GPU is named twice, and --scaling counts GPUs")
    try:
        counts = scaling.counts_of(args.counts, len(args.devices))
    except ValueError as error:
        parser.error(f"--counts: {error}")
    try:
        return scaling.cases_of(args.models, args.devices, counts, args.scaling)
    except ValueError as error:
        parser.error(f"--models: {error}")


def devices_of(names: str, parser: argparse.ArgumentParser, least: int = 1) -> List[torch.device]:
    """Those of --devices, at least so many."""
    devices = [device_of(name, parser) for name in names.split(",")]
    if len({device.type for device in devices}) > 1 or len(devices) < least:
        needed = "two or more are needed, " if least > 1 else ""
        parser.error(f"--devices: {needed}all GPUs or all cpu")
    return devices


def device_of(name: str, parser: argparse.ArgumentParser) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    if not name.isdigit():
        parser.error(f"--devices: {name!r} is neither the number of a GPU nor cpu")
    return torch.device("cuda", int(name))


def _engines(on_host: bool) -> List[str]:
    return ["eager"] if on_host else ["eager", "graph"]


def chosen_model(
    entry: str, parser: argparse.ArgumentParser, option: str = "--models"
) -> Tuple[str, int]:
    name, _, batch = entry.partition(":")
    if name not in MODELS:
        parser.error(f"{option}: {name!r} is not one of {', '.join(MODELS)}")
    if batch and not (batch.isdigit() and int(batch) > 0):
        parser.error(f"{option}: {batch!r} is no batch size; write {name}:{MODELS[name].per_gpu}")
    return name, int(batch) if batch else MODELS[name].per_gpu


def settle(args: argparse.Namespace) -> None:
    """What fastdp measures once for some GPUs and a process, such as the rate of their links, is
    measured now, while nothing else runs."""
    for devices in dict.fromkeys(tuple(case.devices) for case in args.cases):
        for transport in args.transports if len(devices) > 1 else ():
            wrap = fastdp_wrap(devices, transport, "eager")
            gpus = min(args.gpus, len(devices))
            try:
                Local(MODELS["tiny"], devices, 4, args.part, wrap, gpus).warm_up(1)
            except Exception as error:  # its rivals will say so
                say(f"transport {transport}: {error}")


def hold(
    contest: Contest, case: Case, args: argparse.Namespace, later: Sequence[Contest] = ()
) -> Dict[str, Any]:
    """One contest; what it came to even if it is interrupted. `later` ones have been sent off."""
    facts = case.facts()
    began_s = spent_s()
    kind = f", {case.scaling} scaling" if case.scaling else ""
    table: Dict[str, Any] = {
        "title": f"{case.name}, {case.per_gpu} per GPU, devices {facts['devices']}, {args.part}"
        + kind,
        **facts,
        **{"part": args.part, "began": time.strftime("%Y-%m-%d %H:%M:%S")},
        **{"wire": None, "is_whole": False},
    }
    try:
        contest.warm_up()
        for other in later:
            other.warm_up_apart()
        contest.take_turns()
        contest.end()
        table["is_whole"] = True
        table["wire"] = wire_ms(MODELS[case.name], case.devices)
    except RuntimeError as error:
        say(f"{case.title()}: bare copies failed: {error}")
    except KeyboardInterrupt:
        say(f"{case.title()}: interrupted")
    table["rows"] = contest.rows()
    table["took_s"] = round(spent_s() - began_s, 1)
    return table


def begin_or_resume(given: Sequence[str], args: argparse.Namespace) -> Dict[str, Any]:
    """The run as its JSON will have it."""
    if args.resume:
        with open(args.resume) as file:
            return json.load(file)
    return {
        "benchmark": "step",
        "command": shlex.join(["python", "benchmarks/step.py", *given]),
        "machine": machine_of(args.devices),
        "lost": [],
        "tables": [],
    }


def contest_of(
    case: Case, args: argparse.Namespace, found: Dict[str, Any], rescue: Rescue
) -> Contest:
    title = case.title()
    entries = entries_of(case, args)
    bounds = Bounds(args.rounds, args.steps, args.seconds, args.limit, args.ddp_wait)
    lost = {each["rival"]: each["reason"] for each in found["lost"] if each["contest"] == title}
    return Contest(title, entries, bounds, case.gpus, rescue, lost)


def interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main(arguments: Optional[Sequence[str]] = None) -> None:
    args = parse(arguments)
    warnings.filterwarnings("ignore", message="Was asked to gather along dimension 0")
    signal.signal(signal.SIGTERM, interrupt)
    given = list(sys.argv[1:] if arguments is None else arguments)
    found = begin_or_resume(given, args)
    print(json.dumps(found["machine"]), flush=True)
    settle(args)
    path = args.json or args.resume or ""
    if args.resume:
        given = given[: given.index("--resume")]
    ends_at = time.monotonic() + args.limit - spent_s()
    rescue = Rescue(found, given, args.devices, path, ends_at)
    cases = args.cases[len(found["tables"]) :]
    contests = [contest_of(case, args, found, rescue) for case in cases]
    for k, (case, contest) in enumerate(zip(cases, contests)):
        if spent_s() > args.limit:
            say(f"{case.title()}: left out, {args.limit:g} s are over")
            continue
        together = contests[k : k + args.ahead] if k % args.ahead == 0 else [contest]
        if k % args.ahead == 0:
            for each in together:
                each.send_off()
        table = hold(contest, case, args, together[1:])
        scaling.add_shares(table, found["tables"])
        table["bars"] = step_bars.bars(table)
        show(table["title"], table["rows"], table["wire"])
        scaling.show(table)
        step_bars.show(table["bars"])
        found["tables"].append(table)
        keep(args.json, found)
        if not table["is_whole"]:
            # At an ordinary exit threads of torch's nn.DataParallel would abort the process.
            end_children()
            sys.stdout.flush()
            os._exit(130)


if __name__ == "__main__":
    main()
