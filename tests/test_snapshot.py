"""_C.Snapshot: every kind of change that Python code in a forward could read is seen, what is none
is not, nothing leaks and no module is kept alive."""

import argparse
import collections
import copy
import dataclasses
import functools
import gc
import sys
import time
import types
import weakref

import pytest
import torch
from torch import nn

from fastdp import _C

pytestmark = pytest.mark.seam


@dataclasses.dataclass
class Config:
    width: int = 3
    names: list = dataclasses.field(default_factory=lambda: ["a", "b"])


@dataclasses.dataclass(eq=False)
class DataModule(nn.Module):
    width: int = 3

    def __post_init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)


class Settings:
    def __init__(self):
        self.rate = 0.5


Pair = collections.namedtuple("Pair", "a b")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.rnn = nn.LSTM(4, 4)
        self.alpha = 0.5
        self.count = 10**9
        self.flag = True
        self.name = "net number one"
        self.raw = b"ab\0c"
        self.phase = 1 + 2j
        self.shape = (3, (4.0, "x"), None)
        self.size = torch.ones(2, 3).shape
        self.pair = Pair(1, 2)
        self.nan = float("nan")
        self.place = torch.device("cpu")
        self.dtype = torch.float32
        self.items = [1, 2, [3, {"k": [4, 5]}]]
        self.table = {"x": 1, 2: [7]}
        self.counts = collections.Counter("aab")
        self.members = {1, 2, 3}
        self.order = collections.OrderedDict(a=1, b=2)
        self.recent = collections.deque([1, 2], maxlen=4)
        self.nested = ([1], {"y": {2}})
        self.config = Config()
        self.space = types.SimpleNamespace(a=[1])
        self.settings = Settings()
        self.mask = torch.ones(3)
        self.masks = [torch.zeros(2)]
        self.method = self.helper
        self.hidden = [self.first]
        self.empty = collections.OrderedDict()
        self.register_parameter("maybe", None)

    def helper(self):
        return self.alpha

    def other(self):
        return 0

    def forward(self, x):
        out = self.norm(self.first(x))
        return self.rnn(out)[0] * self.alpha


class Residual(nn.Module):
    """A block as torchvision's ResNet has them: some seven modules."""

    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.1)
        self.stride = 1

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.drop(self.relu(out + x))


def resnet(blocks=21, width=4):
    stem = nn.Conv2d(3, width, 3, padding=1)
    body = nn.Sequential(*(Residual(width) for _ in range(blocks)))
    return nn.Sequential(stem, body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 2))


RECORDS = (types.SimpleNamespace, argparse.Namespace)


def snapshot_of(net):
    return _C.Snapshot(tuple(net.modules()), RECORDS)


def change_class(net):
    net.norm.__class__ = nn.BatchNorm2d


def remove_alpha(net):
    del net.alpha


def hook(net):
    net.first.register_forward_hook(lambda *args: None)


def reorder(net):
    net.order.move_to_end("a")


def swap_entry(net):
    net.order["a"] = net.order.pop("a")


def reorder_table(net):
    net.table["x"] = net.table.pop("x")


def pruned(net):
    net.rnn.new = 1
    del net.rnn.new
    net.rnn.other = 1


CHANGES = {
    "number": (lambda n: setattr(n, "alpha", 0.25), "Net.alpha changed from 0.5 to 0.25"),
    "sign": (lambda n: setattr(n, "alpha", -0.5), "Net.alpha changed from 0.5 to -0.5"),
    "int": (lambda n: setattr(n, "count", 7), "Net.count changed from 1000000000 to 7"),
    "type": (lambda n: setattr(n, "flag", 1), "Net.flag changed from True to 1"),
    "text": (lambda n: setattr(n, "name", "x"), "Net.name changed from 'net number one' to 'x'"),
    "bytes": (lambda n: setattr(n, "raw", b"ab\0d"), "Net.raw was replaced (bytes, now bytes)"),
    "complex": (lambda n: setattr(n, "phase", 1j), "Net.phase was replaced"),
    "tuple": (lambda n: setattr(n, "shape", (3, (4.5, "x"), None)), "Net.shape was replaced"),
    "longer tuple": (lambda n: setattr(n, "shape", (*n.shape, 1)), "Net.shape was replaced"),
    "size": (lambda n: setattr(n, "size", torch.ones(3, 2).shape), "Net.size was replaced"),
    "size type": (lambda n: setattr(n, "size", (2, 3)), "Net.size was replaced (Size, now tuple)"),
    "named tuple": (lambda n: setattr(n, "pair", Pair(1, 3)), "Net.pair was replaced"),
    "nan": (lambda n: setattr(n, "nan", 1.0), "Net.nan changed from nan to 1.0"),
    "device": (lambda n: setattr(n, "place", torch.device("cuda", 0)), "Net.place was replaced"),
    "dtype": (lambda n: setattr(n, "dtype", torch.float64), "Net.dtype was replaced"),
    "to None": (lambda n: setattr(n, "alpha", None), "Net.alpha changed from 0.5 to None"),
    "removed": (remove_alpha, "Net.alpha was removed"),
    "added": (lambda n: setattr(n, "beta", 1), "Net.beta was added"),
    "child's": (pruned, "LSTM.other was added (modules[3])"),
    "training": (lambda n: n.norm.eval(), "BatchNorm1d.training changed from True to False"),
    "class": (change_class, "the class of BatchNorm1d changed to BatchNorm2d (modules[2])"),
    "hook": (hook, "Linear._forward_hooks["),
    "child": (lambda n: setattr(n, "norm", nn.BatchNorm1d(4)),
              "Net._modules['norm'] was replaced (a module)"),
    "new child": (lambda n: n.add_module("more", nn.ReLU()), "Net._modules['more'] was added"),
    "None parameter": (lambda n: setattr(n, "maybe", nn.Parameter(torch.ones(1))),
                       "Net._parameters['maybe'] is no longer None"),
    "parameter to None": (lambda n: setattr(n.first, "bias", None),
                          "Linear._parameters['bias'] is None now"),
    "new buffer": (lambda n: n.register_buffer("b", torch.ones(1)), "Net._buffers['b'] was added"),
    "list item": (lambda n: n.items.__setitem__(0, 5), "Net.items[0] changed from 1 to 5"),
    "append": (lambda n: n.items.append(5), "Net.items had 3 entries and has 4"),
    "deep": (lambda n: n.items[2][1]["k"].append(6),
             "Net.items[2][1]['k'] had 2 entries and has 3"),
    "dict": (lambda n: n.table.update(x=2), "Net.table['x'] changed from 1 to 2"),
    "dict entry": (lambda n: n.table.update(y=2), "Net.table['y'] was added"),
    "dict of list": (lambda n: n.table[2].append(1), "Net.table[2] had 1 entries and has 2"),
    "dict order": (reorder_table, "Net.table has its entries in another order"),
    "counter": (lambda n: n.counts.update("b"), "Net.counts['b'] changed from 1 to 2"),
    "set": (lambda n: n.members.add(4), "Net.members had 3 entries and has 4"),
    "set element": (lambda n: (n.members.remove(3), n.members.add(64)),
                    "an element of Net.members"),
    "ordered": (lambda n: n.order.update(b=3), "Net.order['b'] changed from 2 to 3"),
    "moved": (reorder, "Net.order has its entries in another order"),
    "swapped": (swap_entry, "Net.order has its entries in another order"),
    "deque": (lambda n: n.recent.rotate(), "Net.recent[0] changed from 1 to 2"),
    "deque length": (lambda n: n.recent.append(3), "Net.recent had 2 entries and has 3"),
    "in a tuple": (lambda n: n.nested[0].append(2), "Net.nested[0] had 1 entries and has 2"),
    "set in a tuple": (lambda n: n.nested[1]["y"].clear(),
                       "Net.nested[1]['y'] had 1 entries and has 0"),
    "dataclass": (lambda n: setattr(n.config, "width", 4), "Net.config.width changed from 3 to 4"),
    "in a dataclass": (lambda n: n.config.names.clear(),
                       "Net.config.names had 2 entries and has 0"),
    "record": (lambda n: n.space.a.append(2), "Net.space.a had 1 entries and has 2"),
    "record entry": (lambda n: setattr(n.space, "b", 2), "Net.space.b was added"),
    "object": (lambda n: setattr(n, "settings", Settings()), "Net.settings was replaced"),
    "tensor": (lambda n: setattr(n, "mask", torch.ones(3)), "Net.mask was replaced"),
    "tensor's data": (lambda n: setattr(n.mask, "data", torch.ones(3)),
                      "Net.mask was given other memory"),
    "tensor written": (lambda n: n.mask.add_(1), "Net.mask was written in place"),
    "tensor in a list": (lambda n: n.masks[0].add_(1), "Net.masks[0] was written in place"),
    "method": (lambda n: setattr(n, "method", n.other), "Net.method was replaced (a method)"),
    "method of another": (lambda n: setattr(n, "method", copy.copy(n).helper),
                          "Net.method was replaced (a method)"),
    "hidden module": (lambda n: n.hidden.clear(), "Net.hidden had 1 entries and has 0"),
    "filled": (lambda n: n.empty.update(a=1), "Net.empty['a'] was added"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_named(kind):
    change, text = CHANGES[kind]
    net = Net()
    snapshot = snapshot_of(net)
    assert snapshot.differs() is None
    change(net)
    assert snapshot.differs().startswith(text)
    assert "(modules[" in snapshot.differs()
    # What is there now is a state like any other.
    assert snapshot_of(net).differs() is None


def same_values(net):
    net.alpha = float("0.5")
    net.count = int("1000000000")
    net.name = "net number " + "one"
    net.raw = bytes(bytearray(net.raw))
    net.phase = complex(1, 2)
    net.shape = (3, (float("4"), "x"), None)
    net.size = torch.ones(2, 3).shape
    net.pair = Pair(1, 2)
    net.nan = -float("nan")
    net.place = torch.ones(1).device
    net.method = net.helper
    net.config.width = 3
    net.table["x"] = 1


UNCHANGED = {
    "nothing": lambda n: None,
    "equal values": same_values,
    "read": lambda n: (list(n.modules()), n.state_dict(), repr(n)),
    "parameter": lambda n: setattr(n.first, "weight", nn.Parameter(torch.ones(4, 3))),
    "parameter's data": lambda n: setattr(n.first.weight, "data", torch.ones(4, 3)),
    "gradient": lambda n: n(torch.randn(5, 3)).sum().backward(),
    "optimizer": lambda n: torch.optim.SGD(n.parameters(), 0.1).step(),
    "buffer": lambda n: n.norm.running_mean.add_(1),
    "there and back": lambda n: (n.train(False), n.train(True)),
    "added and removed": lambda n: (setattr(n, "new", 1), delattr(n, "new")),
    "order of attributes": lambda n: n.__dict__.update(alpha=n.__dict__.pop("alpha")),
    "hook removed": lambda n: n.register_forward_hook(lambda *args: None).remove(),
    "set again": lambda n: n.order.update(a=1),
}


@pytest.mark.parametrize("kind", UNCHANGED)
def test_no_false_alarm(kind):
    net = Net()
    snapshot = snapshot_of(net)
    UNCHANGED[kind](net)
    assert snapshot.differs() is None


def test_a_zero_of_the_other_sign_is_another_value():
    net = nn.Linear(1, 1)
    net.shift = 0.0
    snapshot = snapshot_of(net)
    net.shift = -0.0
    assert snapshot.differs() == "Linear.shift changed from 0.0 to -0.0 (modules[0])"


def test_no_false_alarm_over_many_steps():
    net = resnet()
    modules = tuple(net.modules())
    assert len(modules) > 150
    snapshot = _C.Snapshot(modules)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    x = torch.randn(2, 3, 4, 4)
    for step in range(100):
        with torch.set_grad_enabled(step % 20 == 0):
            out = net(x).sum()
        if out.requires_grad:
            out.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert snapshot.differs() is None
    modules[77].training = False
    assert snapshot.differs().endswith("changed from True to False (modules[77])")


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
