"""Watch: each thing that a recording would freeze is named, and nothing else is."""

import contextlib
import gc
import io
import logging
import random
import sys
import time
import types
import warnings

import numpy as np
import pytest
import torch
from nets import Apply, ints
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp import listeners
from fastdp.watch import Watch, snapshot_of

GLOBAL = [0]
LOG = logging.getLogger("a.user")


class Watched(fastdp.DataParallel):
    """Watches the replicas' forward of every step."""

    def parallel_apply(self, replicas, inputs, kwargs):
        with Watch(replicas) as watch:
            self.watch = watch
            return super().parallel_apply(replicas, inputs, kwargs)


def watched(module, x=None, steps=2):
    dp = Watched(module, device_ids=["cpu", "cpu"])
    for _ in range(steps):
        dp(ints(4, 3) if x is None else x)
    return dp.watch


def untouched():
    """Nothing of ours is left in the streams and in logging."""
    assert listeners._listeners == () and listeners._taps == []
    for stream in (sys.stdout, sys.stderr):
        assert "write" not in vars(stream)
    return logging.getLogRecordFactory() is FACTORY


FACTORY = logging.getLogRecordFactory()


@pytest.fixture(autouse=True)
def nothing_is_left():
    assert untouched()
    yield
    gc.collect()
    assert untouched()


# What a forward does.


def forward_of(act):
    """A module whose forward calls act(self) first."""

    def forward(self, x):
        act(self)
        return self.lin(x)

    module = Apply(forward)
    module.calls = 0
    module.seen = []
    module.table = {"a": 1}
    module.config = types.SimpleNamespace(n=0)
    module.own = random.Random(0)
    module.numpy_own = np.random.default_rng(0)
    module.generator = torch.Generator()
    module.register_buffer("count", torch.zeros(1))
    return module


def add_call(self):
    self.calls += 1


def early_writer(self, stream=sys.__stderr__):
    (self.stream if hasattr(self, "stream") else stream).write("x")


def set_and_put_back(self):
    self.training = not self.training
    self.training = not self.training


def counted(self):
    self.count.add_(1)


def replaced(self):
    self.count = self.count + 1


def quiet(self):
    with contextlib.redirect_stdout(io.StringIO()):
        print("to nobody")


def global_counter(self):
    GLOBAL[0] += 1


REASONS = {
    "counter": (add_call, "it changes what modules hold: Apply.calls changed from 0 to 1"),
    "new attribute": (lambda s: setattr(s, "last", 1), "Apply.last was added"),
    "removed": (lambda s: delattr(s, "calls"), "Apply.calls was removed"),
    "child's": (lambda s: setattr(s.lin, "scale", 1), "Linear.scale was added (modules[1])"),
    "append": (lambda s: s.seen.append(1), "Apply.seen had "),
    "dict": (lambda s: s.table.update(a=time.perf_counter()), "Apply.table['a'] changed from"),
    "record": (lambda s: setattr(s.config, "n", s.config.n + 1), "Apply.config.n changed from"),
    "training": (lambda s: s.lin.train(not s.lin.training), "Linear.training changed from True"),
    "tensor": (lambda s: setattr(s, "out", torch.ones(1)), "Apply.out was added"),
    "random": (lambda s: random.random(), "it draws from Python's random"),
    "seeded": (lambda s: random.seed(), "it draws from Python's random"),
    "numpy": (lambda s: np.random.rand(), "it draws from NumPy's global generator"),
    "torch": (lambda s: torch.rand(1), "it draws from torch's generator of the host"),
    "dropout": (lambda s: nn.functional.dropout(torch.ones(4), 0.5),
                "it draws from torch's generator of the host"),
    "print": (lambda s: print("step", 1), "it writes to sys.stdout: 'step'"),
    "stderr": (lambda s: sys.stderr.write("oh no"), "it writes to sys.stderr: 'oh no'"),
    "lines": (lambda s: sys.stdout.writelines(["a\n", "b"]), "it writes to sys.stdout: 'a'"),
    "long": (lambda s: print("x" * 99), f"it writes to sys.stdout: '{'x' * 40}...'"),
    "log": (lambda s: LOG.warning("%d is odd", 3), "it makes log records: a.user: '%d is odd'"),
}  # fmt: skip

SILENT = {
    "nothing": lambda s: None,
    "buffer in place": counted,
    "buffer replaced": replaced,
    "put back": set_and_put_back,
    "same value": lambda s: setattr(s, "calls", 0),
    "below the level": lambda s: LOG.debug("unheard"),
    "fastdp's log": lambda s: logging.getLogger("fastdp").warning("ours"),
    "fastdp's own": lambda s: logging.getLogger("fastdp.part").warning("ours"),
    "warning": lambda s: warnings.warn("once", stacklevel=1),
    "not a stream": quiet,
    "empty": lambda s: print(end=""),
    # What the module's docstring says is not seen.
    "global": global_counter,
    "own random": lambda s: s.own.random(),
    "own numpy": lambda s: s.numpy_own.random(),
    "own torch": lambda s: torch.rand(1, generator=s.generator),
    "clock": lambda s: time.time(),
}


@pytest.mark.parametrize("kind", REASONS)
def test_a_reason_is_named(kind):
    act, text = REASONS[kind]
    watch = watched(forward_of(act))
    assert text in watch.reason
    assert watch.passing == ("writes" in text or "log records" in text)


@pytest.mark.parametrize("kind", SILENT)
@pytest.mark.filterwarnings("always")
def test_there_is_no_reason(kind):
    watch = watched(forward_of(SILENT[kind]))
    assert watch.reason is None and not watch.passing


def test_reasons_are_joined():
    def act(self):
        random.random()
        print("a")

    watch = watched(forward_of(act))
    assert watch.reason == "it draws from Python's random; it writes to sys.stdout: 'a'"
    assert not watch.passing


class Blocks(nn.Module):
    """Of each family of modules some, none of which draws on the host."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(True))
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.embedding = nn.EmbeddingBag(5, 4)
        self.parts = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Dropout(0.0)})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(1))])

    def forward(self, x):
        y = self.conv(x.float().unsqueeze(1)).transpose(1, 2)
        y = self.attention(self.rnn(y)[0])
        y = y + self.embedding(torch.zeros(len(x), 1, dtype=torch.long)).unsqueeze(1)
        y = checkpoint(self.parts["a"], y, use_reentrant=False)
        return self.parts["b"](y) * self.scales[0]


KINDS = {
    "fx": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 2))),
    "compiled": lambda: torch.compile(nn.Linear(3, 2), backend="eager"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_modules_that_replicate_themselves(kind):
    module = KINDS[kind]()
    snapshot = snapshot_of([module])
    assert watched(module, torch.ones(4, 3)).reason is None
    assert snapshot.differs() is None


@pytest.mark.filterwarnings("ignore")
def test_scripted_modules_are_seen_through_their_python_side():
    module = torch.jit.script(nn.Sequential(nn.Linear(3, 2)))
    snapshot = snapshot_of([module])
    # A replica of it is new at each forward, and fetches its method then.
    assert "forward was added" in watched(module, torch.ones(4, 3)).reason
    assert snapshot.differs() is None


def test_no_reason_where_modules_do_their_work():
    module = Blocks()
    dp = Watched(module, device_ids=["cpu", "cpu"])
    snapshot = snapshot_of([module])
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    for training in (True, True, False, True):
        module.train(training)
        dp(ints(4, 3)).sum().backward()
        optimizer.step()
        assert dp.watch.reason is None
    assert snapshot.differs() is None


def test_an_error_in_the_forward():
    def act(self):
        random.random()
        raise ValueError("no")

    dp = Watched(forward_of(act), device_ids=["cpu", "cpu"])
    with pytest.raises(ValueError, match="no"):
        dp(ints(4, 3))
    assert dp.watch.reason is None
