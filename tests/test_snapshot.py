"""_C.Snapshot: every kind of change that Python code in a forward could read is seen, and what is
none is not."""

import argparse
import collections
import copy
import dataclasses
import types

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
