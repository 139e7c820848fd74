"""What `compile` may be, and the compiler that it names: torch.compile's own arguments.

The compiler makes no CUDA graphs of its own: the engine records whole steps, and a graph inside a
graph cannot be. So a mode stands for its options but for that one.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Union

from . import _torch_compiler

KEYS = ("backend", "dynamic", "fullgraph", "mode", "options")


class CompileOptions:
    """A compiler and how it is asked. `reason` says why there is none, or is ""."""

    def __init__(self, given: Dict[str, Any]) -> None:
        self._given = dict(given)
        self.dynamic: Optional[bool] = given.get("dynamic")
        self.fullgraph = bool(given.get("fullgraph"))
        self.reason = _torch_compiler.reason_against()
        self.is_inductor = False
        self.name = "inductor"
        self._backend: Any = None
        self._config: Dict[str, Any] = {}
        if not self.reason:
            self._choose(given.get("backend") or "inductor", given)

    def _choose(self, backend: Any, given: Dict[str, Any]) -> None:
        mode, settings = given.get("mode"), given.get("options")
        if backend == "inductor":
            self.is_inductor = True
            self._config = {**_of_mode(mode, self.dynamic), **_checked_settings(settings or {})}
            self._config["triton.cudagraphs"] = False
            return
        self.name = backend if isinstance(backend, str) else getattr(backend, "__name__", "custom")
        found = _looked_up(backend) if isinstance(backend, str) else backend
        named = {"mode": mode, "options": settings}
        kwargs = {name: value for name, value in named.items() if value}
        self._backend = lambda graph, inputs: found(graph, inputs, **kwargs)

    def __deepcopy__(self, memo: Any) -> CompileOptions:
        return self  # nobody changes it

    def __reduce__(self) -> Any:
        """Where it is unpickled, the compiler is looked up anew."""
        return CompileOptions, (self._given,)

    def compile(self, graph: Any, inputs: Sequence[Any], inner: Any = None) -> Callable[..., Any]:
        """What runs `graph`, an fx.GraphModule whose output is a tuple, on inputs like these. The
        graph is the compiler's from now on. `inner(compile, graph, inputs, **options)` stands
        between Inductor's parts, if it is the compiler."""
        if not self.is_inductor:
            return self._backend(graph, list(inputs))
        return _torch_compiler.inductor(graph, inputs, self._config, inner)


def parse(value: Union[bool, Dict[str, Any], None]) -> Union[CompileOptions, bool, None]:
    """The option `compile`: None, False, or what to compile with.

    Raises:
        TypeError, ValueError: it, or one of its entries, is none of torch.compile's.
    """
    if value is None or value is False:
        return value
    given: Any = {} if value is True else value
    if not isinstance(given, dict):
        raise TypeError(
            f"compile is {value!r}: it must be True, False or a dictionary of arguments of "
            f"torch.compile ({', '.join(KEYS)})"
        )
    for name, entry in given.items():
        if name not in KEYS:
            raise ValueError(f"compile has the key {name!r}: it must be one of {', '.join(KEYS)}")
        if not _fits(name, entry):
            raise TypeError(f"compile[{name!r}] is {entry!r}, which torch.compile does not take")
    if given.get("mode") is not None and given.get("options") is not None:
        raise ValueError("compile has mode and options: torch.compile takes one of the two")
    if given.get("backend") == "cudagraphs":
        raise ValueError(
            "compile['backend'] is 'cudagraphs', which makes CUDA graphs of its own: "
            'engine="auto" does that'
        )
    return CompileOptions(given)


def _fits(name: str, entry: Any) -> bool:
    if name == "fullgraph":
        return isinstance(entry, bool)
    kinds: Any = {"dynamic": bool, "mode": str, "options": dict}.get(name)
    return entry is None or (isinstance(entry, kinds) if kinds else _is_backend(entry))


def _is_backend(entry: Any) -> bool:
    return isinstance(entry, str) or callable(entry)


def _of_mode(mode: Optional[str], dynamic: Optional[bool]) -> Dict[str, Any]:
    try:
        return {} if mode is None else _torch_compiler.settings_of_mode(mode, dynamic)
    except ValueError as error:
        raise ValueError(f"compile['mode'] is {mode!r}: {error}") from None


def _checked_settings(settings: Dict[str, Any]) -> Dict[str, Any]:
    known = set(_torch_compiler.known_settings())
    result = {}
    for name, value in settings.items():
        place = str(name).replace("-", "_")
        if place not in known:
            raise ValueError(
                f"compile['options'] has {name!r}, which is none of Inductor's list_options()"
            )
        result[place] = value
    return result


def _looked_up(name: str) -> Callable[..., Any]:
    try:
        return _torch_compiler.looked_up(name)
    except ValueError as error:
        raise ValueError(f"compile['backend'] is {name!r}: {error}") from error


def is_compiled_module(module: Any) -> bool:
    """Whether it came of `torch.compile(module)`."""
    members = getattr(module, "__dict__", {}).get("_modules") or {}
    return "_orig_mod" in members and hasattr(type(module), "_initialize")


def call_in_place(module: Any) -> Any:
    """What `module.compile()` has put in the place of the module's call; None where nothing has."""
    return getattr(module, "__dict__", {}).get("_compiled_call_impl")


def is_compiled_in_place(module: Any) -> bool:
    """Whether somebody has called `module.compile()`. Where torch.compile is switched off it leaves
    the plain call there."""
    call = call_in_place(module)
    return call is not None and call != module._call_impl


def of_compiled_module(module: Any) -> Optional[CompileOptions]:
    """How `torch.compile(module)` or `module.compile()` was asked; None where neither was, or where
    that cannot be told."""
    if not is_compiled_module(module) and not is_compiled_in_place(module):
        return None
    found, fullgraph = _torch_compiler.compiler_of(_torch_compiler.context_of(module))
    dynamic = getattr(found, "dynamic", None)
    given: Dict[str, Any] = {"dynamic": dynamic, "fullgraph": fullgraph}
    if getattr(found, "compiler_name", None) == "inductor":
        settings = {n: v for n, v in found.config.items() if n != "triton.cudagraphs"}
        return CompileOptions({**given, "options": settings})
    if not callable(found):
        return None
    options = CompileOptions({**given, "backend": found})
    options.name = getattr(found, "compiler_name", options.name)
    return options


def parts_compiled_apart(module: Any) -> List[str]:
    """The names of what is compiled by itself: parts; "" for the module."""
    return [
        name
        for name, part in module.named_modules()
        if is_compiled_in_place(part) or is_compiled_module(part)
    ]
