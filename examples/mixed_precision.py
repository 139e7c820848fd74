"""Mixed precision with fastdp: autocast and GradScaler, in today's spelling and in the old one.

    python examples/mixed_precision.py          # torch.autocast, torch.amp.GradScaler
    python examples/mixed_precision.py --old    # torch.cuda.amp.autocast, .GradScaler

Both are written as for one device. Replicas compute under the caller's autocast, its dtype
included; the gradients are summed into the model's own parameters, which is where GradScaler looks
for infinities. It starts here with too large a scale, so that the first steps overflow in float16
and are skipped. The old spelling switches itself off, with a warning of torch's, where there is no
GPU: then all is float32 and no step is skipped.
"""

import argparse
import functools

import torch
from digits import choose_devices, load_images
from torch import nn
from torch.nn import functional

import fastdp

BATCH_SIZE = 64
SEED = 0
TOO_LARGE = 2.0**24


def main() -> None:
    args = parse_arguments()
    device = torch.device(args.devices[0])
    images, labels, test_images, test_labels = load_images(device)
    model = make_model().to(device)
    dtypes = set()
    model.register_forward_hook(lambda module, inputs, output: dtypes.add(str(output.dtype)))
    model = fastdp.DataParallel(model, args.devices)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if args.old:
        autocast = torch.cuda.amp.autocast
        scaler = torch.cuda.amp.GradScaler(init_scale=TOO_LARGE)
    else:
        autocast = functools.partial(torch.autocast, device.type, torch.float16)
        scaler = torch.amp.GradScaler(device.type, init_scale=TOO_LARGE)

    skipped = 0
    for epoch in range(1, args.epochs + 1):
        model.train()
        loss_sum = 0.0
        for indices in torch.randperm(len(images)).to(device).split(BATCH_SIZE):
            with autocast():
                loss = functional.cross_entropy(model(images[indices]), labels[indices])
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=5.0)
            scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            skipped += scaler.get_scale() < scale
            loss_sum += loss.item() * len(indices)

        model.eval()
        with torch.no_grad(), autocast():
            guesses = model(test_images).argmax(dim=1)
        accuracy = (guesses == test_labels).double().mean().item()
        mean_loss = loss_sum / len(images)
        print(f"epoch {epoch}/{args.epochs}  loss {mean_loss:.4f}  test accuracy {accuracy:.2%}")

    print(f"outputs of the replicas: {', '.join(dtypes)}")
    print(f"skipped steps: {skipped}, scale at the end: {scaler.get_scale():.0f}")
    if args.save:
        torch.save(model.module.state_dict(), args.save)


def make_model() -> nn.Sequential:
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", help="one per replica, as cuda:0,cuda:1 or cpu,cpu")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--old", action="store_true", help="write torch.cuda.amp")
    parser.add_argument("--save", metavar="FILE", help="where the weights go at the end")
    args = parser.parse_args()
    args.devices = args.devices.split(",") if args.devices else choose_devices()
    return args


if __name__ == "__main__":
    main()
