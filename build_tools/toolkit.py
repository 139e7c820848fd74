"""Finds the CUDA toolkit that a build uses, and the architectures it compiles for.

Used by setup.py. Run as a script it says what it found (with --nvcc: where), or fails and says why
nothing is usable.
Knows nothing of torch: an nvcc is all that a CUDA build needs.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

OLDEST_ARCH = 75
USUAL_PREFIX = "/usr/local/cuda"


class NotUsable(Exception):
    """Why there is no CUDA toolkit, as a sentence for the user."""


@dataclass(frozen=True)
class Toolkit:
    nvcc: str
    root: str
    release: str  # "13.0"
    include_flags: tuple[str, ...]
    library_flags: tuple[str, ...]
    arch_flags: tuple[str, ...]
    archs: str  # as shown in build_info: "75 80 ... 121 (PTX 121)"


def find_toolkit(environ) -> Toolkit:
    """The toolkit of CUDA_HOME, CUDA_PATH, PATH or the usual prefix, in this order. A path that was
    named is the only one looked at: another toolkit than the one asked for would be a surprise."""
    nvcc = _find_nvcc(environ)
    variables = _dryrun_variables(nvcc)
    root = os.path.realpath(variables["TOP"])
    library_dirs = [flag[2:] for flag in shlex.split(variables.get("LIBRARIES", ""))]
    library_dirs = [path for path in library_dirs if not path.endswith("/stubs")]
    library_dirs += [f"{root}/lib64", f"{root}/lib", *_system_library_dirs()]
    holder = next((d for d in library_dirs if Path(d, "libcudart_static.a").is_file()), None)
    if holder is None:
        raise NotUsable(
            f"{nvcc} has no libcudart_static.a beside it (looked in {', '.join(library_dirs)})"
        )
    arch_flags, archs = arch_choice(environ.get("FASTDP_CUDA_ARCHS", ""), _known_archs(nvcc))
    return Toolkit(
        nvcc=nvcc,
        root=root,
        release=_release(nvcc),
        # As system headers: their warnings are not ours.
        include_flags=tuple(
            f"-isystem{flag[2:]}"
            for flag in shlex.split(variables.get("INCLUDES", ""))
            if flag.startswith("-I")
        ),
        library_flags=(f"-L{holder}", "-lcudart_static"),
        arch_flags=arch_flags,
        archs=archs,
    )


def probe(toolkit: Toolkit, folder: Path) -> None:
    """An nvcc may be there and not work: no headers, or a host compiler that is too new for it.
    Better to learn that before a build than in its middle. Success is remembered in `folder`."""
    identity = repr((toolkit, os.environ.get("NVCC_CCBIN"), os.environ.get("PATH"))).encode()
    passed = folder / f"nvcc-{hashlib.sha256(identity).hexdigest()[:12]}.ok"
    if passed.is_file():
        return
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "probe.cu")
        source.write_text("__global__ void probe(int *p) { *p = 1; }\n")
        try:
            _output(toolkit.nvcc, "-c", str(source), "-o", str(source.with_suffix(".o")))
        except NotUsable as reason:
            raise NotUsable(f"{toolkit.nvcc} cannot compile a trivial kernel: {reason}") from None
    folder.mkdir(parents=True, exist_ok=True)
    passed.touch()


def arch_choice(wish: str, known: list[int]) -> tuple[tuple[str, ...], str]:
    """nvcc's flags and their description for FASTDP_CUDA_ARCHS. "all" or empty: machine code for
    every architecture from sm_75 up that this nvcc knows, and PTX of the newest as a net for later
    chips (PTX needs a driver as new as the toolkit, so it cannot replace machine code)."""
    wish = wish.strip()
    if wish in ("native", "all-major"):
        return (f"-arch={wish}",), wish
    names = [str(arch) for arch in known]
    if wish not in ("", "all"):
        names = re.split(r"[\s,;]+", wish)
    for name in names:
        if not re.fullmatch(r"\d{2,3}[af]?", name):
            raise SystemExit(
                f"FASTDP_CUDA_ARCHS: {name!r} is no architecture; give numbers such as "
                "'80 90', or one of native, all-major, all"
            )
    flags = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
    plain = [int(name) for name in names if name.isdigit()]
    if not plain:
        return tuple(flags), " ".join(names)
    newest = max(plain)
    flags.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
    return tuple(flags), f"{' '.join(names)} (PTX {newest})"


def _find_nvcc(environ) -> str:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if environ.get(variable):
            nvcc = Path(environ[variable], "bin", "nvcc")
            if not nvcc.is_file():
                raise NotUsable(f"{variable} is {environ[variable]}, which holds no bin/nvcc")
            return str(nvcc)
    nvcc = shutil.which("nvcc", path=environ.get("PATH", os.defpath))
    if nvcc is None:
        nvcc = shutil.which("nvcc", path=f"{USUAL_PREFIX}/bin")
    if nvcc is None:
        raise NotUsable(
            f"no nvcc found (looked in CUDA_HOME, CUDA_PATH, PATH and {USUAL_PREFIX})"
        )
    return nvcc


def _output(*command) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotUsable(f"{shlex.join(command)} could not run: {error}") from error
    if done.returncode != 0:
        raise NotUsable(f"{shlex.join(command)} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout + done.stderr


def _dryrun_variables(nvcc: str) -> dict[str, str]:
    """What nvcc says of itself. The nvcc on PATH may be a script far from its toolkit, so its own
    place says nothing; the line `#$ TOP=` does."""
    text = _output(nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null", "-o", "/dev/null")
    variables = {}
    for line in text.splitlines():
        found = re.match(r"#\$ (\w+)=\s*(.*)", line)
        if found:
            variables[found[1]] = found[2]
    if "TOP" not in variables:
        raise NotUsable(f"{nvcc} --dryrun names no toolkit root")
    return variables


def _known_archs(nvcc: str) -> list[int]:
    names = _output(nvcc, "--list-gpu-code").split()
    found = {int(name[3:]) for name in names if re.fullmatch(r"sm_\d+", name)}
    known = sorted(arch for arch in found if arch >= OLDEST_ARCH)
    if not known:
        raise NotUsable(f"{nvcc} knows no architecture from sm_{OLDEST_ARCH} up")
    return known


def _release(nvcc: str) -> str:
    found = re.search(r"release (\d+\.\d+)", _output(nvcc, "--version"))
    return found[1] if found else "unknown"


def _system_library_dirs() -> list[str]:
    """Where a distribution's own package puts the toolkit's libraries."""
    return sorted(str(path) for path in Path("/usr/lib").glob("*-linux-gnu"))


def main() -> None:
    try:
        toolkit = find_toolkit(os.environ)
        probe(toolkit, Path("build"))
    except NotUsable as reason:
        sys.exit(str(reason))
    if sys.argv[1:] == ["--nvcc"]:
        print(toolkit.nvcc)
    else:
        print(f"CUDA {toolkit.release} ({toolkit.root}) for {toolkit.archs}")


if __name__ == "__main__":
    main()
