"""Programs of eager_programs.py on compiled replicas beside plain ones: within rounding, as what is
compiled may sum in another order."""

from __future__ import annotations

import random

import torch
from eager_nets import net_of
from eager_programs import Program, Side
from engine_cases import Recorder, tensors
from engine_programs import Difference, Failed, done

# Steps and changes that a compiled wrapper takes; each of the others compiles anew, or is a call of
# another wrapper.
TAKEN = (
    "train", "train on", "accumulate", "look", "two forwards", "evaluate between", "retain",
    "one by one", "asked", "forgotten", "load", "data", "buffer", "freeze", "mode", "attribute",
    "hook", "rate", "gradient", "written inputs", "written between", "failing", "clipped",
    "failing rank", "used again", "replace", "subclass", "copied", "whole",
    "by name", "gives", "threads asking", "members", "containers",
)  # fmt: skip


# What torch.compile itself fails with (gradients in a forward; outputs that are lazily conjugated,
# in the backward), has wrong gradients of (masks that the forward writes), or rounds otherwise.
UNCOMPILED = {"force", "lazy", "kinds", "buffers", "cast"}


class Recorded(Side):
    def arm(self):
        if self.engine != "eager" and self.dp._fastdp_get_runtime().recorder is None:
            self.dp._fastdp_get_runtime().recorder = Recorder()


class CompiledProgram(Program):
    rival = False

    def __init__(self, seed, actions, engine="eager"):
        super().__init__(seed, {name: actions[name] for name in TAKEN})
        options = {**self.options, "compile": {"backend": "aot_eager"}}
        draw = random.Random(seed)
        while True:
            model = draw.randrange(2**31)
            nets = [net_of(random.Random(model)) for _ in range(2)]
            if not UNCOMPILED.intersection(nets[0][1]):
                break
        self.names = nets[0][1]
        self.ours = Recorded(nets[0][0], engine, self.replicas, options)
        self.theirs = Side(nets[1][0], "eager", self.replicas, self.options)
        self.twins = [self.ours, self.theirs]
        for side in self.twins:
            side.program = self

    def take(self, name, seed):
        act = self.actions[name][1]
        self.trace.append((name, seed))
        want, got = (done(act, side, seed) for side in (self.theirs, self.ours))
        place = f"seed {self.seed}, action {len(self.trace)} ({name})"
        if isinstance(got, Failed) and got.refuses and not isinstance(want, Failed):
            self.over = True  # a recorded step cannot be had; from here on they differ
            return
        if isinstance(got, Failed) != isinstance(want, Failed):
            raise Difference(f"{place}: {got} is not {want}")
        if isinstance(want, Failed):
            if got.kind not in (want.kind, "TorchRuntimeError"):  # the compiler's, of the same
                raise Difference(f"{place}: {got} is not {want}")
            for side in self.twins:
                side.clear_gradients()
                side.log.clear(), side.outer.clear()
        near(got, want, f"{place}: result")
        near(self.ours.state(), self.theirs.state(), place)
        self.over = not all(
            bool(p.abs().max() < 1e3) for p in self.theirs.net.parameters() if p.numel()
        )

    def count(self):
        """Graphs compiled for the wrapper as it is now."""
        return getattr(self.ours.dp.__dict__.get("_fastdp_compiled"), "count", 0)


def near(got, want, place):
    """The tensors of two trees, one by one."""
    got, want = tensors(got), tensors(want)
    if len(got) != len(want):
        raise Difference(f"{place}: {len(got)} tensors, not {len(want)}")
    for one, other in zip(got, want):
        try:
            torch.testing.assert_close(
                one.detach(), other.detach(), rtol=1e-9, atol=1e-11, equal_nan=True
            )
        except AssertionError as error:
            raise Difference(f"{place}: {error}") from None
