"""What a wrapper has beyond torch's, in such a way that a subclass may have the names.

fastdp reads an option under a private name, `_fastdp_engine`. `Option` is what stands under the
public one in the class: `dp.engine` reads it, `dp.engine = "eager"` writes it. Code that knew only
nn.DataParallel may have a method, a property, a part or an attribute `engine` of its own, and finds
it unchanged; the option is then what the constructor made it. `Method` is the same for methods such
as `dp.memory`. Neither hides what a subclass reads in its module by a `__getattr__` of its own.
"""

from __future__ import annotations

import functools
import types
from typing import Any, Callable, Dict

from torch import nn

from . import environment, options

_ABSENT = object()

# torch's own, whatever code puts in its place later: `torch.nn.DataParallel = fastdp.DataParallel`.
TORCH_CLASS = nn.DataParallel


def _found_elsewhere(wrapper: Any, name: str, reads: bool) -> Any:
    """What the name is without fastdp: a part of the wrapper or, if its class `reads` elsewhere
    what it lacks, such as in the module, what is found there. `_ABSENT` where it is nothing."""
    for kind in ("_modules", "_parameters", "_buffers"):
        if name in wrapper.__dict__.get(kind, ()):
            return wrapper.__dict__[kind][name]
    if reads:
        try:
            return type(wrapper).__getattr__(wrapper, name)
        except AttributeError:
            pass
    return _ABSENT


class Option:
    """The attribute of one option, `name`.

    What a subclass's instance is given is there as it was given, whatever it is; so it is in one of
    torch's own class while that is patched. It is the option too if it fits: if
    `check(value, wrapper)` raises nothing. fastdp's class itself has no other use for the name:
    there every value is the option, and a bad one is an error.
    """

    def __init__(self, name: str, check: Callable[[Any, Any], Any], standard: Any = None) -> None:
        self._name = name
        self._place = f"_fastdp_{name}"
        self._check = check
        self._standard = standard

    def __get__(self, wrapper: Any, owner: Any = None) -> Any:
        if wrapper is None or _is_registered(wrapper, self._name):
            kind = type(wrapper) if owner is None else owner
            raise AttributeError(f"{kind.__name__} has no attribute {self._name!r}")
        value = wrapper.__dict__.get(self._name, _ABSENT)
        if value is not _ABSENT:
            return value
        value = _found_elsewhere(wrapper, self._name, not self._is_ours(wrapper))
        return getattr(wrapper, self._place) if value is _ABSENT else value

    def __set__(self, wrapper: Any, value: Any) -> None:
        ours = self._is_ours(wrapper)
        if not ours:
            wrapper.__dict__[self._name] = value
        try:
            wrapper.__dict__[self._place] = self._check(value, wrapper)
        except (TypeError, ValueError):
            if ours:
                raise

    def __delete__(self, wrapper: Any) -> None:
        if wrapper.__dict__.pop(self._name, _ABSENT) is _ABSENT:
            raise AttributeError(f"{self._name!r} is an option: it can be set, not deleted")

    def standard(self, wrapper: Any) -> Any:
        """What it is where nobody said anything."""
        return self._check(self._standard, wrapper)

    def _is_ours(self, wrapper: Any) -> bool:
        """Whether the wrapper is of fastdp's very class."""
        cls = type(wrapper)
        return cls is not TORCH_CLASS and vars(cls).get(self._name) is self


class Method:
    """A method that torch's class lacks. What a subclass or an instance has under the name is found
    before; so is a part of it."""

    def __init__(self, function: Callable[..., Any], home: type) -> None:
        self._function = function
        self._getattr = vars(home)["__getattr__"]
        functools.update_wrapper(self, function)

    def __get__(self, wrapper: Any, owner: Any = None) -> Any:
        if wrapper is None:
            return self._function
        name = self._function.__name__
        if _is_registered(wrapper, name):
            raise AttributeError(f"{type(wrapper).__name__} has no attribute {name!r}")
        reads = type(wrapper).__getattr__ is not self._getattr
        value = _found_elsewhere(wrapper, name, reads)
        return types.MethodType(self._function, wrapper) if value is _ABSENT else value


class Standard:
    """Stands in the class under an option's private name, for wrappers whose own dictionary lacks
    it: torch made them, or a subclass that calls none of our `__init__`. The default value, kept at
    first use."""

    def __init__(self, option: Option, place: str) -> None:
        self._option = option
        self._place = place

    def __get__(self, wrapper: Any, owner: Any = None) -> Any:
        if wrapper is None:
            raise AttributeError(f"{owner.__name__} has no attribute {self._place!r}")
        return wrapper.__dict__.setdefault(self._place, self._option.standard(wrapper))


def _is_registered(wrapper: Any, name: str) -> bool:
    """Whether a part of this name is just being registered."""
    return bool(wrapper.__dict__.get("_fastdp_registered") == name)


def _registers(function: str) -> Callable[..., Any]:
    """nn.Module's function of that name, which refuses what an object has already. What only
    fastdp's class has is there to be taken."""

    @functools.wraps(getattr(nn.Module, function))
    def register(wrapper: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        wrapper.__dict__["_fastdp_registered"] = name
        try:
            return getattr(super(TORCH_CLASS, wrapper), function)(name, *args, **kwargs)
        finally:
            wrapper.__dict__.pop("_fastdp_registered", None)

    return register


def _flag(name: str, standard: bool = False) -> Option:
    return Option(name, lambda value, wrapper: options.flag(name, value), standard)


def _sizes(value: Any, wrapper: Any) -> Any:
    return options.chunk_sizes(value, len(wrapper.__dict__.get("device_ids", ())))


OPTIONS: Dict[str, Option] = {
    "chunk_sizes": Option("chunk_sizes", _sizes),
    "loss_weighting": Option("loss_weighting", lambda value, _: options.loss_weighting(value)),
    "unused_grad": Option("unused_grad", lambda value, _: environment.unused_grad(value)),
    "bucket_bytes": Option("bucket_bytes", lambda value, _: environment.bucket_bytes(value)),
    "transport": Option("transport", lambda value, _: environment.transport(value)),
    "timeout_s": Option("timeout_s", lambda value, _: options.timeout_s(value)),
    "engine": Option("engine", lambda value, _: environment.engine(value)),
}
_FLAGS = "split_lists replicate_scalars sequential forward_attributes"
OPTIONS.update((name, _flag(name)) for name in _FLAGS.split())
OPTIONS["gather_outputs"] = _flag("gather_outputs", True)


def add_attributes(cls: Any) -> None:
    """Gives a class of wrappers the options, and makes `Method`s of what torch's class lacks."""
    for name, option in OPTIONS.items():
        setattr(cls, name, option)
        setattr(cls, f"_fastdp_{name}", Standard(option, f"_fastdp_{name}"))
    for part in reversed([part for part in cls.__mro__ if part not in TORCH_CLASS.__mro__]):
        for name, value in list(vars(part).items()):
            is_public = isinstance(value, types.FunctionType) and not name.startswith("_")
            if is_public and not hasattr(TORCH_CLASS, name):
                setattr(cls, name, Method(value, cls))
    for name in ("register_buffer", "register_parameter", "add_module"):
        setattr(cls, name, _registers(name))


def is_wrapper(thing: Any) -> bool:
    """Whether it is a fastdp.DataParallel: a wrapper of torch's class is one while that is
    patched."""
    return isinstance(thing, TORCH_CLASS) and hasattr(type(thing), "_fastdp_run")
