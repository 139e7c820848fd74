"""An image classifier for several devices, with torch's nn.DataParallel and with fastdp's.

Between the two stands one line of `main`, and the import:

    -    model = nn.DataParallel(model, args.devices)
    +    model = fastdp.DataParallel(model, args.devices)

    python examples/classifier.py             # the line after
    python examples/classifier.py --before    # the line before

Both print the same losses and end with the same weights, up to rounding. The data are the
handwritten digits that scikit-learn ships. All GPUs are used; without one, fastdp runs two replicas
on the CPU, and nn.DataParallel, which has none there, calls the module itself.
"""

import argparse

import torch
from digits import choose_devices, load_images
from torch import nn
from torch.nn import functional

import fastdp

BATCH_SIZE = 64
SEED = 0


def main() -> None:
    args = parse_arguments()
    images, labels, test_images, test_labels = load_images(torch.device(args.devices[0]))

    model = make_model().to(args.devices[0])
    if args.before:
        model = nn.DataParallel(model, args.devices)
    else:
        model = fastdp.DataParallel(model, args.devices)
    devices = model.device_ids or "no devices: the module itself is called"
    print(f"{type(model).__module__}.{type(model).__name__} on {devices}")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(1, args.epochs + 1):
        model.train()
        loss_sum = 0.0
        for indices in torch.randperm(len(images)).to(images.device).split(BATCH_SIZE):
            loss = functional.cross_entropy(model(images[indices]), labels[indices])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(indices)

        model.eval()
        with torch.no_grad():
            guesses = model(test_images).argmax(dim=1)
        accuracy = (guesses == test_labels).double().mean().item()
        mean_loss = loss_sum / len(images)
        print(f"epoch {epoch}/{args.epochs}  loss {mean_loss:.4f}  test accuracy {accuracy:.2%}")

    if args.save:
        # As with nn.DataParallel: `.module` is the model, whose keys have no "module." before them.
        torch.save(model.module.state_dict(), args.save)


def make_model() -> nn.Sequential:
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 10),
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", action="store_true", help="use torch's nn.DataParallel")
    parser.add_argument("--devices", help="one per replica, as cuda:0,cuda:1 or cpu,cpu")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--save", metavar="FILE", help="where the weights go at the end")
    args = parser.parse_args()
    args.devices = args.devices.split(",") if args.devices else choose_devices()
    return args


if __name__ == "__main__":
    main()
