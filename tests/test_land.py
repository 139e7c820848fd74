"""Land: the gradients of a rank go back to Broadcast by one edge. On several GPUs that is the way
of ranks on another stream; here ranks on the host are made to take it. Every gradient must be what
it is without."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp import buckets, functions, plans

RANKS = {"all": lambda n: list(range(n)), "all but the first": lambda n: list(range(1, n))}


@pytest.fixture(params=RANKS)
def landing(request, monkeypatch):
    """Gives the number of Land's backwards so far."""
    make, backward = plans.Plan.__init__, functions.Land.backward
    ran = []

    def link(self, *args):
        make(self, *args)
        self._linked = RANKS[request.param](len(self.devices))

    def counted(ctx, *gradients):
        ran.append(1)
        return backward(ctx, *gradients)

    monkeypatch.setattr(plans.Plan, "__init__", link)
    monkeypatch.setattr(functions.Land, "backward", staticmethod(counted))
    return lambda: len(ran)


class Net(nn.Module):
    """`skip` leaves a layer out; every parameter is in a bucket of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))
        self.double()

    def forward(self, x, skip=None):
        x = torch.tanh(self.a(x))
        if skip is None or bool((x.shape[0] % 2 == 1) == (skip == "odd")):
            x = torch.tanh(self.b(x))
        return self.c(x)


def wrapped(module, n, bucket_bytes=1):
    return fastdp.DataParallel(module, device_ids=["cpu"] * n, bucket_bytes=bucket_bytes)


def rows(count=6):
    return torch.linspace(-1, 1, 3 * count, dtype=torch.float64).view(count, 3)


def grads(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def bits(found, want):
    assert len(found) == len(want)
    for one, other in zip(found, want):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def trained(monkeypatch, act, *, n=3, bucket_bytes=1):
    """(with Land, without it), each the gradients that `act` leaves."""
    result = []
    for undo in (False, True):
        if undo:
            monkeypatch.undo()
        module = Net()
        extra = act(wrapped(module, n, bucket_bytes), module) or ()
        result.append([*grads(module), *extra])
    return result


ACTS = {
    "once": lambda dp, module: dp(rows()).sum().backward(),
    "a penalty": lambda dp, module: (dp(rows()).sum() + module.a.weight.square().sum()).backward(),
    "two forwards": lambda dp, module: (dp(rows()).sum() * dp(rows(4)).sum()).backward(),
    "checkpoint": lambda dp, module: (
        checkpoint(dp, rows().requires_grad_(), use_reentrant=False).sum().backward()
    ),
    "reentrant": lambda dp, module: (
        checkpoint(dp, rows().requires_grad_(), use_reentrant=True).sum().backward()
    ),
}


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("act", ACTS)
def test_gradients_are_those_without(landing, monkeypatch, act, bucket_bytes):
    found, want = trained(monkeypatch, ACTS[act], bucket_bytes=bucket_bytes)
    bits(found, want)
    assert landing() > 0


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_none_for_what_nobody_used(landing, bucket_bytes):
    """Also where others of its bucket have gradients, which come back in the same parcel."""
    module, x = Net(), rows()
    ids = ["cpu"] * 3
    dp = fastdp.DataParallel(module, ids, bucket_bytes=bucket_bytes, unused_grad="none")
    dp(x, "odd").sum().backward()
    assert [p.grad is None for p in module.parameters()] == [False] * 2 + [True] * 2 + [False] * 2
    assert landing() > 0


def test_backward_twice_and_accumulation(landing, monkeypatch):
    def act(dp, module):
        loss = dp(rows()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    bits(*trained(monkeypatch, act))


def test_gradients_of_gradients(landing, monkeypatch):
    def act(dp, module):
        x = rows().requires_grad_()
        parameters = list(module.parameters())
        first = torch.autograd.grad(dp(x).tanh().sum(), [x, *parameters], create_graph=True)
        second = torch.autograd.grad(
            sum(each.square().sum() for each in first), [x, *parameters[:4]], create_graph=True
        )
        sum(each.square().sum() for each in second).backward()
        return [each.detach() for each in (*first, *second)]

    bits(*trained(monkeypatch, act, n=2))


def test_gradgradcheck(landing):
    module = nn.Linear(2, 2).double()
    dp = wrapped(module, 2)
    x = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)

    def run(x, weight, bias):
        def tied(values):
            return torch.func.functional_call(holder, values, (x,))

        return tied({"0.module.weight": weight, "0.module.bias": bias}).tanh()

    holder = nn.Sequential(dp)
    inputs = (x, *(p.detach().clone().requires_grad_() for p in module.parameters()))
    assert torch.autograd.gradcheck(run, inputs) and torch.autograd.gradgradcheck(run, inputs)
    assert landing() > 0


@pytest.mark.parametrize("skip", ["odd", "even"])
def test_ranks_that_do_not_use_a_bucket(landing, monkeypatch, skip):
    """Batches of 2, 2 and 1: some ranks skip a layer, which others use."""
    bits(*trained(monkeypatch, lambda dp, module: dp(rows(5), skip=skip).sum().backward()))


def test_a_bucket_that_nobody_uses_gets_zeros(landing):
    module = Net()
    wrapped(module, 2)(rows(4), skip="odd").sum().backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in module.b.parameters())


def test_some_gradients_only(landing):
    module = Net()
    dp = wrapped(module, 2)
    out = dp(rows())
    (one,) = torch.autograd.grad(out.sum(), [module.b.weight], retain_graph=True)
    out.sum().backward()
    assert torch.equal(one, module.b.weight.grad)


def test_replica_parameters(landing):
    """Non-leaf parameters with a gradient of their own, and hooks that see it."""
    seen = []

    class Hooked(nn.Linear):
        def forward(self, x):
            assert type(self.weight) is nn.Parameter and not self.weight.is_leaf
            self.weight.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
            out = super().forward(x)
            (inside,) = torch.autograd.grad(out.sum(), [self.weight], retain_graph=True)
            return out + inside.sum()

    module = Hooked(2, 2).double()
    wrapped(module, 2)(torch.ones(4, 2, dtype=torch.float64)).sum().backward()
    # Hooks run in the replicas' own backward inside forward, too: not for what grad() is asked for.
    total = sum(seen[-2:])
    assert torch.equal(module.weight.grad, 2 * total)


def test_each_backward_has_its_own_gradients(landing):
    """Two threads go backward through one graph at once."""
    module = Net()
    out = wrapped(module, 3, 1 << 20)(rows())
    parameters = list(module.parameters())
    factors = [torch.full_like(out, 2.0**k) for k in range(8)]
    want = torch.autograd.grad(out, parameters, torch.ones_like(out), retain_graph=True)
    found = [None] * len(factors)

    def run(k):
        for _ in range(20):
            found[k] = torch.autograd.grad(out, parameters, factors[k], retain_graph=True)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(factors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, gradients in enumerate(found):
        bits(gradients, [gradient * 2.0**k for gradient in want])


def test_another_default_dtype_in_backward(landing):
    module = Net()
    loss = wrapped(module, 2)(rows()).sum()
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        loss.backward()
    finally:
        torch.set_default_dtype(former)
    found = grads(module)
    module.zero_grad()
    wrapped(module, 2)(rows()).sum().backward()
    bits(found, grads(module))


@pytest.mark.parametrize("fails", [False, True])
def test_gradients_are_let_go(landing, monkeypatch, fails):
    """By the end of a backward no gradient of a replica is held, also when it was cut short."""
    gone = []
    backward = functions.Land.backward

    def noted(ctx, *gradients):
        gone.extend(weakref.ref(gradient) for gradient in gradients if gradient is not None)
        return backward(ctx, *gradients)

    monkeypatch.setattr(functions.Land, "backward", staticmethod(noted))
    if fails:
        def broken(*args):
            raise ZeroDivisionError

        monkeypatch.setattr(functions, "_reduced", broken)
    gc.collect()
    gc.disable()
    try:
        module = Net()
        loss = wrapped(module, 2)(rows()).sum()
        if fails:
            with pytest.raises(ZeroDivisionError):
                loss.backward()
        else:
            loss.backward()
        del loss
        assert gone and not any(each() is not None for each in gone)
    finally:
        gc.enable()


def test_in_place_changes_of_the_base_still_raise(landing):
    """Replica 0 reads the base in place: its graph must find out."""
    module = Net()
    loss = wrapped(module, 2)(rows()).square().sum()
    with torch.no_grad():
        module.c.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_who_lands():
    devices = [torch.device("cuda", index) for index in (0, 1, 0, 2)]

    def linked(devices, beside):
        class Way:
            apart = beside

        return plans.Plan(b"", [], [], 0, devices, Way)._linked

    assert linked(devices, False) == [1, 3] and linked(devices, True) == [0, 1, 2, 3]
    assert linked([torch.device("cpu")] * 3, False) == []
    assert linked([devices[0]] * 2, False) == []


# Which is early.


def ends_of_backward(monkeypatch):
    """What ends first, of a backward through replicas that ran one after the other: numbers of
    buckets that were summed, and the gradients behind a rank's first layer."""
    module, ends, ranks = Net(), [], []
    sums = buckets.Bucket.sums

    def noted(self, gradients, flat):
        ends.append(self.number)
        return sums(self, gradients, flat)

    def hook(layer, inputs, output):
        rank = len(ranks)
        ranks.append(rank)
        output.register_hook(lambda gradient: ends.append(f"rank {rank}"))

    monkeypatch.setattr(buckets.Bucket, "sums", noted)
    module.a.register_forward_hook(hook)
    ids = ["cpu"] * 3
    dp = fastdp.DataParallel(module, ids, bucket_bytes=1, sequential=True)
    dp(rows()).sum().backward()
    assert ranks == [0, 1, 2]
    return ends


def test_a_bucket_is_summed_as_soon_as_its_gradients_are_there(monkeypatch):
    """The last layer's before the first layer's gradients of the rank whose backward comes last."""
    ends = ends_of_backward(monkeypatch)
    assert sorted(end for end in ends if type(end) is int) == list(range(6))
    assert ends.index(4) < ends.index("rank 0") and ends.index(5) < ends.index("rank 0")
    assert ends.index("rank 0") < min(ends.index(0), ends.index(1))


def test_a_landed_bucket_is_summed_as_soon(landing, monkeypatch):
    test_a_bucket_is_summed_as_soon_as_its_gradients_are_there(monkeypatch)
    assert landing() > 0
