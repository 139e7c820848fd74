"""Training with torch.compile: inside the wrapper, around it, and around the step."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from programs.sides import check, weights

BATCH = 24


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.last = nn.Linear(6, 10)

    def forward(self, images, labels=None):
        hidden = functional.relu(self.first(images[:, None]))
        hidden = hidden + functional.relu(self.norm(self.second(hidden)))
        scores = self.last(hidden.mean((2, 3)))
        if labels is None:
            return {"scores": scores}
        losses = functional.cross_entropy(scores, labels, reduction="none")
        return {"scores": scores, "losses": losses}


def compiled(module):
    return torch.compile(module, backend="aot_eager")


def inside(side, module):
    return side.wrap(compiled(module.to(side.home)))


def around(side, module):
    return compiled(side.wrap(module))


def in_place(side, module):
    module.compile(backend="aot_eager")
    return side.wrap(module)


def a_part(side, module):
    module.second = compiled(module.second)
    return side.wrap(module)


def train(side, digits, build, compile_step=False):
    """Batches of two sizes, so that shapes change under the compiled code; evaluated in between."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Residual().double()
    model = build(side, module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    def loss_of(images, labels):
        return model(images, labels=labels)["losses"].mean()

    if compile_step:
        loss_of = compiled(loss_of)
    images, labels = (t[: 5 * BATCH - 9].to(side.home) for t in digits)
    losses, results = [], []
    for _ in range(2):
        model.train()
        for x, y in zip(images.split(BATCH), labels.split(BATCH), strict=True):
            loss = loss_of(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            results.append(model(images[:10])["scores"].cpu())
    assert losses[-2] < losses[0]
    torch._dynamo.reset()
    kept = {name.replace("_orig_mod.", ""): t for name, t in weights(module).items()}
    return losses, results, kept


def uncompiled(side, module):
    return side.wrap(module)


@pytest.mark.row("E8")
@pytest.mark.slow
@pytest.mark.parametrize("build", [inside, around, in_place, a_part])
def test_compiled_model(fast, digits, build):
    """The plain side is not compiled; torch's replicas of a compiled module have no weights."""
    check_compiled(fast, lambda side: train(side, digits, build), digits)


@pytest.mark.row("E8")
@pytest.mark.slow
def test_compiled_step(fast, digits):
    """The wrapper is in the middle of what is compiled."""
    check_compiled(fast, lambda side: train(side, digits, uncompiled, compile_step=True), digits)


def check_compiled(fast, program, digits):
    reference = lambda side: train(side, digits, uncompiled)
    check(program, fast, like_torch="unable", reference=reference)
