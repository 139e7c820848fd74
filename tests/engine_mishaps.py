"""What else the programs of engine_programs.py do: steps that somebody else writes into, that run
under modes or beside each other, and that fail."""

from __future__ import annotations

import gc
import threading

import torch
from engine_actions import called, clear, differentiable, evaluating, learned, loss_of
from engine_blocks import Counts, Follows, Rebinds
from engine_cases import tensors


def written_outputs(twin, rng):
    """Outputs of several replicas are the caller's."""
    clear(twin, rng)
    output = called(twin, rng, keeps=False)[1]
    if twin.replicas == 1 or not learned(output):
        return output
    tensor = rng.choice(differentiable(output))
    tensor.mul_(2)
    with torch.no_grad():
        for fixed in tensors(output):
            if not fixed.requires_grad and fixed.is_floating_point():
                fixed.zero_()
    loss_of(twin, output, rng).backward()
    return output


def written_inputs(twin, rng):
    """After a forward; replicas have their own."""
    clear(twin, rng)
    inputs, output = called(twin, rng)
    if twin.replicas > 1 and learned(output):
        inputs[0].data.zero_()
        if len(inputs) > 1:
            inputs[1].zero_()
        loss_of(twin, output, rng).backward()
    return output


def written_between(twin, rng):
    """Between a forward and its backward, past autograd or not."""
    clear(twin, rng)
    output = called(twin, rng)[1]
    parameters = [p for p in twin.net.parameters() if p.is_floating_point() and p.numel()]
    target = rng.choice(parameters)
    kind = rng.choice(["copy", "data", "in place", "step", "buffer", "freeze", "gradient"])
    if kind == "copy":
        target.data.copy_(target.data * 0.5)
    elif kind == "data" and twin.replicas > 1:  # a module that is called reads some of both
        target.data = target.data * 0.5
    elif kind == "in place":
        with torch.no_grad():
            target.mul_(0.5)
    elif kind == "step":
        twin.optimizer.step()
    elif kind == "buffer":
        for buffer in twin.net.buffers():
            if buffer.is_floating_point():
                buffer.data.add_(1)
    elif kind == "freeze" and target.is_leaf:
        target.requires_grad_(not target.requires_grad)
    elif kind == "gradient":
        target.grad = torch.ones_like(target)
    gc.collect()
    if learned(output):
        loss_of(twin, output, rng).backward()
    return output


def under_modes(twin, rng):
    clear(twin, rng)
    kind = rng.choice(["anomaly", "saved", "autocast", "default dtype", "grad off and on"])
    if kind == "anomaly":
        context = torch.autograd.detect_anomaly(check_nan=False)
    elif kind == "saved":
        context = torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t)
    elif kind == "autocast":
        context = torch.autocast(twin.home.type, torch.bfloat16)
    else:
        context = torch.set_grad_enabled(kind != "grad off and on")
    if kind == "default dtype":
        torch.set_default_dtype(torch.float64)
    try:
        with context:
            results = [
                called(twin, rng, twin.program.forms[0])[1] for _ in range(rng.choice([1, 1, 4]))
            ]
    finally:
        torch.set_default_dtype(torch.float32)
    output = results[-1]
    if len(results) == 1 and learned(output):
        loss_of(twin, output, rng).backward()
    return results


def averages(twin, rng):
    """Other weights for an evaluation, and back: between steps, or between a forward and its
    backward."""
    clear(twin, rng)
    parameters = list(twin.net.parameters())
    own = [parameter.data for parameter in parameters]
    others = [data * 0.5 for data in own]
    results = []
    for _ in range(rng.randint(1, 4)):
        output = called(twin, rng, twin.program.forms[0])[1] if rng.random() < 0.5 else None
        for parameter, data in zip(parameters, others):
            parameter.data = data
        with torch.no_grad():
            results.append(called(twin, rng, twin.program.forms[0])[1])
        for parameter, data in zip(parameters, own):
            parameter.data = data
        if output is not None and learned(output):
            loss_of(twin, output, rng).backward()
        results.append(output)
    return results


def under_autocast(twin, rng):
    """Some steps, their backward outside of it."""
    if twin.replicas == 1:
        return None  # where one output is made of another, eager sums gradients in another order
    clear(twin, rng)
    results = []
    for _ in range(rng.randint(1, 5)):
        cached = rng.random() < 0.8
        with torch.autocast(twin.home.type, torch.bfloat16, cache_enabled=cached):
            output = called(twin, rng, twin.program.forms[0])[1]
        results.append(output)
        if learned(output):
            loss_of(twin, output, rng).backward()
            twin.optimizer.step()
    return results


def on_threads(act, seeds):
    """What `act(seed)` gives on a thread for each; the first error is raised."""
    found = {}

    def run(seed):
        try:
            found[seed] = act(seed)
        except Exception as error:
            found[seed] = error

    started = [threading.Thread(target=run, args=(seed,)) for seed in seeds]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    for seed in seeds:
        if isinstance(found[seed], Exception):
            raise found[seed]
    return [found[seed] for seed in seeds]


def threads(twin, rng):
    """Two at once, without gradients and without writes of what they share."""
    if any(isinstance(module, (Counts, Follows, Rebinds)) for module in twin.net.modules()):
        return None
    form, seeds = twin.program.forms[0], [rng.randrange(10**6) for _ in range(2)]

    def look_at(seed):
        inputs, named = form.arguments(twin, seed)
        with torch.no_grad():
            return [twin.dp(*inputs, **named) for _ in range(3)][-1]

    with evaluating(twin):
        return on_threads(look_at, seeds)


def failing(twin, rng):
    clear(twin, rng)
    twin.net.explodes = True
    try:
        called(twin, rng)
    except ValueError as error:
        text = str(error)
    finally:
        twin.net.explodes = False
    return "the forward fails" in text


def failing_backward(twin, rng):
    clear(twin, rng)
    output = called(twin, rng)[1]
    targets = [p for p in twin.net.parameters() if p.requires_grad]
    if not learned(output) or not targets:
        return output
    target = rng.choice(targets + differentiable(output))

    def hook(gradient):
        if gradient is not None:
            raise KeyError("a hook fails")

    calls = len(twin.log)
    handle = target.register_hook(hook)
    failed = False
    try:
        loss_of(twin, output, rng).backward()
    except KeyError:
        failed = True
    finally:
        handle.remove()
    if failed:  # how far it came is of no interest
        twin.clear_gradients()
        del twin.log[calls:]
    return output, failed


MISHAPS = {
    "written outputs": (2, written_outputs),
    "written inputs": (2, written_inputs),
    "written between": (4, written_between),
    "under modes": (2, under_modes),
    "averages": (2, averages),
    "under autocast": (2, under_autocast),
    "threads": (1, threads),
    "failing": (1, failing),
    "failing backward": (2, failing_backward),
}
