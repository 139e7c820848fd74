"""A replica's forward on a GPU runs on its stream and its device, and leaves what it found: here
with pretended GPUs, on real ones in test_cuda_*.py."""

import pytest
import torch

from fastdp import apply

GPUS = [torch.device("cuda", index) for index in range(3)]


class Stream:
    def __init__(self, name, device):
        self.name, self.device = name, device


class PretendedCuda:
    """The streams c0, c1, c2 are current; `used` are the GPUs that were set current by set_device,
    which makes CUDA use them."""

    def __init__(self, monkeypatch):
        self.current = {device: Stream(f"c{device.index}", device) for device in GPUS}
        self.device = 0
        self.used = []
        self.fails = False
        cuda = self

        class Device:
            def __init__(self, index):
                self.index = index

            def __enter__(self):
                self.before, cuda.device = cuda.device, self.index

            def __exit__(self, *error):
                cuda.device = self.before

        def set_stream(stream):
            if self.fails:
                self.fails = False
                raise KeyboardInterrupt
            self.current[stream.device] = stream
            self.device = stream.device.index

        def set_device(index):
            self.device = index
            self.used.append(index)

        monkeypatch.setattr(apply, "current_stream", lambda device: self.current[device])
        for name, value in {
            "device": Device,
            "set_stream": set_stream,
            "set_device": set_device,
            "current_device": lambda: self.device,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def now(self):
        return self.device, [self.current[device].name for device in GPUS]


@pytest.fixture
def cuda(monkeypatch):
    return PretendedCuda(monkeypatch)


def stay(cuda):
    pass


def change_stream(cuda):
    torch.cuda.set_stream(Stream("other", GPUS[1]))


def change_device(cuda):
    torch.cuda.set_device(2)


def change_both(cuda):
    torch.cuda.set_stream(Stream("other", GPUS[1]))
    torch.cuda.set_device(0)


@pytest.mark.parametrize("with_error", [False, True])
@pytest.mark.parametrize("act", [stay, change_stream, change_device, change_both])
@pytest.mark.parametrize("is_current", [True, False])
@pytest.mark.parametrize("device", [0, 1, 2])
def test_a_forward_leaves_what_it_found(cuda, device, is_current, act, with_error):
    cuda.device = device
    before = cuda.now()
    stream = cuda.current[GPUS[1]] if is_current else Stream("s1", GPUS[1])

    def forward(x, *, more):
        assert cuda.now() == (1, ["c0", stream.name, "c2"])
        act(cuda)
        if with_error:
            raise KeyError(x)
        return x + more

    call = apply._Call(forward, (3,), {"more": 4}, torch.device("cpu"))
    call.stream = stream
    if with_error:
        with pytest.raises(KeyError):
            call()
    else:
        assert call() == 7
    assert cuda.now() == before
    own = [2] if act is change_device else [0] if act is change_both else []
    assert set(cuda.used) <= {*own, 1}


@pytest.mark.parametrize("device", [0, 1])
def test_an_interrupt_on_the_way_in_leaves_what_it_found(cuda, device):
    cuda.device, cuda.fails = device, True
    before = cuda.now()
    call = apply._Call(pytest.fail, (), {}, torch.device("cpu"))
    call.stream = Stream("s1", GPUS[1])
    with pytest.raises(KeyboardInterrupt):
        call()
    assert cuda.now() == before
