"""Programs at random that use a wrapper as training scripts do, taken by a recorded wrapper and by
an eager twin alike: after each action all that can be seen of the two has to be equal to the bit.

An action is a function of a `Twin` and a generator of its own (engine_actions.py), so that both
twins draw the same. Where the recorded one refuses, in words that say what to do, it is put back
and takes that action eagerly. Any other difference is a `Difference`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import re
import warnings
from typing import Any

import oracle
import torch
from engine_blocks import WIDTH, WORDS
from engine_cases import tensors
from engine_nets import net_of
from operator_recorder import OperatorRecorder
from torch import nn

import fastdp

# What a recorded step says of itself, where it cannot be had (docs/engines.md).
REFUSALS = re.compile(r'engine="eager"|modified by an\s+inplace operation')


class Difference(AssertionError):
    """Of the recorded twin from the eager one."""


@dataclasses.dataclass
class Form:
    """A kind of call that comes back."""

    rows: int
    ids: bool = False
    scale: float = 1.0
    extra: bool = False
    needs: bool = False  # gradients with respect to x
    kind: str = "plain"  # how x lies in memory

    def arguments(self, twin, seed):
        generator = torch.Generator().manual_seed(seed)
        shape = (WIDTH, self.rows) if self.kind == "turned" else (self.rows, WIDTH)
        x = torch.randn(shape, generator=generator, dtype=torch.float64).to(twin.home, twin.dtype)
        if self.kind == "turned":
            x = x.t()
        elif self.kind == "wide":
            x = x[:1].expand(self.rows, WIDTH)
        ids = torch.randint(0, WORDS, (self.rows,), generator=generator).to(twin.home)
        named = {} if self.scale == 1.0 else {"scale": self.scale}
        if self.extra:
            shift = torch.randn(self.rows, WIDTH, generator=generator, dtype=torch.float64)
            named["extra"] = {"shift": shift.to(twin.home, twin.dtype), "name": "shift"}
        return [x.requires_grad_(self.needs), *([ids] if self.ids else [])], named


class Twin:
    """A wrapper over `devices`, again and again, and what a script has beside it."""

    def __init__(self, module, engine, replicas, options, devices=("cpu",)):
        self.engine, self.replicas = engine, replicas
        self.home = torch.device(devices[0])
        moved(module, self.home)
        if engine == "torch's":
            self.dp = oracle.DataParallel(module, list(range(replicas)))
        else:
            ids = [devices[rank % len(devices)] for rank in range(replicas)]
            self.dp = fastdp.DataParallel(module, ids, engine=engine, **options)
        self.dtype = torch.float64
        self.optimizer: Any = None
        self.scaler: Any = None
        self.kept: list = []  # (tensor, its value then)
        self.hooks: list = []
        self.log: list = []
        self.harvest = {"eager": 0, "graph": 0}
        self.optimize(random.Random(0))

    @property
    def net(self):
        return self.dp.module

    def optimize(self, rng):
        kind = rng.choice(["sgd", "momentum", "adam"])
        parameters = list(self.dp.parameters())
        # One by one: some share memory, and a kernel for all of them writes in no order.
        if kind == "adam":
            self.optimizer = torch.optim.Adam(parameters, 1e-3, foreach=False)
        else:
            momentum = 0.9 if kind == "momentum" else 0.0
            self.optimizer = torch.optim.SGD(parameters, 1e-3, momentum=momentum, foreach=False)

    def arm(self):
        """Before each action: a wrapper's threads, recordings and recorder go with its copies, or
        where its module is replaced."""
        if self.engine in ("eager", "torch's") or self.home.type != "cpu":
            return
        runtime = self.dp._fastdp_get_runtime()
        if runtime.recorder is None:
            runtime.recorder = OperatorRecorder()

    def count(self):
        """Before the wrapper is replaced, and at the end."""
        if self.engine == "torch's":
            return
        for forward in self.dp.report()["forwards"]:
            for kind, steps in forward["steps"].items():
                self.harvest[kind] += steps

    def keep(self, tree):
        self.kept += [(t, t.detach().clone()) for t in tensors(tree)]
        del self.kept[:-40]

    def clear_gradients(self):
        for tensor in (*self.net.parameters(), *self.net.buffers()):
            tensor.grad = None

    def state(self):
        """All that a script can look at."""
        held = self.optimizer.state_dict()["state"]
        return {
            "parameters": dict(self.net.named_parameters()),
            "buffers": dict(self.net.named_buffers()),
            "gradients": {n: p.grad for n, p in self.net.named_parameters()},
            "of buffers": {n: b.grad for n, b in self.net.named_buffers()},
            "optimizer": {k: dict(v) for k, v in held.items()},
            "kept": [tensor for tensor, _ in self.kept],
            "calls": {p: m.calls for p, m in self.net.named_modules() if hasattr(m, "calls")},
            "log": sorted(self.log),
        }

    def check_kept(self):
        for tensor, value in self.kept:
            if not alike(tensor, value):
                raise Difference(f"a kept tensor changed: {value} is {tensor} now")


class Before:
    """A twin as it is, to be put back."""

    def __init__(self, twin):
        self.twin = twin
        net = twin.net
        tensors = (*net.parameters(), *net.buffers())
        self.values = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self.gradients = [(tensor, tensor.grad, copied(tensor.grad)) for tensor in tensors]
        self.optimizer = copy.deepcopy(twin.optimizer.state_dict())
        self.scaler = None if twin.scaler is None else twin.scaler.state_dict()
        self.lengths = len(twin.kept), len(twin.log)
        self.kept, self.random = list(twin.kept), torch.get_rng_state()

    def put_back(self):
        twin = self.twin
        for tensor, value in self.values:
            tensor.data.copy_(value)
        for tensor, gradient, value in self.gradients:
            tensor.grad = gradient
            if gradient is not None and not gradient.is_sparse:
                gradient.data.copy_(value)
        twin.optimizer.load_state_dict(self.optimizer)
        if self.scaler is not None:
            twin.scaler.load_state_dict(self.scaler)
        twin.kept = self.kept
        del twin.log[self.lengths[1] :]
        torch.set_rng_state(self.random)


def moved(module, home):
    """With what it holds beside parameters and buffers."""
    for part in module.to(home).modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, torch.Tensor):
                setattr(part, name, value.to(home))
            elif isinstance(value, list) and value and isinstance(value[0], nn.Module):
                moved(value[0], home)
            elif isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
                value[0] = value[0].detach().to(home).requires_grad_(value[0].requires_grad)


def copied(tensor):
    return None if tensor is None else tensor.detach().clone()


def alike(got, want):
    """To the bit, but for which nan it is."""
    if got.layout != want.layout or (got.shape, got.dtype) != (want.shape, want.dtype):
        return False
    got, want = got.detach(), want.detach()
    if got.layout != torch.strided:
        return alike(got.to_dense(), want.to_dense())
    return torch.equal(got, want) or bool(((got == want) | (got.isnan() & want.isnan())).all())


def compare(got, want, path):
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        if not alike(got, want):
            told = f"{got} is not {want}"
            if got.shape == want.shape and got.dtype == want.dtype and got.dtype.is_floating_point:
                told = f"{(got - want).abs().max()} apart, {told}"
            raise Difference(f"{path}: {told}")
        if got.requires_grad != want.requires_grad:
            raise Difference(f"{path}: needs gradients: {got.requires_grad}")
        return
    if type(got) is not type(want):
        raise Difference(f"{path}: {got!r} is not {want!r}")
    if isinstance(want, Failed):
        if got.kind != want.kind:
            raise Difference(f"{path}: {got} is not {want}")
        return
    if dataclasses.is_dataclass(want):
        got, want = vars(got), vars(want)
    if isinstance(want, dict):
        if list(got) != list(want):
            raise Difference(f"{path}: {list(got)} is not {list(want)}")
        for key in want:
            compare(got[key], want[key], f"{path}[{key!r}]")
    elif isinstance(want, (list, tuple)):
        if len(got) != len(want):
            raise Difference(f"{path}: {len(got)} is not {len(want)}")
        for k, (one, other) in enumerate(zip(got, want)):
            compare(one, other, f"{path}[{k}]")
    elif got != want:
        raise Difference(f"{path}: {got!r} is not {want!r}")


@dataclasses.dataclass
class Failed:
    """What an action raised."""

    kind: str
    text: str

    @property
    def refuses(self):
        return self.kind == "EngineError" or bool(REFUSALS.search(self.text))


def done(act, twin, seed):
    twin.arm()
    torch.manual_seed(seed % 2**31)
    try:
        return act(twin, random.Random(seed))
    except Difference:
        raise
    except Exception as error:  # compared, by its type
        return Failed(type(error).__name__, str(error))


class Program:
    """A model, two twins of it, and the actions to come. `trace` says what ran, to be read."""

    def __init__(self, seed, actions, devices=("cpu",)):
        self.rng = random.Random(seed)
        self.seed, self.actions, self.trace = seed, actions, []
        tame = self.rng.random() < 0.85
        model = self.rng.randrange(2**31)
        self.engine = self.rng.choice(["graph", "auto"]) if tame else "auto"
        self.replicas = self.rng.choice([1, 2, 2, 3])
        options = {"sequential": True} if not tame or self.rng.random() < 0.3 else {}
        for name, values in {
            "bucket_bytes": [64, 200, None],
            "unused_grad": ["none", "zero", "zero"],
        }.items():
            options[name] = self.rng.choice(values)
        # Now and then the twin is torch's own, which fails where fastdp does not.
        is_drawn = self.rng.random() < 0.2
        self.rival = is_drawn and tame and self.replicas > 1 and len(devices) == 1
        self.over = False
        if self.rival:
            options = {"bucket_bytes": options["bucket_bytes"]}
        self.options = options
        nets = [net_of(random.Random(model), tame) for _ in range(2)]
        self.names = nets[0][1]
        self.recorded, self.eager = self.twins = [
            Twin(net, engine, self.replicas, options, devices)
            for (net, _), engine in zip(nets, (self.engine, "torch's" if self.rival else "eager"))
        ]
        self.forms = [self._form(True), self._form(False), self._form(False)]
        # What only some outputs use has zeros in place of None, if the others get gradients later.
        # On GPUs such zeros, added to a gradient, make another kernel sum up what follows.
        keeps_none = options.get("unused_grad") == "none"
        self.fixed_loss = self.replicas == 1 or keeps_none or devices[0] != "cpu"
        for twin in self.twins:
            twin.program = self
        self.refused = 0

    def _form(self, main):
        rng = self.rng
        rows = rng.choice([6, 6, 8]) if main else rng.choice([6, 7, 5, 2, 1])
        return Form(
            rows,
            rng.random() < 0.6,
            rng.choice([1.0, 1.0, 0.5]),
            rng.random() < 0.3,
            rng.random() < 0.3,
            rng.choice(["plain", "plain", "plain", "turned", "wide"]),
        )

    def run(self, count):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(count):
                if not self.over:
                    self.step()
        for twin in self.twins:
            twin.count()
        return self.recorded.harvest

    def step(self):
        names, weights = zip(*((name, weight) for name, (weight, _) in self.actions.items()))
        (name,) = self.rng.choices(names, weights)
        self.take(name, self.rng.randrange(2**31))

    def take(self, name, seed):
        act = self.actions[name][1]
        self.trace.append((name, seed))
        want = done(act, self.eager, seed)
        if self.rival and isinstance(want, Failed):
            self.over = True
            return
        before = Before(self.recorded)
        got = done(act, self.recorded, seed)
        alone = isinstance(got, Failed) and getattr(want, "kind", "") != got.kind
        if alone and got.refuses:
            self.refused += 1
            before.put_back()
            with self._eagerly():
                got = done(act, self.recorded, seed)
        del before
        if isinstance(got, Failed) and isinstance(want, Failed):
            for twin in self.twins:  # how far a backward came is of no interest
                twin.clear_gradients()
                twin.log.clear()
        place = f"seed {self.seed}, action {len(self.trace)} ({name})"
        compare(got, want, f"{place}: result")
        compare(self.recorded.state(), self.eager.state(), place)
        for twin in self.twins:
            twin.check_kept()
        # Times infinity the zeros of outputs without a part in the loss are nan.
        self.over = not all(
            bool(p.abs().max() < 1e30) for p in self.eager.net.parameters() if p.numel()
        )

    @contextlib.contextmanager
    def _eagerly(self):
        dp = self.recorded.dp
        kind, dp.engine = dp.engine, "eager"
        try:
            yield
        finally:
            dp.engine = kind


def failing(replayed, seeds):
    """In how many of the programs `replayed(seed)` finds that something differs."""
    found = 0
    for seed in seeds:
        try:
            replayed(seed)
        except AssertionError:
            found += 1
    return found
