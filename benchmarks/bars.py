"""A promise of a benchmark, judged: what its --json, its tables and its printed lines have."""

from __future__ import annotations

from typing import Any, Dict


def at_least(name: str, measured: float, least: float) -> Dict[str, Any]:
    return {"bar": name, "measured": measured, "least": least, "holds": measured >= least}


def at_most(name: str, measured: float, most: float) -> Dict[str, Any]:
    return {"bar": name, "measured": measured, "most": most, "holds": measured <= most}
