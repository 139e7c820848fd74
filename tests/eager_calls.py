"""What the programs of eager_programs.py call beside their own model: small modules of their own,
with arguments and outputs of odd kinds, wrappers in wrappers and around what other tools made."""

from __future__ import annotations

import copy

import oracle
import torch
from engine_actions import called, clear, learned, loss_of
from engine_blocks import WIDTH
from engine_cases import tensors
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastdp


def wrap(side, module, count, dim=0, **options):
    if side.api is oracle:
        return oracle.DataParallel(module, side.ids(count), dim=dim)
    return fastdp.DataParallel(module, side.ids(count), dim=dim, **options)


def rows(side, rng, count):
    generator = torch.Generator().manual_seed(rng.randrange(10**6))
    made = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    return made.to(side.dtype)


def back(side, rng, output):
    if learned(output):
        loss_of(side, output, rng).backward()


def lazy(side, rng):
    """A model that is not ready is refused; after a dry run it is not."""
    made = nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.LazyBatchNorm1d())
    dp = wrap(side, made, rng.choice([2, 3]))
    x = rows(side, rng, 6).float()
    refused = False
    if rng.random() < 0.5:
        try:
            dp(x)
        except (RuntimeError, ValueError):
            refused = True
    with torch.no_grad():
        made(x)
    output = dp(x)
    output.sum().backward()
    return refused, output, [p.grad for p in made.parameters()], list(made.buffers())


def whole(module):
    """Whole numbers: sums in any order are equal."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape))
    return module.double()


def steps_of(made, dp, rng, times=2):
    results = []
    for _ in range(times):
        x = torch.randint(-3, 4, (rng.choice([5, 8]), 3)).double().requires_grad_()
        output = dp(x)
        output.square().sum().backward()
        results.append((output, x.grad, [p.grad.clone() for p in made.parameters()]))
    return results


def nested(side, rng):
    """Wrappers in a wrapped module."""
    inner = whole(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    made = nn.Sequential(wrap(side, inner, rng.choice([1, 2])), whole(nn.Linear(3, 2)))
    return steps_of(made, wrap(side, made, rng.choice([1, 2, 3])), rng)


def made_elsewhere(side, rng):
    """Modules that make their own replicas."""
    made = whole(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)))
    kind = rng.choice(["script", "trace", "fx", "part"])
    if kind == "script":
        made = torch.jit.script(made)
    elif kind == "trace":
        made = torch.jit.trace(made, torch.ones(2, 3).double(), check_trace=False)
    elif kind == "fx":
        made = torch.fx.symbolic_trace(made)
    else:
        made[0] = torch.jit.script(made[0])
    return steps_of(made, wrap(side, made, rng.choice([1, 2, 3])), rng)


def sparse(side, rng):
    """Sparse gradients are summed in an order of their own."""
    bag = rng.random() < 0.5
    cls = nn.EmbeddingBag if bag else nn.Embedding
    made = whole(cls(7, 2, sparse=True, **({"mode": "sum"} if bag else {})))
    dp = wrap(side, made, rng.choice([1, 2, 3]))
    adam = rng.random() < 0.5
    parameters = list(made.parameters())
    optimizer = (torch.optim.SparseAdam if adam else torch.optim.SGD)(parameters, 1.0)
    found = []
    for k in range(1 if adam else 3):
        output = dp(torch.randint(0, 7, (rng.choice([2, 5, 6]), 3)))
        output.square().sum().backward()
        found += [output, made.weight.grad.clone()]
        if k != 1:
            optimizer.step()
            optimizer.zero_grad(set_to_none=rng.random() < 0.5)
    return found, made.weight


def sequences(side, rng):
    """Cut along another dimension than the first."""
    cell = rng.choice([nn.GRU, nn.LSTM, nn.RNN])
    made = cell(3, 2, num_layers=rng.choice([1, 2]), bidirectional=rng.random() < 0.5).double()
    dp = wrap(side, made, rng.choice([1, 2, 3]), dim=1)
    count = rng.choice([3, 5, 6])
    x = torch.randn(4, count, 3).double().requires_grad_()
    state = torch.zeros(made.num_layers * (1 + made.bidirectional), count, 2).double()
    given = (state, state * 2) if cell is nn.LSTM else state
    results = []
    for _ in range(2):
        output, given = dp(x, given)
        output.square().sum().backward()
        given = tuple(t.detach() for t in given) if cell is nn.LSTM else given.detach()
        results.append((output, given))
    return results, x.grad, [p.grad for p in made.parameters()]


class Tagged(torch.Tensor):
    pass


class Echo(nn.Module):
    """Gives what it got, times a parameter where that can be; notes what it got."""

    def __init__(self, gives):
        super().__init__()
        self.gain = nn.Parameter(torch.full((1,), 2.0, dtype=torch.float64))
        self.register_buffer("fixed", torch.ones(1, 2))
        self.gives, self.seen = gives, []

    def forward(self, *args, **named):
        found = tensors([args, named])
        self.seen += [
            (type(t).__name__, tuple(t.shape), str(t.dtype), str(t.layout), t.requires_grad)
            for t in found
        ]
        if self.gives == "same":
            return [t for t in found]
        if self.gives == "state":
            return self.gain, self.fixed, self.gain.detach()
        if self.gives == "leaf":
            return torch.ones(2, 2, requires_grad=True), found[0] * self.gain
        if self.gives == "views":
            return found[0][:1].expand(3, *found[0].shape[1:]) * 1, found[0][..., :0]
        if self.gives == "sizes":
            return torch.ones(found[0].shape[0] % 3 + 1, 2) * self.gain
        if self.gives == "kinds":
            return found[0] if found[0].shape[0] % 2 else found[0].to(torch.float32)
        return [t * self.gain for t in found]


def odd(rng, count):
    x = torch.randn(count, 3, dtype=torch.float64)
    kind = rng.choice(
        ["plain", "tagged", "parameter", "conj", "neg", "expanded", "overlap", "complex",
         "bf16", "view", "int8", "bool", "channels", "scalar", "inference", "detached", "none",
         "uint16", "named", "one row", "empty"]
    )  # fmt: skip
    if kind == "tagged":
        return x.as_subclass(Tagged)
    if kind == "parameter":
        return nn.Parameter(x)
    if kind in ("conj", "neg", "complex"):
        z = torch.complex(x, x * 2)
        if kind == "complex":
            return z.requires_grad_()
        return z.conj() if kind == "conj" else z.conj().imag
    if kind == "expanded":
        return x[:1].clone().requires_grad_().expand(count, 3)
    if kind == "overlap":
        return torch.arange(count + 2.0).double().as_strided((count, 3), (1, 1))
    if kind == "bf16":
        return x.bfloat16().requires_grad_()
    if kind == "view":
        return (x.requires_grad_() * 2)[:, ::2]
    if kind == "channels":
        return x.view(count, 3, 1, 1).expand(-1, -1, 2, 2).to(memory_format=torch.channels_last)
    if kind == "scalar":
        return x.sum()
    if kind == "inference":
        with torch.inference_mode():
            return x * 2
    if kind == "detached":
        return x.requires_grad_().detach()
    if kind in ("int8", "uint16", "bool"):
        return (x * 2).to(getattr(torch, kind))
    if kind == "one row":
        return x[:1]
    if kind == "empty":
        return x[:, :0]
    return None if kind == "none" else x.requires_grad_(rng.random() < 0.5)


def odd_calls(side, rng):
    gives = rng.choice(
        ["times", "times", "times", "same", "state", "leaf", "views", "sizes", "kinds"]
    )
    made = Echo(gives)
    dp = wrap(side, made, rng.choice([2, 2, 3]))
    count = rng.choice([3, 4, 6])
    given = [odd(rng, count) for _ in range(rng.choice([1, 1, 2]))]
    leaves = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
    for leaf in leaves:
        leaf.retain_grad()
    with torch.set_grad_enabled(rng.random() < 0.8):
        output = dp(*given)
    found = [t for t in tensors(output) if t.requires_grad]
    if found:
        total = sum(t.abs().double().sum() for t in found)
        total.backward()
    kinds = [(type(t).__name__, str(t.layout), t.is_leaf) for t in tensors(output)]
    # Zeros where nothing used a parameter.
    gain = torch.zeros(1) if made.gain.grad is None else made.gain.grad.float()
    return output, kinds, sorted(made.seen), gain, [t.grad for t in leaves]


def recomputed(side, rng):
    """The whole wrapper under checkpointing, and again in its backward."""
    made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)).double()
    dp = wrap(side, made, rng.choice([1, 2, 3]))
    x = rows(side, rng, rng.choice([5, 6])).double().requires_grad_()
    output = checkpoint(dp, x, use_reentrant=rng.random() < 0.5)
    output.square().sum().backward()
    return output, x.grad, [p.grad for p in made.parameters()]


def called_with(side, rng):
    """Other tensors for the parameters during a call."""
    made = nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3)).double()
    dp = wrap(side, made, rng.choice([1, 2, 3]))
    x = rows(side, rng, 6).double()
    first = dp(x)
    seeds = {name: torch.rand_like(p).requires_grad_() for name, p in dp.named_parameters()}
    tensors_ = {name: seed * 2 for name, seed in seeds.items()}
    if rng.random() < 0.5:
        tensors_.update({n: b.clone() for n, b in dp.named_buffers()})
    around = nn.Sequential(dp)  # torch refuses a wrapper itself
    tensors_ = {f"0.{name}": tensor for name, tensor in tensors_.items()}
    output = torch.func.functional_call(around, tensors_, (x,))
    (output.square().sum() + first.square().sum()).backward()
    again = dp(x)
    return first, output, again, [s.grad for s in seeds.values()], [
        p.grad for p in made.parameters()
    ], list(made.buffers())  # fmt: skip


class Refusing(nn.Module):
    """Fails in a hook, of whatever kind."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, 2).double()

    def forward(self, x):
        return self.lin(x)


def failing_hooks(side, rng):
    """The wrapper and its module are as before when a hook failed."""
    made = Refusing()
    dp = wrap(side, made, rng.choice([2, 3]))
    x = rows(side, rng, 6).double()

    def fails(*_):
        raise LookupError("a hook fails")

    target = rng.choice([dp, made, made.lin])
    kind = rng.choice(["forward_pre", "forward", "full_backward", "full_backward_pre"])
    handle = getattr(target, f"register_{kind}_hook")(fails)
    told = None
    try:
        dp(x.requires_grad_()).sum().backward()
    except Exception as error:
        told = type(error).__name__
    handle.remove()
    made.zero_grad()
    x.grad = None
    output = dp(x)
    output.sum().backward()
    return told, output, x.grad, [p.grad for p in made.parameters()]


def cloned(side, rng):
    """Copies of a wrapper are apart from it, and what is dropped takes nothing along."""
    made = nn.Sequential(nn.Linear(WIDTH, 2), nn.BatchNorm1d(2)).double()
    dp = wrap(side, made, 2)
    x = rows(side, rng, 6).double()
    first = dp(x)
    other = copy.deepcopy(dp) if rng.random() < 0.5 else copy.copy(dp)
    if rng.random() < 0.5:
        del dp
    second = other(x)
    (first.sum() + second.square().sum()).backward()
    return first, second, [p.grad for p in (*made.parameters(), *other.parameters())]


class Overrides:
    """The four methods, as a subclass would have them."""

    def scatter(self, inputs, kwargs, device_ids):
        inputs, kwargs = super().scatter(inputs, kwargs, device_ids)
        return inputs, [dict(named, scale=named.get("scale", 1.0) * 0.5) for named in kwargs]

    def replicate(self, module, device_ids):
        replicas = super().replicate(module, device_ids)
        for replica in replicas:
            replica.tag = len(replicas)
        return replicas

    def parallel_apply(self, replicas, inputs, kwargs):
        return [out for out in super().parallel_apply(replicas, inputs, kwargs)]

    def gather(self, outputs, output_device):
        return {"given": super().gather(outputs, output_device), "count": [len(outputs)]}


class Functions:
    """The methods by the functions of the same name."""

    def scatter(self, inputs, kwargs, device_ids):
        return self.api.scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def replicate(self, module, device_ids):
        return self.api.replicate(module, device_ids, not torch.is_grad_enabled())

    def parallel_apply(self, replicas, inputs, kwargs):
        return self.api.parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])


class Ours(Overrides, fastdp.DataParallel):
    pass


class OursByFunctions(Functions, fastdp.DataParallel):
    api = fastdp


class Theirs(Overrides, oracle.DataParallel):
    pass


class TheirsByFunctions(Functions, oracle.DataParallel):
    api = oracle


def subclass(side, rng):
    """For some steps the wrapper is of a subclass with methods of its own."""
    plain, *own = fastdp.DataParallel, Ours, OursByFunctions
    if side.api is oracle:
        plain, *own = oracle.DataParallel, Theirs, TheirsByFunctions
    side.dp.__class__ = rng.choice(own)
    try:
        results = []
        for _ in range(rng.randint(1, 3)):
            clear(side, rng)
            results.append(called(side, rng)[1])
            back(side, rng, results[-1])
        return results
    finally:
        side.dp.__class__ = plain


CALLS = {
    "lazy": (0.5, lazy), "nested": (1, nested), "made elsewhere": (0.7, made_elsewhere),
    "sparse": (1, sparse), "sequences": (1, sequences), "odd calls": (4, odd_calls),
    "recomputed": (1, recomputed), "called with": (1, called_with),
    "failing hooks": (1, failing_hooks), "cloned": (1, cloned), "subclass": (2, subclass),
}  # fmt: skip
