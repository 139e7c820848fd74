"""One contest of benchmarks/step.py: rivals over one model take their turns, round after round, and
each becomes a row. A rival that fails leaves the others in; a run that is cut keeps its turns.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import traceback
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import torch
from measure import reason_of
from rivals import COMPILED, Block, NoAnswer
from step_bars import BARE, EAGER, TORCH

OURS, ONE, SILENT = "fastdp", "one GPU", ", silent"
# In one turn: fewer would count the waits around it more than the steps.
LEAST_STEPS = 2
# What a rival in this process may take before it counts as stuck.
WARM_UP_S, COMPILED_S, TURN_S = 120.0, 500.0, 60.0
_BEGAN = time.monotonic()


class Entry(NamedTuple):
    """`batches`: of those of one GPU, in one step. `is_apart`: in processes of its own, which warm
    up while others do. `facts` go into the row."""

    make: Callable[[], Any]
    batches: int
    warmup: int
    facts: Dict[str, Any]
    is_apart: bool = False


class Bounds(NamedTuple):
    """Of one rival's turns: their number, the most steps in each, and about how long all of them
    take. `ends_at`: of the whole run, by `spent_s`."""

    rounds: int
    steps: int
    seconds: float
    ends_at: float
    answer_s: float


def spent_s() -> float:
    return time.monotonic() - _BEGAN


def say(text: str) -> None:
    print(f"[{spent_s():6.1f} s] {text}", flush=True)


class Contest:
    """`rescue`, if there is one, watches over rivals in this process; `lost` are those that it has
    left out, with the reasons."""

    def __init__(
        self,
        title: str,
        entries: Dict[str, Entry],
        bounds: Bounds,
        gpus: int,
        rescue: Any = None,
        lost: Optional[Dict[str, str]] = None,
    ) -> None:
        self._title = title
        self._entries = entries
        self._bounds = bounds
        self._gpus = gpus
        self._rivals: Dict[str, Any] = {}
        self._memories: Dict[str, Any] = {}
        self._warm_up_s: Dict[str, float] = {}
        self._steps: Dict[str, int] = {}
        self._blocks: Dict[str, List[Block]] = {name: [] for name in entries}
        self._facts: Dict[str, Dict[str, Any]] = {}
        self._rescue = rescue
        self._sent_s = 0.0
        self.failed: Dict[str, str] = dict(lost or {})

    def send_off(self) -> None:
        """Starts the rivals that live in processes of their own."""
        self._sent_s = spent_s()
        for name, entry in self._entries.items():
            if entry.is_apart:
                self._try(name, self._start)
                self._try(name, lambda name: self._rivals[name].begin(self._entries[name].warmup))

    def warm_up(self) -> None:
        """Of all rivals, so that nothing runs beside the turns that count."""
        for name, entry in self._entries.items():
            if not entry.is_apart:
                self._try(name, self._warm)
        self.warm_up_apart()
        for name in self._entries:
            self._try(name, self._plan)

    def warm_up_apart(self) -> None:
        """Waits for the rivals in processes of their own: also of a contest whose turns come later,
        lest they compile beside those of another."""
        for name, entry in self._entries.items():
            if entry.is_apart and name not in self._memories:
                self._try(name, self._warm)

    def take_turns(self) -> None:
        for k in range(self._bounds.rounds):
            for name in self._entries:
                if k > 0 and spent_s() > self._bounds.ends_at:
                    return
                self._try(name, self._turn)

    def end(self) -> None:
        for name in self._entries:
            self._try(name, self._note)
        while self._rivals:
            self._rivals.popitem()[1].end()
        _give_memory_back()

    def rows(self) -> List[Dict[str, Any]]:
        """Of all rivals with a turn, whether or not the contest came to its end."""
        names = [n for n in self._entries if self._blocks[n] and n not in self.failed]
        rows = [self._row(name) for name in names]
        compare(rows)
        for name, reason in self.failed.items():
            rows.append({"rival": name, **self._entries[name].facts, "failed": reason})
        return rows

    def _attend(self, name: str, act: Callable[[str], None]) -> Any:
        entry = self._entries[name]
        if self._rescue is None or entry.is_apart:
            return contextlib.nullcontext()
        is_compiled = entry.facts.get("kind") == f"{OURS} {COMPILED}"
        warm_up_s = COMPILED_S if is_compiled else WARM_UP_S
        patience_s = warm_up_s if act == self._warm else TURN_S
        return self._rescue.attend(self._title, name, patience_s)

    def _try(self, name: str, act: Callable[[str], None]) -> None:
        if name in self.failed:
            return
        try:
            with self._attend(name, act):
                act(name)
        except Exception as error:
            traceback.print_exc()
            self.failed[name] = reason_of(error)
            say(f"{self._title}: {name} failed: {self.failed[name]}")
        if name in self.failed:  # outside of the except, whose traceback holds on to tensors
            rival = self._rivals.pop(name, None)
            if rival is not None:
                rival.end()
            del rival
            if self._rescue is not None:
                self._rescue.look_after(self._title, name, self.failed[name])
            _give_memory_back()

    def _start(self, name: str) -> None:
        self._rivals[name] = self._entries[name].make()

    def _warm(self, name: str) -> None:
        entry, began = self._entries[name], time.monotonic()
        if entry.is_apart:
            left_s = max(1.0, self._bounds.ends_at - spent_s())
            answer_s = min(self._bounds.answer_s, left_s)
            try:
                self._memories[name] = self._rivals[name].warm_up(entry.warmup, answer_s)
            except NoAnswer:  # which knows of the last wait for it alone
                waited_s = spent_s() - self._sent_s
                raise NoAnswer(f"not warm {waited_s:.0f} s after it was started") from None
        else:
            self._start(name)
            self._memories[name] = self._rivals[name].warm_up(entry.warmup)
        self._warm_up_s[name] = time.monotonic() - began
        say(f"{self._title}: {name} is warm")

    def _plan(self, name: str) -> None:
        """How many steps its turns have, by a short one that does not count."""
        step_s = max(self._rivals[name].block(LEAST_STEPS).step_ms, 1e-3) / 1e3
        steps = round(self._bounds.seconds / self._bounds.rounds / step_s)
        self._steps[name] = min(self._bounds.steps, max(LEAST_STEPS, steps))

    def _turn(self, name: str) -> None:
        blocks = self._blocks[name]
        blocks.append(self._rivals[name].block(self._steps[name]))
        if len(blocks) == self._bounds.rounds:
            ms = sorted(block.step_ms for block in blocks)
            span = f"{statistics.median(ms):.3f} ms ({ms[0]:.3f} to {ms[-1]:.3f})"
            say(f"{self._title}: {name} took {span}, {len(ms)} turns of {self._steps[name]}")

    def _note(self, name: str) -> None:
        self._facts[name] = self._rivals[name].facts()

    def _row(self, name: str) -> Dict[str, Any]:
        entry, blocks = self._entries[name], self._blocks[name]
        turns_ms = [block.step_ms for block in blocks]
        median_ms = statistics.median(turns_ms)
        return {
            "rival": name,
            **entry.facts,
            "step_ms": median_ms,
            "low_ms": min(turns_ms),
            "high_ms": max(turns_ms),
            "host_ms": statistics.median(block.host_ms for block in blocks),
            "s_per_1000_batches": median_ms * self._gpus / entry.batches,
            "turns_ms": turns_ms,
            "steps_per_turn": self._steps[name],
            "warm_up_s": round(self._warm_up_s[name], 1),
            "allocated_mb": self._memories[name].allocated_mb,
            "reserved_mb": self._memories[name].reserved_mb,
            **self._facts.get(name, {}),
        }


def compare(rows: List[Dict[str, Any]]) -> None:
    """Adds to each row how many times longer every rival takes for the same batches, and to
    fastdp's what of its communication is not hidden."""
    found = {row["rival"]: row for row in rows}
    for row in rows:
        own = row["s_per_1000_batches"]
        row["times_ours"] = {k: v["s_per_1000_batches"] / own for k, v in found.items()}
        silent = found.get(row["rival"] + SILENT)
        if silent is not None:
            row["not_hidden_ms"] = row["step_ms"] - silent["step_ms"]
            row["not_hidden_share"] = row["not_hidden_ms"] / row["step_ms"]


def _give_memory_back() -> None:
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def show(title: str, rows: Sequence[Dict[str, Any]], wire: Optional[Dict[str, float]]) -> None:
    print(f"\n{title}")
    columns = ("ms/step", "low", "high", "host", "s/1,000", "x fastdp", "x one")
    print(f"{'':28}" + "".join(f"{c:>9}" for c in columns) + "  MB allocated, reserved")
    ours = next((r for r in rows if r["rival"].startswith(OURS) and "failed" not in r), None)
    floor = next((r for r in rows if r["rival"] == ONE and "failed" not in r), None)
    for row in rows:
        if "failed" in row:
            print(f"{row['rival']:28}failed: {row['failed']}")
            continue
        keys = ("step_ms", "low_ms", "high_ms", "host_ms", "s_per_1000_batches")
        figures = "".join(f"{row[key]:9.3f}" for key in keys)
        for base in (ours, floor):
            figures += f"{'':9}" if base is None else f"{base['times_ours'][row['rival']]:9.2f}"
        memory = ", ".join(str(row[f"{kind}_mb"]) for kind in ("allocated", "reserved"))
        print(f"{row['rival']:28}{figures}  {memory}")
    for row in rows:
        if "not_hidden_ms" in row:
            print(
                f"{row['rival']}: communication not hidden {row['not_hidden_ms']:.3f} ms, "
                f"{100 * row['not_hidden_share']:.1f} % of the step"
            )
    _show_floor({row["rival"]: row for row in rows if "failed" not in row})
    if wire is not None:
        print(
            f"bare copies of {wire['parameter_mb']:.1f} MB of parameters there and back: "
            f"{wire['there_and_back_ms']:.3f} ms",
        )
    print(flush=True)


def _show_floor(rows: Dict[str, Dict[str, Any]]) -> None:
    """What torch DP over fastdp eager could be at most."""
    if BARE not in rows or TORCH not in rows:
        return
    times = [
        f"{rows[name]['times_ours'][TORCH]:.2f} over {name}"
        for name in (EAGER, BARE)
        if name in rows
    ]
    way = rows[BARE].get("forward")  # a run that was cut has not asked
    print(f"{TORCH} is {', '.join(times)}{f' (forwards {way})' if way else ''}")
