"""What benchmarks/memory.py promises, judged, and what it prints."""

from __future__ import annotations

import sys
from typing import Any, Dict, List, Sequence

from bars import at_most

MB = 2**20
# How far an estimate may be from the measured peak.
BOUND = 0.1

OURS, DDP = "fastdp eager", "DDP"


def bars_of(rows: Sequence[Dict[str, Any]], first: str) -> List[Dict[str, Any]]:
    """The promises about one model, as far as they can be judged."""
    found = {row["way"]: row for row in rows if "failed" not in row}
    bars: List[Dict[str, Any]] = []
    ours = found.get(OURS)
    if ours is None:
        return bars
    for mode in ("train", "eval"):
        for device, row in ours[mode]["devices"].items():
            if "ratio" in row:
                name = f"fits, {mode}, {device}: how far from the measured peak"
                bars.append(at_most(name, abs(row["ratio"] - 1), BOUND))
    ddp = found.get(DDP)
    if ddp is not None and first in ours["added"]:
        for kind in ("allocated", "taken"):
            room = ddp["added"][first][kind] + ours["bucket_bytes"]
            name = f"{first}, {kind}: how much more than DDP and one set of buckets"
            bars.append(at_most(name, ours["added"][first][kind] / room - 1, 0.0))
    return bars


def show(title: str, rows: Sequence[Dict[str, Any]], bars: Sequence[Dict[str, Any]]) -> None:
    print(f"\n{title}")
    print(f"{'':16}MB allocated, reserved, taken, for each device")
    for row in rows:
        if "failed" in row:
            print(f"{row['way']:16}failed: {row['failed']}")
            continue
        figures = [
            f"{device}: " + ", ".join(f"{value / MB:.0f}" for value in figures.values())
            for device, figures in row["added"].items()
        ]
        print(f"{row['way']:16}{'   '.join(figures) or 'nobody counts'}")
        if row["way"] != OURS:
            continue
        print(f"{'':16}one set of buckets: {row['bucket_bytes'] / MB:.1f} MB")
        for mode in ("train", "eval"):
            for device, found in row[mode]["devices"].items():
                measured = found.get("measured_bytes")
                beside = "" if measured is None else f", measured {measured / MB:.1f} MB"
                print(
                    f"{'':16}{mode} on {device}: estimated {found['peak_bytes'] / MB:.1f} MB"
                    f"{beside}; in {row[mode]['seconds']:.1f} s"
                )
    for bar in bars:
        word = "holds" if bar["holds"] else "FAILS"
        print(f"{word}: {bar['bar']}: {bar['measured']:.3f}, at most {bar['most']:g}")
    sys.stdout.flush()
