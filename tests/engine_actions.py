"""What the programs of engine_programs.py do: each a function of a twin and of a generator, the
same for both twins, whose result is compared."""

from __future__ import annotations

import contextlib
import gc

import torch
from engine_cases import tensors
from torch import nn


def differentiable(output):
    return [t for t in tensors(output) if t.requires_grad]


def loss_of(twin, output, rng):
    """Of all outputs, or of some."""
    found = differentiable(output)
    if len(found) > 1 and not twin.program.fixed_loss and rng.random() < 0.3:
        found = rng.sample(found, rng.randint(1, len(found) - 1))
    weight = rng.choice([1.0, 0.5])
    return sum((t.abs().square() * weight).sum().to(torch.float64) for t in found)


def form_of(twin, rng):
    forms = twin.program.forms
    return forms[0] if rng.random() < 0.75 else rng.choice(forms)


def called(twin, rng, form=None, module=None, keeps=True):
    """(inputs, output) of a forward, whose output may be looked at much later."""
    inputs, named = (form or form_of(twin, rng)).arguments(twin, rng.randrange(10**6))
    output = (module or twin.dp)(*inputs, **named)
    if keeps and rng.random() < 0.2:
        twin.keep(output)
    return inputs, output


def gradients(twin):
    return [None if p.grad is None else p.grad.clone() for p in twin.net.parameters()]


def clear(twin, rng):
    twin.optimizer.zero_grad(set_to_none=rng.random() < 0.6)


@contextlib.contextmanager
def evaluating(twin, really=True):
    """The modes of all modules are put back."""
    modes = [(module, module.training) for module in twin.dp.modules()]
    if really:
        twin.dp.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def input_gradient(twin, inputs):
    """What an input that nothing depends on gets is None or zeros, by what else has a gradient."""
    x = inputs[0]
    return torch.zeros_like(x) if x.grad is None and not twin.program.fixed_loss else x.grad


def learned(output):
    """Whether there is anything to learn: all may be frozen."""
    return bool(differentiable(output))


# Steps.


def train(twin, rng):
    clear(twin, rng)
    inputs, output = called(twin, rng)
    if not learned(output):
        return output
    loss = loss_of(twin, output, rng)
    loss.backward()
    norm = None
    if rng.random() < 0.2:
        norm = nn.utils.clip_grad_norm_(twin.dp.parameters(), 0.5)
    if rng.random() < 0.2:
        twin.keep([p.grad for p in twin.net.parameters() if p.grad is not None][:2])
        twin.dp.zero_grad(set_to_none=True)
        return output, loss, norm, input_gradient(twin, inputs)
    twin.optimizer.step()
    return output, loss, norm, input_gradient(twin, inputs)


def train_on(twin, rng):
    """The main kind, some times."""
    results = []
    for _ in range(rng.randint(3, 5)):
        twin.optimizer.zero_grad()
        inputs, output = called(twin, rng, twin.program.forms[0])
        if learned(output):
            loss_of(twin, output, rng).backward()
            twin.optimizer.step()
        results.append((output, input_gradient(twin, inputs)))
    return results


def accumulate(twin, rng):
    clear(twin, rng)
    for _ in range(2):
        output = called(twin, rng)[1]
        if learned(output):
            (loss_of(twin, output, rng) / 2).backward()
    twin.optimizer.step()
    return output


def look(twin, rng):
    # torch's own replicas do not know of inference mode; in it, the recorder's look makes torch
    # compute recurrent nets in another way.
    plain = twin.program.rival or any(isinstance(m, nn.GRU) for m in twin.net.modules())
    mode = rng.choice([torch.no_grad, torch.no_grad if plain else torch.inference_mode])
    form = form_of(twin, rng)
    results = []
    with evaluating(twin, rng.random() < 0.5):
        for _ in range(rng.randint(1, 4)):
            with mode():
                results.append(called(twin, rng, form)[1])
    return [[t.clone() for t in tensors(result)] for result in results]


def two_forwards(twin, rng):
    clear(twin, rng)
    form = form_of(twin, rng)
    first, second = called(twin, rng, form)[1], called(twin, rng, form)[1]
    if learned(first):
        losses = [loss_of(twin, first, rng), loss_of(twin, second, rng)]
        # A module that is called directly has the gradients of both in one sum, in another order.
        kind = rng.randrange(1 if twin.replicas == 1 else 0, 4)
        if kind == 0:
            (losses[0] + losses[1]).backward()
        elif kind == 3:
            losses[rng.randrange(2)].backward()
        else:
            losses[kind - 1].backward()
            losses[2 - kind].backward()
    return first, second


def evaluate_between(twin, rng):
    clear(twin, rng)
    output = called(twin, rng)[1]
    with torch.no_grad():
        other = called(twin, rng)[1]
    if learned(output):
        loss_of(twin, output, rng).backward()
    return output, other


def retain(twin, rng):
    clear(twin, rng)
    output = called(twin, rng)[1]
    if learned(output):
        loss = loss_of(twin, output, rng)
        loss.backward(retain_graph=True)
        loss.backward()
    return output


def one_by_one(twin, rng):
    clear(twin, rng)
    output = called(twin, rng)[1]
    found = differentiable(output)
    if twin.program.fixed_loss and len(found) > 1:
        return output
    for k, tensor in enumerate(found):
        tensor.sum().backward(retain_graph=k + 1 < len(found))
    return output


def penalty(twin, rng):
    if twin.program.rival:
        return None  # another graph, and so another order of sums
    clear(twin, rng)
    inputs, output = called(twin, rng)
    wanted = [p for p in twin.net.parameters() if p.requires_grad][:3] + [inputs[0]]
    wanted = [t for t in wanted if t.requires_grad]
    if learned(output) and wanted:
        loss = loss_of(twin, output, rng)
        slopes = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        total = sum(s.abs().square().sum() for s in slopes if s is not None and s.requires_grad)
        if isinstance(total, torch.Tensor):
            total.backward()
        return slopes
    return output


def asked(twin, rng):
    clear(twin, rng)
    inputs, output = called(twin, rng)
    wanted = [p for p in (*twin.net.parameters(), inputs[0]) if p.requires_grad]
    if not learned(output) or not wanted:
        return output
    wanted = rng.sample(wanted, rng.randint(1, len(wanted)))
    loss = loss_of(twin, output, rng)
    if rng.random() < 0.5:
        loss.backward(inputs=wanted)
        return output
    if twin.program.fixed_loss:
        return output, torch.autograd.grad(loss, wanted, allow_unused=True)
    return output, torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)


def chained(twin, rng):
    """Inputs that are made of others, and outputs that are inputs."""
    clear(twin, rng)
    inputs, named = form_of(twin, rng).arguments(twin, rng.randrange(10**6))
    x = inputs[0].detach().requires_grad_()
    output = twin.dp(x * 2, *inputs[1:], **named)
    first = next((t for t in tensors(output) if t.shape == x.shape and t.dtype == x.dtype), None)
    if first is not None:
        first = first.detach() if rng.random() < 0.5 or twin.replicas == 1 else first
        output = twin.dp(first, *inputs[1:], **named)
    if learned(output):
        loss_of(twin, output, rng).backward()
    return output, torch.zeros_like(x) if x.grad is None else x.grad


def in_backward(twin, rng):
    """Parameters that are written as soon as they have their gradient."""
    clear(twin, rng)
    places = [p.data_ptr() for p in twin.net.parameters() if p.numel()]
    if len(set(places)) < len(places):
        return None  # two in one memory: what the other's gradient is then, depends on the order

    def step(parameter):
        if parameter.grad is not None and not parameter.grad.is_sparse:
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=1e-3)
        parameter.grad = None

    handles = [
        parameter.register_post_accumulate_grad_hook(step)
        for parameter in twin.net.parameters()
        if parameter.requires_grad
    ]
    results = []
    try:
        for _ in range(rng.randint(1, 3)):
            output = called(twin, rng)[1]
            results.append(output)
            if learned(output):
                loss_of(twin, output, rng).backward()
    finally:
        for handle in handles:
            handle.remove()
    return results


def forgotten(twin, rng):
    """Forwards without a backward."""
    return [called(twin, rng)[1] for _ in range(2)][:1]


def by_hooks(twin, rng):
    """Hooks of outputs, and gradients that are kept there."""
    clear(twin, rng)
    output = called(twin, rng)[1]
    found = [t for t in differentiable(output) if t.grad_fn is not None]
    if twin.replicas == 1:
        found = found[:1] if len(found) == 1 else []  # one may be made of another
    for tensor in found:
        tensor.retain_grad()
        # A node of several outputs calls the hooks of all of them, as torch's own do.
        tensor.register_hook(lambda gradient: None if gradient is None else gradient * 2)
    if found:
        loss_of(twin, output, rng).backward()
    return output, [t.grad for t in found]


def scaled(twin, rng):
    twin.scaler = twin.scaler or torch.amp.GradScaler(
        twin.home.type, init_scale=8.0, growth_interval=3
    )
    clear(twin, rng)
    output = called(twin, rng)[1]
    if not learned(output):
        return output
    loss = loss_of(twin, output, rng)
    if rng.random() < 0.2:
        loss = loss * float("inf")
    twin.scaler.scale(loss).backward()
    if any(p.grad is not None for p in twin.net.parameters()):
        twin.scaler.step(twin.optimizer)
        twin.scaler.update()
    return output, twin.scaler.get_scale()


def direct(twin, rng):
    clear(twin, rng)
    output = called(twin, rng, module=twin.net)[1]
    if learned(output):
        loss_of(twin, output, rng).backward()
    return output


def warm(twin, rng):
    inputs, named = form_of(twin, rng).arguments(twin, rng.randrange(10**6))
    if not twin.program.rival:
        twin.dp.warmup(*inputs, **named)


def collect(twin, rng):
    gc.collect()


STEPS = {
    "train": (8, train),
    "train on": (18, train_on),
    "accumulate": (3, accumulate),
    "look": (5, look),
    "two forwards": (2, two_forwards),
    "evaluate between": (2, evaluate_between),
    "retain": (1, retain),
    "one by one": (1, one_by_one),
    "penalty": (1, penalty),
    "asked": (3, asked),
    "chained": (2, chained),
    "in backward": (1, in_backward),
    "forgotten": (2, forgotten),
    "by hooks": (2, by_hooks),
    "scaled": (2, scaled),
    "direct": (2, direct),
    "warm": (1, warm),
    "collect": (1, collect),
}
