"""What a review found in how replicas follow their base: modules from files, edits between calls,
buffers of odd kinds."""

import collections
import copy
import io
import pickle
import sys
import types
import weakref

import numpy as np
import pytest
import torch
from nets import CLOSE, Net, check_against_hand, exact, grads, ints, linear, same
from torch import nn

from fastdp import _C, replica_sets

row = pytest.mark.row


# Modules from files: the keys of their attribute dictionaries are not interned.


def pickled(module):
    return pickle.loads(pickle.dumps(module))


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


FROM_FILE = pytest.mark.parametrize("through", [pickled, saved])


def normed():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2)))
    return exact(module)


def has_strange_keys(module):
    return all(
        any(key is not sys.intern(key) for key in each.__dict__) for each in module.modules()
    )


@row("F4", "A1")
@FROM_FILE
def test_replicas_of_a_loaded_module_have_dictionaries_of_their_own(fast, through):
    module = through(normed())
    assert has_strange_keys(module), "this torch interns them: the test shows nothing"
    dp = fast.wrap(module, 2)
    for replica in dp.replicate(dp.module, dp.device_ids):
        for own, base in zip(replica.modules(), module.modules(), strict=True):
            for name in ("_parameters", "_buffers", "_modules", "_forward_hooks"):
                assert own.__dict__[name] is not base.__dict__[name], name
            assert own._is_replica and own._former_parameters is own._parameters


@row("F4", "A12")
@FROM_FILE
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.distinct
def test_running_statistics_of_a_loaded_module(impl, through, n):
    module = through(normed())
    dp, reference = check_against_hand(impl, module, ints(6, 3), n, CLOSE)
    assert module[1].num_batches_tracked.item() == 1
    torch.testing.assert_close(module[1].running_mean, reference[1].running_mean, **CLOSE)
    torch.testing.assert_close(module[1].running_var, reference[1].running_var, **CLOSE)
    assert all(type(p) is nn.Parameter and p.is_leaf for p in module.parameters())
    dp(ints(6, 3))
    assert module[1].num_batches_tracked.item() == 2


@row("F4")
@FROM_FILE
def test_compile_of_a_loaded_module_reaches_no_replica(fast, through):
    net = through(Net())
    net.compile(backend="eager")
    ran = watch_forwards(net)
    dp = fast.wrap(net, 2)
    same(dp(ints(4, 3)).detach(), Net()(ints(4, 3)).detach())
    assert len(ran) == 2 and net not in ran


# Edits of the base between calls.


def watch_forwards(net):
    """A list of the modules on which the class' forward runs from now on."""
    ran = []

    class Watched(type(net)):
        def forward(self, x):
            ran.append(self)
            return super().forward(x)

    net.__class__ = Watched
    return ran


@row("E8", "A9")
def test_compile_after_the_first_forward(fast):
    net = Net()
    ran = watch_forwards(net)
    dp = fast.wrap(net, 2)
    x = ints(4, 3)
    dp(x)
    ran.clear()
    net.compile(backend="eager")
    dp(x).sum().backward()
    assert len(ran) == 2 and not any(module is net for module in ran)
    want = Net()
    want(x).sum().backward()
    same(grads(net), grads(want))


class Offset(nn.Module):
    """x * w + b, where b may be a buffer or a parameter."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2, 3]).double())
        self.register_buffer("b", torch.tensor([5.0, 6, 7]).double())

    def forward(self, x):
        return x * self.w + self.b


@row("A13", "A1")
@pytest.mark.parametrize("frozen", [True, False])
def test_a_buffer_becomes_a_parameter_and_back(impl, frozen):
    """Frozen, the list of tensors is the same before and after; only the border moves."""
    module = Offset()
    module.w.requires_grad_(not frozen)
    dp = impl.wrap(module, 2)
    x = ints(4, 3, grad=True)
    for kind in ("buffer", "parameter", "buffer"):
        value = module.b.detach()
        del module.b
        if kind == "parameter":
            module.b = nn.Parameter(value, requires_grad=not frozen)
        else:
            module.register_buffer("b", value)
        x.grad = None
        out = dp(x)
        out.sum().backward()
        same(out.detach(), x.detach() * torch.tensor([1.0, 2, 3]) + torch.tensor([5.0, 6, 7]))
        same(x.grad, torch.tensor([1.0, 2, 3]).double().expand(4, 3))
        if kind == "parameter" and not frozen:
            same(module.b.grad, torch.full((3,), 4.0).double())


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3, bias=False) for _ in range(3))
        exact(self)

    def forward(self, x):
        return self.c(self.b(self.a(x)))


TIES = [("b", "a"), ("c", "a"), ("c", "b"), None, ("b", "a")]


def tie(module, pair):
    for k, each in enumerate((module.a, module.b, module.c)):
        each.weight = nn.Parameter(exact(nn.Linear(3, 3), seed=k).weight.detach())
    if pair is not None:
        getattr(module, pair[0]).weight = getattr(module, pair[1]).weight
    return module


@row("D11")
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_other_ties_at_every_call(fast, bucket_bytes):
    module = Chain()
    dp = fast.wrap(module, 2, bucket_bytes=bucket_bytes)
    for pair in TIES:
        tie(module, pair).to(fast.home)
        want = tie(Chain(), pair)
        x = ints(4, 3)
        out = dp(x)
        out.sum().backward()
        expected = want(x)
        expected.sum().backward()
        same(out.detach(), expected.detach())
        same(grads(module), grads(want))
        for replica in dp.replicate(module, dp.device_ids):
            tied = replica.a.weight is replica.b.weight, replica.a.weight is replica.c.weight
            assert tied == (pair == ("b", "a"), pair == ("c", "a"))


def told_buckets(module, bucket_of):
    """What the waiting dictionaries of a replica on another device are told to wait for:
    {module's name: (parameters, buffers)}."""
    tree = _C.Tree(tuple(module.modules()))
    assert tree.hold(module)
    try:
        parameters, _, _ = tree.collect()
        apart = (torch.device("cuda:0"), torch.device("cuda:1"))  # named, never used
        held = replica_sets.ReplicaSet(tree, module, apart)
        blank = [replica_sets._blank_replica(each, held._gates[1]) for each in module.modules()]
        held._replicas.append(_C.Replica(tree, tuple(blank)))
        held._tell_buckets(
            types.SimpleNamespace(parameter_count=len(parameters), bucket_of=bucket_of)
        )
        names = [name for name, _ in module.named_modules()]
        return {
            name: tuple(each.__dict__[kind].bucket for kind in ("_parameters", "_buffers"))
            for name, each in zip(names, blank, strict=True)
        }
    finally:
        tree.release()


@row("D11", "H8", why="the wait for a bucket")
def test_tied_modules_wait_for_the_bucket_of_their_tensor():
    ordinary = told_buckets(tie(Chain(), None), {0: 0, 1: 1, 2: 2})
    assert ordinary == {"": (-1, -1), "a": (0, -1), "b": (1, -1), "c": (2, -1)}
    tied = told_buckets(tie(Chain(), ("b", "a")), {0: 0, 1: 1})
    assert tied == {"": (-1, -1), "a": (0, -1), "b": (0, -1), "c": (1, -1)}
    other = told_buckets(tie(Chain(), ("c", "a")), {0: 0, 1: 1})
    assert other == {"": (-1, -1), "a": (0, -1), "b": (1, -1), "c": (0, -1)}


@row("H8", "A12")
def test_buffers_wait_for_their_bucket():
    module = linear()
    module._buffers["also"] = module.weight
    module.register_buffer("nothing", None)
    module.register_buffer("late", torch.ones(3))
    # weight, bias, then of the buffers: weight again, late.
    assert told_buckets(module, {0: 0, 1: 0, 2: 1, 3: 4}) == {"": (0, 4)}
    # A sparse tensor is in no bucket: nothing to wait for.
    assert told_buckets(module, {0: 0, 1: 0}) == {"": (0, -1)}


@row("D11")
def test_ties_are_part_of_what_a_plan_is_made_for(fast):
    """The same tensors in the same order, tied elsewhere: who waits for what is another matter."""

    def plan_of(pair):
        tie(module, pair).to(fast.home)
        dp(ints(4, 3))
        return dp._fastdp_runtime.replicator._plans[2, True]

    module = Chain()
    dp = fast.wrap(module, 2)
    first = plan_of(("b", "a"))
    assert plan_of(("b", "a")) is first
    assert plan_of(("c", "a")) is not first


# Buffers of odd kinds.


def with_buffer(buffer, use=lambda self, x: x + self.b + self.w):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2).double())
            self.register_buffer("b", buffer)

        def forward(self, x):
            return use(self, x)

    return Holder()


def negated_real():
    return torch.tensor([1 + 2j, 3 + 4j], dtype=torch.complex128).conj().imag


def negated_complex():
    return torch._neg_view(torch.tensor([1 + 2j, 3 + 4j], dtype=torch.complex128))


def conjugated():
    return torch.tensor([1 + 2j, 3 + 4j], dtype=torch.complex128).conj()


@row("A12", why="buffers; precision: complex")
@pytest.mark.parametrize("make", [negated_real, negated_complex, conjugated])
@pytest.mark.parametrize("n", [2, 3])
def test_lazily_negated_and_conjugated_buffers(fast, make, n):
    assert make().is_neg() or make().is_conj()
    module = with_buffer(make())
    dp = fast.wrap(module, n)
    x = torch.arange(12.0).double().view(6, 2)
    for _ in range(2):
        same(dp(x).detach(), x + make())
    same(module.b.resolve_neg().resolve_conj(), make().resolve_neg().resolve_conj())


@row("A12", why="buffers: an error that says which")
@pytest.mark.filterwarnings("ignore")
def test_a_quantized_buffer_is_named(fast):
    module = nn.Sequential(linear())
    scaled = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    module[0].register_buffer("scaled", scaled)
    dp = fast.wrap(module, 2)
    with pytest.raises(TypeError, match="buffer '0.scaled' cannot be replicated.*quantized"):
        dp(ints(4, 3))
    del module[0].scaled
    same(dp(ints(4, 3)).detach(), linear()(ints(4, 3)).detach())


@row("A1", why="parameters: an error that says which")
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
@pytest.mark.parametrize("value", [7, "seven", [torch.ones(1)], np.ones(2)])
def test_what_is_no_tensor_is_named(fast, kind, value):
    module = nn.Sequential(linear())
    dp = fast.wrap(module, 2)
    for used in (False, True):
        if used:
            dp(ints(4, 3))
        module[0].__dict__[f"_{kind}s"]["odd"] = value
        expected = f"{kind} '0.odd' must be a tensor or None, got {type(value).__name__}"
        with pytest.raises(TypeError, match=expected):
            dp(ints(4, 3))
        del module[0].__dict__[f"_{kind}s"]["odd"]
    same(dp(ints(4, 3)).detach(), linear()(ints(4, 3)).detach())


@row("A1", why="parameters: an error that says which")
def test_what_is_no_tensor_is_named_by_the_constructor(fast):
    module = linear()
    module._parameters["odd"] = 7
    with pytest.raises(TypeError, match="parameter 'odd' must be a tensor or None, got int"):
        fast.api.DataParallel(module, fast.ids(2))


@row("A12", why="parameters that share memory with buffers")
def test_a_tensor_that_is_parameter_and_buffer(fast):
    module = Offset()
    module._buffers["b"] = module.w
    dp = fast.wrap(module, 2)
    plain = copy.deepcopy(module).cpu()
    for each in (dp, plain):
        each(ints(4, 3)).sum().backward()
    same(module.w.grad, plain.w.grad)


# Replicas that somebody reached past their module: they are nobody's between two calls.


@row("A1", "C1")
def test_what_is_written_to_a_replica_between_calls_is_gone(fast):
    seen, known = [], []

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.scale = linear(), 1.0

        def forward(self, x):
            seen.append((self.scale, getattr(self, "tag", None), len(self._modules)))
            known.append((weakref.ref(self), self.__dict__))
            return self.lin(x) * self.scale

    dp = fast.wrap(Scaled(), 2, sequential=True)
    x = ints(4, 3)
    first = dp(x)
    dp(x)
    for reach, attributes in list(known):
        attributes["tag"] = "mine"
        attributes["_forward_hooks"] = collections.OrderedDict()
        module = reach()
        if module is not None:
            module.scale = 7.0
            module.more = nn.ReLU()
    del attributes, module, reach
    seen.clear()
    assert torch.equal(dp(x), first)
    assert seen == [(1.0, None, 1)] * 2
