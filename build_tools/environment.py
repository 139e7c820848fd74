"""Makes sure that there is a Python environment with fastdp built in it, for the make targets.

    python3 build_tools/environment.py

Standard library only, and only this repository (and an active virtual environment) is written to.
What was chosen goes to build/environment, which the recipes source. What is done:

- An active virtual environment that has a torch is used as it is; so is a .venv that somebody made
  here. Missing test dependencies are installed into it.
- Else .venv is made here. If this interpreter has a torch, it is kept: .venv sees the system's
  packages. If not, TORCH is installed.
- fastdp is installed as editable, which compiles what changed.

May be run again at any time. While .venv is being filled there is a file INCOMPLETE; a run that
finds that file was preceded by an interrupted one and starts .venv afresh.
"""

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
# Beside it, so that it outlives a .venv that is only half deleted.
INCOMPLETE = ROOT / "build" / "venv-incomplete"
READY = VENV / "fastdp-ready.json"
HEADERS = ROOT / "build" / "python-headers"
CHOICE = ROOT / "build" / "environment"
REQUIREMENTS = ROOT / "tests" / "requirements.txt"

TORCH = "torch==2.13.0"
OLDEST_TORCH = (2, 4)
BUILD_NEEDS = ["setuptools>=77", "numpy>=2.0"]


def main() -> None:
    if sys.platform != "linux":
        fail(f"fastdp runs on Linux only, not on {sys.platform}.")
    base = os.path.realpath(sys.executable)
    if Path(sys.prefix).resolve() == VENV and base != sys.executable:
        # .venv itself is active. It may have to be made again, so it must not run this script.
        os.execv(base, [base, str(Path(__file__).resolve())])
    check_compiler()
    python = choose_environment()
    headers = header_folders()
    if headers:
        os.environ["CPATH"] = os.pathsep.join([*headers, *filter(None, [os.environ.get("CPATH")])])
    build(python)
    lines = [f"python={shlex.quote(python)}"]
    if headers:
        lines.append(f"export CPATH={shlex.quote(os.environ['CPATH'])}")
    CHOICE.parent.mkdir(exist_ok=True)
    CHOICE.write_text("\n".join(lines) + "\n")


def fail(message: str, package: str = "") -> None:
    if package:
        message += f"\nOn Debian or Ubuntu: sudo apt-get install {package}"
    sys.exit(f"\nfastdp: {message}\n")


def say(message: str) -> None:
    print(f"-- {message}", flush=True)


def check_compiler() -> None:
    compiler = shlex.split(os.environ.get("CC") or shutil.which("gcc") or "cc")
    if shutil.which(compiler[0]) is None:
        fail("there is no C compiler (gcc).", "gcc libc6-dev")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text("#include <stdio.h>\nint main(void) { return puts(\"\") < 0; }\n")
        command = [*compiler, str(source), "-o", str(source.with_suffix(""))]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        fail(
            f"the C compiler {shlex.join(compiler)} cannot build a trivial program:\n{done.stderr}",
            "gcc libc6-dev",
        )


# The environment.


def choose_environment() -> str:
    """The interpreter of an environment that has all that fastdp's build and tests need."""
    torch = usable_torch()
    if sys.prefix != sys.base_prefix and torch:
        say(f"using the active virtual environment {sys.prefix} with its torch {torch}")
        install(sys.executable, [])
        return sys.executable
    python = str(VENV / "bin" / "python")
    if VENV.exists() and not INCOMPLETE.exists() and not READY.exists():
        say("using .venv, which was not made by this script, as it is")
        install(python, [] if has_torch(python) else [TORCH])
        return python
    wish = {
        "interpreter": os.path.realpath(sys.executable),
        "version": sys.version,
        "torch": f"system {torch}" if torch else TORCH,
        "requirements": [*BUILD_NEEDS, REQUIREMENTS.read_text()],
    }
    if ready() != wish:
        make_venv(torch)
        install(python, [] if torch else [TORCH])
        READY.write_text(json.dumps(wish, indent=2))
        INCOMPLETE.unlink()
    return python


def usable_torch() -> str:
    """The version of the torch that this interpreter has, "" if there is none that fastdp takes."""
    if importlib.util.find_spec("torch") is None:
        return ""
    try:
        version = metadata.version("torch")
        numbers = tuple(int(part) for part in version.split(".")[:2])
    except (metadata.PackageNotFoundError, ValueError):
        return ""
    if numbers < OLDEST_TORCH:
        say(f"the torch {version} of {sys.executable} is too old: leaving it alone, taking {TORCH}")
        return ""
    return version


def has_torch(python: str) -> bool:
    return subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 0


def ready() -> dict:
    """What the .venv here was made for; {} if it is not there, or not whole."""
    if INCOMPLETE.exists() or not READY.exists():
        return {}
    return json.loads(READY.read_text())


def make_venv(torch: str) -> None:
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        fail(f"{sys.executable} cannot make virtual environments.", "python3-venv")
    INCOMPLETE.parent.mkdir(exist_ok=True)
    INCOMPLETE.touch()
    if VENV.exists():
        say("starting .venv afresh: it is incomplete, or was made for something else")
        shutil.rmtree(VENV)
    VENV.mkdir()
    options = []
    if torch:
        say(f"making .venv over the torch {torch} of {sys.executable}")
        options = ["--system-site-packages"]
    else:
        say(f"making .venv with {TORCH} (a large download on the first run)")
    done = subprocess.run([sys.executable, "-m", "venv", *options, str(VENV)])
    if done.returncode != 0:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        fail(f"{sys.executable} could not make .venv (see above).", f"python{version}-venv")


def install(python: str, more: list[str]) -> None:
    """Installs what is missing. pip asks the index only about what is not there yet."""
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    if subprocess.run([*pip, "--version"], capture_output=True).returncode != 0:
        done = subprocess.run([python, "-m", "ensurepip", "--default-pip"])
        if done.returncode != 0:
            fail(f"{python} has no pip, and none could be installed.", "python3-venv")
    command = [*pip, "install", "--quiet", *BUILD_NEEDS, "-r", str(REQUIREMENTS), *more]
    if subprocess.run(command).returncode != 0:
        fail(
            "pip could not install what is needed (see above). Is the package index reachable?\n"
            "The same command may be run again; there is nothing to clean up."
        )


# The build.


def header_folders() -> list[str]:
    """Folders to add to the compiler's search for Python.h: none if the interpreter has its own."""
    own = sysconfig.get_path("include")
    if Path(own, "Python.h").is_file():
        return []
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    package = f"libpython{version}-dev"
    unpacked = HEADERS / "usr" / "include"
    if not Path(unpacked, f"python{version}", "Python.h").is_file():
        say(f"there is no {own}/Python.h: taking it from Debian's {package}, for this folder only")
        problem = unpack_debian_package(package, HEADERS)
        if problem:
            fail(
                f"{own}/Python.h is missing, and {package} could not be unpacked here ({problem}).",
                f"python{version}-dev",
            )
    return [str(unpacked / f"python{version}"), str(unpacked)]


def unpack_debian_package(package: str, target: Path) -> str:
    """Unpacks a package of the distribution into `target` without installing it, as any user. The
    lists of packages are kept apart too, so that nothing of the system is changed. Returns what
    went wrong, or ""."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return "this is no Debian or Ubuntu"
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fastdp-apt-") as folder:
        for name in ("lists/partial", "cache/archives/partial"):
            Path(folder, name).mkdir(parents=True)
        apt = ["apt-get", "-qq", "-o", f"Dir::State::Lists={folder}/lists"]
        apt += ["-o", f"Dir::Cache={folder}/cache", "-o", "APT::Sandbox::User="]
        for words in ([*apt, "update"], [*apt, "download", package]):
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
            if done.returncode != 0:
                return f"{words[-1]}: {done.stderr.strip()}"
        for archive in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", str(archive), str(target)], check=True)
    return ""


def build(python: str) -> None:
    """An editable install the first time, a build of what changed from then on."""
    say("building fastdp")
    command = [python, "setup.py", "--quiet", "build_ext", "--inplace"]
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        fail("the build failed (see above).")
    if not is_installed(python):
        # Compiles nothing: the objects made above are up to date.
        command = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        command += ["--no-build-isolation", "--no-deps", "--editable", str(ROOT)]
        if subprocess.run(command, cwd=ROOT).returncode != 0:
            fail("pip could not install fastdp as editable (see above).")


def is_installed(python: str) -> bool:
    where = "import importlib.util as u; print(getattr(u.find_spec('fastdp'), 'origin', ''))"
    done = subprocess.run([python, "-c", where], cwd="/", capture_output=True, text=True)
    return done.stdout.strip() == str(ROOT / "fastdp" / "__init__.py")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("interrupted. The same command may be run again; there is nothing to clean up.")
