"""BEHAVIOUR L 3 and B: the four steps of a forward as methods: patched, overridden, by hand."""

import types

import pytest
import torch
from nets import Apply, Net, grads, ints, linear, same

row = pytest.mark.row


@row("L3")
def test_patched_steps_are_called(impl):
    dp = impl.wrap(Net(), 2)
    calls = []
    for name in ("scatter", "replicate", "parallel_apply", "gather"):
        inner = getattr(dp, name)

        def patched(self, *args, _name=name, _inner=inner):
            calls.append(_name)
            return _inner(*args)

        setattr(dp, name, types.MethodType(patched, dp))
    same(out := dp(ints(4, 3)), Net()(ints(4, 3)))
    out.sum().backward()
    assert calls == ["scatter", "replicate", "parallel_apply", "gather"]


@row("B13", "L3")
def test_subclass_with_own_chunk_sizes(impl):
    sizes = []

    class Uneven(impl.api.DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            assert list(device_ids) == list(self.device_ids)
            first, rest = inputs[0][:1], inputs[0][1:]
            rows = (first.to(impl.device(0)),), (rest.to(impl.device(1)),)
            return rows, (kwargs, kwargs)

    module, plain = Net(), Net()
    module.register_forward_pre_hook(lambda m, a: sizes.append(a[0].size(0)))
    dp = impl.wrap_as(Uneven, module, 2)
    same(out := dp(ints(4, 3)), want := plain(ints(4, 3)))
    out.sum().backward()
    want.sum().backward()
    same(grads(module), grads(plain))
    assert sorted(sizes) == [1, 3]


@row("L3", why="tokens are lost without super().gather")
def test_subclass_with_own_gather(impl):
    class Apart(impl.api.DataParallel):
        def gather(self, outputs, output_device):
            return list(outputs)

    module, plain = Net(), Net()
    dp = impl.wrap_as(Apart, module, 3)
    for _ in range(12):
        outputs = dp(ints(6, 3))
    assert type(outputs) is list and [o.shape for o in outputs] == [(2, 2)] * 3
    assert [o.device for o in outputs] == [impl.device(rank) for rank in range(3)]
    outputs = [o.to(impl.home) for o in outputs]
    same(torch.cat(outputs), plain(ints(6, 3)))
    sum(o.sum() for o in outputs).backward()
    plain(ints(6, 3)).sum().backward()
    same(grads(module), grads(plain))


@row("L3")
def test_subclass_that_marks_its_replicas(impl):
    """The synchronised-batch-norm pattern: replicate hands a context to every module."""

    class Marked(impl.api.DataParallel):
        def replicate(self, module, device_ids):
            replicas = super().replicate(module, device_ids)
            assert len(replicas) == len(device_ids)
            lists = [list(replica.modules()) for replica in replicas]
            names = [[type(m) for m in modules] for modules in lists]
            assert names == [[type(m) for m in module.modules()]] * len(replicas)
            for rank, modules in enumerate(lists):
                for child in modules:
                    child.rank = rank
            return replicas

    seen = []
    module = Apply(lambda s, x: seen.append((int(x[0, 0]), s.rank, s.lin.rank)) or s.lin(x))
    dp = impl.wrap_as(Marked, module, 3)
    x = torch.arange(3.0).double()[:, None].expand(3, 3)
    dp(x)
    dp(x[:2])
    assert sorted(seen) == [(0, 0, 0)] * 2 + [(1, 1, 1)] * 2 + [(2, 2, 2)]
    assert not hasattr(module, "rank") and not hasattr(module.lin, "rank")


class DataListParallel:
    """PyG's wrapper: takes a list of items, and walks the four steps by hand."""

    @staticmethod
    def of(impl):
        class Parallel(impl.api.DataParallel):
            def forward(self, data_list):
                if not self.device_ids or len(self.device_ids) == 1:
                    return self.module(torch.cat(data_list).to(self.src_device_obj))
                for t in self.module.parameters():
                    assert t.device == self.src_device_obj
                inputs = self.scatter(data_list, self.device_ids)
                replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
                outputs = self.parallel_apply(replicas, inputs, None)
                return self.gather(outputs, self.output_device)

            def scatter(self, data_list, device_ids):
                count = min(len(device_ids), len(data_list))
                parts = [data_list[i::count] for i in range(count)]
                return [(torch.cat(p).to(impl.device(rank)),) for rank, p in enumerate(parts)]

        return Parallel


@row("B18", "L3")
def test_forward_written_by_hand(impl):
    module, plain = Net(), Net()
    dp = impl.wrap_as(DataListParallel.of(impl), module, 3)
    items = [ints(1, 3, seed=k) for k in range(5)]
    for _ in range(3):
        out = dp(items)
        out.sum().backward()
        want = plain(torch.cat(items))
        want.sum().backward()
        same(out, want[[0, 3, 1, 4, 2]])
    dp(items[:1]).sum().backward()
    plain(items[0]).sum().backward()
    same(grads(module), grads(plain))


@row("L3")
def test_replicas_held_by_hand_are_not_refreshed(impl):
    """A set that user code holds keeps its weights and stays out of later forwards."""
    module = linear()
    dp = impl.wrap(module, 2)
    x = ints(4, 3)
    held = dp.replicate(module, dp.device_ids)
    old = linear()(x)
    with torch.no_grad():
        module.weight += 1
    for _ in range(3):
        same(dp(x), module(x.to(impl.home)))
    same(held[1](x.to(impl.device(1))), old)
    held[1].weight.sum().backward()
    same(module.weight.grad, torch.ones(2, 3).double())
