"""What a recording of a forward would freeze, looked for around some eager forwards.

A recorded step launches the kernels of one forward again and runs no Python. `Watch`, around one
eager forward of the replicas, says why that would go wrong: the forward

- changes what the replicas' modules hold: attributes, and lists, dictionaries and sets in them
  (`_C.Snapshot` says how deep), also of modules that are not registered (outside.py). Writes into
  buffers, and into tensors on a GPU, are kernels and are recorded;
- draws from Python's `random`, NumPy's global generator, or torch's generator of the host;
- prints, or makes log records (listeners.py says what is heard);
- has hooks, on a module or on all of them, which would have to run at every step, but for some of
  transformers' own;
- runs under a torch function or dispatch mode, saved-tensors hooks, anomaly mode or a transform
  (torch.func, forward-mode differentiation).

`global_state()` is the part of torch's global state that kernels depend on: it belongs into the
signature of a recording. `snapshot_of()` is what is asked at each replay whether the module is
still what was recorded.

What is not seen, neither here nor at a replay. A forward that does one of these is recorded as if
it did not, and every replay repeats what it did then:

    step = 0
    def forward(self, x):
        return x * schedule(step)         # a global; also a class attribute or a closure
        return x * time.time()            # a clock; also the environment, files, sockets
        return x + self.generator.normal()         # an np.random.Generator's, random.Random's,
                                                   # torch.Generator's own state
        return x * self.state.factor      # the content of an object of a class of your own, which
                                          # is neither a dataclass nor one of `records()`
        return x * self.array[0]          # elements of a NumPy array that is written in place
        if debug: print(x)                # what was not printed while it was watched

Also not seen: what is changed and put back within one forward (`torch.random.fork_rng` around
numbers drawn on the host), the content of containers more than four deep or past 8192 entries, and
what another thread does at the same time. That thread's draws from the three generators above are
taken for the forward's own.
"""

from __future__ import annotations

import argparse
import pickle
import random
import sys
import types
from typing import Any, Dict, Hashable, Iterable, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import nn

from . import _C, _torch_autograd, _torch_state
from .listeners import Listener
from .outside import Outside, modules_outside

__all__ = ["Watch", "global_state", "records", "snapshot_of"]

# Texts about hooks that one reason names; a model may have a hook on each of its modules.
_MAX_NAMED = 3

_HOOKS = (
    ("_forward_pre_hooks", "forward pre-hook"),
    ("_forward_hooks", "forward hook"),
    ("_backward_pre_hooks", "backward pre-hook"),
    ("_backward_hooks", "backward hook"),
)

# Classes of torch's own that do their work by hooks -> what users call.
_HOOK_CLASSES = {
    "torch.nn.utils.weight_norm": "torch.nn.utils.weight_norm",
    "torch.nn.utils.spectral_norm": "torch.nn.utils.spectral_norm",
    "torch.nn.utils.prune": "torch.nn.utils.prune",
}

# Hooks that do nothing but call operators on what the forward makes, which are recorded with it: of
# module -> name. Gradient checkpointing of transformers has the first.
_RECORDED_HOOKS = {
    "transformers.modeling_utils": "make_inputs_require_grads",
    "transformers.utils.output_capturing": "output_capturing_hook",
}

_AUTOCAST = ("cuda", "cpu")


class Watch:
    """Around one eager forward of replicas: `with Watch(roots) as watch: ...`.

    Args:
        roots: the replicas' root modules, or any modules that the forward calls.

    Attributes:
        reason: after the block, None, or why a recording of this forward would go wrong, as a
            clause whose subject is the forward: "it draws from Python's random". None too if the
            block raised.
        passing: True if the reason is nothing but output, which may be that of a first forward:
            a model that says something once is worth another watch.

    Any number may be active, in each other and in several threads. Whatever it replaces is put back
    at the end of the block, however it ends.
    """

    __slots__ = ("reason", "passing", "_roots", "_listener", "_snapshot", "_states", "__weakref__")

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._listener: Optional[Listener] = None
        self.reason: Optional[str] = None
        self.passing = False
        self._roots = tuple(roots)
        self._snapshot: Any = None
        self._states: Dict[str, Any] = {}

    def __enter__(self) -> "Watch":
        reasons = [*_active_modes(), *_hooks(self._roots)]
        if reasons:  # nothing more to be found out, and a mode would see what the rest does
            self.reason = "; ".join(reasons)
            return self
        self._snapshot = snapshot_of(self._roots)
        self._states = _generator_states()
        self._listener = Listener()
        try:
            self._listener.start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is None and self._listener is not None:
                self._conclude(self._listener)
        finally:
            self._end()

    def _conclude(self, listener: Listener) -> None:
        reasons = []
        changed = self._snapshot.differs()
        if changed is not None:
            reasons.append(f"it changes what modules hold: {changed}")
        states = _generator_states()
        for name, state in self._states.items():
            if name in states and states[name] != state:
                reasons.append(f"it draws from {name}")
        self.passing = not reasons and listener.heard is not None
        if listener.heard is not None:
            reasons.append(f"it {listener.heard}")
        self.reason = "; ".join(reasons) or None

    def _end(self) -> None:
        """Also the end of a watch whose block was left by an interrupt between two lines here."""
        listener = getattr(self, "_listener", None)  # none before __init__
        if listener is not None:
            listener.stop()
        self._snapshot, self._states, self._roots = None, {}, ()

    __del__ = _end


def snapshot_of(roots: Iterable[nn.Module]) -> Any:
    """A `_C.Snapshot` of all modules below these, each once, and of those that they hold without
    having registered them: its `differs()` names a change."""
    modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
    others = modules_outside(modules)
    snapshot = _C.Snapshot((*modules, *others), records())
    return Outside(snapshot, others) if others else snapshot


def records() -> Tuple[type, ...]:
    """Classes, besides dataclasses, whose objects are looked into: they hold settings as plain
    attributes, and forwards read them."""
    found: List[type] = [types.SimpleNamespace, argparse.Namespace]
    # transformers' configurations; it is never imported for this.
    place = sys.modules.get("transformers.configuration_utils")
    for name in ("PretrainedConfig", "PreTrainedConfig"):
        kind = getattr(place, name, None)
        if isinstance(kind, type):
            found.append(kind)
    return tuple(found)


def _generator_states() -> Dict[str, Any]:
    """The states of the global generators of the host, comparable. NumPy is not imported for it."""
    states: Dict[str, Any] = {
        "Python's random": random.getstate(),
        "torch's generator of the host": torch.get_rng_state().tolist(),
    }
    numpy_state = getattr(sys.modules.get("numpy.random"), "get_state", None)
    if numpy_state is not None:
        states["NumPy's global generator"] = pickle.dumps(numpy_state(legacy=False))
    return states


def _active_modes() -> Iterator[str]:
    """What is active on this thread that acts on every operator from Python."""
    for mode in _torch_state.function_modes():
        if not _torch_state.is_default_device(mode):  # recorded as any other argument
            yield f"the torch function mode {type(mode).__name__} is active"
    if _torch_state.dispatch_mode_active():
        yield "a torch dispatch mode is active"
    if _torch_autograd.saved_tensors_hooks_active():
        yield "saved-tensors hooks are active (torch.autograd.graph, or checkpointing around it)"
    if torch.is_anomaly_enabled():
        yield "anomaly mode is on"
    if _torch_autograd.inside_function_transform():
        yield "it is transformed by torch.func"
    if _torch_autograd.forward_mode_active():
        yield "forward-mode differentiation is active"


def _hooks(roots: Sequence[nn.Module]) -> Iterator[str]:
    found: Dict[str, None] = {}  # replicas have the same ones
    for kind, hook in _torch_state.global_module_hooks():
        if not _may_be_recorded(hook):
            found[f"{_hook_name(kind, hook)} on every module"] = None
    for root in roots:
        others = [("a part that is not registered", m) for m in modules_outside(root.modules())]
        for path, module in (*root.named_modules(), *others):
            for attribute, kind in _HOOKS:
                for hook in (getattr(module, attribute, None) or {}).values():
                    if not _may_be_recorded(hook):
                        where = f"{path or 'the module itself'} ({type(module).__name__})"
                        found[f"{_hook_name(kind, hook)} on {where}"] = None
    if found:
        texts = list(found)
        more = f", and {len(texts) - _MAX_NAMED} more" if len(texts) > _MAX_NAMED else ""
        yield f"hooks would have to run at every step: {', '.join(texts[:_MAX_NAMED])}{more}"


def _hook_name(kind: str, hook: Any) -> str:
    while hasattr(hook, "func"):  # functools.partial
        hook = hook.func
    place = getattr(type(hook), "__module__", "")
    if place in _HOOK_CLASSES:
        return f"{_HOOK_CLASSES[place]}'s {kind}"
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return f"the {kind} {name}"


def _may_be_recorded(hook: Any) -> bool:
    place = getattr(hook, "__module__", None) or type(hook).__module__
    if getattr(hook, "__name__", "") == _RECORDED_HOOKS.get(place):
        return True
    return place == "fastdp" or place.startswith("fastdp.")


def global_state() -> Tuple[Hashable, ...]:
    """Everything global that torch's kernels depend on, for the calling thread: what a recording
    has baked in, so that two forwards may share one only if this was equal. Grad and inference
    mode, autocast (enabled and dtype of each device type, cache), default dtype and device, matmul
    precision, flags of cuBLAS, cuDNN and scaled_dot_product_attention, deterministic algorithms.
    Also whether something from Python wants to be told what runs, since a replay tells it nothing.
    """
    modes = _torch_state.function_modes()
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_cache_enabled(),
        *[torch.is_autocast_enabled(kind) for kind in _AUTOCAST],
        *[torch.get_autocast_dtype(kind) for kind in _AUTOCAST],
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        tuple([getattr(mode, "device", None) for mode in modes]) if modes else (),
        _torch_state.watched_from_python(),
        *_torch_state.kernel_flags(),
    )
