"""A Wasserstein GAN with a gradient penalty, which differentiates twice through both wrappers."""

import pytest
import torch
from torch import nn

from programs.sides import check, weights

NOISE = 6


def generator():
    return nn.Sequential(
        nn.Linear(NOISE, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 64), nn.Sigmoid()
    )


def critic():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.SiLU(),
        nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.SiLU(),
        nn.Flatten(), nn.Linear(32, 1),
    )  # fmt: skip


def penalty(model, real, fake, mix):
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return ((slope.norm(dim=1) - 1) ** 2).mean()


def train(side, images, batch_size, steps=8, critic_steps=2):
    torch.manual_seed(0)
    makes, judges = side.wrap(generator().double()), side.wrap(critic().double())
    optimizers = [torch.optim.Adam(m.parameters(), lr=2e-3) for m in (makes, judges)]
    draws = torch.Generator().manual_seed(1)

    def noise():
        drawn = torch.randn(batch_size, NOISE, generator=draws, dtype=torch.double)
        return drawn.to(side.home)

    record = []
    for step in range(steps):
        for _ in range(critic_steps):
            chosen = torch.randint(len(images), (batch_size,), generator=draws)
            real = images[chosen].flatten(1).to(side.home)
            fake = makes(noise()).detach()
            mix = torch.rand(batch_size, 1, generator=draws, dtype=torch.double).to(side.home)
            slope = penalty(judges, real, fake, mix)
            loss = judges(fake).mean() - judges(real).mean() + 10 * slope
            judges.zero_grad()
            loss.backward()
            optimizers[1].step()
            record += [loss.item(), slope.item()]
        loss = -judges(makes(noise())).mean()
        makes.zero_grad()
        loss.backward()
        optimizers[0].step()
        record.append(loss.item())
    assert record[-2] < record[1], "the critic's slopes do not come near 1"
    return record, weights(makes), weights(judges)


@pytest.mark.row("D3")
@pytest.mark.parametrize("batch_size, n", [(8, 2), (7, 3)])
def test_gan(fast, digits, batch_size, n):
    """Not bit for bit: three forwards meet in one backward, and the order in which autograd adds
    their gradients hangs on counters that each thread has for itself."""
    check(lambda side: train(side, digits[0], batch_size), fast, n, like_torch="nearly")
