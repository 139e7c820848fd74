"""Builds the two extension modules of fastdp.

    fastdp._C      the C core, the reference kernels and the seam; with nvcc the CUDA parts too
    fastdp._numpy  the NumPy border, apart, so that fastdp runs without NumPy

Neither torch nor git nor a network is needed. Environment variables of the build:

    FASTDP_CUDA        auto (default): CUDA if a usable nvcc is found; 1: an error if not; 0: never
    FASTDP_CUDA_ARCHS  such as "80 90"; native; all-major; all (default): from sm_75 up
    FASTDP_SANITIZE    none (default), or such as "address,undefined", for tests
    CC, CPPFLAGS, CFLAGS, LDFLAGS, CUDA_HOME, CUDA_PATH   as everywhere

An object is compiled again when its source, a header it includes or the configuration changed.
Every configuration has a folder of its own under build/, named by a hash, so that a build without
CUDA never picks up the objects of one with CUDA.
"""

import filecmp
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
os.chdir(ROOT)
sys.path.insert(0, str(ROOT / "build_tools"))

from toolkit import NotUsable, find_toolkit, probe  # noqa: E402

DLPACK_VERSION = "1.3"
SANITIZERS = ("address", "undefined", "thread")
# Sources that need CUDA headers. NCCL is loaded at run time and has a small header of our own.
CUDA_SOURCES = ("device_cuda*.c",)
NUMPY_SOURCES = ("py_numpy*.c",)

C_FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-fPIC", "-fvisibility=hidden", "-pthread"]
C_FLAGS += ["-Wall", "-Wextra"]
# The host side of a .cu file without what would pull in libstdc++: the linker is gcc.
NVCC_FLAGS = ["-std=c++17", "-O3", "-Xfatbin=-compress-all", "-DFDP_WITH_CUDA", "-Xcompiler"]
NVCC_FLAGS += ["-fPIC,-fvisibility=hidden,-fno-threadsafe-statics,-fno-exceptions,-fno-rtti"]


def choice(name: str, default: str, allowed: tuple[str, ...]) -> str:
    value = os.environ.get(name) or default
    if value not in allowed:
        raise SystemExit(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
    return value


def sanitizer_flags() -> list[str]:
    wish = os.environ.get("FASTDP_SANITIZE", "")
    names = [name for name in wish.split(",") if name] if wish != "none" else []
    for name in names:
        if name not in SANITIZERS:
            raise SystemExit(
                f"FASTDP_SANITIZE: {name!r} is unknown; it is a comma-separated list of "
                f"{', '.join(SANITIZERS)}"
            )
    if not names:
        return []
    return [f"-fsanitize={','.join(names)}", "-fno-sanitize-recover=undefined"]


def numpy_include() -> tuple[str, str]:
    """NumPy's version and header folder. Built against 2.x, the module runs with 1.x too."""
    try:
        import numpy
    except ImportError:
        raise SystemExit(
            "fastdp: building needs NumPy's headers: install numpy>=2.0, or build with isolation "
            "(pip without --no-build-isolation fetches it)"
        ) from None
    if int(numpy.__version__.split(".")[0]) < 2:
        raise SystemExit(f"fastdp: building needs numpy>=2.0, found {numpy.__version__}")
    return numpy.__version__, numpy.get_include()


def matches(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(path.match(pattern) for pattern in patterns)


def source_lists() -> tuple[list[str], list[str], list[str]]:
    """(core and seam, CUDA parts, NumPy border), relative to the root as setuptools wants them."""
    sources = sorted(Path("csrc").glob("*.c"))
    cuda = [path for path in sources if matches(path, CUDA_SOURCES)]
    border = [path for path in sources if matches(path, NUMPY_SOURCES)]
    core = [path for path in sources if path not in cuda and path not in border]
    core += sorted(Path("kernels").glob("ref*.c"))
    cuda += sorted(Path("kernels").glob("*.cu"))
    return tuple([str(path) for path in paths] for paths in (core, cuda, border))


def first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""


class Build(build_ext):
    """Compiles with own commands: .c with the C compiler, .cu with nvcc; links with the former."""

    def build_extensions(self) -> None:
        if sys.platform != "linux":
            raise SystemExit(f"fastdp builds on Linux only, not on {sys.platform}")
        self.check_extensions_list(self.extensions)
        self.job_count = self.parallel or os.cpu_count() or 1
        self.cc = shlex.split(os.environ.get("CC") or shutil.which("gcc") or "cc")
        self.compiler_name = first_line(*self.cc, "--version")
        if not self.compiler_name:
            raise SystemExit(
                f"fastdp: the C compiler {shlex.join(self.cc)!r} does not run; "
                "on Debian or Ubuntu: apt-get install gcc libc6-dev"
            )
        self.sanitize = sanitizer_flags()
        self.numpy_version, self.numpy_headers = numpy_include()
        self.build_base = Path(self.get_finalized_command("build").build_base)
        self.toolkit = self.choose_toolkit()
        self.make_objects_folder()
        self.write_build_info()
        core, cuda, border = source_lists()
        inputs = {
            "fastdp._C": core + (cuda if self.toolkit else []),
            "fastdp._numpy": border,
        }
        jobs = sum(inputs.values(), [])
        with ThreadPoolExecutor(self.job_count) as pool:
            objects = dict(zip(jobs, pool.map(self.compile, jobs)))
        for extension in self.extensions:
            self.link(extension, [objects[source] for source in inputs[extension.name]])

    def choose_toolkit(self):
        wish = choice("FASTDP_CUDA", "auto", ("auto", "1", "0"))
        if wish == "0":
            print("fastdp: FASTDP_CUDA=0: building the CPU backend only")
            return None
        try:
            toolkit = find_toolkit(os.environ)
            probe(toolkit, self.build_base)
        except NotUsable as reason:
            if wish == "1":
                raise SystemExit(f"fastdp: FASTDP_CUDA=1, but {reason}") from None
            print(f"fastdp: building the CPU backend only: {reason}")
            return None
        print(f"fastdp: building with CUDA {toolkit.release} ({toolkit.root}) for {toolkit.archs}")
        return toolkit

    def make_objects_folder(self) -> None:
        environment = [os.environ.get(name, "") for name in ("CPPFLAGS", "CFLAGS", "LDFLAGS")]
        configuration = repr((
            Path(__file__).read_text(), self.cc, self.compiler_name, self.sanitize, self.toolkit,
            environment, bool(self.debug), self.numpy_version,
            sysconfig.get_config_var("EXT_SUFFIX"),
        ))
        digest = hashlib.sha256(configuration.encode()).hexdigest()[:12]
        self.objects = self.build_base / f"objects-{digest}"
        self.objects.mkdir(parents=True, exist_ok=True)

    def write_build_info(self) -> None:
        commit = ""
        if (ROOT / ".git").exists():
            commit = first_line("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
        toolkit = self.toolkit
        values = {
            "VERSION": self.distribution.get_version(),
            "CUDA": 1 if toolkit else 0,
            "CUDA_TOOLKIT": toolkit.release if toolkit else "",
            "CUDA_ARCHS": toolkit.archs if toolkit else "",
            "COMPILER": " ".join([self.compiler_name, *self.sanitize[:1]]),
            "COMMIT": commit,
            "DLPACK": DLPACK_VERSION,
        }
        lines = ["/* Written by setup.py: what this build was made of. */"]
        for name, value in values.items():
            text = value if isinstance(value, int) else '"' + value.replace('"', "'") + '"'
            lines.append(f"#define FDP_BUILD_{name} {text}")
        text = "\n".join(lines) + "\n"
        header = self.objects / "build_info.h"
        if not header.is_file() or header.read_text() != text:
            header.write_text(text)

    def c_command(self, source: str) -> list[str]:
        words = [*self.cc, *C_FLAGS]
        words += ["-O1", "-g", "-fno-omit-frame-pointer"] if self.sanitize else ["-O3"]
        words += self.sanitize
        words += ["-g"] if self.debug else []
        for name in ("CPPFLAGS", "CFLAGS"):
            words += shlex.split(os.environ.get(name, ""))
        if self.toolkit:
            words += ["-DFDP_WITH_CUDA", *self.toolkit.include_flags]
        words.append(f"-I{self.objects}")
        # Only the seam sees Python, only the border sees NumPy.
        if Path(source).name.startswith("py_"):
            paths = [sysconfig.get_path("include"), sysconfig.get_path("platinclude")]
            words += [f"-isystem{path}" for path in dict.fromkeys(paths)]
        if matches(Path(source), NUMPY_SOURCES):
            words.append(f"-isystem{self.numpy_headers}")
        return words

    def compile(self, source: str) -> Path:
        target = self.objects / f"{source.replace('/', '.')}.o"
        depfile = target.with_suffix(".d")
        if self.is_fresh(target, depfile):
            return target
        if source.endswith(".cu"):
            words = [self.toolkit.nvcc, *NVCC_FLAGS, f"--threads={self.job_count}"]
            words += self.toolkit.arch_flags
        else:
            words = self.c_command(source)
        # To a name of its own first: an interrupted compiler must leave no object that looks done,
        # and two builds at once must not write into each other's.
        partial = target.with_suffix(f".{os.getpid()}.o")
        words += ["-MMD", "-MF", str(depfile), "-c", source, "-o", str(partial)]
        self.call(words)
        partial.replace(target)
        return target

    @staticmethod
    def is_fresh(target: Path, depfile: Path) -> bool:
        """True if nothing of what the object was made of, as listed by the compiler, is newer."""
        try:
            made = target.stat().st_mtime_ns
            names = shlex.split(depfile.read_text().replace("\\\n", " ").partition(":")[2])
            # A compiler that was stopped leaves an empty list, which says nothing.
            return bool(names) and all(os.stat(name).st_mtime_ns <= made for name in names)
        except OSError:
            return False

    def link(self, extension: Extension, objects: list[Path]) -> None:
        library = self.objects / Path(self.get_ext_filename(extension.name)).name
        newest = max(path.stat().st_mtime_ns for path in objects)
        listing = library.with_suffix(".inputs")
        names = "\n".join(map(str, objects))
        fresh = library.is_file() and library.stat().st_mtime_ns >= newest
        if not fresh or not listing.is_file() or listing.read_text() != names:
            partial = library.with_suffix(f".{os.getpid()}")
            words = [*self.cc, "-shared", "-o", str(partial), *map(str, objects), *self.sanitize]
            words += shlex.split(os.environ.get("LDFLAGS", "")) + ["-Wl,-z,relro,-z,now"]
            words += [] if self.sanitize or self.debug else ["-Wl,-s"]
            if self.toolkit and extension.name == "fastdp._C":
                words += [*self.toolkit.library_flags, "-Wl,--exclude-libs,ALL"]
            words += ["-Wl,--as-needed", "-lpthread", "-ldl", "-lrt", "-lm"]
            self.call(words)
            partial.replace(library)
            listing.write_text(names)
        target = Path(self.get_ext_fullpath(extension.name))
        if not target.is_file() or not filecmp.cmp(library, target, shallow=False):
            target.parent.mkdir(parents=True, exist_ok=True)
            # A new file, not new bytes in the old one, which a running process may have mapped.
            target.unlink(missing_ok=True)
            shutil.copy2(library, target)

    @staticmethod
    def call(words: list[str]) -> None:
        done = subprocess.run(words, capture_output=True, text=True)
        if done.stdout or done.stderr:
            print(done.stdout + done.stderr, end="", flush=True)
        if done.returncode != 0:
            raise SystemExit(f"fastdp: this command failed:\n  {shlex.join(words)}")


def extensions() -> list[Extension]:
    core, cuda, border = source_lists()
    return [Extension("fastdp._C", core + cuda), Extension("fastdp._numpy", border)]


if __name__ == "__main__":
    setup(ext_modules=extensions(), cmdclass={"build_ext": Build})
