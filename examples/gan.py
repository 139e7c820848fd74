"""A GAN with gradient penalty: two wrapped networks, and a second derivative through one of them.

    python examples/gan.py

The generator learns to throw points on a ring of eight spots, the critic to tell them from real
ones (Wasserstein distance). The penalty needs the gradient of the critic's outputs for its inputs
as part of the loss, which is differentiated again: scatter, broadcast and gather all carry second
derivatives. It must end with most points near a spot, and points at every spot.

The arithmetic is in float64 only so that runs on other devices can be compared: one device, as in
`--devices cpu`, gives the same distances.
"""

import argparse
import math
import sys

import torch
from digits import choose_devices
from torch import nn

import fastdp

BATCH_SIZE = 128
CRITIC_STEPS = 2
NOISE = 4
PENALTY = 1.0
SPOTS = 8
NEAR = 0.5  # neighbouring spots of the ring are 1.53 apart
SEED = 0


def main() -> int:
    args = parse_arguments()
    device = torch.device(args.devices[0])
    torch.manual_seed(SEED)
    generator = fastdp.DataParallel(make_network(NOISE, 2).to(device), args.devices)
    critic = fastdp.DataParallel(make_network(2, 1).to(device), args.devices)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=5e-3, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=5e-3, betas=(0.5, 0.9))

    print(f"untrained: {describe(generator, device)[2]}")
    for step in range(1, args.steps + 1):
        for _ in range(CRITIC_STEPS):
            real, fake = real_points(device), generator(noise(device)).detach()
            distance = critic(real).mean() - critic(fake).mean()
            loss = PENALTY * gradient_penalty(critic, real, fake) - distance
            critic_optimizer.zero_grad()
            loss.backward()
            critic_optimizer.step()
        loss = -critic(generator(noise(device))).mean()
        generator_optimizer.zero_grad()
        loss.backward()
        generator_optimizer.step()
        if step % 100 == 0 or step == args.steps:
            print(f"step {step}/{args.steps}  distance {distance.item():.10f}")

    share, reached, text = describe(generator, device)
    print(f"trained: {text}")
    return 0 if share > 0.4 and reached == SPOTS else 1


def describe(generator: nn.Module, device: torch.device) -> tuple[float, int, str]:
    """Which share of the points is near a spot, how many spots have any, and both in words."""
    with torch.no_grad():
        points = torch.cat([generator(noise(device)) for _ in range(8)])
    far, spot = torch.cdist(points, spots(device)).min(dim=1)
    near = far < NEAR
    share = near.double().mean().item()
    reached = len(set(spot[near].tolist()))
    return share, reached, f"{share:.1%} of the points near a spot, {reached} of {SPOTS} reached"


def gradient_penalty(critic: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """How far the critic's slope is from 1 between real and made points."""
    part = torch.rand(len(real), 1, dtype=torch.float64).to(real)
    between = (part * real + (1 - part) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def spots(device: torch.device) -> torch.Tensor:
    angle = torch.arange(SPOTS, dtype=torch.float64) * (2 * math.pi / SPOTS)
    return 2 * torch.stack([angle.cos(), angle.sin()], dim=1).to(device)


def real_points(device: torch.device) -> torch.Tensor:
    which = torch.randint(SPOTS, (BATCH_SIZE,))
    spread = 0.1 * torch.randn(BATCH_SIZE, 2, dtype=torch.float64)
    return spots(device)[which.to(device)] + spread.to(device)


def noise(device: torch.device) -> torch.Tensor:
    return torch.randn(BATCH_SIZE, NOISE, dtype=torch.float64).to(device)


def make_network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, outputs),
    ).double()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", help="one per replica, as cuda:0,cuda:1 or cpu,cpu")
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    args.devices = args.devices.split(",") if args.devices else choose_devices()
    return args


if __name__ == "__main__":
    sys.exit(main())
