"""Trains a small CNN on real handwritten digits with fastdp.DataParallel.

    pip install scikit-learn
    python examples/digits.py

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships, so nothing is downloaded.
Training never sees the last 360 of them. Without a GPU the model runs on two replicas on the CPU,
with GPUs on all of them. The script has two parts:

1. Training as usual (batch norm included). It must end above 97 % on the held-out images.
2. Proof that replicas change nothing: the same training, in fp64 and without batch norm (which, by
   its nature, sees each replica's part of a batch alone), gives the plain module's weights.

It exits with an error when either fails. Both together take about half a minute on two cores.
"""

import argparse
import sys

import torch
from torch import nn
from torch.nn import functional

import fastdp

HELD_OUT = 360
EPOCHS = 30
BATCH_SIZE = 64
LEARNING_RATE = 0.1
SEED = 0
LEAST_ACCURACY = 0.97
LARGEST_DIFFERENCE = 1e-10


def main() -> int:
    device_ids = choose_devices()
    device = torch.device(device_ids[0])
    data = load_images(device)
    print(f"fastdp {fastdp.__version__}, torch {torch.__version__}")
    print(f"{len(device_ids)} replicas on {', '.join(map(str, device_ids))}")

    print(f"\n1. A CNN with batch norm, {EPOCHS} epochs")
    model = make_model(batch_norm=True).to(device)
    # This line is all that a script needs: the rest is written as for one device.
    model = fastdp.DataParallel(model, device_ids=device_ids)
    accuracy = train(model, data)
    verdict = "ok" if accuracy > LEAST_ACCURACY else "TOO LOW"
    print(f"test accuracy {accuracy:.2%}, must be above {LEAST_ACCURACY:.0%}: {verdict}")
    if accuracy <= LEAST_ACCURACY:
        return 1

    print("\n2. The same in fp64, without batch norm: with replicas, then the plain module")
    replicated = make_model(batch_norm=False).to(device, torch.float64)
    train(fastdp.DataParallel(replicated, device_ids=device_ids), data)
    plain = make_model(batch_norm=False).to(device, torch.float64)
    train(plain, data)
    difference = largest_difference(replicated, plain)
    verdict = "ok" if difference < LARGEST_DIFFERENCE else "TOO LARGE"
    print(
        f"largest difference of a weight {difference:.1e}, "
        f"must be below {LARGEST_DIFFERENCE:.0e}: {verdict}"
    )
    return 0 if difference < LARGEST_DIFFERENCE else 1


def choose_devices() -> list:
    """All GPUs if fastdp can move tensors between them here, else two replicas on the CPU."""
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if gpus:
        try:
            fastdp.comm.broadcast(torch.zeros(1, device=gpus[0]), gpus)
            return gpus
        except NotImplementedError as reason:
            print(f"The GPUs are not used: {reason}")
    # The replicas are threads of their own, and the model is small: more threads inside each
    # operation would only be in each other's way.
    torch.set_num_threads(1)
    return ["cpu", "cpu"]


def load_images(device):
    """(training images, training labels, test images, test labels), images as (n, 1, 8, 8)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("The digits come with scikit-learn: pip install scikit-learn") from None
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, device=device)
    return images[:-HELD_OUT], labels[:-HELD_OUT], images[-HELD_OUT:], labels[-HELD_OUT:]


def make_model(batch_norm: bool) -> nn.Sequential:
    torch.manual_seed(SEED)

    def block(channels_in, channels_out):
        convolution = nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1)
        norm = [nn.BatchNorm2d(channels_out)] if batch_norm else []
        return [convolution, *norm, nn.ReLU()]

    return nn.Sequential(
        *block(1, 32),
        *block(32, 32),
        nn.MaxPool2d(2),
        *block(32, 64),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 2 * 2, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(model: nn.Module, data) -> float:
    """Trains for EPOCHS epochs, prints a line for each, returns the last test accuracy.

    Nothing here knows whether `model` is a plain module or a fastdp.DataParallel.
    """
    images, labels, test_images, test_labels = data
    dtype = next(model.parameters()).dtype
    random = torch.Generator().manual_seed(SEED)
    batches_per_epoch = -(-len(images) // BATCH_SIZE)
    optimizer = torch.optim.SGD(
        model.parameters(), LEARNING_RATE, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=EPOCHS * batches_per_epoch
    )
    for epoch in range(1, EPOCHS + 1):
        model.train()
        loss_sum = 0.0
        order = torch.randperm(len(images), generator=random).to(images.device)
        for done, indices in enumerate(order.split(BATCH_SIZE), start=1):
            outputs = model(distort(images[indices], random).to(dtype))
            loss = functional.cross_entropy(outputs, labels[indices], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            loss_sum += loss.item() * len(indices)
            show_progress(epoch, done, batches_per_epoch)

        model.eval()
        with torch.no_grad():
            guesses = model(test_images.to(dtype)).argmax(dim=1)
        accuracy = (guesses == test_labels).double().mean().item()
        clear_progress()
        mean_loss = loss_sum / len(images)
        print(f"epoch {epoch:2}/{EPOCHS}  loss {mean_loss:.4f}  test accuracy {accuracy:.2%}")
    return accuracy


def distort(images, random):
    """Turns, stretches and shifts each image a little, so that 1,437 of them are enough."""
    count = len(images)

    def uniform(bound):
        return (torch.rand(count, generator=random) * 2 - 1) * bound

    angle, shear = uniform(0.2), uniform(0.15)
    top = torch.stack([(1 + uniform(0.12)) * angle.cos(), shear - angle.sin(), uniform(0.2)], 1)
    bottom = torch.stack([angle.sin(), (1 + uniform(0.12)) * angle.cos(), uniform(0.2)], 1)
    matrix = torch.stack([top, bottom], 1).to(images.device)
    grid = functional.affine_grid(matrix, images.shape, align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False)


def largest_difference(first: nn.Module, second: nn.Module) -> float:
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def show_progress(epoch: int, done: int, total: int) -> None:
    """A bar on the current line of a terminal; nothing where the output goes to a file."""
    if sys.stdout.isatty():
        width = 30 * done // total
        print(f"\repoch {epoch:2}/{EPOCHS}  [{'#' * width:30}]", end="", flush=True)


def clear_progress() -> None:
    if sys.stdout.isatty():
        print("\r\033[K", end="")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    sys.exit(main())
