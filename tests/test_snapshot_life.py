"""_C.Snapshot: what it keeps alive, what it refuses, and how far it looks."""

import collections
import functools
import gc
import sys
import time
import types
import weakref

import pytest
import torch
from test_snapshot import (
    CHANGES,
    RECORDS,
    DataModule,
    Net,
    Settings,
    resnet,
    snapshot_of,
)
from torch import nn

from fastdp import _C

pytestmark = pytest.mark.seam


def test_a_module_that_is_gone():
    net = Net()
    snapshot = snapshot_of(net)
    alive = weakref.ref(net)
    del net
    gc.collect()
    assert alive() is None
    assert snapshot.differs() == "a module of class Net is gone (modules[0])"


def test_no_module_is_kept():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    net.method = net[0].forward
    net.listed = [net[0], (net[1],), {"a": net[1]}]
    modules = tuple(net.modules())
    counts = [sys.getrefcount(module) for module in modules]
    snapshot = _C.Snapshot(modules)
    assert [sys.getrefcount(module) for module in modules] == counts
    assert snapshot.differs() is None
    value = types.SimpleNamespace()
    net.value = value
    before = sys.getrefcount(value)
    snapshot = _C.Snapshot(modules)
    assert sys.getrefcount(value) == before + 1
    del snapshot
    assert sys.getrefcount(value) == before


def test_a_cycle_through_a_snapshot_is_collected():
    net = nn.Linear(2, 2)
    net.partial = functools.partial(net.forward)
    net.snapshot = _C.Snapshot((net,))
    net.cycle = [net.snapshot]
    net.cycle.append(_C.Snapshot((net,)))
    alive = weakref.ref(net)
    del net
    gc.collect()
    assert alive() is None


def test_a_snapshot_inside_garbage_can_be_asked():
    asked = []

    class Asks:
        def __del__(self):
            try:
                asked.append(self.snapshot.differs())
            except RuntimeError as error:
                asked.append(str(error))

    net = nn.Linear(2, 2)
    thing = Asks()
    net.thing = thing
    thing.snapshot = _C.Snapshot((net,))
    thing.net = net
    del net, thing
    gc.collect()
    assert len(asked) == 1


def test_nothing_is_left():
    net = Net()
    texts = []

    def run():
        snapshot = snapshot_of(net)
        for kind in ("append", "dict", "number", "deque", "record"):
            CHANGES[kind][0](net)
            texts.append(snapshot.differs())
        net.items.pop()
        snapshot_of(net).differs()
        for bad in ((), (3,), ((1,),), ((net,), (1,)), ((net,), (), 2), ((nn.Module, net),)):
            with pytest.raises(TypeError):
                _C.Snapshot(*bad)
        texts.clear()

    for _ in range(50):
        run()
    values = (net, net.first, net.mask, net.items, net.config)
    gc.collect()
    counts = [sys.getrefcount(value) for value in values]
    blocks, nones = [sys.getallocatedblocks()], [sys.getrefcount(None)]
    for _ in range(3):
        for _ in range(200):
            run()
        gc.collect()
        blocks.append(sys.getallocatedblocks())
        nones.append(sys.getrefcount(None))
    assert [sys.getrefcount(value) for value in values] == counts
    # What a run leaves is left every time. Free lists and other threads' objects come and go.
    for found in (blocks, nones):
        assert min(b - a for a, b in zip(found, found[1:])) < 100, found


BAD = {
    "nothing": ((), "takes a tuple of modules"),
    "list": (([nn.Linear(1, 1)],), "takes a tuple of modules"),
    "no module": ((("text",),), r"modules\[0\]: expected a module, not <class 'str'>"),
    "a class": (((nn.Linear(1, 1), nn.ReLU),), r"modules\[1\]: expected a module, not <class"),
    "records": (((nn.Linear(1, 1),), (3,)), r"records\[0\]: expected a class, not int"),
    "records list": (((nn.Linear(1, 1),), [int]), "a tuple of classes"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_arguments(kind):
    arguments, text = BAD[kind]
    with pytest.raises(TypeError, match=text):
        _C.Snapshot(*arguments)
    with pytest.raises(TypeError, match="takes a tuple"):
        _C.Snapshot(modules=(nn.Linear(1, 1),))


def test_a_module_without_parameters_of_its_own():
    module = nn.Linear.__new__(nn.Linear)
    snapshot = _C.Snapshot((module,))
    assert snapshot.differs() is None
    module.__dict__["one"] = 1
    assert snapshot.differs() == "Linear.one was added (modules[0])"


def test_no_modules_at_all():
    assert _C.Snapshot(()).differs() is None


def test_below_the_fourth_level_content_is_not_seen():
    net = nn.Linear(1, 1)
    net.deep = [[[[[1]]]]]
    snapshot = snapshot_of(net)
    net.deep[0][0][0][0].append(2)
    assert snapshot.differs() is None
    net.deep[0][0][0][0] = 7
    assert snapshot.differs() == "Linear.deep[0][0][0][0] was replaced (list, now int) (modules[0])"


def test_a_container_past_the_bound_is_known_by_its_length():
    net = nn.Linear(1, 1)
    net.words = {str(i): i for i in range(9000)}
    net.ids = list(range(9000))
    net.few = [1]
    snapshot = snapshot_of(net)
    net.words["5"] = net.ids[5] = -1
    assert snapshot.differs() is None
    net.words["new"] = 1
    assert snapshot.differs() == "Linear.words had 9000 entries and has 9001 (modules[0])"
    del net.words["new"]
    net.few[0] = 2
    assert snapshot.differs() == "Linear.few[0] changed from 1 to 2 (modules[0])"


def test_a_large_model_is_seen_whole():
    net = nn.ModuleList(nn.Linear(1, 1) for _ in range(5000))
    last = net[4999]
    snapshot = snapshot_of(net)
    assert snapshot.differs() is None
    last.bias = None
    assert snapshot.differs() == "Linear._parameters['bias'] is None now (modules[5000])"
    last.bias = nn.Parameter(torch.ones(1))
    former, net[4999] = last, nn.Linear(1, 1)
    assert snapshot.differs() == "ModuleList._modules['4999'] was replaced (a module) (modules[0])"
    net[4999] = former
    last.register_forward_hook(print)
    assert "Linear._forward_hooks[" in snapshot.differs()


def test_containers_that_hold_themselves():
    net = nn.Linear(1, 1)
    net.ring = [1]
    net.ring.append(net.ring)
    net.ring.append({"again": net.ring})
    snapshot = snapshot_of(net)
    assert snapshot.differs() is None
    net.ring[2]["again"] = 1
    assert snapshot.differs() == "Linear.ring[2]['again'] was replaced (list, now int) (modules[0])"


def test_only_records_are_looked_into():
    net = Net()
    snapshot = snapshot_of(net)
    net.settings.rate = 1.0
    assert snapshot.differs() is None
    snapshot = _C.Snapshot((net,), (Settings,))
    net.settings.rate = 2.0
    assert snapshot.differs() == "Net.settings.rate changed from 1.0 to 2.0 (modules[0])"


def test_a_module_that_is_a_dataclass_too():
    net = DataModule()
    outer = nn.Sequential(net)
    outer.same = net
    snapshot = snapshot_of(outer)
    assert snapshot.differs() is None
    net.width = 4
    assert snapshot.differs() == "DataModule.width changed from 3 to 4 (modules[1])"


def test_keys_of_any_kind():
    class Key:
        def __hash__(self):
            return 7

        def __eq__(self, other):
            raise AssertionError("compared")

    net = nn.Linear(1, 1)
    key = Key()
    net.table = {key: [1], (1, 2): 3, 2.5: 4}
    net.ordered = collections.OrderedDict([((1, 2), 1), (None, 2)])
    snapshot = snapshot_of(net)
    assert snapshot.differs() is None
    net.table[key].append(2)
    text = "Linear.table[a Key] had 1 entries and has 2 (modules[0])"
    assert snapshot.differs() == text
    net.table[key].pop()
    net.ordered[None] = 3
    assert snapshot.differs() == "Linear.ordered[None] changed from 2 to 3 (modules[0])"


def test_values_that_cannot_be_compared_are_not():
    class Odd:
        def __eq__(self, other):
            raise AssertionError("compared")

        def __getattr__(self, name):
            raise ValueError(name)

    net = nn.Linear(1, 1)
    net.odd, net.odds = Odd(), [Odd()]
    snapshot = snapshot_of(net)
    assert snapshot.differs() is None
    net.odds[0] = Odd()
    assert snapshot.differs() == "Linear.odds[0] was replaced (Odd, now Odd) (modules[0])"


def test_tensors_without_memory_or_version():
    net = nn.Linear(1, 1)
    net.sparse = torch.eye(2).to_sparse()
    net.meta = torch.ones(2, device="meta")
    with torch.inference_mode():
        net.frozen = torch.ones(2)
    snapshot = snapshot_of(net)
    assert snapshot.differs() is None
    with torch.inference_mode():
        net.frozen = torch.ones(2)
    assert snapshot.differs().startswith("Linear.frozen was replaced (Tensor, now Tensor)")


def test_what_asking_costs(capsys):
    net = resnet()
    modules = tuple(net.modules())[:151]
    snapshot = _C.Snapshot(modules, RECORDS)
    best, made = 1.0, 1.0
    for _ in range(200):
        start = time.perf_counter()
        snapshot.differs()
        best = min(best, time.perf_counter() - start)
    for _ in range(20):
        start = time.perf_counter()
        _C.Snapshot(modules, RECORDS)
        made = min(made, time.perf_counter() - start)
    with capsys.disabled():
        print(f"\n151 modules: differs() {best * 1e6:.1f} us, making {made * 1e6:.0f} us")
