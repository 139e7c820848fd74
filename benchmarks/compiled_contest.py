"""The steps of benchmarks/compiled.py: rivals, all in processes of their own, and their turns."""

from __future__ import annotations

import argparse
import functools
from typing import Any, Callable, Dict, List, Sequence, Tuple

from apart import BARE, DEFAULT, LEAN, OURS, WHOLE, Apart, Spec, share_cores
from bars import at_most
from contest import Bounds, Contest, Entry, say, show, spent_s
from rivals import ANSWER_S, Distributed, distinct
from step import chosen

ALONE, ALONE_BARE = "fastdp compiled, one", "one GPU, reduce-overhead"
ALL, DDP = "fastdp compiled", "DDP, "
# Of the faster compiled DDP's step, ours takes at most so much; on one GPU, of the bare module's.
BARS = {"mlp:64": 0.80, "resnet18:16": 0.55, "resnet50:128": 0.95, "gpt2:8": 1.00}
BAR_ALONE = 1.02
MOST_STEPS = 40  # in one turn
COMPILING = 3  # steps after which a rival has compiled
# Turns take their steps, and some more for what is around them.
TURNS_TAKE = 1.2

Title = Tuple[str, int]


class Kept(Contest):
    """`note` is told the rows after each round of turns. A rival's warm-up is counted from where
    all were sent off: it may have been over before that was looked at. When all have compiled, each
    takes `settling` steps with nothing beside it: by these "auto" chooses its engine."""

    def __init__(
        self, *args: Any, note: Callable[[List[Dict[str, Any]]], None], settling: int
    ) -> None:
        super().__init__(*args)
        self._note_rows, self._settling = note, settling

    def _warm(self, name: str) -> None:
        super()._warm(name)
        self._warm_up_s[name] = spent_s() - self._sent_s

    def _plan(self, name: str) -> None:
        if self._entries[name].is_apart:
            self._memories[name] = self._rivals[name].warm_up(self._settling)
        super()._plan(name)

    def take_turns_until(self, ends_at: float) -> None:
        self._bounds = self._bounds._replace(ends_at=ends_at)
        self.take_turns()

    def _try(self, name: str, act: Callable[[str], None]) -> None:
        super()._try(name, act)
        if act == self._turn and name == list(self._entries)[-1]:
            self._note_rows(self.rows())


def entries_of(model: Title, args: argparse.Namespace) -> Dict[str, Entry]:
    name, per_gpu = model
    devices, on_host = args.devices, args.devices[0].type == "cpu"
    # Replicas on the host stand for GPUs of their own.
    n = len(devices) if on_host else len(distinct(devices))

    def apart(way: str, gpus: int) -> Entry:
        own = devices[:1] if gpus == 1 else devices
        spec = Spec(way, name, per_gpu, own, gpus, args.backend)
        kind = "one GPU compiled" if way in BARE else "fastdp compiled"
        return Entry(lambda: Apart(spec), gpus, COMPILING, {"kind": kind}, is_apart=True)

    entries = {
        "one GPU, compiled": apart(DEFAULT, 1),
        ALONE_BARE: apart(LEAN, 1),
        ALONE: apart(OURS, 1),
        ALL: apart(OURS, n),
        "fastdp compiled, whole": apart(WHOLE, n),
    }
    for mode in BARE if len(devices) == n > 1 else ():
        make = functools.partial(Distributed, name, devices, per_gpu, mode)
        facts = {"kind": "DDP compiled"}
        entries[DDP + mode] = Entry(make, n, COMPILING, facts, is_apart=True)
    return chosen(entries, args.only)


def take_steps(
    models: Sequence[Title],
    ends_at: float,
    args: argparse.Namespace,
    note: Callable[[Title, Dict[str, Any]], None],
) -> None:
    """Of models whose rivals warm up together. `note` is told what there is of one, so far."""
    entries = [entries_of(model, args) for model in models]
    rivals = [name for each in entries for name in each]
    share_cores(sum(len(args.devices) if name.startswith(DDP) else 1 for name in rivals))
    # Who is warm by then has turns: they have their share of the time.
    warm_by = max(ends_at - TURNS_TAKE * args.seconds * len(rivals), spent_s() + 1)
    bounds = Bounds(args.rounds, MOST_STEPS, args.seconds, warm_by, ANSWER_S)
    gpus = len(args.devices) if args.devices[0].type == "cpu" else len(distinct(args.devices))
    contests = [
        Kept(
            f"{m[0]}:{m[1]}",
            own,
            bounds,
            gpus,
            note=functools.partial(_tell, note, m),
            settling=args.warmup,
        )
        for m, own in zip(models, entries)
    ]
    for contest in contests:
        contest.send_off()
    for contest in contests:
        contest.warm_up_apart()
    for model, contest in zip(models, contests):
        contest.warm_up()
        contest.take_turns_until(ends_at)
        contest.end()
        rows = contest.rows()
        show(f"{model[0]}, {model[1]} per GPU", rows, None)
        say_bars(model[0], _tell(note, model, rows))


def say_bars(name: str, found: Sequence[Dict[str, Any]]) -> None:
    for bar in found:
        word = "holds" if bar["holds"] else "FAILS"
        say(f"{word}: {name}: {bar['bar']} is {bar['measured']:.3g}, at most {bar['most']:.3g}")


def _tell(
    note: Callable[[Title, Dict[str, Any]], None], model: Title, rows: List[Dict[str, Any]]
) -> List[Dict[str, Any]]:
    found = bars(f"{model[0]}:{model[1]}", rows)
    note(model, {"rows": rows, "bars": found})
    return found


def bars(model: str, rows: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Those of which both rivals ran; of the two DDPs, both."""
    if model not in BARS:
        return []
    steps_ms = {row["rival"]: row["step_ms"] for row in rows if "step_ms" in row}
    found = []
    theirs = [ms for name, ms in steps_ms.items() if name.startswith(DDP)]
    if ALL in steps_ms and len(theirs) == len(BARE):
        measured = steps_ms[ALL] / min(theirs)
        found.append(at_most("fastdp compiled by DDP compiled", measured, BARS[model]))
    if ALONE in steps_ms and ALONE_BARE in steps_ms:
        measured = steps_ms[ALONE] / steps_ms[ALONE_BARE]
        found.append(at_most("fastdp on one GPU by the bare module", measured, BAR_ALONE))
    return found
