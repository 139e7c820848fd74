"""What the programs of engine_programs.py and eager_programs.py take from training recipes: weights
and gradients that a script moves, gathers and shares around the wrapper."""

from __future__ import annotations

import copy

import oracle
import torch
from engine_actions import called, clear, learned, loss_of
from engine_blocks import linear
from torch import nn

import fastdp


def plain_parameters(twin):
    """Each apart from the others, and of one dtype."""
    found = [p for p in twin.net.parameters() if p.dtype == twin.dtype and p.numel()]
    places = {p.data_ptr() for p in found}
    return found if len(places) == len(found) else []


def gone_back(twin, rng, output):
    if learned(output):
        loss_of(twin, output, rng).backward()


def perturbed(twin, rng):
    """Sharpness-aware steps: the gradient is that of weights moved along the first gradient."""
    results, form = [], twin.program.forms[0]
    for _ in range(rng.choice([1, 4])):
        moved, seed = [], rng.randrange(10**6)
        for k in range(2):
            clear(twin, rng)
            inputs, named = form.arguments(twin, seed)
            results.append(twin.dp(*inputs, **named))
            gone_back(twin, rng, results[-1])
            with torch.no_grad():
                for parameter in twin.net.parameters() if k == 0 else ():
                    if parameter.grad is not None and not parameter.grad.is_sparse:
                        moved.append((parameter, parameter.grad * 1e-3))
                        parameter.add_(moved[-1][1])
        with torch.no_grad():
            for parameter, way in moved:
                parameter.sub_(way)
        twin.optimizer.step()
    return results


def flattened(twin, rng):
    """Gradients that lie in one buffer of the script's, written in place by each backward."""
    found = [p for p in plain_parameters(twin) if p.requires_grad]
    twin.clear_gradients()
    count = sum(p.numel() for p in found)
    buffer = torch.zeros(count, dtype=twin.dtype, device=twin.home)
    start, results = 0, []
    for parameter in found:
        parameter.grad = buffer[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    for _ in range(rng.choice([2, 5])):
        buffer.zero_()
        results.append(called(twin, rng, twin.program.forms[0])[1])
        gone_back(twin, rng, results[-1])
        results.append(buffer.clone())
        twin.optimizer.step()
    twin.clear_gradients()
    return results


def as_vector(twin, rng):
    """Weights that become views of one vector."""
    found = plain_parameters(twin)
    if not found:
        return None
    results = []
    for _ in range(rng.choice([1, 3])):
        vector = nn.utils.parameters_to_vector(found).detach() * 0.99
        nn.utils.vector_to_parameters(vector, found)
        clear(twin, rng)
        results.append(called(twin, rng)[1])
        gone_back(twin, rng, results[-1])
        twin.optimizer.step()
    for parameter in found:
        parameter.data = parameter.data.clone()
    return results


def regularized(twin, rng):
    """Terms of the module's own parameters in the loss, beside the wrapper's graph."""
    if twin.replicas == 1:
        return None  # eager sums in another order where parameters are used more than once
    results, wanted = [], [p for p in twin.net.parameters() if p.requires_grad]
    for _ in range(rng.choice([1, 5])):
        clear(twin, rng)
        results.append(called(twin, rng, twin.program.forms[0])[1])
        total = sum(p.abs().square().sum().double() for p in wanted) * 1e-3
        if learned(results[-1]):
            total = total + loss_of(twin, results[-1], rng)
        if wanted or learned(results[-1]):
            total.backward()
        twin.optimizer.step()
    return results


def wrapped(twin, module):
    ids = list(twin.dp.device_ids)
    if isinstance(twin.dp, oracle.DataParallel):
        return oracle.DataParallel(module, ids)
    engine = twin.dp.engine
    made = fastdp.DataParallel(module, ids, engine=engine, sequential=twin.dp.sequential)
    if twin.home.type == "cpu" and engine != "eager":
        made._fastdp_get_runtime().recorder = twin.dp._fastdp_get_runtime().recorder
    return made


def shared(twin, rng):
    """Another wrapper, of a module that has a part of this one's."""
    if twin.replicas == 1:
        return None
    torch.manual_seed(0)
    rest = linear().to(twin.home, twin.dtype)
    other = wrapped(twin, nn.Sequential(twin.net.head, nn.Tanh(), rest))
    results, forms = [], twin.program.forms
    for _ in range(rng.choice([1, 6])):
        clear(twin, rng)
        first = called(twin, rng, forms[0], keeps=False)[1]
        x = forms[0].arguments(twin, rng.randrange(10**6))[0][0].detach()
        second = other(x)
        losses = [loss_of(twin, out, rng) for out in (first, second) if learned(out)]
        if rng.random() < 0.5:
            for loss in losses:
                loss.backward()
        elif losses:
            sum(losses).backward()
        twin.optimizer.step()
        results.append((first, second))
    return results, list(other.parameters())


def cloned(module, memo):
    """A copy whose parameters are clones in the graph: meta-learning by shallow copies."""
    clone = module.__new__(type(module))
    clone.__dict__.update(module.__dict__)
    for kind in ("_parameters", "_buffers", "_modules"):
        clone.__dict__[kind] = dict(module.__dict__[kind])
    for name, parameter in module._parameters.items():
        if parameter is not None:
            clone._parameters[name] = memo.setdefault(id(parameter), parameter.clone())
    for name, child in module._modules.items():
        clone._modules[name] = child and cloned(child, memo)
    return clone


def adapted(twin, rng):
    """A step of a clone, whose gradients go on to the module's own parameters."""
    if twin.replicas == 1 or any(isinstance(m, nn.RNNBase) for m in twin.net.modules()):
        return None
    twin.optimizer.zero_grad()
    clone = cloned(twin.dp, {})
    first = called(twin, rng, module=clone, keeps=False)[1]
    gone_back(twin, rng, first)
    second = called(twin, rng)[1]
    return first, second


def closures(twin, rng):
    """Several forwards for one step, as a line search has them."""
    found = [p for p in plain_parameters(twin) if p.requires_grad]
    if not found or twin.dtype != torch.float64:
        return None
    optimizer = torch.optim.LBFGS(found, 1e-3, max_iter=2)
    seed, results = rng.randrange(10**6), []

    def closure():
        twin.clear_gradients()
        inputs, named = twin.program.forms[0].arguments(twin, seed)
        results.append(twin.dp(*inputs, **named))
        if not learned(results[-1]):
            return torch.zeros(())
        loss = loss_of(twin, results[-1], copy.copy(rng))
        loss.backward()
        return loss

    optimizer.step(closure)
    return results


RECIPES = {
    "perturbed": (1, perturbed),
    "flattened": (1, flattened),
    "as vector": (1, as_vector),
    "regularized": (1, regularized),
    "shared": (1, shared),
    "adapted": (1, adapted),
    "closures": (1, closures),
}
