"""The build and what it leaves: build_info, packages, imports, exported symbols, rebuilds."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import fastdp
from fastdp import _C

ROOT = Path(__file__).resolve().parent.parent
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
MODULES = [Path(_C.__file__), Path(_C.__file__).with_name(f"_numpy{SUFFIX}")]
SANITIZED = "-fsanitize" in fastdp.build_info()["compiler"]
needs_plain_build = pytest.mark.skipif(SANITIZED, reason="a sanitizer's runtime is in the way")


def environment(**changes):
    """This process's environment without what another build left in it; None removes a name."""
    names = ("FASTDP_CUDA", "FASTDP_CUDA_ARCHS", "FASTDP_SANITIZE", "PYTHONPATH")
    merged = {**os.environ, **dict.fromkeys(names), **changes}
    return {name: value for name, value in merged.items() if value is not None}


def run(*command, check=True, cwd=ROOT, **changes):
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment(**changes),
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    if check and done.returncode != 0:
        raise AssertionError(f"{command} failed:\n{done.stdout}{done.stderr}")
    return done


def run_python(code, *flags, **changes):
    """Runs code in a fresh interpreter that imports this very build of fastdp."""
    where = str(Path(fastdp.__file__).parent.parent)
    return run(sys.executable, *flags, "-c", code, cwd="/", PYTHONPATH=where, **changes).stdout


def build_ext(folder, check=True, **changes):
    """Builds both modules into a folder of its own; returns the finished process."""
    return run(
        sys.executable, "setup.py", "-q", "build", "-b", folder, "build_ext", check=check, **changes
    )


def compile_times(folder):
    """Object or library -> when it was made."""
    paths = [*folder.glob("objects-*/*.o"), *folder.glob(f"objects-*/*{SUFFIX}")]
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in paths}


def test_build_info_is_what_was_built():
    info = fastdp.build_info()
    declared = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert info["version"] == fastdp.__version__ == declared
    assert info["dlpack"] == "1.3"
    assert info["compiler"]
    assert re.fullmatch(r"([0-9a-f]{12})?", info["commit"])
    assert isinstance(info["cuda"], bool)
    if info["cuda"]:
        assert re.fullmatch(r"\d+\.\d+", info["cuda_toolkit"]) and info["cuda_archs"]
    else:
        assert info["cuda_toolkit"] == "" and info["cuda_archs"] == ""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name.partition(".")[0])
def test_only_the_init_function_is_exported(path):
    listing = run("nm", "-D", "--defined-only", path).stdout
    names = [line.split()[-1] for line in listing.splitlines()]
    assert names == [f"PyInit_{path.name.partition('.')[0]}"]


@needs_plain_build
@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name.partition(".")[0])
def test_links_the_c_library_alone(path):
    # No torch, no NumPy, no libstdc++, no shared CUDA runtime: one wheel suits every version.
    listing = run("readelf", "-dW", path).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", listing)
    allowed = ("libc.", "libm.", "libpthread.", "libdl.", "librt.", "libgcc_s.", "ld-linux")
    assert [name for name in needed if not name.startswith(allowed)] == []


def test_import_without_numpy():
    code = """
import sys
sys.modules["numpy"] = None  # every import of it fails
import torch, fastdp
out = fastdp.comm.reduce_add([torch.ones(3), torch.ones(3)], destination=-1)
assert out.tolist() == [2, 2, 2]
try:
    import numpy
except ImportError:
    print("numpy was out of reach")
"""
    assert run_python(code, "-W", "ignore") == "numpy was out of reach\n"


def test_source_that_was_not_compiled_says_so(tmp_path):
    """In a clone, after `pip install .`: Python finds the sources there first."""
    source = tmp_path / "fastdp"
    source.mkdir()
    for file in (ROOT / "fastdp").glob("*.py"):
        shutil.copy(file, source)
    # An editable install of fastdp would lend its compiled part.
    code = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in repr(finder)]
sys.path.insert(0, sys.argv[1])
try:
    import fastdp
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    said = f"{source / '__init__.py'} is fastdp's source, which was not compiled here. Run Python "
    assert done.stdout.startswith(said), done.stdout + done.stderr


def test_import_starts_no_thread():
    code = """
import os, threading, torch
before = len(os.listdir("/proc/self/task"))
import fastdp
print(len(os.listdir("/proc/self/task")) - before, threading.active_count())
"""
    assert run_python(code) == "0 1\n"


def test_all_names_are_listed():
    """Also those that are imported when they are first asked for."""
    assert run_python("import fastdp; print(set(fastdp.__all__) - set(dir(fastdp)))") == "set()\n"


def test_import_opens_no_device():
    code = """
import fastdp, os, torch
print(torch.cuda.is_initialized(), [n for n in os.listdir("/proc/self/fd")
      if "nvidia" in os.path.realpath(f"/proc/self/fd/{n}")])
"""
    assert run_python(code) == "False []\n"


@needs_plain_build
def test_import_takes_20_ms_at_most(tmp_path):
    """Beyond torch's own import: processor time, so that other processes do not count but for the
    caches that they empty, the best of several fresh processes, with warm files and, as in any
    installed package, byte code."""
    code = """
import gc, torch, time
gc.disable()  # a collection of all that torch has made may fall due here: 100 ms, and not fastdp's
start = time.process_time()
import fastdp
print(time.process_time() - start)
"""
    with_byte_code = {"PYTHONDONTWRITEBYTECODE": None, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    run_python(code, **with_byte_code)
    times = []
    while not times or (min(times) > 0.020 and len(times) < 15):
        times.append(float(run_python(code, **with_byte_code)))
    assert min(times) <= 0.020, times


def test_cuda_demanded_without_nvcc_is_an_error(tmp_path):
    done = build_ext(tmp_path, check=False, FASTDP_CUDA="1", CUDA_HOME=str(tmp_path))
    assert done.returncode != 0
    assert f"FASTDP_CUDA=1, but CUDA_HOME is {tmp_path}, which holds no bin/nvcc" in done.stderr


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("FASTDP_CUDA", "yes", "FASTDP_CUDA is 'yes'; it must be one of auto, 1, 0"),
        ("FASTDP_SANITIZE", "adress", "FASTDP_SANITIZE: 'adress' is unknown"),
        ("CC", "no-such-compiler", "the C compiler 'no-such-compiler' does not run"),
    ],
)
def test_bad_settings_are_named(tmp_path, name, value, words):
    done = build_ext(tmp_path, check=False, **{"FASTDP_CUDA": "0", name: value})
    assert done.returncode != 0
    assert words in done.stderr


def test_an_nvcc_that_does_not_work_is_no_nvcc(tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'nvcc: out of order' >&2\nexit 1\n")
    nvcc.chmod(0o755)
    done = run(sys.executable, "build_tools/toolkit.py", check=False, CUDA_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "nvcc: out of order" in done.stderr


def test_architectures(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "build_tools"))
    from toolkit import arch_choice

    flags, shown = arch_choice("", [75, 90])
    assert flags == (
        "-gencode=arch=compute_75,code=sm_75",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    )
    assert shown == "75 90 (PTX 90)"
    assert arch_choice("all", [75, 90]) == (flags, shown)
    assert arch_choice("80;90a", [75]) == (
        (
            "-gencode=arch=compute_80,code=sm_80",
            "-gencode=arch=compute_90a,code=sm_90a",
            "-gencode=arch=compute_80,code=compute_80",
        ),
        "80 90a (PTX 80)",
    )
    assert arch_choice("native", [75]) == (("-arch=native",), "native")
    with pytest.raises(SystemExit, match="FASTDP_CUDA_ARCHS: 'Ampere' is no architecture"):
        arch_choice("80 Ampere", [75])


@pytest.mark.slow
@needs_plain_build
def test_only_what_changed_is_compiled_again(tmp_path):
    source = tmp_path / "a clone"  # in a path with a space
    names = ("setup.py", "pyproject.toml", "csrc", "kernels", "build_tools", "fastdp", "tests")
    ignored = shutil.ignore_patterns("build", "__pycache__", "*.so")
    for name in names[:2]:
        source.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source)
    for name in names[2:]:
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    folder = tmp_path / "a build"

    def rebuild(**changes):
        command = (sys.executable, "setup.py", "-q", "build", "-b", folder)
        run(*command, cwd=source, **{"FASTDP_CUDA": "0", **changes})
        return compile_times(folder)

    first = rebuild()
    assert rebuild() == first

    os.utime(source / "csrc" / "fault.h")
    second = rebuild()
    changed = {path.name for path in second if second[path] != first.get(path)}
    # Those that include it, directly or not; the border knows nothing of faults.
    assert {"csrc.fault.c.o", "csrc.scatter.c.o", f"_C{SUFFIX}"} <= changed
    assert "csrc.dtype.c.o" not in changed and f"_numpy{SUFFIX}" not in changed

    # Another configuration shares nothing with the first, and coming back needs no compiler.
    library = next(folder.glob(f"lib*/fastdp/_C{SUFFIX}"))
    plain = library.read_bytes()
    assert len(rebuild(CFLAGS="-DFDP_ANOTHER_CONFIGURATION -g")) == 2 * len(first)
    third = rebuild()
    assert {path: third[path] for path in second} == second
    assert library.read_bytes() == plain


@pytest.mark.slow
@needs_plain_build
def test_the_sdist_builds_a_wheel_that_works(tmp_path):
    """The archive alone, unpacked far from the repository, has all that a build needs."""
    run(sys.executable, "setup.py", "-q", "egg_info", "-e", tmp_path, "sdist", "-d", tmp_path)
    archive = next(tmp_path.glob("fastdp-*.tar.gz"))
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    tracked = run("git", "ls-files", check=False).stdout.split()
    ours = ("csrc/", "kernels/", "fastdp/", "tests/", "examples/", "benchmarks/", "build_tools/")
    assert {name for name in tracked if name.startswith(ours) and (ROOT / name).exists()} <= names
    assert {"setup.py", "pyproject.toml", "LICENSE", "Makefile"} <= names
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]

    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet")
    options = ("--no-build-isolation", "--no-deps", "-w", tmp_path)
    run(*pip, *options, archive, cwd=tmp_path, FASTDP_CUDA="0")
    wheel = next(tmp_path.glob("fastdp-*.whl"))
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "site")
        files = packed.namelist()
        metadata = packed.read(next(n for n in files if n.endswith("METADATA"))).decode()
    assert {"fastdp/py.typed", "fastdp/_C.pyi", f"fastdp/_C{SUFFIX}"} <= set(files)
    assert {name.partition("/")[0] for name in files} == {"fastdp", "fastdp-0.1.0.dist-info"}
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, re.M)
    assert [line for line in required if "extra ==" not in line] == ["torch>=2.4"]

    code = """
import json, torch, fastdp
dp = fastdp.DataParallel(torch.nn.Linear(2, 2), device_ids=["cpu", "cpu"])
dp(torch.ones(4, 2)).sum().backward()
print(json.dumps([fastdp.__file__, fastdp.build_info(), dp.module.bias.grad.tolist()]))
"""
    done = run(sys.executable, "-c", code, cwd=tmp_path / "site", PYTHONPATH=tmp_path / "site")
    where, info, gradient = json.loads(done.stdout)
    assert Path(where) == tmp_path / "site" / "fastdp" / "__init__.py"
    assert (info["cuda"], info["commit"]) == (False, "")
    assert gradient == [4, 4]


def test_no_file_with_waits_is_unknown_to_the_mutants(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "build_tools"))
    import python_mutation

    assert python_mutation.unlisted() == []
    monkeypatch.setattr(python_mutation, "GPU_ONLY", ("captures.py",))
    assert {"scattered.py", "staging.py"} <= set(python_mutation.unlisted())
