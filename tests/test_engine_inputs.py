"""Arguments of recorded steps: what is a signature of its own, what is not recorded, and that every
shape and container gives what an eager step gives."""

import collections
import dataclasses
from typing import NamedTuple

import pytest
import torch
from engine_cases import SETTLED, SEVERAL, WATCHED, Twins, identical, noise, reasons, steps
from nets import Apply
from torch import nn

import fastdp
from fastdp import engines

AHEAD = WATCHED["graph"]

pytestmark = pytest.mark.filterwarnings("ignore::fastdp.DataParallelWarning")


class Sample(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor


def linear_of(pick):
    return Apply(lambda m, *inputs, **named: m.lin(pick(*inputs, **named)))


# Containers.

TREES = {
    "positional": (lambda x, y: ((x, y), {}), lambda x, y: x * y),
    "keyword": (lambda x, y: ((), {"x": x, "y": y}), lambda x, y: x + 2 * y),
    "tuple": (lambda x, y: (((x, y),), {}), lambda pair: pair[0] * pair[1]),
    "list in dict": (lambda x, y: ((), {"b": {"c": [x, y]}}), lambda b: b["c"][0] - b["c"][1]),
    "named tuple": (lambda x, y: ((Sample(x, y),), {}), lambda s: s.x * s.weight),
    "ordered": (
        lambda x, y: ((collections.OrderedDict(y=y, x=x),), {}),
        lambda d: d["x"] * 2 - d["y"],
    ),
    "constants": (
        lambda x, y: ((x, 3, "sum", None), {"y": y, "flag": True, "dtype": torch.float64}),
        lambda x, n, how, none, y, flag, dtype: (x * n + y * flag).to(dtype),
    ),
    "empty containers": (lambda x, y: ((x, [], {}, ()), {"y": y}), lambda x, *e, y: x + y),
    "twice the same": (lambda x, y: ((x, x), {}), lambda x, y: x * y),
    "host scalars": (lambda x, y: ((x, 2.5, 1 + 2j), {}), lambda x, f, c: x * f * c.imag),
}


@pytest.mark.parametrize("name", TREES)
def test_trees(means, name):
    arguments, pick = TREES[name]
    twins = Twins(means, linear_of(pick))
    for seed in range(AHEAD + 4):
        row, named = arguments(noise(means, 6, 3, seed=seed), noise(means, 6, 3, seed=seed + 50))
        twins.step(*row, **named)
    twins.ran(eager=AHEAD, graph=4)


def test_no_arguments(means):
    twins = Twins(means, Apply(lambda m: m.lin.weight * 3))
    for _ in range(AHEAD + 3):
        twins.step()
    twins.ran(eager=AHEAD, graph=3)


@pytest.mark.parametrize("means", SEVERAL, indirect=True)
def test_constants_only(means):
    twins = Twins(means, Apply(lambda m, n: m.lin.weight * n))
    for _ in range(AHEAD + 3):
        twins.step(4)
    twins.ran(eager=AHEAD, graph=3)


@pytest.mark.parametrize("means", SEVERAL, indirect=True)
def test_marked_arguments_go_whole(means):
    twins = Twins(means, Apply(lambda m, x, t: m.lin(x) * t.sum()))
    for seed in range(AHEAD + 3):
        twins.step(noise(means, 6, 3, seed=seed), fastdp.Replicated(noise(means, 5, seed=seed + 9)))
    twins.ran(eager=AHEAD, graph=3)


@pytest.mark.parametrize("means", SEVERAL, indirect=True)
@pytest.mark.parametrize(
    "options",
    [
        {"chunk_sizes": [1, 2, 3]},
        {"chunk_sizes": lambda batch, n: [batch - n + 1] + [1] * (n - 1)},
        {"replicate_scalars": True},
        {"split_lists": True},
    ],
    ids=lambda o: next(iter(o)),
)
def test_ways_of_cutting(means, options):
    if isinstance(options.get("chunk_sizes"), list):
        options = {"chunk_sizes": [1, 2, 3][-means.replicas :]}
    twins = Twins(
        means, Apply(lambda m, x, s: m.lin(x) * (s if hasattr(s, "dim") else 2)), **options
    )
    for seed in range(AHEAD + 4):
        if options.get("replicate_scalars"):
            extra = noise(means, seed=seed)
        else:
            extra = [1] * 5 if "split_lists" in options else 7
        twins.step(noise(means, 5, 3, seed=seed), extra)
    twins.ran(eager=AHEAD, graph=4)


@pytest.mark.parametrize("means", SEVERAL, indirect=True)
def test_a_scatter_of_ones_own(means):
    """Set on the class or on the wrapper, also once steps were recorded without it."""

    def halves(wrapper, inputs, kwargs, device_ids):
        x = inputs[0] / 2
        return fastdp.DataParallel.scatter(wrapper, (x,), kwargs, device_ids)

    own = type("Own", (fastdp.DataParallel,), {"scatter": halves})
    module = Apply(lambda m, x: m.lin(x))
    dp = means.wrap(module, cls=own)
    plain = means.wrap(module)
    for seed in range(AHEAD + 3):
        x = noise(means, 6, 3, seed=seed)
        identical(dp(x).detach(), plain(x / 2).detach())
    assert steps(dp) == steps(plain) == {"eager": AHEAD, "graph": 3}
    plain.scatter = lambda *arguments: halves(plain, *arguments)
    for _ in range(2):
        identical(plain(x).detach(), dp(x).detach())
    assert steps(plain)["graph"] == 5


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


@pytest.mark.parametrize(
    "argument, kind",
    [(lambda x: Batch(x), "Batch"), (lambda x: [{1, 2}], "set"), (lambda x: iter(()), "iterator")],
    ids=["dataclass", "set", "iterator"],
)
def test_arguments_that_may_change_without_a_sign(means, argument, kind):
    module = Apply(lambda m, x, other: m.lin(x))
    twins = Twins(means, module, "auto")
    for seed in range(SETTLED):
        x = noise(means, 6, 3, seed=seed)
        twins.step(x, argument(x))
    twins.ran()
    assert f" is a {kind}" in reasons(twins.recorded).replace("_iterator", " iterator").replace(
        "tuple iterator", "iterator"
    )
    with pytest.raises(fastdp.EngineError, match="may change without a sign"):
        means.wrap(module)(x, argument(x))


class Own(torch.Tensor):
    pass


def test_tensors_of_a_class_of_their_own(means):
    twins = Twins(means, Apply(lambda m, x, other: m.lin(x)), "auto")
    for seed in range(SETTLED):
        x = noise(means, 6, 3, seed=seed)
        twins.step(x, x.as_subclass(Own))
    if means.replicas == 1:
        twins.ran()
        assert "is a Own, a class of its own" in reasons(twins.recorded)


def test_tensors_that_are_conjugated_lazily(means):
    twins = Twins(means, Apply(lambda m, x: m.lin(x.imag)), "auto")
    for seed in range(SETTLED + 3):
        x = torch.complex(noise(means, 6, 3, seed=seed), noise(means, 6, 3, seed=seed + 9))
        twins.step(x.conj() if seed % 2 else x)
    assert steps(twins.recorded)["graph"] > 0


# Shapes.


@pytest.mark.parametrize("means", SEVERAL, indirect=True)
@pytest.mark.parametrize("batch", [0, 1, 2, 5, 7])
def test_uneven_and_missing_chunks(means, batch):
    """Fewer samples than replicas, and none at all."""
    twins = Twins(means, Apply(lambda m, x: m.lin(x)))
    for seed in range(AHEAD + 3):
        twins.step(noise(means, batch, 3, seed=seed))
    twins.ran(eager=AHEAD, graph=3)


@pytest.mark.parametrize("means", SEVERAL, indirect=True)
def test_tensors_of_unequal_batches(means):
    """Each is cut for itself, and the shortest decides, as in an eager step."""
    twins = Twins(means, Apply(lambda m, x, y: m.lin(x) * y.sum()))
    for seed in range(AHEAD + 4):
        twins.step(noise(means, 6, 3, seed=seed), noise(means, 4, 3, seed=seed + 9))
    twins.ran(eager=AHEAD, graph=4)


@pytest.mark.parametrize("engine", ["auto", "graph"])
def test_shapes_that_come_back(means, engine):
    """A short last batch each epoch is a signature of its own."""
    ahead = WATCHED[engine]
    twins = Twins(means, Apply(lambda m, x: m.lin(x) ** 2), engine)
    epochs = SETTLED + 3
    for epoch in range(epochs):
        for batch in (8, 8, 5):
            twins.step(noise(means, batch, 3, seed=epoch))
    forwards = twins.recorded.report()["forwards"]
    assert [forward["engine"] for forward in forwards] == ["graph", "graph"]
    graph = steps(twins.recorded)["graph"]
    assert graph >= 3 * epochs - 2 * SETTLED
    if engine == "graph":
        assert graph == 3 * epochs - 2 * ahead


def test_shapes_that_keep_changing(means):
    """They stay eager, and what is kept of them is bounded."""
    twins = Twins(means, Apply(lambda m, x: m.lin(x)), "auto", lr=1e-6)
    count = engines._MAX_SIGNATURES + 8
    for batch in range(1, count + 1):
        twins.step(noise(means, batch, 3))
    assert len(twins.recorded.report()["forwards"]) == engines._MAX_SIGNATURES
    assert steps(twins.recorded)["graph"] == 0
    assert all(f["engine"] == "eager" for f in twins.recorded.report()["forwards"])


def test_a_recording_in_use_outlives_shapes_that_change(means):
    """Least recently used is what goes: not the training step that runs between them."""
    twins = Twins(means, Apply(lambda m, x: m.lin(x)), lr=1e-6)
    for _ in range(AHEAD + 1):
        twins.step(noise(means, 6, 3))
    for batch in range(7, engines._MAX_SIGNATURES + 10):
        twins.look(noise(means, batch, 3))
        twins.step(noise(means, 6, 3, seed=batch))
    assert max(forward["steps"]["graph"] for forward in twins.recorded.report()["forwards"]) == (
        engines._MAX_SIGNATURES + 10 - 7 + 1
    )


def test_what_never_comes_back_costs_nothing(means, monkeypatch):
    """A signature that is met once is not even watched."""
    watches = []
    own = engines.Watch
    monkeypatch.setattr(engines, "Watch", lambda roots: watches.append(roots) or own(roots))
    twins = Twins(means, Apply(lambda m, x: m.lin(x)), "auto", lr=1e-6)
    for batch in range(1, 12):
        twins.step(noise(means, batch, 3))
    assert not watches
    twins.step(noise(means, 5, 3))
    assert len(watches) == 1


def test_an_argument_that_changes_each_step(means):
    twins = Twins(means, Apply(lambda m, x, rate: m.lin(x) * rate), "auto")
    for step in range(SETTLED + 4):
        twins.step(noise(means, 6, 3, seed=step), 1.0 / (step + 1))
    twins.ran(eager=SETTLED + 4)


def test_constants_that_are_equal_but_not_the_same(means):
    """1, 1.0 and True; 0.0 and -0.0; nan, which equals nothing."""
    twins = Twins(means, Apply(lambda m, x, c: m.lin(x) * (2 if type(c) is int else 3) / (c or 1)))
    twins.each(lambda module: module.lin.requires_grad_(True))
    for constant in (1, 1.0, True, 0.0, -0.0, float("nan")):
        before = steps(twins.recorded)["graph"]
        for seed in range(AHEAD + 2):
            twins.look(noise(means, 6, 3, seed=seed), constant)
        assert steps(twins.recorded)["graph"] == before + 2


def test_layouts_are_signatures(means):
    twins = Twins(means, Apply(lambda m, x: m.lin(x)))
    for seed in range(AHEAD + 2):
        x = noise(means, 6, 3, seed=seed)
        twins.step(x)
        twins.step(noise(means, 3, 6, seed=seed).t())
        twins.step(noise(means, 6, 6, seed=seed)[:, ::2])
        twins.step(noise(means, 1, 3, seed=seed).expand(6, 3))
    assert steps(twins.recorded)["graph"] >= 4 * 2
    assert all(f["engine"] == "graph" for f in twins.recorded.report()["forwards"])


def test_dtypes_are_signatures(means):
    class Casts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2).double()

        def forward(self, x):
            return self.layer(x.double()) * (2 if x.dtype == torch.int32 else 1)

    twins = Twins(means, Casts(), lr=1e-6)
    for seed in range(AHEAD + 2):
        for dtype in (torch.float64, torch.float32, torch.int32, torch.bool, torch.bfloat16):
            twins.step((10 * noise(means, 6, 3, seed=seed)).to(dtype))
    assert len(twins.recorded.report()["forwards"]) == 5


@pytest.mark.parametrize("means", ["gpu", "gpu-twice", "gpus"], indirect=True)
@pytest.mark.parametrize("pinned", [False, True])
def test_inputs_on_the_host(means, pinned):
    twins = Twins(means, Apply(lambda m, x: m.lin(x)))
    for seed in range(AHEAD + 4):
        x = noise(means, 6, 3, seed=seed).cpu()
        twins.step(x.pin_memory() if pinned else x)
    twins.ran(eager=AHEAD, graph=4)


# Gradients of inputs.


def test_inputs_that_need_gradients(means):
    twins = Twins(means, Apply(lambda m, x, y: torch.tanh(m.lin(x)) * y[:, :2]))
    for seed in range(AHEAD + 4):
        leaves = [noise(means, 6, 3, seed=seed).requires_grad_() for _ in range(2)]
        other = noise(means, 6, 3, seed=seed + 9)
        for dp, leaf in zip(twins.both, leaves):
            (dp(leaf * 2, other) ** 2).sum().backward()
        identical(*[leaf.grad for leaf in leaves])
        twins.check_gradients()
    twins.ran(eager=AHEAD, graph=4)


def test_gradients_of_inputs_that_are_kept(means):
    """They are the user's: later steps do not write there."""
    dp = means.wrap(Apply(lambda m, x: torch.tanh(m.lin(x))))
    kept = []
    for seed in range(AHEAD + 4):
        leaf = noise(means, 6, 3, seed=seed).requires_grad_()
        (gradient,) = torch.autograd.grad((dp(leaf) ** 2).sum(), leaf)
        kept.append((gradient, gradient.clone()))
    for gradient, value in kept:
        assert torch.equal(gradient, value)
    assert steps(dp) == {"eager": AHEAD, "graph": 4}


def test_inputs_of_a_frozen_module(means):
    """Only the input learns, as where one looks for adversarial samples."""
    twins = Twins(means, Apply(lambda m, x: torch.tanh(m.lin(x))), optimizer=False)
    twins.each(lambda module: module.requires_grad_(False))
    for seed in range(AHEAD + 4):
        leaves = [noise(means, 6, 3, seed=seed).requires_grad_() for _ in range(2)]
        grads = [
            torch.autograd.grad((dp(leaf) ** 2).sum(), leaf)[0]
            for dp, leaf in zip(twins.both, leaves)
        ]
        identical(*grads)
    twins.ran(eager=AHEAD, graph=4)


def test_whether_an_input_needs_gradients_is_a_signature(means):
    twins = Twins(means, Apply(lambda m, x: torch.tanh(m.lin(x))))
    for seed in range(2 * AHEAD + 2):
        x = noise(means, 6, 3, seed=seed)
        twins.step(x)
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        for dp, leaf in zip(twins.both, leaves):
            (dp(leaf) ** 2).sum().backward()
        identical(*[leaf.grad for leaf in leaves])
    twins.ran(eager=2 * AHEAD, graph=2 * (AHEAD + 2))
