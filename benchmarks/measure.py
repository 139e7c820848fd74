"""What the benchmarks share: rivals timed in turn, medians with their spread, the line that says
where they were taken, a table to read and JSON to keep.

A `Cost` is one thing that is measured in several ways. `race` times its ways in turn, round after
round, so that whatever else the machine does meets all of them; figures of different runs are not
compared. What is measured is CPU time: on a busy machine long calls are interrupted and short ones
are not, which would favour the shorter. A cost of which waiting is a part is measured by the wall
clock. A `Bar` is a promise about two ways of one cost. One that seems not to hold is tried again,
with objects made anew, and judged by the median of all its tries: one bad moment of the machine or
one unlucky place in memory is no failure, and one lucky try does not help.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shlex
import statistics
import sys
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

# One timing is of as many calls as fill this time: the clock itself takes some 0.05 us.
TIMED_US = 1000.0
OURS = "fastdp"
# Of a bar that did not hold at once, with the first.
TRIES = 5


class Sample(NamedTuple):
    """Microseconds per call: the median, and the tenth and ninetieth percentile of the rounds."""

    median_us: float
    low_us: float
    high_us: float


class Cost(NamedTuple):
    """One thing, done in several ways: name of the way -> call. One way is `OURS`."""

    name: str
    ways: Dict[str, Callable[[], Any]]
    clock_ns: Callable[[], int] = time.thread_time_ns  # or that of the process, or of the wall
    end: Callable[[], None] = lambda: None


class Bar(NamedTuple):
    """`cost`: the rival's median is at least `factor` times ours. With `beyond`, both are counted
    from the median of that way on: the work that is in both and that neither can do without."""

    cost: str
    rival: str
    factor: float
    beyond: Optional[str] = None


class Verdict(NamedTuple):
    """`tries`: how many times our median the rival's was, of the first measurement first."""

    bar: Bar
    tries: List[float]

    @property
    def measured(self) -> float:
        return statistics.median(self.tries)

    @property
    def holds(self) -> bool:
        return self.measured >= self.bar.factor


class Result(NamedTuple):
    cost: str
    way: str
    sample: Sample
    times_ours: float


def race(cost: Cost, repeats: int) -> Dict[str, Sample]:
    """Times each way once a round, `repeats` rounds, after two calls that are not timed. Garbage is
    collected between rounds, not inside a timing; what is there before is no garbage."""
    ways = cost.ways
    calls = {way: _calls_to_time(call) for way, call in ways.items()}
    timings: Dict[str, List[float]] = {way: [] for way in ways}
    was_enabled = gc.isenabled()
    gc.disable()
    gc.collect()
    gc.freeze()
    try:
        for _ in range(repeats):
            for way, call in ways.items():
                timings[way].append(_time_us(call, calls[way], cost.clock_ns))
            gc.collect()
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
    return {way: _sample(taken) for way, taken in timings.items()}


def _time_us(call: Callable[[], Any], calls: int, clock_ns: Callable[[], int]) -> float:
    start_ns = clock_ns()
    for _ in range(calls):
        call()
    return (clock_ns() - start_ns) / 1e3 / calls


def _calls_to_time(call: Callable[[], Any]) -> int:
    call()
    once_us = _time_us(call, 1, time.perf_counter_ns)
    return max(1, min(10_000, round(TIMED_US / max(once_us, 0.01))))


def _sample(timings: Sequence[float]) -> Sample:
    ordered = sorted(timings)
    last = len(ordered) - 1
    return Sample(
        statistics.median(ordered), ordered[round(last * 0.1)], ordered[round(last * 0.9)]
    )


def measure(costs: Sequence[Callable[[], Cost]], repeats: int) -> List[Result]:
    """Makes, races and ends one cost after the other."""
    results = []
    for make in costs:
        cost = make()
        try:
            samples = race(cost, repeats)
        finally:
            cost.end()
        ours = samples[OURS].median_us
        results += [
            Result(cost.name, way, sample, sample.median_us / ours)
            for way, sample in samples.items()
        ]
    return results


def factor_of(bar: Bar, results: Sequence[Result]) -> float:
    """How many times our median the rival's is."""
    medians = {r.way: r.sample.median_us for r in results if r.cost == bar.cost}
    base_us = 0.0 if bar.beyond is None else medians[bar.beyond]
    return (medians[bar.rival] - base_us) / max(medians[OURS] - base_us, 1e-3)


def judge(
    bars: Sequence[Bar],
    makers: Dict[str, Callable[[], Cost]],
    results: Sequence[Result],
    repeats: int,
) -> List[Verdict]:
    verdicts = []
    for bar in bars:
        tries = [factor_of(bar, results)]
        while tries[0] < bar.factor and len(tries) < TRIES:
            tries.append(factor_of(bar, measure([makers[bar.cost]], repeats)))
        verdicts.append(Verdict(bar, tries))
    return verdicts


def machine() -> Dict[str, Any]:
    """Where and with what a run was taken."""
    import torch

    import fastdp

    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fastdp": fastdp.__version__,
        "compiler": fastdp.build_info()["compiler"],
        "commit": fastdp.build_info()["commit"],
        "date": time.strftime("%Y-%m-%d"),
    }


def machine_of(devices: Sequence[Any]) -> Dict[str, Any]:
    """With the GPUs among some devices: torch's, "cpu", or the numbers of GPUs. To be asked before
    anything else: it ends the program where one of them is not there."""
    import torch

    where = machine()
    found = [torch.device("cuda", d) if isinstance(d, int) else torch.device(d) for d in devices]
    gpus = [device.index or 0 for device in found if device.type == "cuda"]
    if gpus:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if max(gpus) >= count:
            which = "no GPU" if count == 0 else f"no GPU {max(gpus)}, but {count} in all"
            raise SystemExit(
                f"there is {which} here; the first lines of --help say how to try it on the host"
            )
        where["gpu"] = torch.cuda.get_device_name(gpus[0])
        where["cuda"] = torch.version.cuda
        where["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        where["cudnn"] = torch.backends.cudnn.version()
    return where


def keep(path: Optional[str], found: Dict[str, Any]) -> None:
    """Written aside and renamed: a run that is killed leaves a whole file."""
    if path:
        with open(path + ".part", "w") as file:
            json.dump(found, file, indent=1)
        os.replace(path + ".part", path)


def reason_of(error: BaseException, line: int = -1) -> str:
    """What failed, in a line of its text; an error that has no text is named."""
    lines = str(error).strip().splitlines()
    return lines[line][:200] if lines else type(error).__name__


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def machine_line(found: Dict[str, Any]) -> str:
    return (
        f"{found['cpu']}, {found['cores']} cores, load {found['load']}; Python {found['python']}, "
        f"torch {found['torch']}, fastdp {found['fastdp']} ({found['compiler']}); {found['date']}"
    )


def table(results: Sequence[Result]) -> str:
    """Markdown; a cost's name stands in its first row."""
    lines = ["| cost | way | median, us | 10 % to 90 % | times fastdp |"]
    lines.append("|---|---|---:|---:|---:|")
    former = None
    for cost, way, sample, times in results:
        lines.append(
            f"| {'' if cost == former else cost} | {way} | {_figure(sample.median_us)} "
            f"| {_figure(sample.low_us)} to {_figure(sample.high_us)} | {_figure(times)} |"
        )
        former = cost
    return "\n".join(lines)


def _figure(value: float) -> str:
    """Three digits, and no more than are there."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def bar_lines(verdicts: Sequence[Verdict]) -> str:
    lines = []
    for verdict in verdicts:
        bar, tries = verdict.bar, verdict.tries
        beyond = "" if bar.beyond is None else f", both beyond {bar.beyond!r}"
        each = f"; median of {', '.join(map(_figure, tries))}" if len(tries) > 1 else ""
        lines.append(
            f"{'holds' if verdict.holds else 'FAILS'}: {bar.cost}: {bar.rival} takes "
            f"{_figure(verdict.measured)} times as long as fastdp{beyond}; "
            f"at least {bar.factor:g} is promised{each}"
        )
    return "\n".join(lines)


def _command() -> str:
    """This one, with what of the environment it needs to be the same; how it shows its figures, and
    what then becomes of bars, does not matter."""
    name = "FASTDP_BENCHMARK_DEVICES"
    devices = f"{name}={os.environ[name]} " if name in os.environ else ""
    given = [word for word in sys.argv[1:] if word not in ("--json", "--check")]
    script = f"benchmarks/{os.path.basename(sys.argv[0])}"
    return devices + shlex.join(["python", script, *given])


def as_json(
    verdicts: Sequence[Verdict],
    results: Sequence[Result],
    found: Dict[str, Any],
    repeats: int,
    devices: Sequence[Any] = ("cpu",),
) -> str:
    return json.dumps(
        {
            "benchmark": os.path.splitext(os.path.basename(sys.argv[0]))[0],
            "command": _command(),
            "machine": found,
            "devices": list(devices),
            "repeats": repeats,
            "results": [
                {"cost": r.cost, "way": r.way, **r.sample._asdict(), "times_fastdp": r.times_ours}
                for r in results
            ],
            "bars": [
                {**v.bar._asdict(), "tries": v.tries, "measured": v.measured, "holds": v.holds}
                for v in verdicts
            ],
        },
        indent=1,
    )


def main(
    description: str,
    costs: Sequence[Callable[[], Cost]],
    bars: Sequence[Bar],
    arguments: Optional[Sequence[str]] = None,
    devices: Sequence[Any] = ("cpu",),
) -> int:
    """The command line of a benchmark; gives its exit status. `devices`: GPUs by their numbers."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=60, help="rounds per cost (default 60)")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar fails")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"argument --repeats: {options.repeats}, must be at least 1")
    found = machine_of(devices)
    results: List[Result] = []
    makers = {}
    for make in costs:
        taken = measure([make], options.repeats)
        makers[taken[0].cost] = make
        results += taken
    verdicts = judge(bars, makers, results, options.repeats)
    if options.json:
        print(as_json(verdicts, results, found, options.repeats, devices))
    else:
        print(f"{machine_line(found)}\n\n{table(results)}\n\n{bar_lines(verdicts)}")
    failed = not all(verdict.holds for verdict in verdicts)
    if failed and options.check:
        print("a bar fails", file=sys.stderr)
    return int(failed and options.check)
