"""BEHAVIOUR A and D, side by side with torch's own: what public code keeps in buffers and
attributes, and how it edits weights between calls. Each case is a kind that many repositories have,
in its smallest form; more are in test_wild_modules.py."""

import copy

import pytest
import torch
from alike import Table, check, trained
from nets import Apply, Net, exact, grads, ints, linear
from torch import nn

row = pytest.mark.row

usages = Table()


# What a forward keeps.


@usages
def queues_keys(wrap):
    """Momentum contrast: a queue and its pointer are written under no_grad, in slices."""

    class Contrast(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = linear(), linear(3).requires_grad_(False)
            self.register_buffer("queue", torch.zeros(2, 8, dtype=torch.float64))
            self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

        @torch.no_grad()
        def enqueue(self, keys):
            start = int(self.pointer)
            self.queue[:, start : start + len(keys)] = keys.T
            self.pointer[0] = (start + len(keys)) % 8

        def forward(self, a, b):
            with torch.no_grad():
                keys = self.k(b)
            logits = torch.einsum("nc,ck->nk", [self.q(a), self.queue.clone().detach()])
            self.enqueue(keys)
            return logits

    module = Contrast()
    dp = wrap(module)
    return [trained(module, dp, ints(4, 3, seed=k), ints(4, 3, seed=k + 5)) for k in range(3)]


@usages
def learns_a_codebook_by_averages(wrap):
    """Vector quantisation: buffers' data is written by averages of the chunk."""

    class Quantise(Apply):
        def __init__(self):
            super().__init__(None)
            self.register_buffer("codes", ints(2, 3, seed=7) * 0.3 + torch.arange(3) * 0.07)
            self.register_buffer("sizes", torch.zeros(3, dtype=torch.float64))
            self.register_buffer("sums", torch.zeros(2, 3, dtype=torch.float64))

        def forward(self, x):
            z = self.lin(x)
            near = ((z[:, :, None] - self.codes) ** 2).sum(1).argmin(1)
            chosen = nn.functional.one_hot(near, 3).to(z)
            found = nn.functional.embedding(near, self.codes.t())
            if self.training:
                self.sizes.data.mul_(0.5).add_(chosen.sum(0), alpha=0.5)
                self.sums.data.mul_(0.5).add_(z.t() @ chosen, alpha=0.5)
                self.codes.data.copy_(self.sums / (self.sizes + 1))
            return z + (found - z).detach(), ((found.detach() - z) ** 2).mean(1), near

    module = Quantise()
    dp = wrap(module)
    results = []
    for step in range(3):
        out, loss, near = dp(ints(6, 3, seed=step))
        (out.sum() + loss.mean()).backward()
        results.append((out, loss, near, [buffer.clone() for buffer in module.buffers()]))
    return results, grads(module)


@usages
def remembers_beside_its_dictionaries(wrap):
    """Spiking nets: states are in a dictionary of their own, which each replica copies."""

    class Neuron(nn.Module):
        def __init__(self):
            super().__init__()
            self.states, self.resets = {}, {}
            self.states["v"] = self.resets["v"] = 0.0
            self.w = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def __getattr__(self, name):
            states = self.__dict__.get("states", ())
            return states[name] if name in states else super().__getattr__(name)

        def __setattr__(self, name, value):
            if name in self.__dict__.get("states", ()):
                self.states[name] = value
            else:
                super().__setattr__(name, value)

        def _replicate_for_data_parallel(self):
            replica = super()._replicate_for_data_parallel()
            replica.states = self.states.copy()
            return replica

        def reset(self):
            self.states.update(self.resets)

        def forward(self, x):
            self.v = self.v * 0.5 + x * self.w
            spikes = (self.v > 1).to(x)
            self.v = self.v - spikes
            return spikes + self.v

    module = nn.Sequential(linear(), Neuron(), Neuron())
    dp = wrap(module)
    results = []
    for step in range(2):
        results.append(trained(module, dp, ints(4, 3, seed=step)))
        for part in dp.modules():
            if hasattr(part, "reset"):
                part.reset()
    return results, module[1].v


# Weights that are edited between calls.


@usages
def perturbs_an_embedding_and_puts_it_back(wrap):
    module = nn.Sequential(exact(nn.Embedding(5, 3)), nn.Flatten(), exact(nn.Linear(6, 2)))
    dp = wrap(module)
    words, weight = torch.tensor([[0, 1], [2, 3], [4, 0]]), module[0].weight
    first = trained(module, dp, words)
    kept = weight.data.clone()
    weight.data.add_(weight.grad / weight.grad.norm())
    second = trained(module, dp, words)
    weight.data = kept
    return first, second, dp(words)


@usages
def climbs_and_steps_back(wrap):
    """Sharpness-aware steps; a Fisher penalty on what weights were."""
    module = Net()
    dp = wrap(module)
    dp(ints(4, 3)).sum().backward()
    old = {name: p.detach().clone() for name, p in dp.named_parameters()}
    fisher = {name: p.grad.detach() ** 2 / 1024 for name, p in dp.named_parameters()}
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in dp.parameters()]).norm()
        steps = [p.grad / norm for p in dp.parameters()]
        for parameter, step in zip(dp.parameters(), steps, strict=True):
            parameter.add_(step)
    dp.zero_grad()
    penalty = sum((fisher[n] * (p - old[n]) ** 2).sum() for n, p in dp.named_parameters())
    (dp(ints(4, 3)).sum() + penalty).backward()
    with torch.no_grad():
        for parameter, step in zip(dp.parameters(), steps, strict=True):
            parameter.sub_(step)
    return grads(module), dp(ints(4, 3))


@usages
def swaps_in_averages_for_evaluation(wrap):
    module = Net()
    dp = wrap(module)
    shadow = {name: p.data.clone() * 2 for name, p in dp.named_parameters()}
    kept = {name: p.data for name, p in dp.named_parameters()}
    outputs = []
    for source in (shadow, kept):
        for name, parameter in dp.named_parameters():
            parameter.data = source[name]
        outputs.append(dp(ints(4, 3)))
    return outputs


@usages
def starts_over_from_a_copy(wrap):
    """Finders of learning rates."""
    module = Net()
    dp = wrap(module)
    optimizer = torch.optim.Adam(dp.parameters(), 0.5)
    states = copy.deepcopy(dp.state_dict()), copy.deepcopy(optimizer.state_dict())
    dp(ints(4, 3)).sum().backward()
    optimizer.step()
    moved = dp(ints(4, 3))
    dp.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    return moved, dp(ints(4, 3))


@usages
def finds_adversarial_directions(wrap):
    module = Net()
    dp = wrap(module)
    softmax, log_softmax = nn.functional.softmax, nn.functional.log_softmax
    with torch.no_grad():
        target = softmax(dp(ints(4, 3)), 1)
    direction = torch.full((4, 3), 0.125, dtype=torch.float64)
    for _ in range(2):
        direction.requires_grad_()
        found = log_softmax(dp(ints(4, 3) + direction), 1)
        nn.functional.kl_div(found, target, reduction="batchmean").backward()
        direction = nn.functional.normalize(direction.grad).detach()
        dp.zero_grad()
    return direction, dp(ints(4, 3) + direction)


@usages
def freezes_norms_between_calls(wrap):
    module = nn.Sequential(linear(), nn.BatchNorm1d(2).double())
    dp = wrap(module)
    results = [trained(module, dp, ints(4, 3))]
    for part in dp.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.momentum = 0.5
            part.weight.requires_grad = False
    results.append(trained(module, dp, ints(4, 3)))
    module[1].eval()
    return [*results, trained(module, dp, ints(4, 3))]


class Adjoint(torch.autograd.Function):
    """Recomputes a part in its backward, for the weights that it is told of."""

    @staticmethod
    def forward(ctx, part, x, *weights):
        ctx.part = part
        ctx.save_for_backward(x, *weights)
        return part(x)

    @staticmethod
    def backward(ctx, gradient):
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.part(x), [x, *weights], gradient)


@usages
def finds_weights_among_attributes(wrap):
    """torchdiffeq's adjoint asks a module in a replica for tensors in its __dict__."""
    names = []

    def attributes(module):
        return [(k, v) for k, v in module.__dict__.items() if torch.is_tensor(v)]

    def forward(module, x):
        found = list(module.lin.named_parameters())
        if getattr(module, "_is_replica", False):
            found = list(module._named_members(get_members_fn=attributes))
            names.append([name for name, _ in found])
        return Adjoint.apply(module.lin, x, *[weight for _, weight in found])

    module = Apply(forward)
    dp = wrap(module)
    dtypes = [t.dtype for _, t in dp._named_members(attributes)]
    return trained(module, dp, ints(4, 3)), names, dtypes


@row("A10", "A12", "A13", "D2", "D9", "D10", "F13")
@pytest.mark.parametrize("case", usages.values(), ids=usages.keys())
def test_usages(case, fast):
    check(case, fast)
