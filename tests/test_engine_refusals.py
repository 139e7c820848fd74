"""Forwards that a recording would freeze: under "auto" they stay eager, right, and say why; under
"graph" they are an error that says it, after which the wrapper runs on with engine "eager"."""

import logging
import random
import re
import sys

import numpy
import pytest
import torch
from engine_cases import (
    SETTLED,
    SEVERAL,
    WATCHED,
    Recorder,
    Twins,
    identical,
    noise,
    reasons,
    steps,
)
from nets import Apply
from torch import nn

import fastdp

AHEAD = WATCHED["graph"]


def rows(means, seed=0):
    return noise(means, 6, 3, seed=seed)


def counts(module, x):
    module.calls = getattr(module, "calls", 0) + 1
    return module.lin(x)


def fills_a_list(module, x):
    module.seen.append(x.shape[0])
    return module.lin(x)


def fills_a_dict(module, x):
    module.cache["last"] = x.shape
    module.cache[len(module.cache)] = 1
    return module.lin(x)


def adds_a_module(module, x):
    module.extra = nn.Identity()
    return module.lin(x)


def writes_a_number_of_a_part(module, x):
    module.lin.times = getattr(module.lin, "times", 0) + 1
    return module.lin(x)


def prints(module, x):
    print("batch of", len(x))
    return module.lin(x)


def logs(module, x):
    logging.getLogger("model").warning("batch of %d", len(x))
    return module.lin(x)


def writes_to_stderr(module, x):
    sys.stderr.write(".")
    return module.lin(x)


def draws_python(module, x):
    return module.lin(x) * (1 + random.random())


def draws_numpy(module, x):
    return module.lin(x) * (1 + numpy.random.rand())


def draws_torch_on_the_host(module, x):
    return module.lin(x) * (1 + torch.rand(()).item())


REFUSED = {
    counts: "changes what modules hold: Apply.calls",
    fills_a_list: "changes what modules hold: Apply.seen",
    fills_a_dict: "changes what modules hold: Apply.cache",
    adds_a_module: "changes what modules hold",
    writes_a_number_of_a_part: "changes what modules hold: Linear.times",
    prints: "writes to sys.stdout: 'batch of'",
    logs: "makes log records: model: ",
    writes_to_stderr: r"writes to sys.stderr: '\.'",
    draws_python: "draws from Python's random",
    draws_numpy: "draws from NumPy's global generator",
    draws_torch_on_the_host: "draws from torch's generator of the host",
}


def made(function):
    module = Apply(function)
    module.seen, module.cache = [], {}
    return module


def seeded(seed):
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_auto_stays_eager(means, function, capsys, caplog):
    caplog.set_level(logging.INFO, "fastdp")
    twins = Twins(means, made(function), "auto", optimizer=False, sequential=True)
    for seed in range(SETTLED + 3):
        outputs = []
        for dp in twins.both:
            seeded(seed)
            dp.zero_grad()
            outputs.append(dp(rows(means, seed)))
            outputs[-1].square().sum().backward()
        twins.check_outputs(*outputs)
        twins.check_gradients()
    twins.ran(eager=SETTLED + 3)
    assert re.search(REFUSED[function], reasons(twins.recorded)), reasons(twins.recorded)
    said = [r.getMessage() for r in caplog.records if r.name == "fastdp"]
    assert len(said) == 1 and re.search(REFUSED[function], said[0])
    (forward,) = twins.recorded.report()["forwards"]
    assert forward["engine"] == "eager" and forward["reason"] in said[0]
    assert forward["reason"] in str(twins.recorded.report())


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_graph_is_an_error(means, function, capsys):
    """It names what stands against; the wrapper goes on as "eager", or as "auto"."""
    dp = means.wrap(made(function), sequential=True)
    plain = means.wrap(made(function), "eager", sequential=True)
    with pytest.raises(fastdp.EngineError, match=REFUSED[function]) as caught:
        for _ in range(SETTLED):
            dp(rows(means))
    assert str(caught.value).startswith("the forward is not recorded: it ")
    with pytest.raises(fastdp.EngineError, match=REFUSED[function]):
        dp(rows(means))
    for engine in ("eager", "auto"):
        dp.engine = engine
        for wrapped in (dp, plain):
            seeded(1)
            wrapped.zero_grad()
            output = wrapped(rows(means))
            output.square().sum().backward()
        identical(dp.module.lin.weight.grad, plain.module.lin.weight.grad)


def test_what_is_said_once_is_no_obstacle(means, capsys):
    """A model that prints at its first forward is recorded a little later."""

    def greets(module, x):
        if x.device not in GREETED:
            GREETED.add(x.device)
            print("hello")
        return module.lin(x)

    GREETED = set()
    twins = Twins(means, Apply(greets), "auto")
    for seed in range(SETTLED + 4):
        twins.step(rows(means, seed))
    assert "hello" in capsys.readouterr().out
    assert steps(twins.recorded)["graph"] >= 4
    assert twins.recorded.report()["forwards"][0]["engine"] == "graph"


def test_what_is_set_once_is_no_obstacle(means):
    """A cache that the first forward fills, on the base or on the replicas."""

    def fills(module, x):
        if not module.cache:
            module.cache["scale"] = 2.0
        return module.lin(x) * module.cache["scale"]

    twins = Twins(means, made(fills), "auto")
    for seed in range(2 * SETTLED):
        twins.step(rows(means, seed))
    assert steps(twins.recorded)["eager"] + steps(twins.recorded)["graph"] == 2 * SETTLED


def test_an_error_in_the_forward_is_the_models_own(means):
    """While steps are watched, and where a step is recorded for another shape."""

    def picky(module, x):
        if x.shape[1] != 3:
            raise LookupError("three columns, please")
        return module.lin(x)

    twins = Twins(means, Apply(picky))
    for seed in range(AHEAD + 2):
        for _ in range(2):
            with pytest.raises(LookupError, match="three columns, please"):
                twins.recorded(noise(means, 6, 5))
        twins.step(rows(means, seed))
    assert steps(twins.recorded)["graph"] == 2


# What the wrapper itself does otherwise.


class Doubling(fastdp.DataParallel):
    def gather(self, outputs, output_device):
        return 2 * super().gather(outputs, output_device)


class Counting(fastdp.DataParallel):
    def parallel_apply(self, replicas, inputs, kwargs):
        self.applied = getattr(self, "applied", 0) + len(replicas)
        return super().parallel_apply(replicas, inputs, kwargs)


class Replicating(fastdp.DataParallel):
    def replicate(self, module, device_ids):
        self.applied = getattr(self, "applied", 0) + len(device_ids)
        return super().replicate(module, device_ids)


@pytest.mark.parametrize("means", SEVERAL, indirect=True)
@pytest.mark.parametrize("cls", [Doubling, Counting, Replicating])
def test_overridden_steps(means, cls):
    """They run at every step, and the reason names them."""
    name = next(name for name in ("gather", "parallel_apply", "replicate") if name in vars(cls))
    module = Apply(lambda m, x: m.lin(x))
    dp, plain = means.wrap(module, "auto", cls=cls), means.wrap(module, "eager")
    factor = 2 if cls is Doubling else 1
    for seed in range(SETTLED + 2):
        identical(dp(rows(means, seed)), factor * plain(rows(means, seed)))
    assert steps(dp)["graph"] == 0
    assert f"{cls.__name__} has its own {name}()" in reasons(dp)
    if cls is not Doubling:
        assert dp.applied == (SETTLED + 2) * means.replicas
    with pytest.raises(fastdp.EngineError, match=rf"has its own {name}\(\)"):
        means.wrap(module, cls=cls)(rows(means))


@pytest.mark.parametrize("means", SEVERAL, indirect=True)
@pytest.mark.parametrize("name", ["gather", "parallel_apply", "replicate"])
def test_steps_overridden_on_the_wrapper_later(means, name):
    twins = Twins(means, Apply(lambda m, x: m.lin(x)), "auto")
    for seed in range(SETTLED + 1):
        twins.step(rows(means, seed))
    before = steps(twins.recorded)["graph"]
    own = getattr(twins.recorded, name)
    calls = []
    setattr(twins.recorded, name, lambda *args: calls.append(args) or own(*args))
    twins.step(rows(means))
    delattr(twins.recorded, name)
    twins.step(rows(means))
    assert len(calls) == 1 and steps(twins.recorded)["graph"] == before + 1


@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0")
@pytest.mark.parametrize(
    "options", [{"gather_outputs": False}, {"loss_weighting": "chunk"}], ids=lambda o: next(iter(o))
)
def test_outputs_that_are_not_just_joined(means, options):
    module = Apply(lambda m, x: m.lin(x).square().mean())
    dp, plain = means.wrap(module, "auto", **options), means.wrap(module, "eager", **options)
    for seed in range(SETTLED + 2):
        identical(dp(rows(means, seed)), plain(rows(means, seed)))
    assert steps(dp)["graph"] == 0
    assert "gather_outputs=False and loss_weighting" in reasons(dp)
    with pytest.raises(fastdp.EngineError, match="gather_outputs=False"):
        means.wrap(module, **options)(rows(means))


def test_another_method(means):
    """call() is eager; forwards of the same wrapper are recorded."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 2).double()

        def forward(self, x):
            return self.layer(x)

        def embed(self, x):
            return 2 * self.layer(x)

    twins = Twins(means, Two(), "auto")
    for seed in range(SETTLED + 2):
        twins.step(rows(means, seed))
        twins.check_outputs(*[dp.call("embed", rows(means, seed)) for dp in twins.both])
    twins.ran(eager=SETTLED - 2, graph=4)
    assert "call() runs 'embed' instead of forward" in reasons(twins.recorded)
    with pytest.raises(fastdp.EngineError, match="call"):
        means.wrap(Two()).call("embed", rows(means))


@pytest.mark.parametrize("means", ["gpu-twice", "gpus"], indirect=True)
def test_an_output_device_of_its_own(means):
    module = Apply(lambda m, x: m.lin(x))
    dp = means.wrap(module, "auto", output_device="cpu")
    assert dp(rows(means)).device.type == "cpu"
    assert "output_device is not device_ids[0]" in reasons(dp)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["scripted", "fx", "lazy"])
def test_modules_that_make_their_own_replicas(means, kind):
    def make():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        if kind == "scripted":
            module[0] = torch.jit.script(module[0])
        elif kind == "fx":
            module = torch.fx.symbolic_trace(module)
        else:
            module[0] = nn.LazyLinear(4).double()
            module(torch.ones(1, 3, dtype=torch.float64))
        return module

    dp, plain = means.wrap(make(), "auto"), means.wrap(make(), "eager")
    for seed in range(SETTLED + 2):
        for wrapped in (dp, plain):
            wrapped.zero_grad()
            wrapped(rows(means, seed)).square().sum().backward()
        for got, want in zip(dp.parameters(), plain.parameters()):
            identical(got.grad, want.grad)
    if kind == "lazy":  # initialised, it is a Linear
        assert steps(dp) == {"eager": SETTLED - 2, "graph": 4}
    else:
        assert steps(dp)["graph"] == 0
        assert "makes its own replicas" in reasons(dp)


@pytest.mark.parametrize("means", ["cpu", "cpu-twice"], indirect=True)
def test_on_the_host_there_is_nothing_to_record(means):
    module = Apply(lambda m, x: m.lin(x))
    auto = fastdp.DataParallel(module, list(means.ids), engine="auto")
    plain = fastdp.DataParallel(module, list(means.ids))
    for seed in range(SETTLED):
        identical(auto(rows(means, seed)), plain(rows(means, seed)))
    assert reasons(auto) == "its replicas run on the host, where there is nothing to record"
    assert "not recorded: its replicas run on the host" in str(auto.report())
    with pytest.raises(fastdp.EngineError, match="run on the host"):
        fastdp.DataParallel(module, list(means.ids), engine="graph")(rows(means))


@pytest.mark.parametrize("means", ["cpu", "cpu-twice"], indirect=True)
def test_a_recorder_that_fails(means):
    """Whatever goes wrong while a step is recorded: the step is right, and stays eager."""

    class Failing(Recorder):
        def record(self, device, pool, act):
            if self.recorded == 1:
                raise MemoryError("no room for another graph")
            return super().record(device, pool, act)

    torch.manual_seed(0)
    twins = Twins(means, nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double(), "auto")
    twins.recorded._fastdp_get_runtime().recorder = Failing()
    for seed in range(SETTLED + 2):
        twins.step(rows(means, seed))
    twins.ran(eager=SETTLED + 2)
    assert "MemoryError: no room for another graph" in reasons(twins.recorded)


class Uncopied(dict):
    def __deepcopy__(self, memo):
        raise ValueError("there is one of me")


def test_an_output_that_cannot_be_copied_is_left_as_it_is(means):
    dp = means.wrap(Apply(lambda m, x: Uncopied(y=m.lin(x))), "auto")
    for _ in range(SETTLED + 1):
        output = dp(torch.ones(6, 3, dtype=torch.float64, device=means.home))
    assert type(output) is Uncopied and output["y"].shape == (6, 2)
    assert "the output cannot be copied: there is one of me" in reasons(dp)
