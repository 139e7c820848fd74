"""What a tree and its replicas know of dictionaries that nobody wrote to (their versions, in
CPython up to 3.12): each way to write to one is noticed."""

import pytest
from test_refresh import empty, held, new_replica, refresh
from torch import nn

from fastdp import _C


class Plain:
    """As much of a module as a tree knows. It has no `__setattr__`, so that Python sets attributes
    by the quickest way it has."""

    def __init__(self):
        self._parameters, self._buffers, self._modules = {}, {}, {}
        self.note = self.last = "base"

    def modules(self):
        return iter([self])


def store(module, value):
    module.note = value


def replace_all(module, value):
    module.__dict__ = {**module.__dict__, "note": value}


def clear_and_update(module, value):
    former = dict(module.__dict__)
    module.__dict__.clear()
    module.__dict__.update(former, note=value)


def pop_last(module, value):
    if module.__dict__.popitem()[0] != "last":  # a replica's mark
        module.__dict__["last"] = value


WRITES = {
    "store": store,
    "setattr": lambda module, value: setattr(module, "note", value),
    "add": lambda module, value: setattr(module, "added", value),
    "object": lambda module, value: object.__setattr__(module, "note", value),
    "delete": lambda module, value: delattr(module, "note"),
    "item": lambda module, value: module.__dict__.__setitem__("note", value),
    "update": lambda module, value: module.__dict__.update(note=value),
    "or": lambda module, value: module.__dict__.__ior__({"note": value}),
    "pairs": lambda module, value: module.__dict__.__init__([("note", value)]),
    "pop": lambda module, value: module.__dict__.pop("note"),
    "popitem": pop_last,
    "setdefault": lambda module, value: module.__dict__.setdefault("added", value),
    "clear": clear_and_update,
    "dict": replace_all,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
@pytest.mark.parametrize("whose", ["base", "replica"])
def test_each_way_to_write_an_attribute_is_noticed(write, whose):
    for _ in range(50):  # Python specializes what runs often
        store(Plain(), None)
    base = Plain()
    tree = _C.Tree((base,))
    replica = new_replica(tree, base)
    for _ in range(3):
        for _ in range(2):
            refresh(tree, base, replica)
            empty(tree, base, replica)
        refresh(tree, base, replica)
        value = object()
        write(base if whose == "base" else replica.modules[0], value)
        if whose == "replica":
            empty(tree, base, replica)
            assert value not in replica.modules[0].__dict__.values()
        refresh(tree, base, replica)
        if whose == "base":
            assert replica.modules[0].__dict__["_is_replica"] is True
            replica_has = value in replica.modules[0].__dict__.values()
            assert replica_has == (value in base.__dict__.values())
            base.__dict__.update(note=None, last=None)


def move_to_end(module, child):
    module._modules["0"] = module._modules.pop("0")


def give_new_dictionary(module, child):
    module.__dict__["_modules"] = {**module._modules, "0": child}


def clear_and_fill(module, child):
    module._modules.clear()
    module._modules["0"] = child


@pytest.mark.parametrize("with_collect", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        nn.Sequential.append,
        move_to_end,
        give_new_dictionary,
        clear_and_fill,
        lambda module, child: module.__setattr__("0", child),
        lambda module, child: module.__setattr__("0", None),
        lambda module, child: module.__delattr__("1"),
        lambda module, child: module._modules.update({"1": child}),
        lambda module, child: setattr(module[1], "__class__", nn.Tanh),
    ],
    ids=["append", "order", "dictionary", "clear", "set", "none", "delete", "update", "class"],
)
def test_each_way_to_change_children_is_noticed(change, with_collect):
    base = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    tree = _C.Tree(tuple(base.modules()))
    for _ in range(3):
        assert tree.hold(base)
        if with_collect:
            assert len(tree.collect()[0]) == 2
        tree.release()
    kept = dict(base[0]._modules)
    change(base[0], nn.Linear(1, 1))
    assert not tree.hold(base)
    assert not tree.hold(base)
    kept["1"].__class__ = nn.ReLU
    base[0]._modules.clear()
    base[0]._modules.update(kept)
    assert tree.hold(base)
    tree.release()


def test_dictionaries_that_are_replaced_are_noticed():
    base = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    tree = _C.Tree(tuple(base.modules()))
    for _ in range(3):
        for name, count in (("_parameters", 4), ("_buffers", 3)):
            held(tree, base, lambda *found: None)
            base[1].__dict__[name] = {}
            found = held(tree, base, lambda *found: found)
            assert len(found[name == "_buffers"]) == count - (2 if name == "_parameters" else 3)
            base[1].__dict__[name] = dict(nn.BatchNorm1d(1).__dict__[name])
            found = held(tree, base, lambda *found: found)
            assert len(found[name == "_buffers"]) == count
            assert all(here is there for here, there in zip(found[0], base.parameters()))
        base[0].__dict__["_modules"] = {"late": nn.ReLU()}
        assert not tree.hold(base)
        base[0].__dict__["_modules"] = {}


def test_a_dictionary_that_is_gone_is_named():
    base = nn.Sequential(nn.Linear(1, 1))
    tree = _C.Tree(tuple(base.modules()))
    held(tree, base, lambda *found: None)
    kept = base[0].__dict__.pop("_buffers")
    with pytest.raises(TypeError, match="Linear has no dictionary '_buffers'"):
        held(tree, base, lambda *found: None)
    base[0].__dict__["_buffers"] = kept
    held(tree, base, lambda *found: None)
