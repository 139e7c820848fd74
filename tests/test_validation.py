"""fastdp.validation: what it looks at before, gives back afterwards, and leaves alone."""

import gc
import weakref

import pytest
import torch
from nets import Apply, exact, linear
from torch import nn

import fastdp
from fastdp import memory, validations

CPU = torch.device("cpu")


def scratched(ids=("cpu", "cpu")):
    """A wrapper whose backward needs the core's scratch, and a batch."""
    dp = fastdp.DataParallel(Apply(lambda self, x: x + self.lin.weight.sum()), list(ids))
    return dp, torch.ones(4, 3).double()


def scratch():
    return memory.scratch_bytes().get(CPU, 0)


def test_the_error_names_device_needed_and_free(monkeypatch):
    monkeypatch.setattr(memory, "host_bytes", lambda: (2**34, 2**30))
    dp = fastdp.DataParallel(linear(), ["cpu", "cpu"])
    words = (
        r"validation: cpu has 1073741824 bytes free \(1.0 GiB\), but 3221225472 \(3.0 GiB\) are "
        "needed"
    )
    with pytest.raises(MemoryError, match=words):
        with fastdp.validation(dp, reserve_bytes=3 * 2**30):
            pytest.fail("the block was entered")
    assert dp.memory()["cpu"]["left_by_validation"] == 0
    with fastdp.validation(dp, reserve_bytes=2**30):
        pass
    with fastdp.validation(dp):
        pass


def test_idle_scratch_is_given_back_before_it_gives_up(monkeypatch):
    dp, x = scratched()
    dp(x).sum().backward()
    held = scratch()
    assert held > 0
    monkeypatch.setattr(memory, "host_bytes", lambda: (2**34, 2**30 - scratch()))
    with fastdp.validation(dp, reserve_bytes=2**30):
        assert scratch() == 0


def test_an_estimate_says_how_much_to_reserve(monkeypatch):
    dp = fastdp.DataParallel(linear(), ["cpu", "cpu"])
    fit = dp.fits(torch.ones(10, 3).double(), mode="eval")
    step_bytes = fit.devices["cpu"].step_bytes
    for free, enough in ((step_bytes, True), (step_bytes - 1, False)):
        monkeypatch.setattr(memory, "host_bytes", lambda free=free: (2**34, free))
        if enough:
            with fastdp.validation(dp, fit):
                pass
        else:
            with pytest.raises(MemoryError, match=f"but {step_bytes} "):
                fastdp.validation(dp, fit).__enter__()
    monkeypatch.setattr(memory, "host_bytes", lambda: (None, None))  # nobody knows
    with fastdp.validation(dp, 2**60):
        pass


@pytest.mark.parametrize("raises", [False, True], ids=["", "raises"])
def test_scratch_is_given_back(raises):
    dp, x = scratched()
    context = fastdp.validation(dp)
    try:
        with context as given:
            assert given is context
            dp(x).sum().backward()
            assert scratch() > 0
            if raises:
                raise KeyError("of the block")
    except KeyError as error:
        assert raises and error.args == ("of the block",)
    assert scratch() == 0
    assert context.left_bytes == {"cpu": 0} and dp.memory()["cpu"]["left_by_validation"] == 0
    dp(x).sum().backward()
    assert scratch() > 0


def test_it_sets_nothing():
    dp = fastdp.DataParallel(nn.Sequential(nn.Linear(3, 3), nn.Dropout()), ["cpu", "cpu"])
    for training in (True, False):
        dp.train(training)
        with fastdp.validation(dp):
            assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            assert all(module.training == training for module in dp.modules())
            dp.train(not training)
        assert all(module.training != training for module in dp.modules())


def test_what_it_left(monkeypatch):
    dp = fastdp.DataParallel(linear(), ["cpu", "cpu"])
    allocated = [1000]
    figures = memory.usage(CPU)
    monkeypatch.setattr(
        validations, "usage", lambda device: {**figures, "allocated": allocated[0]}
    )
    for after, left in ((1700, 700), (900, 0)):
        allocated[0] = 1000
        with fastdp.validation(dp) as context:
            allocated[0] = after
        assert context.left_bytes == {"cpu": left}
        assert dp.memory()["cpu"]["left_by_validation"] == left
    gone = weakref.ref(dp)
    del dp, context
    gc.collect()
    assert gone() is None and not any(key is None for key in validations._left)


@pytest.mark.parametrize("allocated, left", [(1000, 300), (None, 500)], ids=["known", "unknown"])
def test_what_recordings_it_left(monkeypatch, allocated, left):
    """Their memory is the whole of their pools, of which torch counts a part as allocated: that is
    not counted twice, and not taken off where torch counts nothing."""
    dp = fastdp.DataParallel(linear(), ["cpu", "cpu"])
    graphs, figures = {}, {**memory.usage(CPU), "allocated": allocated}
    monkeypatch.setattr(validations, "usage", lambda device: figures)
    monkeypatch.setattr(validations, "make_graphs", lambda wrapper: graphs)
    with fastdp.validation(dp) as context:
        graphs[CPU] = (500, 200)
    assert context.left_bytes == {"cpu": left}


def evaluated(dp, x, times=6):
    dp.eval()
    with torch.no_grad():
        outputs = [dp(x) for _ in range(times)]
    dp.train()
    return outputs[-1]


def engines_of(dp):
    return [forward["engine"] for forward in dp.report()["forwards"]]


def test_steps_recorded_in_it_are_dropped_and_no_others(means):
    dp, twin = means.twins(exact(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))))
    x = torch.ones(6, 3, device=means.home).double()

    def train(wrapper):
        wrapper.zero_grad(set_to_none=True)
        wrapper(x).sum().backward()

    for wrapper in (dp, twin):
        for _ in range(6):
            train(wrapper)
    kept = dp.memory()
    (before,) = dp._fastdp_get_runtime().recordings()
    for _ in range(2):
        with fastdp.validation(dp) as context:
            assert torch.equal(evaluated(dp, x), evaluated(twin, x))
            assert engines_of(dp) == ["graph", "graph"]
            assert sum(row["graphs"] for row in dp.memory().values()) > sum(
                row["graphs"] for row in kept.values()
            )
        assert dp._fastdp_get_runtime().recordings() == [before]
        assert engines_of(dp) == ["graph", "eager"]
        assert "recorded in a validation" in dp.report()["forwards"][1]["reason"]
        for device, row in dp.memory().items():
            assert row["graphs"] == kept[device]["graphs"]
            assert row["left_by_validation"] == context.left_bytes[device]
    before_steps = dp.report()["forwards"][0]["steps"]["graph"]
    for wrapper in (dp, twin):
        train(wrapper)
    assert dp.report()["forwards"][0]["steps"]["graph"] == before_steps + 1
    for a, b in zip(dp.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_backward_to_come_is_not_lost(means):
    """A loss that is kept across the block belongs to a recording that was there before, or made in
    the block: both keep what they need."""
    dp, twin = means.twins(exact(nn.Linear(3, 2)), engine="graph")
    x = torch.ones(6, 3, device=means.home).double()
    for wrapper in (dp, twin):
        with fastdp.validation(wrapper):
            for _ in range(6):
                wrapper.zero_grad(set_to_none=True)
                loss = wrapper(x).sum()
                loss.backward()
            wrapper.zero_grad(set_to_none=True)
            loss = wrapper(x).sum()
        assert wrapper._fastdp_get_runtime().recordings() == []
        loss.backward()
    for a, b in zip(dp.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ((nn.Linear(1, 1),), TypeError, "dp is a Linear: it must be a fastdp.DataParallel"),
        ((None, "2GB"), TypeError, "reserve_bytes is '2GB': it must be a whole number of bytes"),
        ((None, True), TypeError, "reserve_bytes is True"),
        ((None, 1e9), TypeError, "reserve_bytes is 1000000000.0"),
        ((None, -1), ValueError, "reserve_bytes is -1: it must be at least 0"),
    ],
    ids=["module", "text", "bool", "float", "negative"],
)
def test_arguments(arguments, error, words):
    dp, *rest = arguments
    with pytest.raises(error, match=words):
        fastdp.validation(dp or fastdp.DataParallel(linear(), ["cpu"]), *rest)


def test_before_any_forward_and_without_replicas(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # where [] is no error
    for ids in ([], ["cpu"], ["cpu", "cpu"]):
        dp = fastdp.DataParallel(linear(), ids)
        with fastdp.validation(dp) as context:
            pass
        assert context.left_bytes == {"cpu": 0}
