"""Training without the interpreter's lock: some steps of three replicas on threads, with a
deadline, beside the same steps of the plain module. For a free-threaded Python, built as
tests/free_threading.py says:

    PYTHON_GIL=0 PYTHONPATH=. python tests/free_training.py

It ends with 1 where the weights differ by more than rounding does, or a loss is not a number."""

import argparse
import copy
import sys

import torch
from torch import nn

import fastdp

REPLICAS = 3
LARGEST_DIFFERENCE = 1e-12  # weights of some tenths; rounding makes some 1e-16 of 25 steps


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def train(model, steps):
    """The losses of `steps` steps on made data, the same at each call."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(12, 6, generator=generator, dtype=torch.float64)
        loss = model(x).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=25)
    steps = parser.parse_args().steps
    if steps < 1:
        parser.error(f"--steps is {steps}: it must be at least 1")
    replicated = make_model()
    plain = copy.deepcopy(replicated)
    # Small buckets, so that a step has several.
    options = {"bucket_bytes": 100, "timeout_s": 60}
    losses = train(fastdp.DataParallel(replicated, ["cpu"] * REPLICAS, **options), steps)
    train(plain, steps)
    pairs = zip(replicated.parameters(), plain.parameters(), strict=True)
    difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    lock = "on" if has_lock else "off"
    print(
        f"{steps} steps, {REPLICAS} replicas, lock {lock}: loss {losses[0]:.4f} to "
        f"{losses[-1]:.4f}, largest difference of a weight from plain training {difference:.1e}"
    )
    return not difference < LARGEST_DIFFERENCE or losses[-1] != losses[-1]


if __name__ == "__main__":
    sys.exit(main())
