"""What the tests of the engines share: replicas on the host, on one GPU and on several, and pairs
of wrappers, one recorded and one eager, that take the same steps and have to stay equal to the bit.

On the host a stand-in records (host_recorder.py). Under "auto" the trial's clock stands still, so
that the recorded step is kept; test_engine_trials.py has clocks that move.
"""

import contextlib
import copy
import dataclasses
import os

import fastdp
import torch
from conftest import no_cuda_reason
from fastdp import captures, engines, trials
from gpu_lists import lacking, several
from host_recorder import HostRecorder
from torch import nn

# Deterministic algorithms ask for it, before cuBLAS is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

LISTS = {
    "cpu": ["cpu"],
    "cpu-twice": ["cpu"] * 2,
    "cpu-thrice": ["cpu"] * 3,
    "gpu": [0],
    "gpu-twice": [0, 0],
    "gpus": [0, 1],
}
SEVERAL = [name for name, ids in LISTS.items() if len(ids) > 1]
ON_HOST = [name for name, ids in LISTS.items() if ids[0] == "cpu"]
ON_GPUS = [name for name, ids in LISTS.items() if ids[0] != "cpu"]

# Eager steps before a signature is recorded.
WATCHED = engines._WATCHED
# Steps of each engine that a trial times, in these tests.
TIMED = 2
# Steps under "auto" after which a step that is to be recorded is.
SETTLED = WATCHED["auto"] + 2 * TIMED


class StillMark:
    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


class Recorder(HostRecorder):
    def mark(self):
        return StillMark()


@dataclasses.dataclass(frozen=True)
class Means:
    """Where replicas run."""

    ids: tuple

    @property
    def replicas(self):
        return len(self.ids)

    @property
    def home(self):
        return torch.device("cpu") if self.on_host else torch.device("cuda", self.ids[0])

    @property
    def on_host(self):
        return self.ids[0] == "cpu"

    def wrap(self, module, engine="graph", cls=fastdp.DataParallel, **options):
        wrapped = cls(module.to(self.home), list(self.ids), engine=engine, **options)
        if self.on_host and engine != "eager":
            wrapped._fastdp_get_runtime().recorder = Recorder()
        return wrapped

    def twins(self, module, engine="graph", **options):
        """(recorded, eager) wrappers of equal modules."""
        twin = copy.deepcopy(module)
        return self.wrap(module, engine, **options), self.wrap(twin, "eager", **options)


def ids_of(name):
    """Of "gpus", where there are more: three, as these tests' batches are."""
    return several()[:3] if name == "gpus" and len(several()) > 1 else LISTS[name]


def reason_against(name):
    """Why these means cannot be had here, or None."""
    if LISTS[name][0] == "cpu":
        return None
    return no_cuda_reason() or lacking(ids_of(name))


@contextlib.contextmanager
def settings(monkeypatch):
    """Around a test of engines: what makes two runs equal, and few steps enough."""
    monkeypatch.setattr(trials, "TIMED", TIMED)
    monkeypatch.setattr(captures.CudaRecorder, "mark", lambda self: StillMark())
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    if not no_cuda_reason():
        # torch sets its order of attention kernels, a global that counts, at the first call.
        one = torch.ones(1, 1, 1, 8, device="cuda:0")
        torch.nn.functional.scaled_dot_product_attention(one, one, one)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.set_num_threads(before[1])


def steps(wrapped):
    """{engine: steps that it ran}, of all signatures."""
    forwards = wrapped.report()["forwards"]
    return {kind: sum(f["steps"][kind] for f in forwards) for kind in ("eager", "graph")}


def reasons(wrapped):
    """Why the wrapper's forwards were not recorded, as one text."""
    return "; ".join(wrapped.report()["reasons"])


def noise(means, *shape, seed=0, dtype=torch.float64):
    """Reals, so that another order of sums would show."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(means.home, dtype)


def squares(output):
    """A loss of all tensors in the output that can have gradients."""
    return sum((t * t.conj()).real.sum() for t in tensors(output) if t.requires_grad)


def tensors(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, dict):
        tree = [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [t for item in tree for t in tensors(item)] if isinstance(tree, (list, tuple)) else []


def identical(got, want, atol=0.0):
    """Equality, to the bit unless `atol` is given, of two trees of tensors and all else."""
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)
        assert got.requires_grad == want.requires_grad
        torch.testing.assert_close(got, want, rtol=0, atol=atol, equal_nan=True)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            identical(got[key], want[key], atol)
    elif dataclasses.is_dataclass(want):
        for field in dataclasses.fields(want):
            identical(getattr(got, field.name), getattr(want, field.name), atol)
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for one, other in zip(got, want):
            identical(one, other, atol)
    else:
        assert got == want


def plain(name):
    """The name of a tensor in a module, without what torch.compile(module) puts before it."""
    return name.removeprefix("_orig_mod.")


class Pair:
    """Two wrappers of equal modules, in step: `both`, of which the first is looked at and the other
    says what is right."""

    def __init__(self, both, lr=1e-2, optimizer=True, atol=0.0):
        self.both, self.atol = both, atol
        self.optimizers = [
            torch.optim.SGD(dp.parameters(), lr, momentum=0.9) if optimizer else None
            for dp in both
        ]

    def step(self, *inputs, loss=squares, **kwargs):
        """One training step of both; the first one's output."""
        outputs = []
        for dp, optimizer in zip(self.both, self.optimizers):
            if optimizer is not None:
                optimizer.zero_grad()
            outputs.append(dp(*inputs, **kwargs))
            loss(outputs[-1]).backward()
        self.check_outputs(*outputs)
        self.check_gradients()
        for optimizer in self.optimizers:
            if optimizer is not None:
                optimizer.step()
        self.check_state()
        return outputs[0]

    def look(self, *inputs, **kwargs):
        """One forward of both without gradients, as validation has it."""
        with torch.no_grad():
            outputs = [dp(*inputs, **kwargs) for dp in self.both]
        self.check_outputs(*outputs)
        self.check_state()
        return outputs[0]

    def each(self, act):
        """The same done to both modules."""
        for dp in self.both:
            act(dp.module)

    def check_outputs(self, got, want):
        identical(got, want, self.atol)

    def check_gradients(self):
        got, want = (
            {plain(name): parameter.grad for name, parameter in dp.module.named_parameters()}
            for dp in self.both
        )
        identical(got, want, self.atol)

    def check_state(self):
        got, want = (
            {plain(name): held for name, held in dp.module.state_dict().items()}
            for dp in self.both
        )
        identical(got, want, self.atol)


class Twins(Pair):
    """A recorded wrapper and an eager one of an equal module."""

    def __init__(self, means, module, engine="graph", lr=1e-2, optimizer=True, atol=0.0, **options):
        self.recorded, self.eager = both = means.twins(module, engine, **options)
        super().__init__(both, lr, optimizer, atol)

    def ran(self, **counts):
        """The recorded wrapper's steps by engine were exactly these, and the eager one's eager."""
        assert steps(self.recorded) == {"eager": 0, "graph": 0, **counts}, str(
            self.recorded.report()
        )
        assert steps(self.eager) == {"eager": 0, "graph": 0}


class Scaled(nn.Module):
    """Reads what the user may change."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()
        self.register_buffer("shift", torch.zeros(3, dtype=torch.float64))
        self.rate, self.deep, self.path = 1.0, False, {"gain": [1.0]}

    def forward(self, x):
        x = torch.tanh(self.first(x)) if self.deep else self.first(x)
        return self.second(x) * self.rate * self.path["gain"][0] + self.shift


def rows_of_four(means, seed=0):
    return noise(means, 6, 4, seed=seed)


def recorded_twins(means, engine="auto", module=None, **options):
    """Twins of this module, or one that is `Scaled`, whose steps are recorded ones by now."""
    twins = Twins(means, Scaled() if module is None else module, engine, **options)
    for seed in range(SETTLED + 1):
        twins.step(rows_of_four(means, seed))
    assert twins.recorded.report()["forwards"][0]["engine"] == "graph"
    return twins


def graph_steps(twins):
    return steps(twins.recorded)["graph"]


def still_fine(twins, means):
    """The next steps are recorded ones, and right."""
    before = graph_steps(twins)
    for dp in twins.both:
        dp.zero_grad()
    for seed in range(3):
        twins.step(rows_of_four(means, 30 + seed))
    assert graph_steps(twins) == before + 3
