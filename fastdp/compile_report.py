"""What a wrapper says of its compiled replicas."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

from .compile_seam import is_asked, reason_of_parts

_KINDS = {
    "one size": "for one size",
    "any size": "for any size",
    "breaks": "with graph breaks, so replicas take turns on one thread",
}


def compile_report(wrapper: Any) -> Optional[Dict[str, Any]]:
    """None where nothing is to be compiled, or was so far. `backend`, None where only parts of the
    module were compiled, and not by this wrapper; `seconds` that the first steps took in all;
    `forms`, one dictionary for each thing that was compiled: `kind` ("one size", "any size" or
    "breaks"), `graphs`, `seconds` by device, `pieces` that a graph was cut into (of "one size"),
    `again` why a GPU could not use what was compiled for another, `reason` for the breaks;
    `reasons` why replicas run uncompiled, each once."""
    compiled = wrapper.__dict__.get("_fastdp_compiled")
    if compiled is not None and is_asked(wrapper):
        return compiled.report()
    reason = reason_of_parts(wrapper)
    return {"backend": None, "seconds": 0.0, "forms": [], "reasons": [reason]} if reason else None


def compile_lines(report: Optional[Dict[str, Any]]) -> List[str]:
    """The same as text."""
    if report is None:
        return []
    lines = []
    if report["backend"] is not None:
        lines.append(f"compiled   with {report['backend']}, {report['seconds']:.1f} s")
    for form in report["forms"]:
        seconds = ", ".join(f"{s:.1f} s for {device}" for device, s in form["seconds"].items())
        pieces = form.get("pieces", 1)
        cut = f", in {pieces} pieces" if pieces > 1 else ""
        count = f"{form['graphs']} graph{'' if form['graphs'] == 1 else 's'}"
        lines.append(f"           {_KINDS[form['kind']]}: {count}{cut}; {seconds}")
        for name in ("again", "reason"):
            if name in form:
                lines.append(f"           {form[name]}")
    lines.extend(f"not compiled: {reason}" for reason in report["reasons"])
    return lines
