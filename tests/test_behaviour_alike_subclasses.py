"""BEHAVIOUR B and L, side by side with torch's own: subclasses as found in public code."""

import copy
import threading

import pytest
import torch
from alike import Table, check, trained
from nets import Net, grads, ints, linear
from torch import nn

row = pytest.mark.row

subclasses = Table()


def base_and_ids(wrap, n=2):
    """The implementation's class, its names for n devices, and the device of each."""
    dp = wrap(Net(), n)
    return type(dp), list(dp.device_ids), dp.src_device_obj


@subclasses
def balanced(wrap):
    """Fewer samples for the first device, or none: then its replica is made and not run."""
    base, ids, home = base_and_ids(wrap, 3)

    class Balanced(base):
        def __init__(self, first, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.first = first

        def forward(self, *inputs):
            chosen = self.device_ids[self.first == 0 :]
            rows, named = self.scatter(inputs, {}, chosen)
            replicas = self.replicate(self.module, self.device_ids)[self.first == 0 :]
            return self.gather(self.parallel_apply(replicas, rows, named), self.output_device)

        def scatter(self, inputs, kwargs, device_ids):
            (x,) = inputs
            first = [x[: self.first]] if self.first else []
            chunks = [*first, *x[self.first :].chunk(len(device_ids) - len(first))]
            rows = tuple((chunk.to(place(device)),) for chunk, device in zip(chunks, device_ids))
            return rows, ({},) * len(rows)

    def place(device):
        return home if home.type == "cpu" else torch.device("cuda", device)

    results = []
    for first in (0, 1):
        module = Net().to(home)
        dp = Balanced(first, module, device_ids=ids)
        results.append(trained(module, dp, ints(7, 3).to(home)))
    return results


@subclasses
def criterion_in_parallel(wrap):
    """The model leaves its outputs apart; a second wrapper runs the loss, in threads of its own."""
    base, ids, home = base_and_ids(wrap)

    class Model(base):
        def gather(self, outputs, output_device):
            return outputs

    class Criterion(base):
        def forward(self, inputs, *targets):
            rows, _ = self.scatter(targets, {}, self.device_ids)
            replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
            losses = [None] * len(inputs)

            def work(rank):
                losses[rank] = replicas[rank](inputs[rank], *rows[rank])

            threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(inputs))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return sum(loss.to(home) for loss in losses) / len(losses)

    module = Net().to(home)
    model, criterion = Model(module, ids), Criterion(nn.MSELoss(), ids)
    losses = []
    for step in range(3):
        losses.append(criterion(model(ints(4, 3)), ints(4, 2, seed=step)))
        losses[-1].backward()
    return losses, grads(module)


@subclasses
def forward_through_super(wrap):
    base, ids, home = base_and_ids(wrap)

    class Scaled(base):
        def forward(self, x, *args):
            return {"y": super().forward(x * 2, *args)}

    return Scaled(Net().to(home), ids)(ints(4, 3))


@subclasses
def attributes_of_the_module(wrap):
    base, ids, home = base_and_ids(wrap)

    class Through(base):
        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

    module = Net().to(home)
    module.config = 3
    dp = Through(module, ids)
    out = dp(ints(4, 3))
    return out, dp.config, copy.deepcopy(dp).config, hasattr(dp, "nothing")


@subclasses
def state_and_parts_of_its_own(wrap):
    base, ids, home = base_and_ids(wrap)

    class Counting(base):
        def __init__(self, *args):
            super().__init__(*args)
            self.extra, self.calls = linear(3).to(home), 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) + self.extra(x.to(home))

    module = Net().to(home)
    dp = Counting(module, ids)
    return trained(module, dp, ints(4, 3)), dp.calls, sorted(dp.state_dict()), grads(dp.extra)


@subclasses
def replicas_that_know_their_number(wrap):
    """Callbacks on each module of each replica, as synchronised batch norm wants them."""
    base, ids, home = base_and_ids(wrap, 3)
    called = []

    class Told(nn.Linear):
        def told(self, context, number):
            self.number, self.context = number, context
            called.append(number)

    class Telling(base):
        def replicate(self, module, device_ids):
            replicas = super().replicate(module, device_ids)
            contexts = [object() for _ in replicas[0].modules()]
            for number, replica in enumerate(replicas):
                for context, part in zip(contexts, replica.modules(), strict=True):
                    if hasattr(part, "told"):
                        part.told(context, number)
            return replicas

    module = nn.Sequential(Told(3, 2), Told(2, 2)).double().to(home)
    numbers = []
    module[1].register_forward_pre_hook(lambda m, args: numbers.append((m.number, len(args[0]))))
    result = trained(module, Telling(module, ids), ints(5, 3))
    return result, called, sorted(numbers), hasattr(module[0], "number")


@row("B13", "B18", "C13", "L3", "X31")
@pytest.mark.parametrize("case", subclasses.values(), ids=subclasses.keys())
def test_subclasses(case, fast):
    check(case, fast)
