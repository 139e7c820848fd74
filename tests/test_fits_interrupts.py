"""Ctrl-C in dp.fits: a KeyboardInterrupt at once, wherever the estimate is. Under torch's fake
tensors one would end the process."""

import subprocess
import sys
import threading

import pytest
import torch
from nets import Net, ints

import fastdp
from fastdp import aside

SCRIPT = """
import signal, sys, time
import torch, fastdp
from fastdp import ledger
from torch import nn

dispatch, asked = ledger.Ledger.__torch_dispatch__, []

def struck(self, func, types, args=(), kwargs=None):
    if func.namespace == "prim":
        asked.append(func)
        if len(asked) == int(sys.argv[1]):
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.01)
    return dispatch(self, func, types, args, kwargs)

signal.signal(signal.SIGINT, signal.default_int_handler)
ledger.Ledger.__torch_dispatch__ = struck
dp = fastdp.DataParallel(nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)), ["cpu"] * 2)
try:
    dp.fits(torch.ones(4, 3))
except KeyboardInterrupt:
    print(bool(dp.fits(torch.ones(4, 3))), dp(torch.ones(4, 3)).shape[0], flush=True)
"""


@pytest.mark.parametrize("point", [1, 3, 6])
def test_an_interrupt_where_torch_cannot_raise(point):
    command = [sys.executable, "-c", SCRIPT, str(point)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == ["True", "4"]
    assert not process.stderr


def test_an_estimate_that_nobody_waits_for_ends(monkeypatch):
    class Struck:
        def get(self):
            raise KeyboardInterrupt

        def put(self, found):
            answers.append(found)

    def work(stop):
        while True:
            stop.look()

    answers = []
    monkeypatch.setattr(aside, "SimpleQueue", Struck)
    with pytest.raises(KeyboardInterrupt):
        aside.run_aside(work)
    for thread in [t for t in threading.enumerate() if t.name == "fastdp-aside"]:
        thread.join(30)
    assert [type(error) for _, error in answers] == [aside.Stopped]


def test_the_estimate_has_the_callers_state():
    seen = []

    class Looks(Net):
        def forward(self, x):
            seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
            return super().forward(x)

    dp = fastdp.DataParallel(Looks(), ["cpu"] * 2)
    with torch.autocast("cpu", torch.bfloat16):
        dp.fits(ints(4, 3), mode="eval")
    assert set(seen) == {(False, True)}
