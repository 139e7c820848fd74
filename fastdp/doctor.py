"""`python -m fastdp doctor` and `fastdp.preflight`: is this machine fit to train on, and if not,
what is to be done. Facts are gathered (facts.py), a real step is trained, and both are judged
(diagnosis.py)."""

from __future__ import annotations

import argparse
import copy
import json
import sys
import textwrap
import time
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn

from . import diagnosis, facts
from .devices import HOST, parse_devices
from .diagnosis import size_text
from .overlap import has_passed
from .shown import Shown
from .wrapper import DataParallel

__all__ = ["Diagnosis", "PreflightError", "preflight"]

MIN_FREE_BYTES = 5 * 2**30
_ROWS, _FEATURES, _CLASSES = 8, 64, 8  # rows for each replica


class PreflightError(RuntimeError):
    """Something is wrong with the machine. `diagnosis` is what `preflight` would have given."""

    __module__ = "fastdp"  # as EngineError's

    def __init__(self, text: str, found: "Diagnosis") -> None:
        super().__init__(text)
        self.diagnosis = found

    def __reduce__(self) -> Tuple[Any, ...]:  # it may come from a process that a launcher started
        return PreflightError, (str(self), self.diagnosis)


class Diagnosis(Shown, Dict[str, Any]):
    """The facts by name, as plain values for JSON, with `findings`: dictionaries with `wrong`,
    `about`, `text` and `advice`. Prints as text."""

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong; what is only slow, or may fail later, is not counted."""
        return not any(finding["wrong"] for finding in self["findings"])

    def verdict(self) -> str:
        """The findings as text, or that there are none."""
        wrong = sum(finding["wrong"] for finding in self["findings"])
        if wrong:
            lines = [f"{wrong} things are wrong:" if wrong > 1 else "One thing is wrong:"]
        else:
            lines = [f"Good: {_what_runs(self)}"]
        for finding in self["findings"]:
            word = "WRONG" if finding["wrong"] else "note"
            lines += [f"  {word}: {finding['text']}.", f"      {finding['advice']}"]
        return "\n".join(lines)

    def __str__(self) -> str:
        rows = [f"{name:14}{line}" for name, line in _lines(self)]
        return "\n".join([*rows, "", self.verdict()])


def preflight(
    devices: Optional[Sequence[Any]] = None, min_free_bytes: int = MIN_FREE_BYTES
) -> Diagnosis:
    """Looks whether training can run here: what `python -m fastdp doctor` looks at, before the run
    instead of in it. Takes some seconds. Of the GPUs' memory it keeps what CUDA itself takes.

    Args:
        devices: as `DataParallel`'s device_ids. None means all GPUs; without one, two replicas on
            the CPU.
        min_free_bytes: what each GPU must have free.

    Returns:
        What was found, a dictionary that prints as text; its `findings` may hold notes.

    Raises:
        PreflightError: something is wrong; the text says what, and what to do.
        ValueError, TypeError: devices that are not there, or a size that is not one.
    """
    if isinstance(min_free_bytes, bool) or not isinstance(min_free_bytes, int):
        raise TypeError(f"min_free_bytes is {min_free_bytes!r}: it must be a number of bytes")
    if min_free_bytes < 0:
        raise ValueError(f"min_free_bytes is {min_free_bytes}: it must be 0 or more")
    given = None if devices is None else parse_devices(devices, "devices")
    found = diagnose(given, min_free_bytes)
    if not found.is_good:
        raise PreflightError(found.verdict(), found)
    return found


def diagnose(
    devices: Optional[Sequence[torch.device]], min_free_bytes: int = MIN_FREE_BYTES
) -> Diagnosis:
    """Facts, a step and findings. `devices` as they were parsed; None: what there is."""
    chosen = _all_gpus() if devices is None else tuple(devices)
    found = facts.gather(chosen)
    stepped = chosen or (HOST, HOST)
    try:
        found["step"] = step(stepped)
    except Exception as error:
        found["step"] = None
        found["failed"]["step"] = facts.told(error)
    if found["gpus"]:
        torch.cuda.empty_cache()
    findings = diagnosis.examine(found, min_free_bytes)
    return Diagnosis(found, findings=[finding._asdict() for finding in findings])


def _all_gpus() -> Tuple[torch.device, ...]:
    return tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))


# The step


def step(devices: Sequence[torch.device]) -> Dict[str, Any]:
    """Trains one step on all devices together. If that fails, `alone` tells of each by itself."""
    begin_s = time.perf_counter()
    error = _error_of(devices)
    took_ms = (time.perf_counter() - begin_s) * 1e3
    alone = {}
    if error and len(set(devices)) > 1:
        for device in dict.fromkeys(devices):
            alone[str(device)] = _error_of([device, device]) or "right"
    return {
        "devices": [str(device) for device in devices],
        "error": error,
        "ms": took_ms,  # with all that a first step prepares
        "alone": "; ".join(f"{name}: {what}" for name, what in alone.items()),
    }


def _error_of(devices: Sequence[torch.device]) -> str:
    try:
        # Whatever modes the caller is in.
        with torch.inference_mode(False), torch.enable_grad():
            with torch.autocast(devices[0].type, enabled=False):
                return train_once(devices)
    except Exception as error:
        return facts.told(error)


def train_once(devices: Sequence[torch.device]) -> str:
    """What is wrong with a step's numbers, or "". All values are small integers: the sums are the
    same in any order, with TF32 too, so that they have to equal the CPU's bit for bit."""
    generator = torch.Generator("cpu").manual_seed(0)
    plain, count = _model(generator), _ROWS * len(devices)
    inputs = _integers((count, _FEATURES), generator)
    gradient = _integers((count, _CLASSES), generator)
    module = copy.deepcopy(plain).to(devices[0])
    ids = ["cpu" if device.type == "cpu" else device.index for device in devices]
    wrapped = DataParallel(module, device_ids=ids, engine="eager")
    results = []
    for model, home in ((plain, HOST), (wrapped, devices[0])):
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
        output = model(inputs)
        output.backward(gradient.to(home))
        optimizer.step()
        results.append([output.detach(), *(p.grad for p in model.parameters())])
        results[-1] += [p.detach() for p in model.parameters()]
    if not _finish(devices):
        return "the GPUs have not finished after some seconds"
    names = ["the output"]
    names += [f"the gradient of {name}" for name, _ in plain.named_parameters()]
    names += [f"{name} after the step" for name, _ in plain.named_parameters()]
    wrong = [
        name for name, want, got in zip(names, *results) if not torch.equal(want, got.to(HOST))
    ]
    return f"the numbers are not those of the CPU: {', '.join(wrong)}" if wrong else ""


def _integers(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-2, 3, tuple(shape), generator=generator, device=HOST).float()


def _model(generator: torch.Generator) -> nn.Module:
    how: Any = {"device": HOST, "dtype": torch.float32}
    # torch's own initial values draw from the caller's random numbers.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = nn.Sequential(
            nn.Linear(_FEATURES, _FEATURES, **how),
            nn.ReLU(),
            nn.Linear(_FEATURES, _CLASSES, **how),
        )
        for parameter in model.parameters():
            parameter.copy_(_integers(parameter.shape, generator))
    return model


def _finish(devices: Sequence[torch.device]) -> bool:
    """Waits for the GPUs, under a deadline."""
    events = []
    for device in dict.fromkeys(devices):
        if device.type == "cuda":
            events.append(torch.cuda.Event())
            events[-1].record(torch.cuda.current_stream(device))
    return all(has_passed(event) for event in events)


# What is printed


def _what_runs(found: Diagnosis) -> str:
    gpus = found["gpus"] or []
    if not gpus:
        return (
            "there is no GPU that torch can use, so fastdp runs replicas on the CPU "
            '(device_ids=["cpu", "cpu"]); with device_ids=None the module is called directly'
        )
    names = ", ".join(f"cuda:{gpu['index']}" for gpu in gpus)
    return f"a step ran on {names}, and its numbers are right"


def _lines(found: Diagnosis) -> List[Tuple[str, str]]:
    """What is known, kind by kind; the name of a kind stands before its first line."""
    kinds = (
        ("versions", _versions),
        ("GPUs", _gpus),
        ("visible", _visible),
        ("peers", _peers),
        ("transport", _transport),
        ("buses", _buses),
        ("limits", _limits),
        ("variables", _variables),
        ("step", _step),
    )
    rows = []
    for name, tell in kinds:
        try:
            lines = tell(found)
        except Exception as error:  # a fact of an unforeseen shape
            lines = [facts.told(error)]
        rows += [(name if k == 0 else "", line) for k, line in enumerate(lines)]
    return rows


def _versions(found: Diagnosis) -> List[str]:
    lines = []
    if versions := found["versions"]:
        newest = versions["driver_cuda"]
        runs = f"up to {newest}" if newest else "none"
        lines = [
            f"Python {versions['python']} on {versions['system']}",
            f"torch {versions['torch']}, for CUDA: {versions['cuda'] or 'no'}",
            f"fastdp {versions['fastdp']}, for CUDA: {versions['fastdp_cuda'] or 'no'}",
            f"CUDA that the driver runs: {runs}",
        ]
    if driver := found["driver"]:
        count = "unknown" if driver["count"] is None else driver["count"]
        lines.append(f"driver {driver['version'] or 'none found'}, its GPUs: {count}")
    if nccl := found["nccl"]:
        loaded = [f"{version} from {path}" for path, version in nccl["loaded"].items()]
        where = ", ".join(loaded) or f"not loaded (wheel: {nccl['installed'] or 'none'})"
        lines.append(f"NCCL {nccl['torch'] or 'none in torch'}; {where}")
    return lines


def _gpus(found: Diagnosis) -> List[str]:
    lines = []
    for gpu in found["gpus"] or []:
        others, listed = diagnosis.others_bytes(gpu, found)
        who = "".join(f"; process {each['pid']} {each['name']}" for each in listed)
        lines.append(
            f"cuda:{gpu['index']} {gpu['name']} (sm {gpu['capability']}), free "
            f"{size_text(gpu['free_bytes'])} of {size_text(gpu['total_bytes'])}, others hold "
            f"{size_text(others)}{who}"
        )
    return lines or ["none"]


def _visible(found: Diagnosis) -> List[str]:
    seen = found["visible"]
    if not seen:
        return []
    value = "not set" if seen["variable"] is None else repr(seen["variable"])
    return [f"CUDA_VISIBLE_DEVICES is {value}; torch sees {seen['count']} GPU(s)"]


def _peers(found: Diagnosis) -> List[str]:
    lines = []
    for pair in found["peers"] or []:
        first, second = pair["gpus"]
        text = f"cuda:{first} and cuda:{second}: check of copies: {pair['check']}"
        if pair["gb_per_s"]:
            there, back = pair["gb_per_s"]
            text += f", {there:.0f} GB/s there, {back:.0f} back by {pair['transport']}"
        lines.append(text)
    kinds = found["links"] or {}
    if found["peers"] and kinds:
        told = [f"{pair} {kind}" for pair, kind in kinds.items()]
        lines.append(f"links by the driver's numbers (NV: NVLink, else PCIe): {', '.join(told)}")
    return lines


def _transport(found: Diagnosis) -> List[str]:
    chosen = found["transport"]
    return [f"{chosen[0] or 'none'}: {chosen[1]}"] if chosen else []


def _buses(found: Diagnosis) -> List[str]:
    buses = found["buses"]
    if not buses:
        return []
    acs = "unknown (it takes root)" if buses["acs"] is None else "on" if buses["acs"] else "off"
    return [f"IOMMU {'on' if buses['iommu'] else 'off'}, ACS between PCIe bridges {acs}"]


def _limits(found: Diagnosis) -> List[str]:
    limits = found["limits"]
    if not limits:
        return []
    shared = "none" if limits["shm_bytes"] is None else size_text(limits["shm_bytes"])
    memlock = limits["memlock_bytes"]
    locked = "no limit" if memlock is None else size_text(memlock)
    return [f"/dev/shm {shared}; locked memory: {locked}; open files: {limits['open_files']}"]


def _variables(found: Diagnosis) -> List[str]:
    rows = found["variables"] or []
    lines = [f"{row['name']}={row['value']}" for row in rows if row["value"] is not None]
    unset = [f"{r['name']} ({r['default']})" for r in rows if r["value"] is None]
    return lines + textwrap.wrap("as by default: " + ", ".join(unset), 84) if rows else []


def _step(found: Diagnosis) -> List[str]:
    stepped = found["step"]
    if not stepped:
        return []
    where, what = ", ".join(stepped["devices"]), stepped["error"] or "right"
    return [f"on {where}: {what}, {stepped['ms']:.0f} ms with its preparations"]


# The command


def main(arguments: List[str]) -> int:
    """The command; its exit code is 1 if something is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m fastdp doctor",
        description="Looks whether this machine is fit to train on: versions, GPUs, what lies "
        "between them, limits and variables; trains one step on every GPU. The exit code is 1 if "
        "something is wrong.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="all of it as JSON")
    options = parser.parse_args(arguments)
    found = diagnose(None)
    print(json.dumps(found, indent=1) if options.json else found)
    sys.stdout.flush()
    return 0 if found.is_good else 1
