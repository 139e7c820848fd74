"""ddp_before.py, moved from DistributedDataParallel to fastdp.

    python examples/ddp_after.py

One process. What fell away: the launcher, the process group, the sampler, the batch size per
process, the all_reduce of each number, the rank checks and the barrier. The learning rate stayed,
since the global batch did. It ends with the weights of ddp_before.py, up to rounding.
"""

import argparse

import torch
from digits import choose_devices, load_images
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import fastdp

BATCH_SIZE = 64  # what the devices share
LEARNING_RATE = 0.05
SEED = 0


def main() -> None:
    args = parse_arguments()
    device = torch.device(args.devices[0])
    images, labels, test_images, test_labels = load_images(torch.device("cpu"))
    data = TensorDataset(images, labels)
    # `shuffle=True` would do. A generator of our own, seeded as DistributedSampler seeds its own
    # for each epoch, gives the batches of ddp_before.py.
    order = torch.Generator()
    sampler = RandomSampler(data, generator=order)
    loader = DataLoader(data, BATCH_SIZE, sampler=sampler, drop_last=True)
    test_data = TensorDataset(test_images, test_labels)
    test_loader = DataLoader(test_data, BATCH_SIZE)

    model = make_model().to(device)
    model = fastdp.DataParallel(model, args.devices)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9)
    for epoch in range(args.epochs):
        model.train()
        order.manual_seed(SEED + epoch)
        loss_sum = torch.zeros((), device=device)
        for batch, target in loader:
            # fastdp takes the batch from the host, too, and sends each device its piece alone.
            loss = functional.cross_entropy(model(batch), target.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()

        model.eval()
        right = torch.zeros((), device=device)
        with torch.no_grad():
            for batch, target in test_loader:
                guesses = model(batch).argmax(dim=1)
                right += (guesses == target.to(device)).sum()
        loss = loss_sum.item() / len(loader)
        accuracy = right.item() / len(test_data)
        print(f"epoch {epoch + 1}/{args.epochs}  loss {loss:.4f}  test accuracy {accuracy:.2%}")

    if args.save:
        torch.save(model.module.state_dict(), args.save)


def make_model() -> nn.Sequential:
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", help="one per replica, as cuda:0,cuda:1 or cpu,cpu")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--save", metavar="FILE", help="where the weights go at the end")
    args = parser.parse_args()
    args.devices = args.devices.split(",") if args.devices else choose_devices()
    return args


if __name__ == "__main__":
    main()
