"""A refreshed replica is as a new one, whatever was done to the base and to the replica before:
random edits of both, and after each refresh every attribute beside those of a replica made that
moment."""

import gc
import types
import weakref
from collections import OrderedDict

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn

from fastdp import _C

SETTINGS = hypothesis.settings(max_examples=150, deadline=None)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.nothing = None
        self.note = "base"

    def forward(self, x):
        return self.norm(self.linear(x))

    def other_forward(self, x):
        return x


def base_module():
    return nn.Sequential(Block(), nn.ReLU(), Block())


def blank(module):
    replica = type(module).__new__(type(module))
    replica.__dict__.update(_parameters={}, _buffers={}, _modules={})
    return replica


def new_replica(tree, base):
    return _C.Replica(tree, tuple(blank(module) for module in base.modules()))


def hook(*args):
    pass


def held(tree, base, act):
    assert tree.hold(base)
    try:
        return act(*tree.collect()[:2])
    finally:
        tree.release()


def refresh(tree, base, replica):
    def act(parameters, buffers):
        copies = tuple(nn.Parameter(p.detach().clone()) for p in parameters)
        buffer_copies = tuple(b.clone() for b in buffers)
        fresh = new_replica(tree, base)
        for each in (replica, fresh):
            each.refresh(copies, buffer_copies)
        return fresh

    fresh = held(tree, base, act)
    replica.settle()
    assert replica.idle()
    assert_same(replica, fresh, base)


def empty(tree, base, replica, strip=False):
    held(tree, base, lambda *_: replica.empty(strip))
    for module in replica.modules:
        for kind in (module._parameters, module._buffers):
            assert all(value is None for value in kind.values())


def assert_same(replica, fresh, base):
    names = {id(m): i for each in (replica, fresh) for i, m in enumerate(each.modules)}
    for got, want, own in zip(replica.modules, fresh.modules, base.modules()):
        assert list(got.__dict__) == list(want.__dict__)
        for name, value in want.__dict__.items():
            here = got.__dict__[name]
            where = f"{type(own).__name__}.{name}"
            assert type(here) is type(value), where
            if isinstance(value, types.MethodType):
                assert here.__func__ is value.__func__, where
                if id(value.__self__) in names:
                    assert here.__self__ is not value.__self__, where
                    assert names[id(here.__self__)] == names[id(value.__self__)], where
            elif name == "_modules":
                assert list(here) == list(value), where
                assert [names[id(m)] for m in here.values()] == [
                    names[id(m)] for m in value.values()
                ], where
            elif isinstance(value, dict) and name.startswith("_"):
                assert here is not own.__dict__.get(name), where
                assert list(here.items()) == list(value.items()), where
            else:
                assert here is value, where


# Edits. `modules` are a base's or a replica's; `pick` chooses one of them.

NAMES = ["note", "nothing", "added", "other"]


def set_attribute(module, name):
    module.__dict__[name] = object()


def share_dict(module, name):
    module.__dict__[name] = {}


def bind_method(module, name):
    module.__dict__["forward"] = types.MethodType(Block.other_forward, module)


def bind_again(module, name):
    """A new method, likely at the address of the former."""
    module.__dict__.pop("forward", None)
    module.__dict__["forward"] = types.MethodType(Block.forward, module)


def delete_attribute(module, name):
    module.__dict__.pop(name, None)


def reorder(module, name):
    module.__dict__["training"] = module.__dict__.pop("training", True)


def rename_last(module, name):
    former = list(module.__dict__)[-1]
    if not former.startswith("_"):
        module.__dict__[name] = module.__dict__.pop(former)


def add_hook(module, name):
    module.register_forward_hook(hook)


def clear_hooks(module, name):
    module._forward_hooks.clear()


def replace_hooks(module, name):
    module.__dict__["_forward_pre_hooks"] = OrderedDict()


def replace_hooks_by_dict(module, name):
    del module.__dict__["_forward_pre_hooks"]
    module.__dict__["_forward_pre_hooks"] = {}


def change_mode(module, name):
    module.__dict__["training"] = not module.__dict__.get("training", True)


def set_buffer(module, name):
    if not hasattr(module, name):
        module.register_buffer(name, torch.zeros(1))


def drop_buffer(module, name):
    module._buffers.pop(name, None)


def replace_parameter(module, name):
    if "weight" in module._parameters and module._parameters["weight"] is not None:
        module._parameters["weight"] = nn.Parameter(torch.zeros(2))


def replace_dictionary(module, name):
    module.__dict__["_buffers"] = dict(module._buffers)


EDITS = st.sampled_from(
    [
        *(set_attribute, share_dict, bind_method, bind_again, delete_attribute, reorder),
        *(rename_last, add_hook, clear_hooks, replace_hooks, replace_hooks_by_dict, change_mode),
        *(set_buffer, drop_buffer, replace_parameter, replace_dictionary),
    ]
)
EDIT = st.tuples(EDITS, st.integers(0, 6), st.sampled_from(NAMES))
# A forward: edits of the base before it, edits that the replica's forward makes, edits of the base
# while it runs, and whether the replica is emptied afterwards, and stripped too.
ROUNDS = st.lists(
    st.tuples(*[st.lists(EDIT, max_size=3)] * 3, st.sampled_from([None, False, True])),
    min_size=1,
    max_size=4,
)


def edit(modules, edits):
    for change, pick, name in edits:
        change(modules[pick % len(modules)], name)


@SETTINGS
@hypothesis.given(rounds=ROUNDS)
def test_a_refreshed_replica_is_as_a_new_one(rounds):
    base = base_module()
    tree = _C.Tree(tuple(base.modules()))
    replica = new_replica(tree, base)
    for before, inside, meanwhile, strip in rounds:
        edit(list(base.modules()), before)
        refresh(tree, base, replica)
        edit(replica.modules, inside)
        edit(list(base.modules()), meanwhile)
        if strip is not None:
            empty(tree, base, replica, strip)
    refresh(tree, base, replica)


@pytest.mark.parametrize("is_emptied", [True, False])
@pytest.mark.parametrize("change", EDITS.elements, ids=lambda change: change.__name__)
def test_each_edit_of_a_base_is_seen(change, is_emptied):
    base = base_module()
    tree = _C.Tree(tuple(base.modules()))
    replica = new_replica(tree, base)
    for module in list(base.modules()):
        refresh(tree, base, replica)
        if is_emptied:
            empty(tree, base, replica)
        change(module, "note")
        refresh(tree, base, replica)


@pytest.mark.parametrize("with_cycle", [False, True])
def test_a_module_that_no_other_holds_is_the_tree_s(with_cycle):
    """What a modules() of its own names beside the children: once read where it had been."""
    root, hidden = nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1)
    tree = _C.Tree((*root.modules(), hidden))
    gone = weakref.ref(hidden)
    if with_cycle:
        hidden.tree = tree
    del hidden
    gc.collect()
    assert gone() is not None and tree.hold(root)
    assert [p is gone().weight for p in tree.collect()[0]] == [False, False, True, False]
    tree.release()
    del tree
    gc.collect()
    assert gone() is None


def test_a_module_that_comes_before_its_parent():
    root = nn.Sequential(nn.Sequential(nn.Linear(1, 1)))
    tree = _C.Tree((root, root[0][0], root[0]))
    gone = weakref.ref(root[0][0])
    assert tree.hold(root)
    tree.release()
    del root[0]
    gc.collect()
    assert gone() is not None and not tree.hold(root)


def test_a_new_method_at_the_address_of_the_former():
    base = base_module()
    tree = _C.Tree(tuple(base.modules()))
    replica = new_replica(tree, base)
    for i in range(10):
        change = (bind_method, bind_again)[i % 2]
        base[0].__dict__.pop("forward", None)
        change(base[0], "forward")
        refresh(tree, base, replica)
        empty(tree, base, replica)


def test_what_a_forward_leaves_is_dropped_by_empty():
    base = base_module()
    tree = _C.Tree(tuple(base.modules()))
    replica = new_replica(tree, base)
    refresh(tree, base, replica)
    empty(tree, base, replica)
    refresh(tree, base, replica)
    left = [torch.zeros(1), torch.zeros(1), torch.zeros(1)]
    refs = [weakref.ref(tensor) for tensor in left]
    replica.modules[1].activation = left.pop()
    replica.modules[1].nothing = left.pop()
    replica.modules[1]._forward_hooks["kept"] = left.pop()
    empty(tree, base, replica)
    assert [ref() for ref in refs] == [None, None, None]
    refresh(tree, base, replica)
