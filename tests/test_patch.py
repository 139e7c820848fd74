"""fastdp.patch(): by whatever reference torch's nn.DataParallel is called, fastdp runs.

On the host torch's own wrapper ignores its device_ids and calls the module once, so whether a
wrapper is fastdp's shows in its devices and in how often forward ran.
"""

import inspect
import io
import pickle
import pickletools
import types

import pytest
import test_behaviour_subclasses
import test_behaviour_wrapper
import torch
import torch.nn.parallel
from nets import Net, exact, ints, same
from patch_cases import LIBRARY, Fast, check_is_fast, counted, home, patch_and_undo
from torch import nn
from torch_features import needs_safe_globals

import fastdp
from fastdp.patch import _rehomed

row = pytest.mark.row
REFERENCES = {
    "attribute": lambda m, ids: torch.nn.DataParallel(m, ids),
    "nn.parallel": lambda m, ids: torch.nn.parallel.DataParallel(m, device_ids=ids),
    "submodule": lambda m, ids: home.DataParallel(m, ids, None, 0),
    "name": LIBRARY.DataParallel,
    "other name": LIBRARY.Other,
    "default argument": LIBRARY.default,
    "closure": LIBRARY.closure,
    "partial": LIBRARY.partial,
    "generic alias": LIBRARY.alias,
    "in a tuple in a dict": LIBRARY.WRAPPERS["dp"][0],
    "subclass": LIBRARY.Before,
    "its subclass": LIBRARY.Grandchild,
}


class Plain(nn.DataParallel):
    """At the top of a file, so that it can be pickled."""


@pytest.fixture
def patched():
    with patch_and_undo() as handle:
        yield handle


@pytest.mark.parametrize("reference", REFERENCES)
def test_every_reference_to_the_class_makes_fastdps(patched, fast, reference):
    module = Net().to(fast.home)
    wrapped = REFERENCES[reference](module, fast.ids(2))
    check_is_fast(wrapped, module, fast)
    assert isinstance(wrapped, nn.DataParallel) and isinstance(wrapped, fastdp.DataParallel)
    if "subclass" not in reference:
        assert type(wrapped) is nn.DataParallel and LIBRARY.is_parallel(wrapped)
    else:
        assert wrapped.early and vars(wrapped).get("scattered", "its" not in reference)


@pytest.mark.parametrize("reference", ["data_parallel", "renamed"])
def test_every_reference_to_the_function_runs_fastdps(patched, fast, reference):
    for function in (vars(LIBRARY)[reference], torch.nn.parallel.data_parallel, home.data_parallel):
        module = Net().to(fast.home)
        calls = counted(module)
        x, ids = ints(5, 3), fast.ids(2)
        same(function(module, x, ids), Net()(x))
        same(function(module, None, ids, ids[0], 0, {"x": x}), Net()(x))
        same(function(module, inputs=(x,), device_ids=tuple(ids)), Net()(x))
        assert len(calls) == 6


@row("L3", "F4", "F5")
@pytest.mark.parametrize("cases", [test_behaviour_subclasses, test_behaviour_wrapper])
def test_behaviours_hold_for_the_patched_class(patched, fast, cases):
    """The tests of subclasses and of the wrapper that need nothing but an implementation."""
    ran = 0
    for name, test in inspect.getmembers(cases, inspect.isfunction):
        wanted = list(inspect.signature(test).parameters)
        if name.startswith("test_") and wanted in (["impl"], ["fast"]):
            torch.manual_seed(0)
            test(fast)
            ran += 1
    assert ran >= 5 and fast.api.DataParallel is nn.DataParallel


def test_subclasses_made_while_patched_survive_undo(patched, fast):
    class After(nn.DataParallel):
        def gather(self, outputs, output_device):
            return super().gather(outputs, output_device) + 1

    module = Net().to(fast.home)
    wrapped, x = After(module, fast.ids(2)), ints(4, 3)
    same(wrapped(x), Net()(x) + 1)
    assert After.__bases__ == (nn.DataParallel,) and isinstance(wrapped, fastdp.DataParallel)
    patched.undo()
    assert After.gather is not nn.DataParallel.gather
    assert After.forward is nn.DataParallel.forward is vars(nn.DataParallel)["forward"]
    assert "_fastdp_runtime" not in vars(wrapped)
    assert type(pickle.loads(pickle.dumps(Plain(module)))) is Plain


@row("F5")
def test_type_checks_of_both_classes(patched, fast):
    explicit = Fast(Net().to(fast.home), fast.ids(2))
    assert isinstance(explicit, nn.DataParallel) and isinstance(explicit, fastdp.DataParallel)
    assert isinstance(explicit, Fast) and type(explicit) is Fast
    ours = nn.DataParallel(Net().to(fast.home), fast.ids(2))
    assert type(ours) is nn.DataParallel is fastdp.DataParallel
    assert issubclass(Fast, nn.DataParallel) and issubclass(Plain, fastdp.DataParallel)
    for other in (Net(), nn.Linear(1, 1), object()):
        assert not isinstance(other, fastdp.DataParallel)
    same(explicit(ints(4, 3)), Net()(ints(4, 3)))


@pytest.fixture
def of_torch(fast):
    """A wrapper that torch made, as if for the devices of `fast`, and its pickle."""
    module = Net().to(fast.home)
    wrapped = nn.DataParallel(module, [0])
    module.to(fast.home)  # where there are GPUs it was moved to the first
    ids = fast.ids(2)
    wrapped.device_ids = [torch.device(i) for i in ids] if fast.home.type == "cpu" else ids
    wrapped.output_device, wrapped.src_device_obj = wrapped.device_ids[0], fast.home
    wrapped.dim = 0
    assert "unused_grad" not in vars(wrapped)
    return wrapped, pickle.dumps(wrapped)


@row("F4")
def test_what_torch_made_and_saved_runs_on_fastdp(of_torch, patched, fast):
    wrapped, data = of_torch
    check_is_fast(wrapped, wrapped.module, fast)
    loaded = pickle.loads(data)
    assert type(loaded) is nn.DataParallel
    check_is_fast(loaded, loaded.module, fast)
    assert loaded.unused_grad == "zero" and vars(loaded)["_fastdp_bucket_bytes"] == 25 * 2**20
    patched.undo()
    assert type(wrapped) is nn.DataParallel and type(loaded) is Fast
    assert not [name for name in vars(wrapped) if name.startswith("_fastdp")]
    same(loaded(ints(4, 3)), Net()(ints(4, 3)))


@row("F4")
@needs_safe_globals
def test_what_is_saved_while_patched_names_torchs_class(patched, fast):
    """So it can be loaded where fastdp is not, and where only torch's class is allowed."""
    wrapped = nn.DataParallel(exact(nn.Sequential(nn.Linear(3, 2))).to(fast.home), fast.ids(2))
    x = ints(4, 3)
    want = wrapped(x)
    data = pickle.dumps(wrapped)
    strings = [arg for _, arg, _ in pickletools.genops(data) if isinstance(arg, str)]
    assert "torch.nn.parallel.data_parallel" in strings
    assert not [text for text in strings if text.split(".")[0] == "fastdp"]
    allowed = [nn.DataParallel, nn.Sequential, nn.Linear, torch.device, getattr, set]
    file = io.BytesIO()
    torch.save(wrapped, file)
    file.seek(0)
    with torch.serialization.safe_globals(allowed):
        loaded = torch.load(file, weights_only=True)
    assert type(loaded) is nn.DataParallel
    same(loaded(x), want)
    patched.undo()
    assert type(pickle.loads(data)) is nn.DataParallel


def own_functions_that_call_super():
    found = {}
    for name, value in vars(Fast).items():
        code = getattr(value, "__code__", None)
        if code is not None and "__class__" in code.co_freevars:
            found[name] = code
    return found


def test_super_in_fastdps_class_reaches_beyond_torchs():
    """In torch's class `super()` starts behind it, so what only torch's class has is not found.
    `__init__` says itself that it starts behind torch's."""
    torch_has = {n for n, v in vars(nn.DataParallel).items() if isinstance(v, types.FunctionType)}
    assert {"forward", "scatter", "gather", "__init__"} <= torch_has
    for name, code in own_functions_that_call_super().items():
        assert not (torch_has - {"__init__"}) & set(code.co_names), name
        assert "__init__" not in code.co_names or "TORCH_CLASS" in code.co_names
    assert "__getattr__" in own_functions_that_call_super()


def test_functions_move_with_all_they_have():
    class Ours(nn.DataParallel):
        def method(self, a, b=2, *, c=3):
            """Text."""
            return super().extra_repr(), a, b, c

        @property
        def both(self):
            return super()._get_name()

        @both.setter
        def both(self, value):
            super().__setattr__("training", value)

        @classmethod
        def of_class(cls):
            return cls, super().__subclasshook__

        @staticmethod
        def plain(a):
            return a

    methods = {name: _rehomed(value) for name, value in vars(Ours).items() if name[0] != "_"}
    moved = type("Moved", (nn.Module,), methods)
    # As if it were torch's class: the cell of super() is filled with the class it lands in.
    for value in (moved.method, moved.both.fget, moved.both.fset, moved.of_class.__func__):
        assert value.__closure__[0].cell_contents is nn.DataParallel
    wrapped = nn.DataParallel(nn.Identity())
    assert moved.method(wrapped, 1) == ("", 1, 2, 3)
    assert moved.method(wrapped, 1, 4, c=5) == ("", 1, 4, 5)
    assert inspect.signature(moved.method) == inspect.signature(Ours.method)
    assert moved.method.__doc__ == "Text." and moved.plain is Ours.plain and moved.plain(7) == 7
    moved.both.fset(wrapped, False)
    assert moved.both.fget(wrapped) == "DataParallel" and wrapped.training is False
    assert moved.of_class.__func__(nn.DataParallel)[0] is nn.DataParallel


@row("F2")
def test_attributes_that_are_missing(patched, fast):
    module = Net().to(fast.home)
    module.config = 7
    with pytest.raises(AttributeError, match="config"):
        _ = nn.DataParallel(module, fast.ids(2)).config
    assert nn.DataParallel(module, fast.ids(2), forward_attributes=True).config == 7
    for name, parameter in inspect.signature(Fast).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            assert not hasattr(nn.DataParallel, name) or hasattr(nn.Module, name), name


def test_options_are_all_that_a_wrapper_of_torch_lacks(of_torch):
    """What else fastdp's __init__ sets has no default in wrappers that torch made."""
    wrapped, _ = of_torch
    parameters = inspect.signature(Fast).parameters.values()
    options = {f"_fastdp_{p.name}" for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert set(vars(Fast(Net(), ["cpu", "cpu"]))) - set(vars(wrapped)) == options


def test_a_part_may_have_the_name_of_an_option(of_torch, patched, fast):
    wrapped, _ = of_torch
    wrapped.transport = part = nn.Identity()
    assert wrapped.transport is part


def test_signature_and_names_stay(patched):
    names = list(inspect.signature(nn.DataParallel).parameters.values())
    positional = [p.name for p in names if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["module", "device_ids", "output_device", "dim"]
    assert nn.DataParallel.__module__ == "torch.nn.parallel.data_parallel"
    assert nn.DataParallel.__qualname__ == "DataParallel"
    assert nn.DataParallel.__doc__ != Fast.__doc__
    assert home.data_parallel.__name__ == home.data_parallel.__code__.co_name
    assert repr(nn.DataParallel(nn.Tanh())) == "DataParallel(\n  (module): Tanh()\n)"
