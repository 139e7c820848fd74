"""BEHAVIOUR F and L, as in public code: what scripts do around a wrapper, to torch itself and to
modules before they are wrapped. Subclasses are in test_wild_usage.py."""

import sys
import types

import fastdp
import oracle
import pytest
import torch
from alike import check, trained
from nets import Apply, Net, grads, ints, linear, same
from torch import nn

from fastdp.engine_choice import cuts_alike
from fastdp.placement import choose_devices

row = pytest.mark.row

SCATTERS = ["torch.nn.parallel.scatter_gather", f"{oracle.PACKAGE}.scatter_gather"]


def splitting(impl):
    """A scatter that takes lists for lists of samples."""

    def scatter(inputs, target_gpus, dim=0):
        count = len(target_gpus)
        if isinstance(inputs, torch.Tensor):
            return [c.to(impl.device(rank)) for rank, c in enumerate(inputs.chunk(count, dim))]
        if isinstance(inputs, list):
            size = -(-len(inputs) // count)
            return [inputs[start : start + size] for start in range(0, len(inputs), size)]
        if isinstance(inputs, tuple):
            return list(zip(*[scatter(each, target_gpus, dim) for each in inputs]))
        if isinstance(inputs, dict):
            pieces = [[(k, v) for v in scatter(x, target_gpus, dim)] for k, x in inputs.items()]
            return [dict(pairs) for pairs in zip(*pieces)]
        return [inputs for _ in target_gpus]

    return scatter


@row("B9", "B13", "L3")
def test_torchs_scatter_is_replaced(impl, monkeypatch):
    """Scripts put their own scatter in the place of torch's, and wrap as ever after."""
    seen = []

    def forward(s, x, names, more=()):
        seen.append((len(x), names, more))
        return s.lin(x)

    module = Apply(forward)
    dp = impl.wrap(module, 2)
    dp(ints(4, 3), list("abcd"))
    assert [names for _, names, _ in seen] == [list("abcd")] * 2
    seen.clear()
    for name in SCATTERS:
        monkeypatch.setattr(sys.modules[name], "scatter", splitting(impl))
    out = dp(ints(5, 3), list("abcde"), more=[1, 2])
    same(out, linear()(ints(5, 3)))
    out.sum().backward()
    same(grads(module)["lin.weight"], ints(5, 3).sum(0).expand(2, 3))
    assert sorted(seen) == [(2, ["d", "e"], [2]), (3, ["a", "b", "c"], [1])]
    same(impl.api.data_parallel(module, (ints(4, 3), list("abcd")), impl.ids(2)), dp(ints(4, 3), 1))
    rows, named = impl.api.scatter_kwargs((ints(4, 3), list("abcd")), None, impl.ids(2))
    assert [names for _, names in rows] == [["a", "b"], ["c", "d"]] and named == ({}, {})


@row("B9", "B13")
def test_options_stand_above_a_scatter_that_was_put_in_torchs_place(fast, monkeypatch):
    seen = []
    module = Apply(lambda s, x, names: (seen.append((len(x), names)), s.lin(x))[1])
    dp = fast.wrap(module, 2)
    assert cuts_alike(dp)
    monkeypatch.setattr(sys.modules[SCATTERS[0]], "scatter", splitting(fast))
    assert not cuts_alike(dp)
    sized = fast.wrap(module, 2, chunk_sizes=[1, 3])
    same(sized(ints(4, 3), ["a", "b"]), linear()(ints(4, 3)))
    assert sorted(seen) == [(1, ["a", "b"]), (3, ["a", "b"])]


def replicates_by_a_method_of_its_own(wrap):
    """Libraries of adapters give a module, not its class, the method that makes its replicas."""

    def replicate(self):
        replica = type(self).__new__(type(self))
        replica.__dict__.update(vars(self), _is_replica=True, made_by="hand")
        for name in ("_buffers", "_modules"):
            replica.__dict__[name] = getattr(self, name).copy()
        replica.__dict__["_parameters"] = {}
        return replica

    seen = []
    padded = nn.ConstantPad1d((0, 1), 1.0)
    own = Apply(lambda s, x: (seen.append(s.made_by), s.lin(padded(x)))[1])
    module = nn.Sequential(linear(), own)
    module[1].made_by = "torch"
    module[1]._replicate_for_data_parallel = types.MethodType(replicate, module[1])
    dp = wrap(module)
    return [trained(module, dp, ints(4, 3)) for _ in range(2)], seen, module[1].made_by


@row("A9", "A10")
def test_a_module_replicates_by_a_method_of_its_own(fast):
    check(replicates_by_a_method_of_its_own, fast)


@row("F9", "L3")
def test_replicas_of_a_wrapper_without_devices(monkeypatch):
    """A subclass that makes copies in its constructor works where there is no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for base in (nn.DataParallel, fastdp.DataParallel):
        dp = base(Net())
        assert dp.replicate(dp.module, dp.device_ids) == []
        same(dp(ints(4, 3)), Net()(ints(4, 3)))


@row("F7")
def test_an_option_that_was_not_given_as_the_only_device(monkeypatch):
    """device_ids=[args.gpu] where that is None: torch's takes the current GPU."""
    assert choose_devices([None]) == () or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert choose_devices([None]) == choose_devices((None,)) == (torch.device("cuda", 1),)
    with pytest.raises(TypeError, match=r"device_ids\[1\] must be an int"):
        choose_devices([0, None])
    assert torch._utils._get_device_index(None, optional=True) == 1  # torch's, of each entry
