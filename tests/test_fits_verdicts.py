"""dp.fits: forwards that it cannot act out, their own errors, and what it says of what does not
fit."""

import pytest
import torch
from nets import NO_LIST, Apply

import fastdp
from fastdp.fits import DeviceFit, Fit


@pytest.mark.parametrize("ids", [NO_LIST, ["cpu", "cpu"]])
@pytest.mark.parametrize(
    "forward, reason",
    [
        (lambda self, x: self.lin(x) * x.sum().item(), "DataDependentOutputException: .*"),
        (lambda self, x: self.lin(x) * len(x.tolist()), "DataDependentOutputException: .*"),
        (lambda self, x: self.lin(x)[x.sum(1) > 0], "DynamicOutputShapeException: .*"),
        (lambda self, x: self.lin(x) * float(x.detach().numpy().sum()), "a NumPy array of one"),
    ],
    ids=["item", "tolist", "mask", "numpy"],
)
def test_forwards_that_want_values(ids, forward, reason):
    dp = fastdp.DataParallel(Apply(forward), ids)
    line = forward.__code__.co_firstlineno
    words = (
        rf"cannot run without the values of tensors.*\({reason}, in <lambda> of "
        rf"test_fits_verdicts\.py, line {line}\): run a step, and read dp\.memory\(\)"
    )
    with pytest.raises(RuntimeError, match=words):
        dp.fits(torch.ones(4, 3).double())
    assert dp(torch.ones(4, 3).double()).shape == (4, 2)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("ids", [NO_LIST, ["cpu"], ["cpu", "cpu"]], ids=str)
def test_parameters_that_a_forward_writes(ids, mode):
    """As it clips or normalizes its weights."""

    def forward(self, x):
        with torch.no_grad():
            self.lin.weight.clamp_(-1, 1)
            self.lin.weight[0].div_(2)
            self.lin.bias.copy_(self.lin.bias / 2)
        return self.lin(x)

    dp = fastdp.DataParallel(Apply(forward), ids)
    before = [(p.clone(), p._version) for p in dp.parameters()]
    assert dp.fits(torch.ones(4, 3).double(), mode=mode)
    for p, (value, version) in zip(dp.parameters(), before, strict=True):
        assert torch.equal(p, value) and p._version == version
    dp(torch.ones(4, 3).double()).sum().backward()


@pytest.mark.parametrize("ids", [NO_LIST, ["cpu", "cpu"]], ids=str)
def test_tensors_that_are_plain_attributes_stay_as_they_are(ids):
    """A forward that writes to them, or draws with a generator of its own, among them alone."""

    def forward(self, x):
        self.mean.mul_(0.9)
        self.mean[0] += 1
        torch.add(self.mean, 1, out=self.other)
        return self.lin(x) + torch.bernoulli(self.mean, generator=self.drawing).sum()

    module = Apply(forward)
    module.mean, module.other = torch.full((3,), 0.5), torch.zeros(3)
    module.drawing = torch.Generator().manual_seed(1)
    dp, state = fastdp.DataParallel(module, ids), module.drawing.get_state()
    assert dp.fits(torch.ones(4, 3).double()) and dp.fits(torch.ones(4, 3).double(), mode="eval")
    assert module.mean.tolist() == [0.5] * 3 and module.other.tolist() == [0.0] * 3
    assert torch.equal(module.drawing.get_state(), state)


def test_while_autograd_looks_for_anomalies():
    dp = fastdp.DataParallel(Apply(lambda self, x: self.lin(x)), ["cpu", "cpu"])
    fit = dp.fits(torch.ones(4, 3).double())
    with torch.autograd.set_detect_anomaly(True):
        again = dp.fits(torch.ones(4, 3).double())
        assert torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    assert again.devices["cpu"].step_bytes == fit.devices["cpu"].step_bytes


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
