"""Random numbers of recorded steps: they differ from step to step and from replica to replica,
follow torch.manual_seed, and are those that eager steps would have drawn; an eager step after them
goes on where they ended. And what a warm-up leaves as it was."""

import contextlib
import random

import numpy
import pytest
import torch
from engine_cases import SETTLED, WATCHED, Twins, identical, noise, reasons, squares, steps
from engine_cases import rows_of_four as rows
from nets import Apply
from torch import nn

import fastdp
from fastdp import watch

AHEAD = WATCHED["graph"]


@pytest.fixture(autouse=True)
def _the_hosts_generator_stands_in(request, monkeypatch):
    """On the host a forward that draws numbers is refused. For these tests the host's generator
    plays a GPU's, whose numbers may be drawn."""
    if not request.node.callspec.params["means"].startswith("cpu"):
        return
    states = watch._generator_states

    def others():
        return {name: state for name, state in states().items() if "torch's" not in name}

    monkeypatch.setattr(watch, "_generator_states", others)


def states(means):
    """Of every generator of the replicas' devices."""
    if means.on_host:
        return [torch.get_rng_state()]
    return [torch.cuda.get_rng_state(device) for device in sorted(set(means.ids))]


def dropping():
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3), nn.Dropout(0.25)
    ).double()


def trained(means, dp, count, first=0):
    """[(output, gradients, generator states) of each of some steps]."""
    optimizer = torch.optim.SGD(dp.parameters(), 0.05, momentum=0.9)
    found = []
    for seed in range(first, first + count):
        optimizer.zero_grad()
        output = dp(rows(means, seed))
        squares(output).backward()
        gradients = [p.grad.clone() for p in dp.parameters()]
        found.append((output.detach().clone(), gradients, states(means)))
        optimizer.step()
    return found


@pytest.mark.parametrize("engine", ["auto", "graph"])
def test_the_numbers_of_eager_steps(means, engine):
    """Outputs, gradients and the state of the generators after each step."""
    module = dropping()
    twins = Twins(means, module, engine, optimizer=False, sequential=True)
    count = SETTLED + 6
    found = []
    for dp in twins.both:
        torch.manual_seed(77)
        found.append(trained(means, dp, count))
    identical(*found)
    ahead = {"auto": SETTLED - 2, "graph": AHEAD}[engine]
    twins.ran(eager=ahead, graph=count - ahead)


def test_eager_goes_on_where_recorded_steps_ended(means):
    module = dropping()
    twins = Twins(means, module, optimizer=False, sequential=True)
    found = []
    for dp in twins.both:
        torch.manual_seed(78)
        steps_before = trained(means, dp, AHEAD + 3)
        dp.engine = "eager"
        found.append(steps_before + trained(means, dp, 2))
        outside = torch.rand(3, device=means.home)
        found[-1].append((outside, [], states(means)))
    identical(*found)
    twins.recorded.engine = "graph"
    twins.ran(eager=AHEAD, graph=3)


def test_recorded_steps_go_on_where_eager_ones_ended(means):
    """With other draws between the steps, as of an augmentation on the device."""
    twins = Twins(means, dropping(), optimizer=False, sequential=True)
    found = []
    for dp in twins.both:
        torch.manual_seed(79)
        outputs = []
        for seed in range(AHEAD + 4):
            noisy = rows(means, seed) + torch.rand(6, 4, device=means.home, dtype=torch.float64)
            outputs.append(dp(noisy).detach())
        found.append(outputs)
    identical(*found)
    twins.ran(eager=AHEAD, graph=4)


def test_the_seed_decides(means):
    dp = means.wrap(dropping(), sequential=True)
    ones = torch.ones(6, 4, device=means.home, dtype=torch.float64)

    def drawn(seed):
        torch.manual_seed(seed)
        return dp(ones).detach().clone()

    for _ in range(AHEAD):
        drawn(0)
    first, again, other = drawn(5), drawn(5), drawn(6)
    assert torch.equal(first, again) and not torch.equal(first, other)
    following = dp(ones).detach()
    assert not torch.equal(following, other), "each step has its own numbers"
    pieces = first.chunk(means.replicas)
    for rank, piece in enumerate(pieces[1:]):
        if means.ids[0] == means.ids[rank + 1]:
            assert not torch.equal(piece, pieces[0]), "each replica has its own"
    assert steps(dp) == {"eager": AHEAD, "graph": 4}


def test_generator_states_that_are_put_back(means):
    """As a resumed run does."""
    dp = means.wrap(dropping(), sequential=True)
    for seed in range(AHEAD + 1):
        dp(rows(means, seed))
    if means.on_host:
        kept = torch.get_rng_state()
    else:
        kept = torch.cuda.get_rng_state_all()
    first = dp(rows(means)).detach().clone()
    dp(rows(means))
    if means.on_host:
        torch.set_rng_state(kept)
    else:
        torch.cuda.set_rng_state_all(kept)
    identical(dp(rows(means)).detach(), first)
    assert steps(dp)["graph"] == 4


def test_evaluation_draws_nothing(means):
    dp = means.wrap(dropping().eval(), sequential=True)
    with torch.no_grad():
        before = states(means)
        for _ in range(AHEAD + 2):
            dp(rows(means))
        identical(states(means), before)
    assert steps(dp)["graph"] == 2


def attended(x):
    x = x.view(x.shape[0], 1, 2, 2)
    return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5).flatten(1)


DRAWS = {
    "noise": lambda m, x: m.lin(x[:, :3] + torch.randn_like(x[:, :3])),
    "uniform in place": lambda m, x: m.lin(x[:, :3] * torch.empty_like(x[:, :3]).uniform_(1, 2)),
    "bernoulli": lambda m, x: m.lin(x[:, :3]) * torch.bernoulli(torch.full_like(x[:, :2], 0.5)),
    "attention": lambda m, x: m.lin(attended(x)[:, :3]),
    "leaky": lambda m, x: nn.functional.rrelu(m.lin(x[:, :3]), training=True),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws(means, name):
    twins = Twins(means, Apply(DRAWS[name]), optimizer=False, sequential=True)
    found = []
    for dp in twins.both:
        torch.manual_seed(80)
        found.append(trained(means, dp, AHEAD + 3))
    identical(*found)
    twins.ran(eager=AHEAD, graph=3)


# Warm-up.


@pytest.mark.parametrize("engine", ["eager", "auto", "graph"])
def test_a_warm_up_leaves_all_as_it_was(means, engine):
    """Buffers, gradients, and every generator; the step is recorded by then."""
    torch.manual_seed(4)
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)).double()
    twins = Twins(means, module, engine, sequential=True)
    for dp in twins.both:
        torch.manual_seed(3)
        dp(rows(means)).sum().backward()
    random.seed(1), numpy.random.seed(1), torch.manual_seed(81)
    dp = twins.recorded
    kept = {name: value.clone() for name, value in dp.state_dict().items()}
    gradients = [p.grad.clone() for p in dp.parameters()]
    before = states(means), torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1]
    assert dp.warmup(rows(means, 5)) is None
    after = states(means), torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1]
    identical(list(after[:2]), list(before[:2]))
    assert after[2] == before[2] and (after[3] == before[3]).all()
    identical(dict(dp.state_dict()), kept)
    identical([p.grad for p in dp.parameters()], gradients)
    if engine != "eager":
        assert dp.report()["forwards"][0]["engine"] == "graph"
    found = []
    for dp in twins.both:
        torch.manual_seed(82)
        found.append(trained(means, dp, SETTLED + 1))
    identical(*found)


@pytest.mark.parametrize("engine", ["eager", "auto", "graph"])
def test_a_warm_up_leaves_buffers_that_a_forward_binds_anew(means, engine):
    """Where there is one replica it is the module itself."""

    def averages(module, x):
        module.mean = 0.9 * module.mean + 0.1 * x.detach().mean(0)
        module.count += 1
        module.last = x.detach()
        return module.lin(x - module.mean)

    module = Apply(averages)
    module.register_buffer("mean", torch.zeros(3).double())
    module.register_buffer("count", torch.zeros(()), persistent=False)
    module.register_buffer("last", None)
    dp = means.wrap(module, engine)
    held = dict(module._buffers)
    with contextlib.suppress(fastdp.EngineError):
        dp.warmup(noise(means, 6, 3))
    assert all(module._buffers[name] is held[name] for name in held)
    assert not module.mean.any() and module.count == 0


def test_a_warm_up_of_a_forward_that_draws_on_the_host(means):
    """Also Python's and NumPy's numbers are as before."""

    def draws(module, x):
        return module.lin(x[:, :3]) * random.random() * numpy.random.rand()

    dp = means.wrap(Apply(draws), "auto", sequential=True)
    random.seed(1), numpy.random.seed(1)
    dp.warmup(rows(means))
    got = random.random(), numpy.random.rand()
    random.seed(1), numpy.random.seed(1)
    assert got == (random.random(), numpy.random.rand())
    assert "Python's random" in reasons(dp)


@pytest.mark.parametrize("engine", ["auto", "graph"])
def test_the_first_step_after_a_warm_up(means, engine):
    """Is the recorded one."""
    dp = means.wrap(dropping(), engine, sequential=True)
    dp.warmup(rows(means))
    before = steps(dp)
    dp(rows(means)).sum().backward()
    assert steps(dp)["graph"] == before["graph"] + 1


def test_a_warm_up_for_evaluation(means):
    twins = Twins(means, dropping().eval(), optimizer=False)
    with torch.no_grad():
        twins.recorded.warmup(rows(means))
        before = steps(twins.recorded)["graph"]
        twins.look(rows(means, 3))
    assert steps(twins.recorded)["graph"] == before + 1
    with torch.inference_mode():
        twins.recorded.warmup(rows(means))


def test_errors_of_a_warm_up(means):
    dp = means.wrap(dropping())
    kept = states(means)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        dp.warmup(noise(means, 6, 5))
    identical(states(means), kept)
    refusing = means.wrap(Apply(lambda m, x: print("hm") or m.lin(x[:, :3])))
    with pytest.raises(fastdp.EngineError, match="writes to sys.stdout"):
        for _ in range(SETTLED):
            refusing.warmup(rows(means))
