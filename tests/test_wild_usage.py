"""BEHAVIOUR L, side by side with torch's own: subclasses of the wrapper as in public code, and
wrappers that are patched. Each case is a kind that many repositories have, in its smallest form;
what is done with modules is in test_wild_modules.py, what scripts do around them in
test_wild_scripts.py. More kinds are in test_behaviour_alike_subclasses.py."""

import copy
import functools
import threading
import types

import pytest
import torch
from alike import Table, check, trained
from nets import Apply, Net, grads, ints, linear
from torch import nn

row = pytest.mark.row

usages = Table()


class Side:
    """The implementation's class, its names for n devices, and where each is."""

    def __init__(self, wrap, n=2):
        dp = wrap(Net(), n)
        self.base, self.ids, self.home = type(dp), list(dp.device_ids), dp.src_device_obj

    def place(self, device):
        return self.home if self.home.type == "cpu" else torch.device("cuda", device)


# Names.


@usages
def reads_the_module_for_what_it_lacks(wrap):
    """The commonest subclass of all; the module has the names of fastdp's methods and options."""
    side = Side(wrap)

    class Through(side.base):
        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

    module = Net().to(side.home)
    names = "memory report trace call dump fits warmup grad_norm nonfinite watch_replicas".split()
    names += "clip_grad_norm_ engine transport sequential chunk_sizes timeout_s config".split()
    for value, name in enumerate(names):
        setattr(module, name, value)
    dp = Through(module, side.ids)
    out = trained(module, dp, ints(4, 3))
    return out, [[getattr(each, name) for name in names] for each in (dp, copy.deepcopy(dp))]


@usages
def reads_the_module_for_everything(wrap):
    side = Side(wrap)

    class All(side.base):
        def __getattr__(self, name):
            module = super().__getattr__("module")
            return module if name == "module" else getattr(module, name)

    module = Net().to(side.home)
    module.memory = 3
    dp = All(module, side.ids)
    out = trained(module, dp, ints(4, 3))
    return out, [(each.memory, each.first.weight) for each in (dp, copy.deepcopy(dp))]


@usages
def has_parts_of_its_own(wrap):
    side = Side(wrap)
    names = "memory report trace call dump fits warmup grad_norm".split()

    class Parts(side.base):
        def __init__(self, *args):
            super().__init__(*args)
            for name in names:
                setattr(self, name, linear())
            self.nonfinite = 3
            self.register_buffer("steps", torch.zeros(1))

        def forward(self, x):
            self.steps += 1
            return super().forward(x)

    dp = Parts(Net().to(side.home), side.ids)
    kinds = [type(getattr(dp, name)) for name in names]
    return dp(ints(4, 3)), kinds, dp.nonfinite, dp.steps, sorted(dp.state_dict())


@usages
def has_a_module_among_its_bases(wrap):
    """Torch's class calls super().__init__, which is the mixin's. Meta-learning gives the weights
    as an argument."""
    side = Side(wrap)

    class Meta(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache = {}
            self.scale = nn.Parameter(torch.ones(1))

        def named(self):
            self.cache["asked"] = True
            return list(self.named_parameters())

    class Parallel(side.base, Meta):
        def scatter(self, inputs, kwargs, device_ids):
            weights = kwargs.pop("weights", None)
            rows, named = super().scatter(inputs, kwargs, device_ids)
            if weights is not None:
                places = map(side.place, device_ids)
                named = [dict(k, weight=weights.to(p)) for k, p in zip(named, places, strict=False)]
            return rows, named

    def forward(self, x, weight=None):
        return nn.functional.linear(x, self.lin.weight if weight is None else weight)

    module = Apply(forward).to(side.home)
    dp = Parallel(module, side.ids)
    (slope,) = torch.autograd.grad(dp(ints(4, 3)).sum(), module.lin.weight, create_graph=True)
    out = dp(ints(4, 3, seed=5), weights=module.lin.weight - slope / 64)
    out.sum().backward()
    return out, module.lin.weight.grad, dp.cache, [name for name, _ in dp.named()]


@usages
def calls_the_class_by_name(wrap):
    side = Side(wrap)

    class Abstract(nn.Module):
        def helper(self):
            return 7

    class Both(Abstract, side.base):
        def __init__(self, module):
            side.base.__init__(self, module, side.ids)

        def forward(self, *args, **kwargs):
            return side.base.forward(self, *args, **kwargs)

    module = Net().to(side.home)
    dp = Both(module)
    return trained(module, dp, ints(4, 3)), dp.helper()


@usages
def is_looked_at(wrap):
    dp = wrap(Net())
    names = "module generate config no_sync reducer static_graph base_model _orig_mod gather device"
    kind = type(dp).__name__, "DataParallel" in str(type(dp)), isinstance(dp, nn.Module)
    found = [hasattr(dp, name) for name in names.split()]
    return kind, found, repr(dp), dict(dp.state_dict()._metadata), dict(dp.named_modules()).keys()


# The steps.


@usages
def puts_the_module_in_place_of_replica_0(wrap):
    side = Side(wrap)

    class Own(side.base):
        def replicate(self, module, device_ids):
            replicas = super().replicate(module, device_ids)
            replicas[0] = module
            return replicas

    module = Net().to(side.home)
    dp = Own(module, side.ids)
    return [trained(module, dp, ints(4, 3)) for _ in range(3)]


@usages
def takes_several_rounds(wrap):
    """More items than devices: steps again and again, and one gather at the end."""
    side = Side(wrap)

    class Rounds(side.base):
        def forward(self, items):
            outputs = []
            for start in range(0, len(items), len(self.device_ids)):
                now = items[start : start + len(self.device_ids)]
                ids = self.device_ids[: len(now)]
                rows = [(x.to(side.place(d)),) for x, d in zip(now, ids, strict=True)]
                replicas = self.replicate(self.module, ids)
                outputs.extend(self.parallel_apply(replicas, rows, [{}] * len(rows)))
            return self.gather(outputs, self.output_device)

    module = Net().to(side.home)
    dp = Rounds(module, side.ids)
    return [trained(module, dp, [ints(1, 3, seed=k) for k in range(n)]) for n in (5, 21, 1)]


@usages
def keeps_replicas_and_empties_them(wrap):
    """Early Lightning made copies once, to carry attributes from call to call in them."""
    side = Side(wrap)

    class Keeping(side.base):
        def __init__(self, *args):
            super().__init__(*args)
            self.copies = self.replicate(self.module, self.device_ids)
            for replica in self.copies:
                for key in vars(replica):
                    vars(replica)[key] = None

    module = Net().to(side.home)
    dp = Keeping(module, side.ids)
    results = [trained(module, dp, ints(4, 3)) for _ in range(2)]
    dp.copies = None
    return results + [trained(module, dp, ints(4, 3)) for _ in range(2)]


@usages
def replicates_once(wrap):
    """For evaluation, where weights do not change; in training the graph goes on to be the same."""
    side = Side(wrap)

    class Static(side.base):
        def __init__(self, module, device_ids=None):
            super().__init__(module, device_ids=device_ids)
            self.replicas = []

        def replicate(self, module, device_ids):
            if not self.replicas:
                self.replicas = super().replicate(module, self.device_ids)
            return self.replicas[: len(device_ids)]

    module = Net().to(side.home)
    dp = Static(module, side.ids)
    results = [trained(module, dp, ints(n, 3)) for n in (4, 4, 1)]
    dp.replicas = []
    with torch.no_grad():
        module.first.weight.add_(1)
        return results, [dp(ints(4, 3, seed=k)) for k in range(3)]


@usages
def runs_a_part_by_hand(wrap):
    side = Side(wrap)

    class Encoding(side.base):
        def encode(self, *inputs, **kwargs):
            rows, named = self.scatter(inputs, kwargs, self.device_ids)
            replicas = self.replicate(self.module.first, self.device_ids[: len(rows)])
            return self.gather(self.parallel_apply(replicas, rows, named), self.output_device)

    module = Net().to(side.home)
    dp = Encoding(module, side.ids)
    codes = [dp.encode(ints(4, 3)) for _ in range(2)]
    sum(codes).sum().backward()
    return codes, trained(module, dp, ints(4, 3))


@usages
def runs_steps_of_training_in_own_threads(wrap):
    side = Side(wrap)

    class Lightning(side.base):
        def parallel_apply(self, replicas, inputs, kwargs):
            results, enabled = [None] * len(replicas), torch.is_grad_enabled()

            def work(rank):
                torch.set_grad_enabled(enabled)
                replica = replicas[rank]
                step = replica.train_step if replica.training else replica.eval_step
                results[rank] = step(*inputs[rank], **kwargs[rank])

            threads = [threading.Thread(target=work, args=(r,)) for r in range(len(replicas))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return results

    class Module(Net):
        def train_step(self, batch, number):
            x, y = batch
            return {"loss": ((self(x) - y) ** 2).mean(), "log": {"x": x.mean()}}

        def eval_step(self, batch, number):
            return {"error": (self(batch[0]) - batch[1]).abs().sum()}

    module = Module().to(side.home)
    dp = Lightning(module, side.ids)
    outputs = []
    for number in range(2):
        outputs.append(dp((ints(4, 3), ints(4, 2)), number))
        outputs[-1]["loss"].mean().backward()
    with torch.no_grad():
        outputs.append(dp.eval()((ints(4, 3), ints(4, 2)), number=0))
    return outputs, grads(module)


@usages
def cuts_lists_and_stacks_losses(wrap):
    """Detectors: images and targets are lists; one dictionary of keywords stands for all."""
    side = Side(wrap)

    class Detector(side.base):
        def scatter(self, inputs, kwargs, device_ids):
            images, targets = inputs[0]
            count, rows = len(images) // len(device_ids), []
            for rank, device in enumerate(device_ids):
                mine = slice(rank * count, (rank + 1) * count)
                rows.append([torch.stack(images[mine]).to(side.place(device)), targets[mine]])
            return rows, [kwargs] * len(device_ids)

        def gather(self, outputs, output_device):
            if not self.training:
                return sum(outputs, [])
            return {k: torch.stack([o[k].to(side.home) for o in outputs]) for k in outputs[0]}

    def forward(self, images, targets, scale=1):
        if not self.training:
            return [name for name, _ in targets]
        return {"B": self.lin(images).sum() * scale, "C": self.lin.bias.sum() * targets[0][1]}

    module = Apply(forward).to(side.home)
    dp = Detector(module, side.ids)
    batch = list(ints(4, 3)), [(name, k) for k, name in enumerate("abcd")]
    losses = dp(batch, scale=2)
    sum(loss.mean() for loss in losses.values()).backward()
    return losses, grads(module), dp.eval()(batch)


@usages
def is_given_a_dictionary_for_each_device(wrap):
    side = Side(wrap)

    class Scattered(side.base):
        def scatter(self, inputs, kwargs, device_ids):
            rows = [
                [{key: value.to(side.place(device)) for key, value in feed.items()}]
                for feed, device in zip(inputs[0], device_ids, strict=True)
            ]
            return rows, [{} for _ in rows]

    module = Apply(lambda s, feed: (s.lin(feed["x"]).mean(), feed["x"].mean())).to(side.home)
    feeds = [{"x": ints(2, 3)}, {"x": ints(3, 3)}]
    return trained(module, Scattered(module, side.ids), feeds)


@usages
def patches_its_replicate(wrap):
    """Callbacks for the modules of each replica, by a closure over the bound method."""
    side = Side(wrap, 3)
    module = Net().to(side.home)
    dp = side.base(module, side.ids)
    inner, told = dp.replicate, []

    @functools.wraps(inner)
    def replicate(module, device_ids):
        replicas = inner(module, device_ids)
        for rank, replica in enumerate(replicas):
            for part, context in zip(replica.modules(), range(3), strict=True):
                part.rank, part.context = rank, types.SimpleNamespace(number=context)
                told.append((rank, type(part)))
        return replicas

    dp.replicate = replicate
    seen = []
    module.second.register_forward_hook(lambda m, a, out: seen.append((m.rank, len(out))))
    out = trained(module, dp, ints(5, 3))
    copied = copy.deepcopy(dp)
    return out, told[:9], sorted(seen), trained(copied.module, copied, ints(5, 3))


@row("F1", "F2", "F4", "B13", "L3")
@pytest.mark.parametrize("case", usages.values(), ids=usages.keys())
def test_usages(case, fast):
    check(case, fast)
