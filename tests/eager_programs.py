"""Programs at random that use fastdp's eager wrapper and torch's own alike: after each action all
that can be seen of the two has to be equal to the bit. Models are those of eager_nets.py, actions
those of eager_actions.py and the recorded steps'.
"""

from __future__ import annotations

import random
import re
import warnings

import oracle
from eager_nets import net_of
from engine_programs import Difference, Failed, Form, Twin, compare, done

import fastdp

# What torch's own refuses and fastdp does (README, "What differs from nn.DataParallel").
BETTER = re.compile(
    "view_as_real doesn't work on unresolved conjugated|Expected use_count of t1"
    "|Output 0 of Gather is a view|is the output of a function that returns multiple views"
)
# And the other way round.
WORSE = re.compile("cannot assign .* as parameter")


class Side(Twin):
    """One implementation's wrapper. `api` has its functions, `ids` names n replicas."""

    def __init__(self, module, kind, replicas, options):
        super().__init__(module, kind, replicas, options)
        self.api = oracle if kind == "torch's" else fastdp
        self.others: list = []
        self.outer: list = []  # calls of the wrapper's own hooks

    def ids(self, count):
        return list(range(count)) if self.api is oracle else ["cpu"] * count

    def state(self):
        seen = {p: sorted(m.seen) for p, m in self.net.named_modules() if hasattr(m, "seen")}
        modes = [m.training for m in self.dp.modules()]
        return {**super().state(), "seen": seen, "modes": modes, "outer": self.outer}


def told(act, side, seed):
    """(result, what was warned of)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = done(act, side, seed)
    texts = {
        (w.category.__name__, str(w.message).split("(Triggered")[0])
        for w in caught
        if not issubclass(w.category, (fastdp.DataParallelWarning, ResourceWarning))
    }
    return result, sorted(texts)


class Program:
    """A model, a wrapper of each implementation, and the actions to come."""

    rival, engine = True, "eager"

    def __init__(self, seed, actions):
        self.rng = random.Random(seed)
        self.seed, self.actions, self.trace, self.over = seed, actions, [], False
        self.replicas = self.rng.choice([2, 2, 2, 3, 3, 1])
        self.options = {"bucket_bytes": self.rng.choice([64, 200, None])}
        if self.rng.random() < 0.3:
            self.options["sequential"] = True
        model = self.rng.randrange(2**31)
        nets = [net_of(random.Random(model)) for _ in range(2)]
        self.names = nets[0][1]
        self.ours, self.theirs = self.twins = [
            Side(net, kind, self.replicas, self.options if kind == "eager" else {})
            for (net, _), kind in zip(nets, ("eager", "torch's"))
        ]
        self.forms = [self._form(True), self._form(False), self._form(False)]
        # Zeros or None for what only some outputs use.
        self.fixed_loss = self.replicas == 1
        for side in self.twins:
            side.program = self

    def _form(self, main):
        rng = self.rng
        rows = rng.choice([6, 6, 8]) if main else rng.choice([6, 7, 5, 2, 1])
        kind = rng.choice(["plain", "plain", "turned", "wide"])
        # Constants beside fewer rows than replicas: torch's calls some without x.
        scale, extra = rng.choice([(1.0, False), (0.5, False), (0.5, True)])
        if rows < 3:
            scale, extra = 1.0, False
        return Form(rows, rng.random() < 0.6, scale, extra, rng.random() < 0.4, kind)

    def run(self, count):
        names, weights = zip(*((name, weight) for name, (weight, _) in self.actions.items()))
        for _ in range(count):
            (name,) = self.rng.choices(names, weights)
            self.take(name, self.rng.randrange(2**31))
            if self.over:
                break

    def take(self, name, seed):
        act = self.actions[name][1]
        self.trace.append((name, seed))
        (want, warned), (got, warned_here) = (
            told(act, side, seed) for side in (self.theirs, self.ours)
        )
        place = f"seed {self.seed}, action {len(self.trace)} ({name})"
        if isinstance(want, Failed) and BETTER.search(want.text):
            self.over = True  # from here on they differ
            return
        if isinstance(want, Failed) and not isinstance(got, Failed):
            raise Difference(f"{place}: torch's fails: {want}")
        if isinstance(got, Failed) and not isinstance(want, Failed) and WORSE.search(got.text):
            self.over = True
            return
        if isinstance(want, Failed):
            for side in self.twins:  # how far a backward came is of no interest
                side.clear_gradients()
                side.log.clear(), side.outer.clear()
        compare(got, want, f"{place}: result")
        if warned_here != warned and not isinstance(want, Failed):
            raise Difference(f"{place}: warns of {warned_here}, torch's of {warned}")
        compare(self.ours.state(), self.theirs.state(), place)
        for side in self.twins:
            side.check_kept()
        self.over = not all(
            bool(p.abs().max() < 1e6) for p in self.theirs.net.parameters() if p.numel()
        )
