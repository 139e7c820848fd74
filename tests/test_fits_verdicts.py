"""dp.fits: forwards that it cannot act out, their own errors, and what it says of what does not
fit."""

import pytest
import torch
from nets import NO_LIST, Apply

import fastdp
from fastdp.fits import DeviceFit, Fit


@pytest.mark.parametrize("ids", [NO_LIST, ["cpu", "cpu"]])
def test_forwards_that_want_values(ids):
    def forward(self, x):
        return self.lin(x) * x.sum().item()

    dp = fastdp.DataParallel(Apply(forward), ids)
    line = forward.__code__.co_firstlineno + 1
    words = (
        r"cannot run without the values of tensors.*\(DataDependentOutputException: .*, in forward "
        rf"of test_fits_verdicts\.py, line {line}\): run a step, and read dp\.memory\(\)"
    )
    with pytest.raises(RuntimeError, match=words):
        dp.fits(torch.ones(4, 3).double())
    assert dp(torch.ones(4, 3).double()).shape == (4, 2)


def test_errors_of_the_forward_are_its_own():
    def forward(self, x):
        if x.shape[1] != 3:
            raise KeyError(f"wanted 3, got {x.shape[1]}")
        return self.lin(x)

    dp = fastdp.DataParallel(Apply(forward), ["cpu", "cpu"])
    with pytest.raises(KeyError, match="wanted 3, got 5"):
        dp.fits(torch.ones(4, 5).double())
    with pytest.raises(ValueError, match="mode is 'test': it must be one of train, eval"):
        dp.fits(torch.ones(4, 3).double(), mode="test")
    with pytest.raises(RuntimeError, match="0-dim"):
        dp.fits(torch.ones(()).double())


def test_what_does_not_fit():
    little = DeviceFit(100, 10, 80, 10, 109)
    assert (little.peak_bytes, little.needed_bytes, little.fits) == (190, 100, False)
    enough = little._replace(free_bytes=110)
    assert enough.fits and little._replace(free_bytes=None).fits
    fit = Fit("train", {"cuda:0": enough, "cuda:1": little})
    assert not fit and str(fit).splitlines() == [
        "a training step does not fit",
        "cuda:0: 190 bytes at the peak, of them 80 bytes for the step; 100 bytes are needed, 110 "
        "bytes free",
        "cuda:1: 190 bytes at the peak, of them 80 bytes for the step; 100 bytes are needed, 109 "
        "bytes free: too little",
    ]
    assert str(Fit("eval", {"cpu": enough})).startswith("a forward without gradients fits\n")


def test_a_batch_that_cannot_fit(monkeypatch):
    dp = fastdp.DataParallel(Apply(lambda self, x: self.lin(x)), ["cpu", "cpu"])
    monkeypatch.setattr(fastdp.memory, "host_bytes", lambda: (10_000, 5_000))
    assert dp.fits(torch.ones(4, 3).double())
    fit = dp.fits(torch.ones(400, 3).double())
    assert not fit and "too little" in str(fit) and fit.devices["cpu"].free_bytes == 5_000


@pytest.mark.parametrize("ids", [["cpu"], ["cpu", "cpu"]], ids=["one", "two"])
def test_a_batch_that_no_machine_could_hold(ids):
    dp = fastdp.DataParallel(Apply(lambda self, x, all: self.lin(x) + all.sum()), ids)
    x = torch.ones(1, 3).double().expand(1 << 42, 3)
    fit = dp.fits(x, fastdp.Replicated(x))
    assert not fit and fit.devices["cpu"].step_bytes > len(ids) * x.numel() * 8
