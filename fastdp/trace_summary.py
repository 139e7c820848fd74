"""What a trace (traces.py) says: time by phase on the host and on GPUs, how busy each GPU was, how
much of the moves between replicas ran beside compute, and which replica the others waited for.

What ran on a GPU is of the phase in which it was launched: its `correlation` leads to the call on
the host, and that call's place and thread to the phase.
"""

from __future__ import annotations

import bisect
import gzip
import json
import statistics
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from .traces import METADATA

PREFIX = "fastdp: "
COMPUTE = "compute"
_FORWARD = "DataParallel.forward"
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_MOVES = ("broadcast", "reduce")

Span = Tuple[float, float]  # begin and end, us


class Piece(NamedTuple):
    """Something that ran. `row` is a thread of the host, or (device, stream)."""

    row: Tuple[Any, ...]
    phase: str
    begin_us: float
    end_us: float


class Trace(NamedTuple):
    """A trace as read: phases on the host, what ran on GPUs, and the wrapper's report, if it is
    there."""

    host: List[Piece]
    gpu: List[Piece]
    steps: int
    report: Optional[Dict[str, Any]]


def read(path: str) -> Trace:
    """A trace's file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no trace of torch's profiler.
    """
    opened: Any = gzip.open if path.endswith(".gz") else open
    with opened(path, "rt") as file:
        try:
            content = json.load(file)
            events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path} is no trace of torch's profiler") from None
    host = [
        Piece((event["pid"], event["tid"]), _phase_name(event["name"]), *_span(event))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(PREFIX)
    ]
    steps = sum(
        event["name"] == _FORWARD and event.get("cat") == "user_annotation" for event in events
    )
    return Trace(host, _on_gpus(events, _Innermost(host)), steps, content.get(METADATA))


def _phase_name(name: str) -> str:
    return name[len(PREFIX) :]


def _span(event: Dict[str, Any]) -> Span:
    begin_us = float(event["ts"])
    return begin_us, begin_us + float(event.get("dur", 0))


class _Innermost:
    """Finds the innermost phase around a point of time on a thread. Phases of one thread are nested
    or apart."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._rows: Dict[Any, List[Piece]] = {}
        for piece in sorted(pieces, key=lambda piece: (piece.begin_us, -piece.end_us)):
            self._rows.setdefault(piece.row, []).append(piece)
        self._begins = {row: [p.begin_us for p in found] for row, found in self._rows.items()}

    def at(self, row: Any, time_us: float) -> Optional[str]:
        found = self._rows.get(row, [])
        k = bisect.bisect_right(self._begins.get(row, []), time_us) - 1
        while k >= 0:
            if found[k].end_us >= time_us:
                return found[k].phase
            k -= 1
        return None


def _on_gpus(events: Sequence[Dict[str, Any]], innermost: _Innermost) -> List[Piece]:
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    found = []
    for event in events:
        if event.get("cat") not in _ON_GPU:
            continue
        arguments = event["args"]
        launch = launches.get(arguments.get("correlation"))
        phase = None
        if launch is not None:
            phase = innermost.at((launch["pid"], launch["tid"]), float(launch["ts"]))
        if phase is None or phase.startswith(("replica ", "replay ", "parallel_apply")):
            phase = COMPUTE
        row = (f"cuda:{arguments['device']}", arguments["stream"])
        found.append(Piece(row, phase, *_span(event)))
    return found


# Sets of time


def union(spans: Sequence[Span]) -> List[Span]:
    """As few spans as cover the same time, in order."""
    merged: List[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def length(spans: Sequence[Span]) -> float:
    return sum(end - begin for begin, end in union(spans))


def common(one: Sequence[Span], other: Sequence[Span]) -> float:
    """How long both are on."""
    return length(one) + length(other) - length([*one, *other])


# What is told


def summarize(trace: Trace) -> Dict[str, Any]:
    """`phases` (for each: `count`, `host_ms`, `gpu_ms`, in the order in which they begin; "compute"
    is what else ran on GPUs, `count` kernels and copies), `devices` (for each GPU: `busy_ms` of
    `span_ms`, `moves_ms`, `hidden_percent`), `replicas` (`forward_ms` and `waited_ms`, medians),
    `steps`, `report`."""
    return {
        "steps": trace.steps,
        "phases": _phases(trace),
        "devices": _devices(trace),
        "replicas": _replicas(trace),
        "report": trace.report,
    }


def _spans(pieces: Sequence[Piece], *phases: str) -> List[Span]:
    chosen = [p for p in pieces if not phases or p.phase.startswith(phases)]
    return [(piece.begin_us, piece.end_us) for piece in chosen]


def _phases(trace: Trace) -> Dict[str, Dict[str, Any]]:
    found: Dict[str, Dict[str, Any]] = {}
    for piece in sorted(trace.host, key=lambda piece: piece.begin_us):
        row = found.setdefault(piece.phase, {"count": 0, "host_ms": 0.0, "gpu_ms": 0.0})
        row["count"] += 1
        row["host_ms"] += (piece.end_us - piece.begin_us) / 1e3
    for name, row in found.items():
        row["gpu_ms"] = sum(p.end_us - p.begin_us for p in trace.gpu if p.phase == name) / 1e3
    compute = [piece for piece in trace.gpu if piece.phase == COMPUTE]
    if compute:
        gpu_ms = sum(piece.end_us - piece.begin_us for piece in compute) / 1e3
        found[COMPUTE] = {"count": len(compute), "host_ms": 0.0, "gpu_ms": gpu_ms}
    return found


def _devices(trace: Trace) -> Dict[str, Dict[str, Any]]:
    found = {}
    everything = _spans([*trace.host, *trace.gpu])
    for name in sorted({piece.row[0] for piece in trace.gpu}):
        pieces = [piece for piece in trace.gpu if piece.row[0] == name]
        moves = _spans(pieces, *_MOVES)
        moves_us = length(moves)
        hidden_us = common(moves, _spans(pieces, COMPUTE))
        found[name] = {
            "busy_ms": length(_spans(pieces)) / 1e3,
            "span_ms": (max(e for _, e in everything) - min(b for b, _ in everything)) / 1e3,
            "moves_ms": moves_us / 1e3,
            "hidden_percent": 100 * hidden_us / moves_us if moves_us else None,
        }
    return found


def _replicas(trace: Trace) -> Dict[str, Dict[str, float]]:
    """Of each forward on the host: how long a replica's took, and how long it then waited for the
    slowest."""
    ran: Dict[str, List[Span]] = {}
    waited: Dict[str, List[float]] = {}
    forwards = [piece for piece in trace.host if piece.phase == "parallel_apply"]
    replicas = [piece for piece in trace.host if piece.phase.startswith("replica ")]
    for forward in forwards:
        inside = [p for p in replicas if forward.begin_us <= p.begin_us <= forward.end_us]
        for piece in inside:
            last_us = max(other.end_us for other in inside)
            ran.setdefault(piece.phase, []).append((piece.begin_us, piece.end_us))
            waited.setdefault(piece.phase, []).append(last_us - piece.end_us)
    return {
        name: {
            "forward_ms": statistics.median(end - begin for begin, end in ran[name]) / 1e3,
            "waited_ms": statistics.median(waited[name]) / 1e3,
        }
        for name in sorted(ran, key=lambda name: int(name.split()[1]))
    }


def text_of(summary: Dict[str, Any]) -> str:
    """The summary as text."""
    lines = [f"{summary['steps']} forward(s)"]
    report = summary["report"] or {}
    if report:
        name, reason = report["transport"] or (None, "")
        lines.append(f"engine {report['engine']}, on {', '.join(report['devices'])}")
        lines.append(f"transport {name or 'none'}, since {reason}" if reason else "")
    lines += ["", f"{'phase':28}{'count':>7}{'host ms':>11}{'GPU ms':>11}"]
    for name, row in summary["phases"].items():
        host, gpu = f"{row['host_ms']:.3f}", f"{row['gpu_ms']:.3f}"
        lines.append(f"{name:28}{row['count']:7}{host:>11}{gpu:>11}")
    for name, row in summary["devices"].items():
        share = 100 * row["busy_ms"] / row["span_ms"]
        hidden = row["hidden_percent"]
        tail = "" if hidden is None else f", {hidden:.0f} % of it beside compute"
        lines.append(
            f"{name}: busy {row['busy_ms']:.2f} of {row['span_ms']:.2f} ms ({share:.0f} %), "
            f"moves between replicas {row['moves_ms']:.2f} ms{tail}"
        )
    for name, row in summary["replicas"].items():
        ms, waited = row["forward_ms"], row["waited_ms"]
        lines.append(f"{name}: forward {ms:.3f} ms of the host, then waited {waited:.3f} (medians)")
    return "\n".join(lines)
