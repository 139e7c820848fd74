"""A promise of a benchmark, judged: what its --json, its tables and its printed lines have."""

from __future__ import annotations

from typing import Any, Dict


# Of eager steps; files of before there were others say no more than what it is.
EAGER_FLOOR = {"floor_title": "bare modules alone", "floor_of": "no eager step of one process"}


def at_least(name: str, measured: float, least: float) -> Dict[str, Any]:
    return {"bar": name, "measured": measured, "least": least, "holds": measured >= least}


def at_most(name: str, measured: float, most: float) -> Dict[str, Any]:
    return {"bar": name, "measured": measured, "most": most, "holds": measured <= most}


def with_floor(bar: Dict[str, Any], title: str, floor: float, whose: str) -> Dict[str, Any]:
    """The bar with what the floor of its steps would be, and whose steps cannot do better."""
    return {**bar, "floor": floor, "floor_title": title, "floor_of": whose}


def beside_floor(bar: Dict[str, Any]) -> str:
    """What the sentence of a bar ends with, where it fails and the floor of its steps was run."""
    if "floor" not in bar:
        return ""
    title, whose = (bar.get(key, EAGER_FLOOR[key]) for key in ("floor_title", "floor_of"))
    # A floor that is slower than what it is the floor of proves nothing.
    is_out_of_reach = bar["measured"] <= bar["floor"] < bar["least"]
    words = f", {whose} reaches it here" if is_out_of_reach else ""
    return f"; {title}: {bar['floor']:.3g}{words}"
