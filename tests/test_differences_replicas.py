"""README.md, "What differs from nn.DataParallel": replicas. One test per row, named by the row's
first cell, on torch's own code (oracle.py) and on fastdp.
"""

import copy

import fastdp
import oracle
import pytest
import torch
from differences import OURS, THEIRS, Rows, call, cells, per_replica, rank_of, ranked, wrap
from nets import Apply, grads, ints, linear, same
from torch import nn

row = Rows()


def test_every_row_of_the_page_has_a_test():
    assert cells("Replicas") == list(row)


@row("`parameters()` in a replica")
def test_parameters():
    def look(self):
        return [(type(p), p.grad_fn is not None) for p in self.parameters()]

    assert per_replica(THEIRS, look) == [[], []]
    assert per_replica(OURS, look) == [[(nn.Parameter, True)] * 2] * 2


@row("`for p in self.parameters(): p.requires_grad_(False)` in a forward")
def test_freeze_in_forward():
    def forward(self, x):
        for p in self.parameters():
            p.requires_grad_(False)
        return self.lin(x)

    assert call(THEIRS, forward).requires_grad
    with pytest.raises(RuntimeError, match="leaf"):
        call(OURS, forward)


@row("`self.weight = tensor` in a forward")
def test_weight_set_in_forward():
    def forward(delete):
        def run(self, x):
            doubled = self.lin.weight * 2
            if delete:
                del self.lin.weight
            self.lin.weight = doubled
            return self.lin(x)

        return run

    want = ints(4, 3) @ (2 * linear().weight).T + linear().bias
    same(call(THEIRS, forward(False)), want)
    same(call(OURS, forward(True)), want)
    with pytest.raises(TypeError, match="cannot assign"):
        call(OURS, forward(False))


@row("a slice of a `ParameterList` in a forward")
def test_slice_of_parameters():
    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            self.list = nn.ParameterList(torch.ones(3).double() * k for k in range(3))

        def forward(self, x):
            return x * self.list[0] + sum(self.list[1:])

    x = ints(4, 3)
    for side in (THEIRS, OURS):
        sliced = Sliced()
        same(out := wrap(side, sliced)(x), x * 0 + 3)
        out.sum().backward()
        assert [bool(p.grad.any()) for p in sliced.list] == [True] + [side == OURS] * 2


@row("`requires_grad` of a replica's parameters under `no_grad`")
def test_requires_grad_without_gradients():
    def forward(self, x):
        seen[rank_of(x)] = self.lin.weight.requires_grad, self.lin.weight is module.lin.weight
        return x

    module = Apply(forward)
    for mode in (torch.no_grad, torch.inference_mode):
        for side, first in ((THEIRS, (True, True)), (OURS, (False, False))):
            seen = {}
            with mode():
                wrap(side, module)(ranked())
            assert seen == {0: first, 1: (False, False)}


@row("`copy.deepcopy` of a submodule in a forward")
def test_deepcopy_in_forward():
    def forward(self, x):
        return copy.deepcopy(self.lin)(x)

    with pytest.raises(RuntimeError, match="deepcopy"):
        call(THEIRS, forward)
    same(call(OURS, forward), linear()(ints(4, 3)))


@row("replica objects")
def test_replica_objects():
    for side, count in ((THEIRS, 6), (OURS, 2)):
        held = []  # what is held keeps its address
        dp = wrap(side, Apply(lambda self, x: (held.append(self.lin.weight), x)[1]))
        names = set()
        dp.module.function = lambda self, x: (names.add(id(self)), held.append(self), x)[2]
        for _ in range(3):
            dp(ints(4, 3))
            if side == OURS:
                held.clear()
        assert len(names) == count
    held = []
    dp = wrap(OURS, Apply(lambda self, x: (held.append(self), x)[1]))
    for _ in range(2):
        dp(ints(4, 3))
    assert len({id(replica) for replica in held}) == 4


@row("a bound method of the module kept as an attribute, a patched `forward`")
def test_bound_methods():
    for side, rebound in ((THEIRS, False), (OURS, True)):
        module = Apply(lambda self, x: (seen.append(self.method.__self__), self.lin(x))[1])
        module.method = module.lin.forward
        module.lin.forward = module.lin.forward
        module.lin.register_forward_hook(lambda m, *_: seen.append(m.forward.__self__))
        seen = []
        wrap(side, module)(ints(4, 3))
        assert len(seen) == 4 and all((m is not module.lin) == rebound for m in seen)


@row("dictionaries of hooks")
def test_hook_dictionaries():
    for side, count in ((THEIRS, 1), (OURS, 3)):
        module = Apply(lambda self, x: (seen.append(self.lin._forward_hooks), x)[1])
        seen = []
        wrap(side, module)(ints(4, 3))
        assert len({id(hooks) for hooks in [*seen, module.lin._forward_hooks]}) == count


@row("`torch.compile`d modules, whole or inside")
@pytest.mark.slow
def test_compiled():
    def compiled():
        return torch.compile(linear(), backend="eager")

    for module in (compiled, lambda: nn.Sequential(compiled())):
        with pytest.raises(AttributeError):
            wrap(THEIRS, module())(ints(4, 3))
        same(wrap(OURS, module())(ints(4, 3)), linear()(ints(4, 3)))
    for side, on_replica in ((THEIRS, False), (OURS, True)):
        seen = []
        module = Apply(lambda self, x: (seen.append(hasattr(self, "_is_replica")), x)[1])
        module.compile(backend=lambda graph, _: graph)
        wrap(side, module)(ints(4, 3))
        assert set(seen) == {on_replica}
    torch._dynamo.reset()


@row("own `gather` that does not call the wrapper's")
def test_own_gather():
    for side, base, options in (
        (THEIRS, oracle.DataParallel, {}),
        (OURS, fastdp.DataParallel, {"bucket_bytes": 1}),
    ):
        kind = type("Own", (base,), {"gather": lambda self, out, device: torch.cat(list(out))})
        module = Apply(lambda self, x: x @ self.lin.weight.T)
        wrap(side, module, kind, **options)(ints(4, 3)).sum().backward()
        assert (grads(module)["lin.bias"] is None) == (side == OURS)
