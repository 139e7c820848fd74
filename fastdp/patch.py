"""`fastdp.patch()`: torch's own `nn.DataParallel` does what `fastdp.DataParallel` does.

The class that torch made is changed from within: it is given the functions of fastdp's class, and
torch's function `data_parallel` fastdp's code. No reference has to be found, since all references
stay what they are. Two other ways were weighed:

- Names bound anew (`torch.nn.DataParallel = fastdp.DataParallel`, in all of sys.modules) miss what
  no name holds: default arguments, closures, tuples of wrapper classes, bases of subclasses.
- A `__new__` that returns an object of fastdp's class misses subclasses, and the object is of
  another type than the one called: `type(model) in (nn.DataParallel, ...)`, which much code asks,
  becomes false. Whole models that were saved could not be loaded where fastdp is not installed.

So while the patch is on:

- A wrapper is of the class that was called, and is pickled under its name. `fastdp.DataParallel`
  names torch's class too, so `isinstance` with either is true, and so is `type(w) is`.
- Subclasses, made before or after, find fastdp's functions where they found torch's. A function of
  torch's class that somebody else replaced before stays theirs, as an override does.
- Wrappers made before the patch, and those loaded from files, run on fastdp too: options that they
  never had take their default values at first use.
- Only this process, and what it forks, is patched: a process that is spawned is not.

`undo()` gives torch's class back its own functions. A wrapper of that very class that was made
meanwhile becomes a `fastdp.DataParallel` and works on; one made before is torch's again; an
instance of a subclass goes with its class. No forward may be running then.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import sys
import threading
import types
import weakref
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from torch import nn

from .attributes import TORCH_CLASS as _Torch
from .functional import data_parallel
from .wrapper import DataParallel

__all__ = ["Patch", "Replacement", "patch"]

_Fast = DataParallel
# By its full name: torch.nn.parallel.data_parallel is also a function of that name.
_home = importlib.import_module("torch.nn.parallel.data_parallel")
# Entries of a class's dictionary that describe the class and are no behaviour.
_DESCRIBING = frozenset(
    "__module__ __doc__ __dict__ __weakref__ __parameters__ __orig_bases__ __slotnames__ "
    "__annotations__ __annotate__ __annotate_func__ __annotations_cache__ __firstlineno__ "
    "__static_attributes__".split()
)
_ABSENT = object()


class Replacement(NamedTuple):
    """One line of code whose wrappers, or calls of `data_parallel`, were fastdp's."""

    name: str  # of the class, "data_parallel", or that of the class and how it came: "... (loaded)"
    file: str
    line: int
    times: int
    replicas: Optional[int]  # of the last one; 0: the module is called directly; None: a function


class _Places:
    """Where something was replaced, in the order of first use. Any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: Dict[Tuple[str, str, int], Tuple[int, Optional[int]]] = {}

    def add(self, name: str, frame: Optional[types.FrameType], replicas: Optional[int]) -> None:
        file, line = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        with self._lock:
            count = self._found.get((name, file, line), (0, None))[0]
            self._found[name, file, line] = count + 1, replicas

    def list(self) -> List[Replacement]:
        with self._lock:
            return [Replacement(*place, *rest) for place, rest in self._found.items()]


class Patch:
    """What `fastdp.patch()` returns: says what was replaced, and can undo it. As a context manager
    it leaves things as it found them: a patch inside a patch ends nothing."""

    def __init__(self, surgery: "_Surgery") -> None:
        self._surgery = surgery

    @property
    def active(self) -> bool:
        """Whether this patch is still on."""
        return _current is self._surgery

    @property
    def replaced(self) -> List[Replacement]:
        """Where wrappers were made and `data_parallel` was called since the patch is on, in the
        order of first use."""
        return self._surgery.places.list()

    def report(self) -> str:
        """`replaced` as text, one line per place."""
        found = self.replaced
        if not found:
            return "fastdp: no nn.DataParallel was made, so nothing was replaced"
        places = "1 place" if len(found) == 1 else f"{len(found)} places"
        lines = [f"fastdp: nn.DataParallel was replaced in {places}"]
        for place in found:
            line = f"  {place.file}:{place.line}: {place.name}"
            if place.replicas is not None:
                line += f", {place.replicas} replica{'s' * (place.replicas > 1)}"
                line = line.replace(", 0 replica", ", called directly: no GPU")
            lines.append(line + f" ({place.times} times)" * (place.times > 1))
        return "\n".join(lines)

    def undo(self) -> None:
        """Gives torch's class and function back their own code, whoever else asked for the patch.
        Does nothing where that was done."""
        with _lock:
            if self.active:
                self._surgery.undo()

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *error: Any) -> None:
        with _lock:
            self._surgery.holders.discard(self)
            if not self._surgery.holders:
                self.undo()

    def __repr__(self) -> str:
        state = "on" if self.active else "undone"
        return f"<fastdp.patch(): {state}, {len(self.replaced)} places>"


# Held while the patch is put on or undone.
_lock = threading.RLock()
_current: Optional["_Surgery"] = None


def patch() -> Patch:
    """From here on every `nn.DataParallel(...)` is fastdp's, and every
    `nn.parallel.data_parallel(...)`, in whatever code, by whatever name, in subclasses too.

    Arguments and results stay as they are; fastdp's options may be given as keywords. May be called
    at any time, from any thread, and again. Opens no device.

    Returns:
        A handle: `.replaced` lists file, line and number of what was replaced, `.undo()` ends it.
        `with fastdp.patch():` ends it with the block, unless it was on before.

    Example::

        import fastdp
        fastdp.patch()
        model = torch.nn.DataParallel(net)  # or a library that says so
    """
    global _current
    with _lock:
        if _current is None:
            surgery = _Surgery()
            try:
                surgery.do()
                _current = surgery
            except BaseException:  # an interrupt: half a patch could not be undone by anybody
                surgery.undo()
                raise
        handle = Patch(_current)
        _current.holders.add(handle)
        return handle


class _Surgery:
    """The change of torch's class and function, with what is needed to take it back."""

    def __init__(self) -> None:
        self.places = _Places()
        self.holders: Set[Patch] = set()
        # By id: a subclass may have made its instances unhashable.
        self._made: "weakref.WeakValueDictionary[int, nn.Module]" = weakref.WeakValueDictionary()
        self._put: Dict[str, Any] = {}
        self._had: Dict[str, Any] = {}
        self._function: Any = _home.data_parallel
        self._code: Optional[types.CodeType] = None

    def do(self) -> None:
        table = _behaviour()
        table["__init__"] = self._counted(table["__init__"])
        table["__setstate__"] = self._loaded(table.get("__setstate__", nn.Module.__setstate__))
        # Forward last: another thread may be inside torch's, which gets on with fastdp's steps.
        for name in sorted(table, key=lambda name: name == "forward"):
            had = vars(_Torch).get(name, _ABSENT)
            if had is _ABSENT or _is_of_torch(had):
                self._had[name], self._put[name] = had, table[name]
                setattr(_Torch, name, table[name])
        if _is_of_torch(self._function):
            self._code, self._function.__code__ = self._function.__code__, _SHIM
        vars(sys.modules[__package__])["DataParallel"] = _Torch

    def undo(self) -> None:
        """What is there of it; whole, also where an interrupt strikes."""
        try:
            self._undo()
        except BaseException:
            self._undo()
            raise

    def _undo(self) -> None:
        global _current
        _current = None
        vars(sys.modules[__package__])["DataParallel"] = _Fast
        if self._code is not None and self._function.__code__ is _SHIM:
            self._function.__code__ = self._code
        for wrapped in list(self._made.values()):
            if type(wrapped) is _Torch:
                object.__setattr__(wrapped, "__class__", _Fast)
        for name, put in reversed(self._put.items()):
            if vars(_Torch).get(name) is not put:
                continue  # replaced by somebody after us
            if self._had[name] is _ABSENT:
                delattr(_Torch, name)
            else:
                setattr(_Torch, name, self._had[name])
        for wrapped in _torch_wrappers():
            # What fastdp keeps in a wrapper: options, threads, replicas.
            for name in [name for name in vars(wrapped) if name.startswith("_fastdp_")]:
                del wrapped.__dict__[name]

    def _counted(self, init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def __init__(wrapped: Any, *args: Any, **kwargs: Any) -> None:
            init(wrapped, *args, **kwargs)
            self._note(wrapped, "", lambda frame: _works_on(frame, wrapped))

        return __init__

    def _loaded(self, setstate: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(setstate)
        def __setstate__(wrapped: Any, state: Any) -> None:
            setstate(wrapped, state)
            self._note(wrapped, " (loaded or copied)", _is_of_a_loader)

        return __setstate__

    def _note(self, wrapped: Any, how: str, skips: Callable[[types.FrameType], bool]) -> None:
        self._made[id(wrapped)] = wrapped
        frame = _callers_caller()
        while frame is not None and frame.f_back is not None and skips(frame):
            frame = frame.f_back
        self.places.add(type(wrapped).__qualname__ + how, frame, len(wrapped.device_ids))


def run_function(*args: Any) -> Any:
    """`data_parallel`, counted. Called by torch's function."""
    surgery = _current
    if surgery is not None:
        surgery.places.add("data_parallel", _callers_caller(), None)
    return data_parallel(*args)


def _shim(  # type: ignore[no-untyped-def]
    module, inputs, device_ids=None, output_device=None, dim=0, module_kwargs=None
):
    # Only its code is used, in torch's function; so it sees no global name of this file.
    from fastdp.patch import run_function

    return run_function(module, inputs, device_ids, output_device, dim, module_kwargs)


# Under the name that tracebacks and profiles had before.
_SHIM = _shim.__code__.replace(co_name=_home.data_parallel.__name__)


def _behaviour() -> Dict[str, Any]:
    """What fastdp's class consists of, made for torch's class."""
    parts = [part for part in _Fast.__mro__ if part not in _Torch.__mro__]
    return {
        name: _rehomed(value)
        for part in reversed(parts)  # what comes first in the order has the last word
        for name, value in vars(part).items()
        if name not in _DESCRIBING
    }


def _rehomed(value: Any) -> Any:
    """A function whose `super()` starts from torch's class rather than from fastdp's."""
    if isinstance(value, (classmethod, staticmethod)):
        return type(value)(_rehomed(value.__func__))
    if isinstance(value, property):
        getter, setter, deleter = map(_rehomed, (value.fget, value.fset, value.fdel))
        return property(getter, setter, deleter, value.__doc__)
    if not isinstance(value, types.FunctionType) or "__class__" not in value.__code__.co_freevars:
        return value
    cells = list(value.__closure__ or ())
    cells[value.__code__.co_freevars.index("__class__")] = types.CellType(_Torch)
    copy = types.FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells)
    )
    copy.__kwdefaults__ = value.__kwdefaults__
    return functools.update_wrapper(copy, value, updated=("__dict__",))


def _is_of_torch(value: Any) -> bool:
    """Whether a function is torch's own, not put there by somebody else."""
    return getattr(value, "__globals__", None) is vars(_home)


def _torch_wrappers() -> Iterator[Any]:
    """All wrappers of torch's class and its subclasses, apart from fastdp's."""
    for thing in gc.get_objects():
        if issubclass(type(thing), _Torch) and not issubclass(type(thing), _Fast):
            yield thing


def _callers_caller() -> Optional[types.FrameType]:
    """The frame two steps above the one that asks."""
    frame = inspect.currentframe()
    for _ in range(3):
        frame = frame.f_back if frame is not None else None
    return frame


def _works_on(frame: types.FrameType, wrapped: Any) -> bool:
    """Whether a frame is part of a construction: a subclass's `__init__`, or `DataParallel[T](...)`
    on its way through typing."""
    if frame.f_globals.get("__name__") == "typing":
        return True
    code = frame.f_code
    return code.co_argcount > 0 and frame.f_locals.get(code.co_varnames[0]) is wrapped


def _is_of_a_loader(frame: types.FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name.split(".")[0] in ("torch", "pickle", "copy", "copyreg")
