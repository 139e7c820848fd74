"""Scripts that run in an interpreter of their own, with a small model and a wrapper of it at hand,
on the host or a GPU."""

import os
import subprocess
import sys
import textwrap

import pytest

# An interpreter ends, or answers Ctrl-C, in a second or two; beside other work in some more. A
# thread that holds it up holds it up for good.
HANGS_S = 60
# Of a whole process, which imports torch first.
ENDS_S = 300

PRELUDE = """
import os, signal, sys, threading, time, warnings
# A test run in the background of a shell inherits an ignored SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
import torch
from torch import nn
import fastdp
torch.set_num_threads(1)
IDS = [0, 0] if os.environ.get("TEST_DEVICE") == "cuda" else ["cpu"] * 2
HOME = torch.device("cuda:0" if IDS[0] == 0 else "cpu")

class Timed(nn.Module):
    def __init__(self, naps=None):
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.lin.weight.data.copy_(torch.tensor([[1.0, 2], [3, 4]]))  # exact in any order
        self.lin.bias.data.fill_(1)
        self.naps = naps or {}

    def forward(self, x):
        nap = self.naps.get(int(x[0, 0]), 0)
        if nap:
            os.write(1, b"naps\\n")  # at once: the other replica may come between
            time.sleep(nap)
        return self.lin(x)

x = torch.tensor([[0.0, 1], [1.0, 1]]).to(HOME)

def wrap(naps=None):
    return fastdp.DataParallel(Timed(naps).to(HOME), device_ids=IDS)
"""


def start(script, device="cpu"):
    code = PRELUDE + textwrap.dedent(script)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TEST_DEVICE": device,
        },
    )


def finish(process, seconds):
    """(exit code, stdout, stderr); a process that does not end in time fails the test."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"no end after {seconds} s\n{out}\n{err}")
    return process.returncode, out, err


def check(script, device="cpu"):
    code, out, err = finish(start(script, device), ENDS_S)
    assert code == 0, f"{out}\n{err}"
    return out
