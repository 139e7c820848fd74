"""Watch beside hooks, modes of torch's and roots that change."""

import functools
import sys
import types

import pytest
import torch
from nets import Apply
from test_watch import nothing_is_left, watched  # noqa: F401
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fastdp import _C
from fastdp.watch import Watch, records, snapshot_of

# Hooks.


def hook(*args):
    return None


def on_child(method):
    def put(module):
        return getattr(module.lin, method)(hook)

    return put


HOOKS = {
    "forward": (on_child("register_forward_hook"), "the forward hook hook on lin (Linear)"),
    "pre": (on_child("register_forward_pre_hook"), "the forward pre-hook hook on lin (Linear)"),
    "backward": (on_child("register_full_backward_hook"), "the backward hook hook on lin"),
    "backward pre": (on_child("register_full_backward_pre_hook"), "the backward pre-hook hook on"),
    "root": (lambda m: m.register_forward_hook(hook), "hook on the module itself (Apply)"),
    "partial": (lambda m: m.register_forward_hook(functools.partial(hook, 1)), "forward hook hook"),
    "lambda": (lambda m: m.register_forward_hook(lambda *args: None), "<lambda> on the module"),
    "weight_norm": (lambda m: nn.utils.weight_norm(m.lin),
                    "torch.nn.utils.weight_norm's forward pre-hook on lin (Linear)"),
    "spectral_norm": (lambda m: nn.utils.spectral_norm(m.lin),
                      "torch.nn.utils.spectral_norm's forward pre-hook on lin (Linear)"),
    "prune": (lambda m: nn.utils.prune.l1_unstructured(m.lin, "weight", 1),
              "torch.nn.utils.prune's forward pre-hook on lin (Linear)"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.filterwarnings("ignore")
def test_hooks_are_named(kind):
    import torch.nn.utils.prune  # noqa: F401

    put, text = HOOKS[kind]
    module = Apply(lambda self, x: self.lin(x))
    put(module)
    reason = watched(module).reason
    assert reason.startswith("hooks would have to run at every step: ") and text in reason
    assert reason.count("hook") < 8, "replicas repeat it"


GLOBAL_HOOKS = {
    "register_module_forward_hook": "the forward hook hook on every module",
    "register_module_forward_pre_hook": "the forward pre-hook hook on every module",
    "register_module_full_backward_hook": "the backward hook hook on every module",
    "register_module_full_backward_pre_hook": "the backward pre-hook hook on every module",
}


@pytest.mark.parametrize("name", GLOBAL_HOOKS)
def test_global_hooks_are_named(name):
    handle = getattr(nn.modules.module, name)(hook)
    try:
        with Watch([nn.Linear(1, 1)]) as watch:
            pass
    finally:
        handle.remove()
    assert GLOBAL_HOOKS[name] in watch.reason
    with Watch([nn.Linear(1, 1)]) as watch:
        pass
    assert watch.reason is None


def test_many_hooks_are_counted():
    module = nn.Sequential(*(nn.Linear(1, 1) for _ in range(10)))
    for each in module:
        each.register_forward_hook(hook)
    with Watch([module, module]) as watch:
        pass
    assert watch.reason.endswith("the forward hook hook on 2 (Linear), and 7 more")


def test_hooks_that_are_none_of_the_forwards():
    module = Apply(lambda self, x: self.lin(x))
    module._register_state_dict_hook(hook)
    module.register_state_dict_pre_hook(hook)
    module.register_load_state_dict_post_hook(hook)
    module.lin.weight.register_hook(lambda gradient: None)
    parametrize.register_parametrization(module.lin, "bias", nn.ReLU())
    nn.utils.parametrizations.weight_norm(module.lin)
    removed = module.register_forward_hook(hook)
    removed.remove()

    def own(*args):
        return None

    own.__module__ = "fastdp.anything"
    module.register_forward_hook(own)
    assert watched(module).reason is None


@pytest.mark.parametrize(
    "place, name",
    [
        ("transformers.modeling_utils", "make_inputs_require_grads"),
        ("transformers.utils.output_capturing", "output_capturing_hook"),
    ],
)
def test_hooks_of_transformers_that_are_recorded(place, name):
    """Those of gradient checkpointing and of hidden states. Others of these modules are not."""

    def known(module, args, output):
        return None

    def other(module, args, output):
        return None

    known.__name__, known.__module__, other.__module__ = name, place, place
    module = Apply(lambda self, x: self.lin(x))
    module.lin.register_forward_hook(known)
    assert watched(module).reason is None
    module.lin.register_forward_hook(other)
    assert "hooks would have to run at every step" in watched(module).reason


# Modes.


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


MODES = {
    "function": (FunctionMode, "the torch function mode FunctionMode is active"),
    "dispatch": (DispatchMode, "a torch dispatch mode is active"),
    "saved": (torch.autograd.graph.save_on_cpu, "saved-tensors hooks are active"),
    "anomaly": (lambda: torch.autograd.set_detect_anomaly(True), "anomaly mode is on"),
    "dual": (torch.autograd.forward_ad.dual_level, "forward-mode differentiation is active"),
}


@pytest.mark.parametrize("kind", MODES)
@pytest.mark.filterwarnings("ignore")
def test_modes_are_named(kind):
    mode, text = MODES[kind]
    with mode(), Watch([nn.Linear(1, 1)]) as watch:
        pass
    assert watch.reason.startswith(text)
    with Watch([nn.Linear(1, 1)]) as watch:
        pass
    assert watch.reason is None


def test_a_transform_is_named():
    seen = []

    def function(x):
        with Watch([nn.Linear(1, 1)]) as watch:
            seen.append(watch)
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    assert seen[0].reason == "it is transformed by torch.func"


def test_checkpointing_around_it_is_named():
    watches = []

    def function(x):
        with Watch([nn.Linear(1, 1)]) as watch:
            watches.append(watch)
        return x * 2

    checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert watches[0].reason.startswith("saved-tensors hooks are active")


def test_a_default_device_is_no_mode():
    with torch.device("cpu"), Watch([nn.Linear(1, 1)]) as watch:
        pass
    assert watch.reason is None


# Snapshots of roots.


def test_settings_objects_are_looked_into(monkeypatch):
    class PretrainedConfig:
        def __init__(self):
            self.use_cache = True

    place = types.ModuleType("transformers.configuration_utils")
    monkeypatch.setitem(sys.modules, place.__name__, place)
    assert len(records()) == 2
    place.PretrainedConfig = PretrainedConfig
    module = nn.Linear(1, 1)
    module.config = PretrainedConfig()
    snapshot = snapshot_of([module])
    assert snapshot.differs() is None
    module.config.use_cache = False
    text = "Linear.config.use_cache changed from True to False (modules[0])"
    assert snapshot.differs() == text


def test_a_snapshot_has_each_module_once():
    shared = nn.Linear(1, 1)
    snapshot = snapshot_of([nn.Sequential(shared), nn.Sequential(shared)])
    assert isinstance(snapshot, _C.Snapshot)
    first, second = nn.Sequential(shared), nn.Sequential(shared)
    snapshot = snapshot_of([first, second])
    shared.new = 1
    assert snapshot.differs() == "Linear.new was added (modules[1])"
