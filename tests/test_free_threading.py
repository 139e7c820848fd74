"""The scripts for a Python without the interpreter's lock, on whichever Python runs the tests: few
rounds, so that they are right when they are needed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


def run(script, *arguments):
    command = [sys.executable, TESTS / script, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def test_threads_that_call_everything():
    code, out, err = run("free_threading.py", "--rounds", "10")
    assert code == 0 and ": 0 failed" in out, out + err
    assert "5 threads, 10 rounds each" in out


def test_training():
    code, out, err = run("free_training.py")
    assert code == 0, out + err
    assert out.startswith("25 steps, 3 replicas")
    assert float(re.search(r"plain training (\S+)", out)[1]) < 1e-12


def test_training_that_differs_is_told(tmp_path):
    """The same script with another learning rate for the replicas."""
    script = (TESTS / "free_training.py").read_text()
    wrong = script.replace("lr=0.01", "lr=0.01 + 0.01 * isinstance(model, fastdp.DataParallel)")
    assert wrong != script
    path = tmp_path / "wrong.py"
    path.write_text(wrong)
    code, out, err = run(path)
    assert code == 1 and not err, out + err


@pytest.mark.parametrize("steps", ["0", "-3", "many"])
def test_steps_that_make_no_sense(steps):
    code, _, err = run("free_training.py", "--steps", steps)
    assert code == 2 and "--steps" in err
