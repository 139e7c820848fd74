"""Every private name of torch's compiler that fastdp uses, each behind a function, and what happens
where a torch lacks it. tests/test_torch_compat.py checks the table against the source.

None of these is imported before something is to be compiled: it takes seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import os
import threading
import types
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch

_lock = threading.RLock()

# name -> (where it lives, what fastdp does without it)
PRIVATE = {
    "_dynamo": ("torch", "replicas run uncompiled"),
    "_inductor": ("torch", "replicas run uncompiled; other backends need it not"),
    "_functorch": ("torch", "none: every compiler of torch's has it"),
    "_aot_autograd": ("torch._functorch", "a kept graph goes backward once"),
    "_optimize": ("torch._dynamo.eval_frame", "each GPU is compiled for"),
    "compile_lock": ("torch._dynamo.convert_frame", "fastdp's own compilations take turns"),
    "_torchdynamo_orig_backend": ("torch.compile's functions", "as for the next"),
    "_torchdynamo_orig_callable": ("older ones", "torch.compile(module) runs uncompiled inside"),
}


def reason_against() -> str:
    """Why nothing can be compiled here, or ""."""
    try:
        from torch._dynamo.eval_frame import check_if_dynamo_supported

        check_if_dynamo_supported()
    except Exception as error:
        return f"torch.compile does not work here: {error}"
    major, minor = torch.__version__.split(".")[:2]
    if (int(major), int(minor)) < (2, 5):
        return f"torch {torch.__version__} compiles each replica for itself; compile= needs 2.5"
    return ""


# Dynamo: what finds graphs in a function.


def takes_guard_filter() -> bool:
    """Whether guards can be left out."""
    try:
        from torch._dynamo.eval_frame import _optimize
    except ImportError:
        return False
    return "guard_filter_fn" in inspect.signature(_optimize).parameters


def compiling(
    function: Any, backend: Any, fullgraph: bool, dynamic: Optional[bool], guards: Any
) -> Callable[..., Any]:
    """The function, which compiles what is missing. `guards`, if there is such, tells for each of
    its guards whether to keep it."""
    from torch import _dynamo

    filters = {} if guards is None else {"guard_filter_fn": guards}
    wrap = _dynamo.optimize(backend=backend, nopython=fullgraph, dynamic=dynamic, **filters)
    return wrap(function)


def as_compiled(function: Any) -> Callable[..., Any]:
    """The function, which runs what is compiled, and the rest as Python."""
    from torch import _dynamo

    return _dynamo.run(function)


def forget(code: types.CodeType) -> None:
    """torch keeps a code object, and what it compiled of it, until it is told."""
    from torch._dynamo import eval_frame

    reset = getattr(eval_frame, "reset_code", None)
    if reset is not None:
        reset(code)


def may_break(error: Exception) -> bool:
    """Whether of what cannot be one graph parts may do: a compiler that fails, fails with parts."""
    from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

    found = isinstance(error, TorchDynamoException)
    return found and not isinstance(error, BackendCompilerFailed)


@contextlib.contextmanager
def messages_of_once_left_out() -> Iterator[None]:
    """transformers says some things once, by methods of its own on all loggers. They would break
    the graph for a message that no later step has, so what is compiled does without them."""
    from torch._dynamo import config

    names = ("ignore_logging_functions", "ignore_logger_methods")  # by version
    found = [getattr(logging.Logger, name, None) for name in ("warning_once", "info_once")]
    known = next((name for name in names if hasattr(config, name)), None)
    if known is None or not any(found):
        yield
        return
    left_out = getattr(config, known) | {function for function in found if function is not None}
    with config.patch({known: left_out}):
        yield


@contextlib.contextmanager
def hooks_guarded() -> Iterator[None]:
    """What is compiled meanwhile asks for the hooks of modules; torch leaves that out by default,
    so that a hook which comes later never runs."""
    from torch._dynamo import config

    name = "skip_nnmodule_hook_guards"
    with config.patch({name: False}) if hasattr(config, name) else contextlib.nullcontext():
        yield


def looked_up(name: str) -> Callable[..., Any]:
    """The compiler of that name. ValueError, with those that there are."""
    from torch._dynamo import list_backends, lookup_backend

    try:
        return lookup_backend(name)
    except Exception as error:
        known = ", ".join(name for name in list_backends() if name != "cudagraphs")
        raise ValueError(f"it must be one of {known}, or a function") from error


def context_of(module: Any) -> Any:
    """What torch.compile(module), or module.compile(), keeps of its arguments; None if unknown."""
    if hasattr(module, "dynamo_ctx"):
        return module.dynamo_ctx
    call = module.__dict__.get("_compiled_call_impl")
    cells = getattr(call, "__closure__", None) or ()
    names = getattr(getattr(call, "__code__", None), "co_freevars", ())
    found = dict(zip(names, cells)).get("self")
    return None if found is None else found.cell_contents


def compiler_of(context: Any) -> Tuple[Any, bool]:
    """The compiler below torch's own layers, and `fullgraph`."""
    found = getattr(context, "callback", None)
    fullgraph = bool(getattr(context, "fullgraph", False))
    for name in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable"):
        while getattr(found, name, None) is not None:
            fullgraph = fullgraph or type(found).__name__ == "ConvertFrameAssert"
            found = getattr(found, name)
    return found, fullgraph


# AOTAutograd: what makes a forward and a backward of a graph.


def lock() -> Any:
    """What torch holds while it compiles, so that nobody else does; no code of the user's runs
    under it."""
    from torch._dynamo import convert_frame

    return getattr(convert_frame, "compile_lock", _lock)


@contextlib.contextmanager
def compiled_at_once(is_noted: bool) -> Iterator[None]:
    """Around a compilation: backwards are compiled now. One that is compiled when it first runs
    would be so on a thread of autograd's, beside others. `is_noted`: what comes out of its cache
    would not pass through `inner` (`inductor`); Inductor's own cache stays."""
    from torch._functorch import config

    settings = {}
    if hasattr(config, "force_non_lazy_backward_lowering"):
        settings["force_non_lazy_backward_lowering"] = True
    if is_noted:
        settings["enable_autograd_cache"] = False
    with config.patch(settings), _nothing_donated():
        yield


@contextlib.contextmanager
def _nothing_donated() -> Iterator[None]:
    """A graph that was kept may go backward again, as that of plain replicas: so its backward must
    not use up what was saved for it. torch's own setting is asked when the backward runs, too, and
    then refuses what was compiled while it was off."""
    name = "collect_bw_donated_buffer_idxs"
    place = _place_of(name)
    if place is None:  # another torch, whose backward then says so itself
        yield
        return
    collect = getattr(place, name)
    setattr(place, name, lambda *args, **kwargs: [])
    try:
        yield
    finally:
        setattr(place, name, collect)


def _place_of(name: str) -> Any:
    """The module of AOTAutograd that calls the function of that name; torch 2.6 has it in the
    second."""
    for part in ("graph_compile", "jit_compile_runtime_wrappers"):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"torch._functorch._aot_autograd.{part}")
            if hasattr(module, name):
                return module
    return None


# Inductor: what makes code.


def inductor(
    graph: Any, inputs: Sequence[Any], settings: Dict[str, Any], inner: Any
) -> Callable[..., Any]:
    """What runs the graph. `inner(compile, graph, inputs, **options)` stands between its parts."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    given = {}
    if inner is not None:
        given["inner_compile"] = lambda *args, **kw: inner(compile_fx_inner, *args, **kw)
    return compile_fx(graph, list(inputs), config_patches=dict(settings), **given)


def settings_of_mode(mode: str, dynamic: Optional[bool]) -> Dict[str, Any]:
    """ValueError, with the modes that there are."""
    from torch._inductor import list_mode_options

    known = dict.fromkeys(("default", *list_mode_options()))
    if mode not in known:
        raise ValueError(f"it must be one of {', '.join(known)}")
    return {} if mode == "default" else list_mode_options(mode, dynamic)


def known_settings() -> Sequence[str]:
    from torch._inductor import list_options

    return list_options()


def share_kernels(index: int) -> None:
    """Triton keeps its kernels where it does for this GPU, for all: else each has a cache."""
    from torch._inductor.runtime.runtime_utils import triton_cache_dir

    os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(index))


def loaded(source: str, constants: Dict[str, Any]) -> Any:
    """The module of generated code."""
    from torch._inductor.codecache import PyCodeCache

    key, path = PyCodeCache.write(source)
    return PyCodeCache.load_by_key_path(key, path, attrs=constants)


def aligned(call: Any, checked: List[int], mutated: Any) -> Callable[[List[Any]], Any]:
    """As Inductor does it: an input that lies at an odd address is copied first."""
    from torch._inductor.utils import align_inputs_from_check_idxs as align

    if len(inspect.signature(align).parameters) > 2:
        return align(call, checked, mutated)
    return align(call, checked)
