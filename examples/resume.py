"""Validation every 100 batches, with save and resume.

    python examples/resume.py                               # shows that resuming changes nothing
    python examples/resume.py --checkpoint run.pt           # trains; goes on where run.pt ends
    python examples/resume.py --checkpoint run.pt --stop-after 250    # as if it were killed there

After every 100th batch the model is validated and all that training needs goes into the checkpoint:
weights and buffers, the optimizer, the schedule, and where in which epoch it is. A run that is
killed loses what came after the last checkpoint, and a second one does that again: it ends with the
weights of a run that was never stopped, bit for bit. Without --checkpoint the script does all three
runs in a temporary directory and compares.

This model draws no random numbers. One with dropout also needs the generators in its checkpoint,
torch.get_rng_state() and torch.cuda.get_rng_state_all(); and where replicas share a device, as on
the CPU, they draw in a fixed order under `fastdp.DataParallel(..., sequential=True)` only.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
from digits import choose_devices, load_images
from torch import nn
from torch.nn import functional

import fastdp

BATCH_SIZE = 32
EVERY = 100
SEED = 0


def main() -> int:
    args = parse_arguments()
    if args.checkpoint:
        train(args.devices, args.checkpoint, args.batches, args.stop_after)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = Path(folder, "whole.pt"), Path(folder, "parts.pt")
        print("1. without a stop")
        train(args.devices, whole, args.batches)
        print(f"2. stopped after batch {args.batches - EVERY // 2}")
        train(args.devices, parts, args.batches, args.batches - EVERY // 2)
        print("3. resumed")
        train(args.devices, parts, args.batches)
        same = equal(load(whole)["model"], load(parts)["model"])
    print(f"weights and buffers of 1 and 3: {'the same bits' if same else 'DIFFERENT'}")
    return 0 if same else 1


def train(devices: list, checkpoint: Path, batches: int, stop_after: int | None = None) -> None:
    device = torch.device(devices[0])
    images, labels, test_images, test_labels = load_images(device)
    model = make_model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=batches)
    dp = fastdp.DataParallel(model, devices)

    batch = 0
    if checkpoint.exists():
        state = load(checkpoint, device)
        # Into the model itself, in place: the wrapper sees it at its next forward.
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        batch = state["batch"]
        print(f"resumed after batch {batch}")

    while batch < batches:
        if batch == stop_after:
            print(f"stopped after batch {batch}")
            return
        indices = indices_of_batch(batch, len(images)).to(device)
        dp.train()
        loss = functional.cross_entropy(dp(images[indices]), labels[indices])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        batch += 1
        if batch % EVERY == 0 or batch == batches:
            dp.eval()
            with torch.no_grad():
                guesses = dp(test_images).argmax(dim=1)
            accuracy = (guesses == test_labels).double().mean().item()
            print(f"batch {batch}/{batches}  loss {loss.item():.4f}  test accuracy {accuracy:.2%}")
            state = {
                "model": model.state_dict(),  # not dp's, whose keys begin with "module."
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "batch": batch,
            }
            save(state, checkpoint)


def indices_of_batch(batch: int, count: int) -> torch.Tensor:
    """Which samples make up a batch: a function of its number alone, so that nothing of the order
    has to be saved."""
    per_epoch = -(-count // BATCH_SIZE)
    epoch, place = divmod(batch, per_epoch)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(SEED + epoch))
    return order.split(BATCH_SIZE)[place]


def save(state: dict, path: Path) -> None:
    """A kill in the middle leaves the old checkpoint, not half of a new one."""
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def load(path: Path, device: torch.device | None = None) -> dict:
    return torch.load(path, map_location=device, weights_only=True)


def make_model() -> nn.Sequential:
    """With batch norm, whose running statistics are buffers and belong into a checkpoint, too."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 128),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def equal(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=300, help="how many to train on in all")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE")
    parser.add_argument("--devices", help="one per replica, as cuda:0,cuda:1 or cpu,cpu")
    parser.add_argument("--stop-after", type=int, metavar="BATCH")
    args = parser.parse_args()
    args.devices = args.devices.split(",") if args.devices else choose_devices()
    return args


if __name__ == "__main__":
    sys.exit(main())
