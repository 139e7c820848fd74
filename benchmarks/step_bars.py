"""What fastdp's steps must reach beside other rivals of one run of benchmarks/step.py."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from bars import EAGER_FLOOR, at_least, at_most, beside_floor, with_floor

ALONE = ", one GPU"
# The floor of --floor (bare.py).
BARE = "bare modules"


class Bar(NamedTuple):
    """`rival` takes at least `factor` times as long as `ours`, by model with its batch."""

    ours: str
    rival: str
    factors: Dict[str, float]


EAGER, GRAPH, TORCH, DDP = "fastdp eager", "fastdp graph", "torch DP", "DDP"
SIZES = ("mlp:64", "resnet18:16", "resnet50:128", "gpt2:8")


def _each(*factors: float) -> Dict[str, float]:
    return dict(zip(SIZES, factors))


# Two replicas on one GPU, forward and backward.
SHARED = (
    Bar(EAGER, TORCH, _each(1.7, 3.3, 3.8, 3.3)),
    Bar(GRAPH, TORCH, _each(5.5, 14, 5.2, 5.3)),
)
# Two GPUs, whole steps.
APART = (
    Bar(EAGER, TORCH, _each(1.9, 3.6, 3.1, 3.1)),
    Bar(EAGER, DDP, {"resnet50:512": 1 / 1.01, "gpt2:32": 1 / 1.06}),
    Bar(
        GRAPH,
        DDP,
        {
            **_each(4.5, 4.2, 1.22, 1.4),
            "resnet50:512": 1.0,
            "gpt2:32": 1 / 1.03,
            "gpt-causal:32": 1.0,
        },
    ),
    Bar(GRAPH, GRAPH + ALONE, _each(*[1 / 1.03] * 4)),
    Bar(GRAPH, "DDP compiled reduce-overhead", {"mlp:64": 1.0, "resnet18:16": 1.0}),
)
# Weak scaling from one GPU to many: the least share of one GPU's rate, with recorded steps, and a
# step no longer than that of those who do the same.
WEAK, STRONG = "weak", "strong"
SCALED_GPUS, SCALED = 8, {"resnet50:128": 0.989, "gpt2:8": 0.989}
ALIKE = {GRAPH: (DDP,), "fastdp compiled": ("DDP compiled default", "DDP compiled reduce-overhead")}
# Of a step that is bound by compute.
NOT_HIDDEN, COMPUTE_BOUND = 0.02, ("resnet50:512", "gpt2:32", "gpt-causal:32")


def bars(table: Dict[str, Any]) -> List[Dict[str, Any]]:
    """Those of which both rivals ran, with what was measured."""
    rows = {row["rival"]: row for row in table["rows"] if "step_ms" in row}
    model = f"{table['model']}:{table['per_gpu']}"
    devices, part = table["devices"], table["part"]
    promised: Sequence[Bar] = ()
    if len(devices) == 2 and "cpu" not in devices and table.get("scaling") != STRONG:
        gpus = len(set(devices))
        promised = {(1, "backward"): SHARED, (2, "step"): APART}.get((gpus, part), ())
    results = []
    for bar in promised:
        least = bar.factors.get(model)
        if least is not None and bar.ours in rows and bar.rival in rows:
            measured = rows[bar.rival]["step_ms"] / rows[bar.ours]["step_ms"]
            judged = at_least(f"{bar.rival} over {bar.ours}", measured, least)
            results.append(judged if judged["holds"] else _beside_floor(bar, judged, rows))
    for name, row in rows.items():
        if model in COMPUTE_BOUND and promised is APART and "not_hidden_share" in row:
            text = f"communication of {name} that is not hidden"
            results.append(at_most(text, row["not_hidden_share"], NOT_HIDDEN))
    if len(devices) == SCALED_GPUS == len(set(devices)) and table.get("scaling") == WEAK:
        results += _scaled(rows, SCALED.get(model))
    return results


# What steps cannot be faster than: without moves and sums, eager ones, and recorded ones.
FLOORS = {
    (EAGER, TORCH): (BARE, *EAGER_FLOOR.values()),
    (GRAPH, DDP): (GRAPH + ALONE, "one GPU's recorded step alone", "no recorded step"),
}


def _beside_floor(bar: Bar, judged: Dict[str, Any], rows: Dict[str, Any]) -> Dict[str, Any]:
    """With the floor's own ratio, where it was run."""
    row, title, whose = FLOORS.get((bar.ours, bar.rival), ("", "", ""))
    if row not in rows:
        return judged
    return with_floor(judged, title, rows[bar.rival]["step_ms"] / rows[row]["step_ms"], whose)


def _scaled(rows: Dict[str, Any], least: Optional[float]) -> List[Dict[str, Any]]:
    """Of many GPUs, each with the batch of one."""
    results = []
    for ours, rivals in ALIKE.items() if least is not None else ():
        own = rows.get(ours, {})
        if "efficiency" in own:
            results.append(at_least(f"share of one GPU's rate, {ours}", own["efficiency"], least))
        for rival in rivals:
            if own and rival in rows:
                measured = rows[rival]["step_ms"] / own["step_ms"]
                results.append(at_least(f"{rival} over {ours}", measured, 1.0))
    return results


def show(results: Sequence[Dict[str, Any]]) -> None:
    for bar in results:
        bound = f"at most {bar['most']:.3g}" if "most" in bar else f"at least {bar['least']:.3g}"
        word = "holds" if bar["holds"] else "FAILS"
        end = beside_floor(bar)
        print(f"{word}: {bar['bar']} is {bar['measured']:.3f}, {bound}{end}", flush=True)
