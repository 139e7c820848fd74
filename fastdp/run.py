"""`python -m fastdp run train.py args...`: a script as it is, with its nn.DataParallel on fastdp.

The script finds what plain Python would give it: `sys.argv`, `sys.path[0]`, and a module `__main__`
of its own, so that classes defined there can be pickled and spawned workers of a DataLoader find
them. How it ends is left to the interpreter: what it raises goes on upwards, from where SystemExit
becomes an exit code, and KeyboardInterrupt a death by SIGINT. Only the frames below the script's
first one are cut from the traceback that is printed. Our own words go to stderr.

torch is imported before the script starts: what it reads from the environment at its import, such
as OMP_NUM_THREADS, has to be set outside. No GPU is touched, so CUDA_VISIBLE_DEVICES need not.
What the script forks is patched as it is; a Python that it spawns is plain.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.machinery
import importlib.util
import io
import os
import sys
import types
from typing import Any, Dict, List, Optional, Tuple

from . import _C
from .patch import Patch, patch

__all__ = ["main"]

# Those that the table of environment variables has become options: FASTDP_TRANSPORT is --transport.
# FASTDP_LOG is none: it is read when fastdp is imported, which was before.
_OPTIONS = ("engine", "transport", "overlap", "unused_grad", "bucket_bytes", "timeout_ms", "nccl")


def main(arguments: List[str]) -> Optional[int]:
    """Runs a script or module; comes back only if that reaches its end, or cannot be started.

    Args:
        arguments: options, then the script's path, or -m and the module's name, then what is the
            script's own.

    Returns:
        The exit code, where there was no script to run; else None.
    """
    parser, variables = _parser()
    options = parser.parse_args(arguments)
    words = options.program[options.program[:1] == ["--"] :]
    if not words:
        parser.error("the following arguments are required: program")
    for name, variable in variables.items():
        if getattr(options, name) is not None:
            os.environ[variable] = str(getattr(options, name))
    handle = patch()
    try:
        program = (_Module if options.module else _File)(words[0], words[1:])
        if not options.quiet:
            # What is registered first runs last: after all that the script still does at its end.
            atexit.register(_report, handle, os.getpid())
        program.execute()
    except _CannotRun as error:
        print(f"fastdp run: {error}", file=sys.stderr)
        return error.code
    except SystemExit:
        raise
    except BaseException as error:
        _show_without_ours(error)
        raise
    return None


def _parser() -> Tuple[argparse.ArgumentParser, Dict[str, str]]:
    """The parser, and the variables that its options set."""
    parser = argparse.ArgumentParser(
        prog="python -m fastdp run",
        description="Runs a Python script as it is, with every nn.DataParallel that it or a "
        "library makes on fastdp. At the end stderr says where these were made.",
        allow_abbrev=False,
    )
    parser.add_argument("--quiet", action="store_true", help="no report at the end")
    variables = {}
    for variable, kind, standard, sentence in _C.env_table():
        name = variable.removeprefix("FASTDP_").lower()
        if name not in _OPTIONS:
            continue
        variables[name] = variable
        how: Dict[str, Any] = {"metavar": name.upper()}
        if "|" in kind:
            how = {"choices": kind.split("|")}
        elif kind.startswith("integer"):
            how["type"] = int
        how["help"] = f"{sentence} As {variable} does; default: {standard}"
        parser.add_argument("--" + name.replace("_", "-"), **how)
    parser.add_argument(
        "-m", dest="module", action="store_true", help="the program is a module, as for python -m"
    )
    # One for both: argparse takes a "--" behind a program that is by itself for its own.
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        help="path of the script, or with -m name of the module, and its own arguments",
    )
    return parser, variables


class _CannotRun(Exception):
    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class _Program:
    """Code to run as `__main__`."""

    origin: str
    loader: Any
    spec: Optional[importlib.machinery.ModuleSpec] = None
    package: Optional[str] = None
    cached: Optional[str] = None

    def code(self) -> types.CodeType:
        raise NotImplementedError

    def execute(self) -> None:
        module = types.ModuleType("__main__")
        module.__dict__.update(
            __file__=self.origin,
            __loader__=self.loader,
            __spec__=self.spec,
            __package__=self.package,
            __cached__=self.cached,
            __builtins__=sys.modules["builtins"],
        )
        if sys.version_info < (3, 14):
            module.__dict__["__annotations__"] = {}
        sys.modules["__main__"] = module
        exec(self.code(), module.__dict__)


class _File(_Program):
    def __init__(self, path: str, args: List[str]) -> None:
        # As plain Python has it: absolute, and otherwise as it was written.
        self.origin = os.path.join(os.getcwd(), path)
        try:
            with io.open_code(self.origin) as file:
                self._source = file.read()
        except OSError as error:
            what = f"can't open file {self.origin!r}: [Errno {error.errno}] {error.strerror}"
            raise _CannotRun(what, 2) from None
        self.loader = importlib.machinery.SourceFileLoader("__main__", self.origin)
        sys.argv = [path, *args]
        if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):
            sys.path[0] = os.path.dirname(os.path.realpath(self.origin))

    def code(self) -> types.CodeType:
        return compile(self._source, self.origin, "exec", dont_inherit=True)


class _Module(_Program):
    def __init__(self, name: str, args: List[str]) -> None:
        sys.argv = ["-m", *args]  # as it is while packages around the module are imported
        spec = _find(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name += ".__main__"
            spec = _find(name)
        if spec is None or not hasattr(spec.loader, "get_code"):
            raise _CannotRun(f"No module named {name}", 1)
        self._name = spec.name
        self.spec, self.loader, self.cached = spec, spec.loader, spec.cached
        self.package, self.origin = spec.parent, spec.origin or name
        sys.argv[0] = self.origin

    def code(self) -> types.CodeType:
        code: Optional[types.CodeType] = self.loader.get_code(self._name)
        if code is None:
            raise ImportError(f"No code object available for {self.origin}")
        return code


def _find(name: str) -> Optional[importlib.machinery.ModuleSpec]:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # Of the name itself or a package around it, that is; not what these import in turn.
        if error.name is not None and (name + ".").startswith(error.name + "."):
            return None
        raise


def _show_without_ours(error: BaseException) -> None:
    """Lets the hook that prints an uncaught error see the script's frames only. A file that does
    not compile has none."""
    hook, traceback = sys.excepthook, error.__traceback__
    while traceback is not None and _is_ours(traceback.tb_frame):
        traceback = traceback.tb_next

    def show(kind: Any, value: Any, whole: Any) -> None:
        if value is error:
            value.__traceback__ = whole = traceback
        hook(kind, value, whole)

    sys.excepthook = show


def _is_ours(frame: types.FrameType) -> bool:
    """Whether a frame stands below the script's first one."""
    name = str(frame.f_globals.get("__name__", ""))
    return name == __name__ or name.split(".")[0] == "importlib"


def _report(handle: Patch, process: int) -> None:
    # A forked child that ends as if it were the script reports nothing.
    if os.getpid() == process and sys.stderr is not None:
        print(handle.report(), file=sys.stderr, flush=True)
