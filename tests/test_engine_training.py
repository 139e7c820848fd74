"""Recorded training steps give the bits of eager ones: outputs, gradients, parameters, buffers, for
many steps and many kinds of models; and they are recorded ones."""

import copy

import pytest
import torch
from engine_cases import SETTLED, SEVERAL, WATCHED, Twins, identical, noise, reasons, squares
from torch import nn
from torch.utils.checkpoint import checkpoint

AHEAD = WATCHED["graph"]


def seeded(make):
    torch.manual_seed(3)
    return make().double()


def convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 3)
    )


def layers():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def images(means, seed):
    return noise(means, 6, 2, 5, 5, seed=seed)


def rows(means, seed, width=4, batch=6):
    return noise(means, batch, width, seed=seed)


def train(twins, means, make=rows, count=AHEAD + 4, **options):
    for seed in range(count):
        twins.step(make(means, seed), **options)


# Loops.


@pytest.mark.parametrize("engine", ["auto", "graph"])
def test_training(means, engine):
    twins = Twins(means, seeded(convolutions), engine)
    watched = {"graph": AHEAD, "auto": SETTLED - 2}[engine]  # two steps of a trial are recorded
    train(twins, means, images, SETTLED + 4)
    twins.ran(eager=watched, graph=SETTLED + 4 - watched)
    assert [f["engine"] for f in twins.recorded.report()["forwards"]] == ["graph"]


def test_buffers_are_the_first_replicas_and_written_once_a_step(means):
    norm = nn.BatchNorm1d(4, momentum=0.5).double()
    twins = Twins(means, norm)
    x = rows(means, 0)
    for step in range(AHEAD + 3):
        twins.step(x + step)
        assert norm.num_batches_tracked == step + 1
    first = (x + AHEAD + 2).chunk(means.replicas)[0]
    before = rows(means, 0).chunk(means.replicas)[0] + AHEAD + 1
    assert not torch.equal(first.mean(0), before.mean(0))
    recent = norm.running_mean.clone()
    twins.step(x)
    want = 0.5 * recent + 0.5 * x.chunk(means.replicas)[0].mean(0)
    torch.testing.assert_close(norm.running_mean, want)
    twins.ran(eager=AHEAD, graph=4)


def test_accumulation(means):
    twins = Twins(means, seeded(convolutions), optimizer=False)
    optimizers = [torch.optim.Adam(dp.parameters()) for dp in twins.both]
    for seed in range(AHEAD + 8):
        twins.step(images(means, seed))
        if seed % 3 == 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    twins.ran(eager=AHEAD, graph=8)


def test_gradients_are_new_memory_each_step(means):
    twins = Twins(means, seeded(layers))
    train(twins, means)
    kept = [p.grad for p in twins.recorded.module.parameters()]
    values = [grad.clone() for grad in kept]
    twins.step(rows(means, 9))
    for grad, value, parameter in zip(kept, values, twins.recorded.module.parameters()):
        identical(grad, value)
        assert parameter.grad is not grad


def test_outputs_that_are_kept_do_not_change(means):
    twins = Twins(means, seeded(layers))
    kept = []
    for seed in range(AHEAD + 6):
        output = twins.step(rows(means, seed))
        kept.append((output, output.detach().clone()))
    for output, value in kept:
        assert torch.equal(output, value)
    twins.ran(eager=AHEAD, graph=6)


def test_losses_that_are_kept_leave_the_recording_free(means):
    twins = Twins(means, seeded(layers))
    losses = []

    def keep(output):
        losses.append(squares(output))
        return losses[-1]

    train(twins, means, loss=keep)
    twins.ran(eager=AHEAD, graph=4)


def test_writes_through_data(means):
    """As a moving average, or a clamp of weights after the step, writes."""
    twins = Twins(means, seeded(convolutions))
    for seed in range(AHEAD + 4):
        twins.step(images(means, seed))
        for dp in twins.both:
            for parameter in dp.module.parameters():
                parameter.data.mul_(0.75).add_(seed)
            dp.module[1].running_mean.data.fill_(seed)
    twins.ran(eager=AHEAD, graph=4)


def test_weights_that_are_loaded(means):
    twins = Twins(means, seeded(convolutions))
    train(twins, means, images)
    state = {name: value / 2 for name, value in seeded(convolutions).state_dict().items()}
    twins.each(lambda module: module.load_state_dict(state))
    train(twins, means, images, 2)
    twins.ran(eager=AHEAD, graph=6)


@pytest.mark.parametrize("optimizer", ["foreach", "clipped", "set_to_zero"])
def test_what_loops_do_to_gradients(means, optimizer):
    twins = Twins(means, seeded(layers), optimizer=False)
    made = [torch.optim.SGD(dp.parameters(), 0.05, foreach=True) for dp in twins.both]
    for seed in range(AHEAD + 3):
        twins.step(rows(means, seed))
        for dp, one in zip(twins.both, made):
            if optimizer == "clipped":
                nn.utils.clip_grad_norm_(dp.parameters(), 0.5)
            one.step()
            one.zero_grad(set_to_none=optimizer != "set_to_zero")
    twins.check_state()
    twins.ran(eager=AHEAD, graph=3)


# Models.


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))
        self.shift = nn.Parameter(torch.randn(3))

    def double(self):
        return self  # Module.double would make the complex one real

    def forward(self, x):
        return x.to(self.weight.dtype) @ self.weight + self.shift


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn = getattr(nn, kind)(4, 8, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.rnn(x[:, None] * torch.ones(1, 3, 1, device=x.device))[0]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 5 * gradient * x  # not the derivative: it must be this that runs


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return Cube.apply(self.layer(x))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.block(x[:, None] * torch.ones(1, 3, 1, device=x.device))


class Inplace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x.mul_(2)).relu_()


MODELS = {
    "tied": Tied,
    "frozen": Frozen,
    "complex": Complex,
    "custom function": Custom,
    "attention": Attention,
    "lists": lambda: nn.Sequential(*[nn.Linear(4, 4, bias=b % 2 == 0) for b in range(5)]),
    "one bucket each": layers,
    "embedding": lambda: nn.Sequential(Rounded(), nn.Embedding(7, 3)),
    "layer norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU()),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
}


class Rounded(nn.Module):
    def forward(self, x):
        return x.abs().long() % 7


@pytest.mark.parametrize("name", MODELS)
def test_models(means, name):
    options = {"bucket_bytes": 1} if name == "one bucket each" else {}
    twins = Twins(means, seeded(MODELS[name]), **options)
    train(twins, means, count=AHEAD + 3)
    twins.ran(eager=AHEAD, graph=3)


@pytest.mark.parametrize("means", SEVERAL, indirect=True)
def test_a_forward_that_writes_its_input(means):
    twins = Twins(means, seeded(Inplace))
    train(twins, means, count=AHEAD + 3)
    twins.ran(eager=AHEAD, graph=3)


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
def test_recurrent_nets(means, kind):
    # On the host their kernels round by where their memory begins.
    atol = 1e-15 if means.on_host else 0.0
    twins = Twins(means, seeded(lambda: Recurrent(kind)), atol=atol)
    train(twins, means, count=AHEAD + 3)
    twins.ran(eager=AHEAD, graph=3)


def test_two_precisions_in_one_module(means):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.short, self.single = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 3)

        def forward(self, x):
            return self.single(self.short(x.bfloat16()).float())

    torch.manual_seed(3)
    twins = Twins(means, Mixed())
    train(twins, means, count=AHEAD + 3)
    twins.ran(eager=AHEAD, graph=3)


def test_autocast(means):
    torch.manual_seed(3)
    twins = Twins(means, nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)))

    def step(enabled, seed):
        x = rows(means, seed).float()
        with torch.autocast(means.home.type, torch.bfloat16, enabled=enabled):
            output = twins.step(x, loss=lambda out: squares(out.float()))
        assert output.dtype == (torch.bfloat16 if enabled else torch.float32)

    for seed in range(AHEAD + 3):
        step(True, seed)
    twins.ran(eager=AHEAD, graph=3)
    for seed in range(AHEAD + 2):  # another signature: the dtype of the recording is baked in
        step(False, seed)
    twins.ran(eager=2 * AHEAD, graph=5)
    step(True, 0)
    twins.ran(eager=2 * AHEAD, graph=6)


@pytest.mark.parametrize("unused_grad", ["zero", "none"])
def test_unused_parameters(means, unused_grad):
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.used(x)

    # Within a used bucket, and in one of its own.
    for bucket_bytes in (1 << 20, 1):
        twins = Twins(means, seeded(Unused), unused_grad=unused_grad, bucket_bytes=bucket_bytes)
        for seed in range(AHEAD + 3):
            twins.step(rows(means, seed))
        gradient = twins.recorded.module.unused.weight.grad
        if means.replicas > 1:
            assert (gradient is None) == (unused_grad == "none")
        twins.ran(eager=AHEAD, graph=3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside(means, reentrant):
    """Torch refuses the older kind under autograd.grad(), which recordings are made by."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            hidden = torch.tanh(self.first(x))
            return checkpoint(
                self.second, hidden, use_reentrant=reentrant, preserve_rng_state=False
            )

    twins = Twins(means, seeded(Checkpointed), "auto")
    train(twins, means, count=SETTLED + 3)
    if reentrant:
        twins.ran(eager=SETTLED + 3)
        assert "use_reentrant=True" in reasons(twins.recorded)
    else:
        twins.ran(eager=SETTLED - 2, graph=5)


@pytest.mark.parametrize("means", SEVERAL, indirect=True)
def test_a_compiled_part(means):
    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.part = torch.compile(nn.Linear(4, 3), backend="eager")

        def forward(self, x):
            return self.part(torch.tanh(self.first(x)))

    twins = Twins(means, seeded(Compiled), "auto")
    train(twins, means, count=SETTLED + 3)
    twins.ran(eager=SETTLED - 2, graph=5)


def test_copies_of_a_trained_wrapper(means):
    twins = Twins(means, seeded(convolutions))
    train(twins, means, images)
    copied = copy.deepcopy(twins.recorded)
    x = images(means, 7)
    identical(copied.module(x), twins.eager.module(x))
