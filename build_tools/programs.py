"""Installs the libraries that tests/programs runs, into a .venv that environment.py made.

    python3 build_tools/programs.py

Run after environment.py. No other environment is touched: there, the tests of what is missing are
skipped. So are they where the package index lacks a library, or a torch is too old for it: that is
no failure here. Installed once; what failed is tried again by the next run.

torchvision goes into a folder of its own, APART, without what it asks for: its wheels ask for one
version of torch and are built for CUDA. Beside a CPU build of torch its import fails, and so does
that of libraries that look for it. tests/programs/vision.py knows how to use it all the same.
"""

import subprocess

from environment import CHOICE, READY, ROOT, VENV, say

REQUIREMENTS = ROOT / "tests" / "programs" / "requirements.txt"
APART = VENV / "fastdp-apart"
DONE = VENV / "fastdp-programs-ready"

LOOK = """
from importlib import metadata, util
print("" if util.find_spec("torchvision") else metadata.version("torch"))
"""


def main() -> None:
    python = str(VENV / "bin" / "python")
    ours = READY.exists() and f"python={python}\n" in CHOICE.read_text()
    if not ours:
        say("not an environment of make's own: tests/programs uses what libraries are there")
        return
    wish = READY.read_text() + REQUIREMENTS.read_text()
    if DONE.exists() and DONE.read_text() == wish:
        return
    say("installing the libraries that the tests of whole programs run")
    done = install(python, "-r", str(REQUIREMENTS))
    version = subprocess.run([python, "-c", LOOK], capture_output=True, text=True).stdout.strip()
    if version:
        folder = ["--no-deps", "--upgrade", "--target", str(APART)]
        done &= install(python, *folder, torchvision_for(version))
    if done:
        DONE.write_text(wish)
    else:
        say("some could not be installed (see above): the tests that need them will be skipped")


def torchvision_for(torch: str) -> str:
    """torchvision 0.15 came with torch 2.0, and so on."""
    major, minor = (int(part) for part in torch.split(".")[:2])
    return f"torchvision==0.{minor + 15 if major == 2 else minor}.*"


def install(python: str, *what: str) -> bool:
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    return subprocess.run([*pip, *what]).returncode == 0


if __name__ == "__main__":
    main()
