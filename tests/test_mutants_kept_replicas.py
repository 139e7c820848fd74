"""Mistakes with replicas that outlive their forward, one test for each; others: test_mutants.py."""

import gc
import weakref

import pytest
import torch
from nets import Apply, Net, grads, ints, linear, same
from torch.utils.checkpoint import checkpoint

row = pytest.mark.row


@row("D16", why="mutant: a refreshed replica under a checkpoint that has yet to recompute")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpoint_survives_other_forwards(impl, reentrant):
    """Three graphs wait for their recompute while evaluation and other batches go by."""
    module, plain = Apply(None), Net()
    module.net = Net()
    module.function = lambda s, x: checkpoint(lambda y: s.net(y), x, use_reentrant=reentrant)
    dp = impl.wrap(module, 2)
    xs = [ints(k + 2, 3, seed=k, grad=True) for k in range(3)]
    outs = []
    for x in xs:
        outs.append(dp(x))
        dp.eval()
        with torch.no_grad():
            dp(ints(7, 3))
        dp.train()
    for out in reversed(outs):
        out.sum().backward()
    for x in xs:
        z = x.detach().clone().requires_grad_()
        plain(z).sum().backward()
        same(x.grad, z.grad)
    same(grads(module.net), grads(plain))


@row("D6", why="mutant: a replica held by user code is refreshed under it")
def test_a_held_replica_is_left_alone(fast):
    held = []
    module = Apply(lambda s, x: held.append(s) or s.lin(x))
    module.tag = "old"
    dp = fast.wrap(module, 2)
    dp(ints(4, 3))
    module.tag = "new"
    first = list(held)
    for _ in range(3):
        dp(ints(4, 3))
    assert [r.tag for r in first] == ["old"] * 2
    assert {r.tag for r in held[2:]} == {"new"}
    assert not set(map(id, first)) & set(map(id, held[2:]))


@row("D6", why="mutant: an inner module held by user code is refreshed under it")
def test_a_held_inner_module_is_left_alone(fast):
    held = []
    module = Net()
    dp = fast.wrap(module, 2)
    handle = module.second.register_forward_hook(lambda m, a, out: held.append(m))
    dp(ints(4, 3))
    handle.remove()
    first = list(held)
    weights = [m.weight.detach().clone() for m in first]
    with torch.no_grad():
        module.second.weight.add_(1)
    dp(ints(4, 3))
    base = module.second.weight.data_ptr()
    others = [k for k, m in enumerate(first) if m.weight.data_ptr() != base]
    assert len(others) == 1
    same(first[others[0]].weight, weights[others[0]])


@row("D6", why="mutant: emptied replicas: one that escaped keeps working")
def test_an_escaped_replica_still_computes(fast):
    held = []
    dp = fast.wrap(Apply(lambda s, x: held.append(s) or s.lin(x)), 2)
    dp(ints(4, 3))
    for replica in list(held):
        same(replica(ints(2, 3).to(replica.lin.weight.device)), linear()(ints(2, 3)))


@row("G3", why="mutant: replicas keep last step's tensors alive between steps")
def test_attributes_set_in_forward_are_let_go(fast):
    refs = []

    def forward(self, x):
        self.cache = x * 2
        refs.append(weakref.ref(self.cache))
        return self.lin(x)

    dp = fast.wrap(Apply(forward), 3)
    out = dp(ints(6, 3))
    del out
    gc.collect()
    assert len(refs) == 3 and all(ref() is None for ref in refs)
