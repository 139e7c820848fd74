"""Training under DistributedDataParallel, as many scripts do it: what ddp_after.py starts from.

    python examples/ddp_before.py

One process per device: two on the CPU over gloo, or one per GPU over NCCL. The processes are
started here; a script that leaves that to torchrun reads its rank from the environment instead.
The comments name the seven things that only several processes need. ddp_after.py has none of them
and ends with the same weights, up to rounding.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from digits import load_images
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH_SIZE = 64
LEARNING_RATE = 0.05
SEED = 0


def main() -> None:
    args = parse_arguments()
    # 1. A launcher. It needs a place where the processes find each other: a file, or a port.
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(args, f"file://{folder}/store"), nprocs=args.processes)


def worker(rank: int, args: argparse.Namespace, store: str) -> None:
    # 2. A process group, and a device for each process.
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if gpus else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=args.processes)
    try:
        train(rank, device, args)
    finally:
        dist.destroy_process_group()


def train(rank: int, device: torch.device, args: argparse.Namespace) -> None:
    images, labels, test_images, test_labels = load_images(torch.device("cpu"))
    # 3. A sampler, which gives each process its share of the data; set_epoch() below, or every
    #    epoch has the same order.
    # 4. The batch size is that of one process.
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data, seed=SEED)
    batch_size = GLOBAL_BATCH_SIZE // args.processes
    loader = DataLoader(data, batch_size, sampler=sampler, drop_last=True)
    test_data = TensorDataset(test_images, test_labels)
    test_sampler = DistributedSampler(test_data, shuffle=False)
    test_loader = DataLoader(test_data, batch_size, sampler=test_sampler)

    model = make_model().to(device)
    model = DistributedDataParallel(model, [device] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9)
    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        loss_sum = torch.zeros((), device=device)
        for batch, target in loader:
            batch, target = batch.to(device), target.to(device)
            loss = functional.cross_entropy(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()

        model.eval()
        right = torch.zeros((), device=device)
        with torch.no_grad():
            for batch, target in test_loader:
                guesses = model(batch.to(device)).argmax(dim=1)
                right += (guesses == target.to(device)).sum()
        # 5. Each process knows its own share only: sums over all of them.
        dist.all_reduce(loss_sum)
        dist.all_reduce(right)
        # 6. Rank checks: one process prints,
        if rank == 0:
            loss = loss_sum.item() / len(loader) / args.processes
            accuracy = right.item() / len(test_data)
            print(f"epoch {epoch + 1}/{args.epochs}  loss {loss:.4f}  test accuracy {accuracy:.2%}")

    # and one process saves,
    if args.save and rank == 0:
        torch.save(model.module.state_dict(), args.save)
    # 7. while the others wait for it.
    dist.barrier()


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
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--save", metavar="FILE", help="where the weights go at the end")
    if "TORCHELASTIC_RUN_ID" in os.environ:  # its store is another one: both would wait for ever
        parser.error("it starts its processes itself: run it by python, without torchrun")
    return parser.parse_args()


if __name__ == "__main__":
    main()
