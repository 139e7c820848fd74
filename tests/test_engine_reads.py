"""What a forward reads that is no argument, parameter or buffer: it is kept alive, or the step is
not recorded. What cannot be seen is shown too, as docs/engines.md tells it."""

import gc

import pytest
import torch
from engine_cases import ON_GPUS, SETTLED, WATCHED, Twins, identical, noise, reasons, squares, steps
from nets import Apply, ints
from torch import nn

import fastdp
from fastdp.reads import Reads

AHEAD = WATCHED["graph"]


def rows(means, seed=0):
    return noise(means, 6, 3, seed=seed)


def train(twins, means, count=SETTLED + 2):
    for seed in range(count):
        twins.step(rows(means, seed))


# Leaves whose gradients would be lost.


def test_a_parameter_of_nobody(means):
    """Of a closure, in no module: it gets its gradient, since the step stays eager."""
    outside = nn.Parameter(noise(means, 2, seed=40))
    module = Apply(lambda m, x: m.lin(x) * outside.to(x.device))
    twins = Twins(means, module, "auto")
    twins.each(lambda m: setattr(m, "function", module.function))  # deepcopy keeps functions
    gradients = []
    for dp in (*twins.both, twins.recorded):
        outside.grad = None
        for seed in range(SETTLED):
            squares(dp(rows(means, seed))).backward()
        gradients.append(outside.grad)
    for gradient in gradients:
        identical(gradient, gradients[0])
    twins.ran(eager=2 * SETTLED)
    if len(set(means.ids)) > 1:  # said first
        assert "that is no argument, parameter or buffer" in reasons(twins.recorded)
        return
    assert "that needs gradients and is no parameter of its replica" in reasons(twins.recorded)


@pytest.mark.parametrize("means", ["cpu", "cpu-twice", "gpu", "gpu-twice"], indirect=True)
def test_the_modules_own_parameter_by_another_way(means):
    """A closure over the module itself reads past the replica."""
    twins = Twins(means, Apply(None), "auto", optimizer=False, sequential=True)
    for dp in twins.both:
        base = dp.module
        base.function = lambda m, x, base=base: m.lin(x) + base.lin.weight[:, 0]
    train(twins, means)
    assert steps(twins.recorded)["graph"] == 0
    assert "that needs gradients and is no parameter of its replica" in reasons(twins.recorded)


def test_leaves_that_a_forward_makes(means):
    """Forces as the derivative of an energy: a leaf of the forward's own is no stranger."""

    def forces(module, x):
        place = x.detach().requires_grad_()
        energy = module.lin(place).pow(2).sum()
        (slope,) = torch.autograd.grad(energy, place, create_graph=True)
        return slope

    class Forces(Apply):
        def forward(self, x):
            with torch.enable_grad():
                return self.function(self, x)

    twins = Twins(means, Forces(forces), lr=1e-6)
    train(twins, means, AHEAD + 3)
    twins.ran(eager=AHEAD, graph=3)


def test_a_leaf_that_forward_reads_without_gradients(means):
    outside = nn.Parameter(noise(means, 2, seed=40))
    twins = Twins(means, Apply(lambda m, x: m.lin(x) * outside.detach().to(x.device)), lr=1e-6)
    if len(set(means.ids)) == 1:
        train(twins, means, AHEAD + 2)
        twins.ran(eager=AHEAD, graph=2)


# Values.


@pytest.mark.parametrize("means", ON_GPUS, indirect=True)
def test_a_tensor_on_the_host(means):
    """Its value would be baked in."""
    factor = torch.tensor(2.0, dtype=torch.float64)
    twins = Twins(means, Apply(lambda m, x: m.lin(x) * factor), "auto", lr=1e-6)
    for seed in range(SETTLED + 2):
        twins.step(rows(means, seed))
        factor += 1
    twins.ran(eager=SETTLED + 2)
    assert "on cpu that is no argument, parameter or buffer" in reasons(twins.recorded)


@pytest.mark.parametrize("means", ["gpu", "gpu-twice"], indirect=True)
def test_a_global_tensor_lives_as_long_as_its_recording(means):
    """Dropped by everybody else: what is at its address is still it."""
    outside = {"table": noise(means, 1 << 16, seed=40)}
    twins = Twins(means, Apply(lambda m, x: m.lin(x) * outside["table"][:2]), optimizer=False)
    train(twins, means, AHEAD + 1)
    want = twins.recorded(rows(means)).detach()
    outside.clear()
    gc.collect()
    poison = [torch.full((1 << 16,), float("nan"), device=means.home) for _ in range(8)]
    identical(twins.recorded(rows(means)).detach(), want)
    assert steps(twins.recorded)["graph"] == 3 and len(poison) == 8


@pytest.mark.parametrize("means", ["gpu", "gpu-twice"], indirect=True)
def test_a_global_tensor_that_is_written_in_place_is_read_anew(means):
    outside = noise(means, 2, seed=40)
    twins = Twins(means, Apply(lambda m, x: m.lin(x) * outside), lr=1e-6)
    for seed in range(AHEAD + 3):
        twins.step(rows(means, seed))
        outside += 1
    twins.ran(eager=AHEAD, graph=3)


@pytest.mark.parametrize("means", ON_GPUS, indirect=True)
def test_a_global_number_is_frozen(means):
    """The limit that docs/engines.md tells of: nothing shows that a global was changed."""
    outside = {"factor": 2.0}
    dp = means.wrap(Apply(lambda m, x: m.lin(x) * outside["factor"]))
    with torch.no_grad():
        for _ in range(AHEAD + 1):
            want = dp(rows(means))
        outside["factor"] = 3.0
        identical(dp(rows(means)), want)
    assert steps(dp) == {"eager": AHEAD, "graph": 2}


def test_constants_that_a_forward_makes(means):
    """torch.tensor(...) of numbers, arange, zeros: made anew in each replay, or baked in alike."""

    def constants(module, x):
        steps = torch.arange(2, device=x.device, dtype=x.dtype)
        return module.lin(x) * steps + torch.zeros(2, device=x.device, dtype=x.dtype)

    twins = Twins(means, Apply(constants), lr=1e-6)
    train(twins, means, AHEAD + 3)
    twins.ran(eager=AHEAD, graph=3)


def test_a_plain_attribute(means):
    """A tensor that is no buffer: replaced or, on the host, written, it is recorded anew."""
    module = Apply(lambda m, x: m.lin(x) * m.table.to(x.device))
    module.table = noise(means, 2, seed=40)
    twins = Twins(means, module, "auto", lr=1e-6)
    train(twins, means)
    twins.each(lambda m: setattr(m, "table", m.table * 2))
    train(twins, means)
    if len(set(means.ids)) == 1:
        assert [f["engine"] for f in twins.recorded.report()["forwards"]] == ["graph"]


# What a forward writes of what it reads: once, as often as steps are taken.


def decays(module, x):
    module.lin.weight.data.mul_(0.9)
    return module.lin(x)


def clips(module, x):
    with torch.no_grad():
        module.lin.weight.add_(0.125).clamp_(-0.25, 0.25)
        torch._foreach_mul_([module.lin.bias], 0.5)
    return module.lin(x)


def follows(module, x):
    """As a key encoder's momentum."""
    with torch.no_grad():
        for mine, others in zip(module.key.parameters(), module.lin.parameters()):
            mine.mul_(0.75).add_(others, alpha=0.25)
    return module.lin(x) * module.key(x)


def renormalizes(module, x):
    norm = module.lin.weight.data.norm(dim=1, keepdim=True)
    torch.div(module.lin.weight.data, norm, out=module.lin.weight.data)
    return module.lin(x)


def accumulates(module, x):
    output = module.lin(x)
    module.table.add_(output.detach().sum(0))
    return output * module.table.clone()


@pytest.mark.parametrize("forward", [decays, clips, follows, renormalizes])
def test_parameters_that_a_forward_writes(means, forward):
    """While it is recorded it runs more often, and what it writes is put back."""
    module = Apply(forward)
    module.key = nn.Linear(3, 2).double().requires_grad_(False)
    twins = Twins(means, module, lr=1e-3)
    train(twins, means, AHEAD + 3)
    twins.ran(eager=AHEAD, graph=3)


@pytest.mark.parametrize("means", ["gpu"], indirect=True)
def test_a_plain_attribute_that_a_forward_writes(means):
    module = Apply(accumulates)
    module.table = torch.zeros(2, dtype=torch.float64, device=means.home)
    twins = Twins(means, module, lr=1e-6)
    train(twins, means, AHEAD + 3)
    identical(*[dp.module.table for dp in twins.both])
    twins.ran(eager=AHEAD, graph=3)


# Buffers that a forward might resize, as those of quantization's observers are.


@pytest.mark.parametrize("shape", [(1,), (0,)], ids=["one", "none"])
def test_buffers_of_one_element(means, shape):
    """In an eager step they are in no bucket; in a recorded one nothing grows."""

    def forward(module, x):
        module.scale.mul_(0.5)
        return module.lin(x) * (module.scale.clone() if shape == (1,) else module.shift)

    module = Apply(forward)
    for name in ("scale", "shift"):
        module.register_buffer(name, noise(means, *(shape if name == "scale" else (2,)), seed=41))
    twins = Twins(means, module, lr=1e-3)
    train(twins, means, AHEAD + 3)
    twins.ran(eager=AHEAD, graph=3)
    twins.each(lambda module: module.scale.fill_(3.0))
    train(twins, means, 1)


RESIZES = {
    "resize_": lambda tensor, like: tensor.resize_(like.shape),
    "resize_as_": lambda tensor, like: tensor.resize_as_(like),
    "out": lambda tensor, like: torch.neg(like, out=tensor),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("resize", RESIZES.values(), ids=RESIZES.keys())
def test_a_forward_that_resizes_a_buffer(means, resize):
    """In the slot of a bucket it would grow over what lies behind it."""

    def grows(module, x):
        resize(module.scale, x[0, :2]).fill_(3.0)
        output = module.lin(x) * module.scale.clone()
        resize(module.scale, x[0, :1]).fill_(1.0)
        return output

    module = Apply(grows)
    module.register_buffer("scale", torch.ones(1, dtype=torch.float64))
    twins = Twins(means, module, "auto", lr=1e-3)
    train(twins, means, AHEAD + 3)
    assert steps(twins.recorded)["graph"] == 0
    assert "it resizes a tensor of shape (1,) that it was given to (2,)" in reasons(twins.recorded)
    assert module.scale.shape == (1,) and twins.recorded.module.scale.shape == (1,)
    strict = means.wrap(Apply(grows), "graph")
    strict.module.register_buffer("scale", torch.ones(1, dtype=torch.float64, device=means.home))
    with pytest.raises(fastdp.EngineError, match="it resizes a tensor"):
        for _ in range(AHEAD + 2):  # the first step gives the buffer more memory
            squares(strict(rows(means))).backward()


def test_another_view_of_an_argument_is_no_other_size():
    x = ints(4, 3)
    with Reads(x.device, [x]):
        assert x.unsqueeze_(1).transpose_(0, 2).shape == (3, 1, 4)
