"""BEHAVIOUR A, D and L, side by side with torch's own: what public code does with wrapped modules,
and in them. Each case is a kind that many repositories have, in its smallest form; subclasses of
the wrapper are in test_wild_usage.py."""

import collections
import copy
import enum
import functools
import io
import math
import queue
import types
import typing

import pytest
import torch
from alike import Table, check, trained
from nets import Apply, Net, exact, grads, ints, linear
from torch import nn

row = pytest.mark.row

usages = Table()


# What owners do with a wrapper and its module.


@usages
def patches_its_forward(wrap):
    """Mixed precision of old wraps the forward of an instance."""
    module = Net()
    dp = wrap(module)
    inner = dp.forward
    dp.forward = lambda *inputs, **kwargs: inner(*[x * 2 for x in inputs], **kwargs).float()
    return trained(module, dp, ints(4, 3))


@usages
def saves_from_the_host(wrap):
    net = nn.Sequential(linear(), nn.BatchNorm1d(2).double())
    dp = wrap(net)
    dp.apply(lambda m: nn.init.constant_(m.weight.data, 2) if hasattr(m, "weight") else None)
    first = trained(net, dp, ints(4, 3))
    file = io.BytesIO()
    torch.save(dp.module.cpu().state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    del state._metadata
    dp.module.load_state_dict(state)
    dp.to(dp.src_device_obj)
    missing = dp.load_state_dict({f"module.{k}": state[k] * 2 for k in ("0.weight",)}, strict=False)
    return first, trained(net, dp, ints(4, 3)), missing.missing_keys


@usages
def converts_its_norms(wrap):
    net = nn.Sequential(linear(), nn.BatchNorm1d(2).double())
    dp = wrap(net)
    first = trained(net, dp, ints(4, 3))
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(dp).eval()
    return first, converted is dp, type(converted.module[1]), converted(ints(4, 3))


@usages
def counts_what_modules_do(wrap):
    """Summaries and counters of operations: hooks on every module, buffers that they add to."""
    net = nn.Sequential(linear(), nn.ReLU(), exact(nn.Linear(2, 2)))
    dp = wrap(net)
    shapes, handles = collections.Counter(), []

    def count(module, inputs, output):
        module.total += torch.tensor([float(output.numel())], device=module.total.device)
        module.plain += 1
        shapes[type(module), tuple(output.shape)] += 1

    for part in net:
        part.register_buffer("total", torch.zeros(1, dtype=torch.float64, device=dp.src_device_obj))
        part.plain = 0
        handles.append(part.register_forward_hook(count))
    with torch.no_grad():
        dp(ints(4, 3)), dp(ints(6, 3))
    totals = [(part.total.clone(), part.plain) for part in net]
    for handle in handles:
        handle.remove()
    return totals, sorted(shapes.items(), key=str), dp(ints(4, 3)), torch.jit.trace(
        dp.module, ints(4, 3).to(dp.src_device_obj)
    )(ints(4, 3).to(dp.src_device_obj))


@usages
def is_one_of_many_wrappers(wrap):
    """Parts wrapped each by itself, one in a table; one called again and again in one graph."""
    nets = nn.ModuleDict({"cell": wrap(exact(nn.Linear(3, 3))), "head": wrap(linear())})
    hidden = ints(4, 3)
    for _ in range(12):
        hidden = nets.cell(hidden) / 4
    out = nets["head"](hidden)
    out.sum().backward()
    first = grads(nets)
    nets.requires_grad_(False).eval()
    return out, first, nets["head"](nets["cell"](ints(5, 3))).requires_grad


# Weights that a forward makes.


@usages
def ties_weights_in_forward(wrap):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(), linear(3)

        def forward(self, x):
            self.b.weight = self.a.weight
            return self.b(x)

    module = Tied()
    dp = wrap(module)
    results = [trained(module, dp, ints(4, 3)) for _ in range(3)]
    return results, module.b.weight is module.a.weight, sorted(module.state_dict())


@usages
def drops_weights(wrap):
    """Weight drop as language models have it. Where nothing is dropped, as in evaluation, dropout
    gives the very weight, so that a parameter goes from one name to another."""

    class WeightDrop(nn.Module):
        def __init__(self, rnn):
            super().__init__()
            self.rnn = rnn
            raw = rnn._parameters.pop("weight_hh_l0")
            rnn.register_parameter("weight_hh_l0_raw", nn.Parameter(raw.data))
            rnn.flatten_parameters = self.nothing

        def nothing(self, *args, **kwargs):
            return None

        def forward(self, x, p=0.0):
            raw = self.rnn.weight_hh_l0_raw
            weight = nn.functional.dropout(raw, p=p, training=self.training)
            setattr(self.rnn, "weight_hh_l0", weight)
            return self.rnn(x)[0]

    module = WeightDrop(nn.GRU(3, 2, batch_first=True).double())
    dp = wrap(module)
    results = [trained(module, dp, ints(4, 5, 3)) for _ in range(2)]
    dp.eval()
    module.rnn.train()  # cuDNN has a backward of a GRU in training only
    results += [trained(module, dp, ints(4, 5, 3), 0.5) for _ in range(2)]
    return results, sorted(dict(module.named_parameters()))


@usages
def normalises_by_a_wrapping_module(wrap):
    """The spectral norm that GANs carry with them: vectors are parameters whose data is swapped."""

    def unit(v):
        return v / (v.norm() + 1e-12)

    class Normed(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module
            weight = module._parameters.pop("weight")
            for name, size in zip("uv", weight.shape, strict=True):
                vector = unit(torch.arange(1, size + 1).double())
                module.register_parameter(f"weight_{name}", nn.Parameter(vector, False))
            module.register_parameter("weight_bar", nn.Parameter(weight.data))

        def forward(self, x):
            u, v, w = (getattr(self.module, f"weight_{name}") for name in ("u", "v", "bar"))
            v.data = unit(w.data.t() @ u.data)
            u.data = unit(w.data @ v.data)
            self.module.weight = w / u.dot(w.mv(v))
            return self.module.forward(x)

    module = nn.Sequential(Normed(linear()), nn.Tanh())
    dp = wrap(module)
    results = [trained(module, dp, ints(4, 3)) for _ in range(3)]
    return results, module.state_dict(), "weight" in vars(module[0].module)


@usages
def scales_weights_in_a_hook(wrap):
    """Equalised learning rates; the base was called itself before, and has the weight of then."""
    lin = linear()
    lin.register_parameter("weight_orig", nn.Parameter(lin._parameters.pop("weight").data))
    lin.register_forward_pre_hook(
        lambda m, _: setattr(m, "weight", m.weight_orig * math.sqrt(2 / m.weight_orig.size(1)))
    )
    module = nn.Sequential(lin)
    dp = wrap(module)
    results = []
    for _ in range(2):
        dp.module(ints(2, 3).to(dp.src_device_obj))
        results.append(trained(module, dp, ints(4, 3)))
    return results


@usages
def keeps_vectors_behind_properties(wrap):
    """A generator and a discriminator in one module, whose layers write slices of buffers."""

    class Layer(nn.Linear):
        def __init__(self, *args):
            super().__init__(*args)
            self.register_buffer("u0", torch.ones(1, args[1]))

        @property
        def u(self):
            return [self.u0]

        def forward(self, x):
            with torch.no_grad():
                v = nn.functional.normalize(self.u[0] @ self.weight)
                u = nn.functional.normalize(v @ self.weight.t())
                if self.training:
                    self.u[0][:] = u
            norm = (v @ self.weight.t() @ u.t()).squeeze()
            return nn.functional.linear(x, self.weight / norm, self.bias)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.g, self.d = exact(Layer(3, 3)), exact(Layer(3, 1), 2)
            self.optimizers = [torch.optim.SGD(m.parameters(), 2**-5) for m in (self.g, self.d)]

        def forward(self, z, x=None, train_g=False):
            with torch.set_grad_enabled(train_g):
                fake = self.g(z)
            if x is None:
                return self.d(fake)
            return torch.split(self.d(torch.cat([fake, x])), [len(fake), len(x)])

    module = Both()
    dp = wrap(module)
    source, average = module.state_dict(), copy.deepcopy(module).state_dict()
    outputs = []
    for step in range(2):
        fake, real = dp(ints(4, 3, seed=step), ints(4, 3, seed=step + 9))
        (fake.mean() - real.mean()).backward()
        dp.module.optimizers[1].step()
        module.zero_grad()
        outputs += [fake, real, dp(ints(4, 3, seed=step), train_g=True)]
        (-outputs[-1].mean()).backward()
        dp.module.optimizers[0].step()
        module.zero_grad()
        with torch.no_grad():
            for name in source:
                average[name].data.copy_((average[name].data + source[name].data) / 2)
    return outputs, average


# Replicas that talk to each other, and to the base.


@usages
def combines_statistics_in_the_base(wrap):
    """Synchronised batch norm: an object that all replicas share holds a bound method of the base,
    which gives the base other buffers while the replicas run."""

    class Master:
        def __init__(self, combine):
            self.combine, self.inbox, self.boxes = combine, queue.Queue(), {}

    class Sync(nn.BatchNorm1d):
        def __init__(self, *args):
            super().__init__(*args)
            self.master, self.rank = Master(self.combine), None

        def told(self, rank, count):
            self.rank = rank
            if rank == 0:
                self.master.boxes = {other: queue.Queue() for other in range(1, count)}

        def combine(self, parts):
            size = sum(part[2] for part in parts)
            mean = sum(part[0] for part in parts) / size
            spread = sum(part[1] for part in parts) - size * mean**2
            self.running_mean = self.running_mean * 0.9 + mean.data * 0.1
            self.running_var = self.running_var * 0.9 + spread.data / (size - 1) * 0.1
            return mean, (spread / size + self.eps) ** -0.5

        def forward(self, x):
            if not self.training or self.rank is None:
                return super().forward(x)
            sums = x.sum(0), (x**2).sum(0), len(x)
            if self.rank:
                self.master.inbox.put((self.rank, sums))
                mean, scale = self.master.boxes[self.rank].get(timeout=60)
            else:
                others = sorted(self.master.inbox.get(timeout=60) for _ in self.master.boxes)
                parts = [sums] + [(a.to(x.device), b.to(x.device), n) for _, (a, b, n) in others]
                mean, scale = self.master.combine(parts)
                for box in self.master.boxes.values():
                    box.put((mean, scale))
            return (x - mean.to(x.device)) * (scale.to(x.device) * self.weight) + self.bias

    module = nn.Sequential(linear(), Sync(2)).double()
    dp = wrap(module)
    inner = dp.replicate

    def replicate(module, device_ids):
        replicas = inner(module, device_ids)
        for rank, replica in enumerate(replicas):
            replica[1].told(rank, len(replicas))
        return replicas

    dp.replicate = replicate
    results = [trained(module, dp, ints(6, 3, seed=step)) for step in range(3)]
    return results, dp.eval()(ints(5, 3)), sorted(dp.state_dict())


@usages
def asks_a_wrapped_teacher(wrap):
    """A wrapper, and a hidden module, that replicas call."""
    student = Apply(lambda s, x, teacher: ((s.lin(x) - teacher(x).detach().to(x)) ** 2).mean(1))
    student.__dict__["count"] = collections.Counter()
    return trained(student, wrap(student), ints(4, 3), wrap(Net(seed=5)))


@usages
def caches_a_method_of_each_replica(wrap):
    class Cached(Net):
        @functools.lru_cache(maxsize=None)  # noqa: B019
        def total(self):
            return self.first.weight.sum()

        def forward(self, x):
            return super().forward(x) + self.total()

    module = Cached()
    dp = wrap(module)
    results = []
    for _ in range(3):
        results.append(trained(module, dp, ints(4, 3)))
        with torch.no_grad():
            module.first.weight.add_(1)
    return results


# Arguments and results.


@usages
def takes_dictionaries_with_attributes(wrap):
    class Plain(dict):
        __getattr__ = dict.__getitem__

    class Easy(dict):
        def __init__(self, given=None, **more):
            super().__init__()
            for key, value in dict(given or {}, **more).items():
                self[key] = value

        def __setitem__(self, key, value):
            if isinstance(value, (list, tuple)):
                value = [type(self)(v) if isinstance(v, dict) else v for v in value]
            super().__setitem__(key, value)
            self.__dict__[key] = value

    results = []
    for kind in (Plain, Easy):
        dp = wrap(Apply(lambda s, a: type(a)(y=s.lin(a.x), all=[a.x], of=type(a).__name__)))
        out = dp(kind(x=ints(4, 3), name="n", part={"t": ints(4, 2)}))
        results.append((out.y, list(out.all), out["y"]))
    return results


@usages
def takes_what_is_no_tensor(wrap):
    class Mode(enum.Enum):
        ON = 1

    class Out(typing.NamedTuple):
        y: torch.Tensor
        z: typing.Optional[torch.Tensor] = None

    seen = []

    def forward(s, x, *args, **kwargs):
        seen.append((args, kwargs))
        return Out(s.lin(x)), None, collections.deque([x])

    mine = types.SimpleNamespace(to=lambda device: None)
    arguments = Mode.ON, torch.float64, range(3), slice(0, 2), {1, 2}, torch.abs, mine, None
    out = wrap(Apply(forward))(ints(4, 3), *arguments, flag=True, text={"s": "t", "e": []})
    return out[0].y, out[0].z, out[1], list(out[2]), seen == [(arguments, seen[0][1])] * 2


@row("A8", "A12", "A16", "A19", "A20", "A23", "D11", "B11", "B12", "C5", "F11", "L4", "L9", "X31")
@pytest.mark.parametrize("case", usages.values(), ids=usages.keys())
def test_usages(case, fast):
    check(case, fast)
