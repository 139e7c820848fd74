"""Averaged weights: torch.optim.swa_utils around a wrapped model, and a hand-written average."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from programs.sides import BOUND, check, inner, weights

BATCH = 30


def net():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Flatten(), nn.Linear(216, 10),
    ).double()  # fmt: skip


def loader(side, digits, batches):
    images, labels = digits
    count = BATCH * batches - 7  # the last batch is smaller
    return [
        (x.to(side.home), y.to(side.home))
        for x, y in zip(
            images[:count].split(BATCH), labels[:count].split(BATCH), strict=True
        )
    ]  # fmt: skip


def train(model, side, digits, epochs, each_step=None, each_epoch=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    swa = SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
    losses = []
    for _ in range(epochs):
        model.train()
        for images, labels in loader(side, digits, 4):
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if each_step:
                each_step(model)
        if each_epoch:
            each_epoch(model)
        swa.step()
    assert losses[-1] < losses[0]
    return losses


def scores(model, side, digits):
    model.eval()
    with torch.no_grad():
        return model(digits[0][-40:].to(side.home)).cpu()


def stochastic_weight_averaging(side, digits):
    """The average is a deep copy of the wrapper, made when it has replicas and threads."""
    torch.manual_seed(0)
    model = side.wrap(net())
    before = train(model, side, digits, 1)
    average = AveragedModel(model)
    losses = train(model, side, digits, 3, each_epoch=average.update_parameters)
    update_bn(loader(side, digits, 4), average)
    results = scores(average, side, digits), scores(model, side, digits)
    return before, losses, results, weights(model), weights(average.module)


def exponential_average(side, digits):
    """Buffers too; evaluated while training goes on, and swapped into the model at the end."""
    torch.manual_seed(0)
    model = side.wrap(net())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    between = []

    def each_epoch(model):
        between.append(scores(average, side, digits))

    losses = train(model, side, digits, 3, average.update_parameters, each_epoch)
    model.load_state_dict(average.module.state_dict())
    assert torch.equal(scores(model, side, digits), between[-1])
    return losses, between, weights(average.module)


def average_by_hand(side, digits):
    """Written through .data, which bumps no version: shadow weights swapped in and out again."""
    torch.manual_seed(0)
    model = side.wrap(net())
    shadow = {name: p.data.clone() for name, p in model.named_parameters()}
    between = []

    def each_step(model):
        for name, parameter in model.named_parameters():
            shadow[name].mul_(0.8).add_(parameter.data, alpha=0.2)

    def each_epoch(model):
        kept = {name: p.data.clone() for name, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.data.copy_(shadow[name])
        between.append(scores(model, side, digits))
        for name, parameter in model.named_parameters():
            parameter.data = kept[name]

    losses = train(model, side, digits, 2, each_step, each_epoch)
    return losses, between, weights(model), list(shadow.values())


@pytest.mark.row("D9", "A14")
@pytest.mark.parametrize(
    "program", [stochastic_weight_averaging, exponential_average, average_by_hand]
)
def test_averages(fast, digits, program):
    """Batch norm sees its replica's chunk, so the numbers are not the plain module's. On a GPU
    torch's AveragedModel weighs by a single precision 1 / n, on the host it divides by n."""
    single = fast.home.type == "cuda" and program is stochastic_weight_averaging
    bound = 1e-6 if single else BOUND
    check(lambda side: program(side, digits), fast, like_plain=False, bound=bound)


@pytest.mark.row("F4")
def test_an_average_keeps_its_replicas(fast, digits):
    """The copy runs on as many replicas as the original: it is no plain module by accident."""
    dp = fast.wrap(net(), 2)
    dp(digits[0][:4])
    average = AveragedModel(dp)
    assert type(average.module) is type(dp) and average.module.device_ids == dp.device_ids
    seen = []
    inner(average.module).register_forward_pre_hook(lambda m, args: seen.append(len(args[0])))
    average(digits[0][:4])
    assert seen == [2, 2]
