"""fastdp.devices: every way to write a device, and every message for one that cannot be."""

import doctest

import pytest
import torch

import fastdp
from fastdp import devices
from fastdp.devices import parse_device, parse_devices

CPU = torch.device("cpu")


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def cuda(index):
    return torch.device("cuda", index)


@pytest.mark.parametrize("host", ["cpu", "cpu:0", -1, CPU, torch.device("cpu", 0)])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_host_entries_may_repeat(host, count, no_gpu):
    assert parse_devices([host] * count) == (CPU,) * count


def test_host_spellings_mix(no_gpu):
    parsed = parse_devices(("cpu", -1, CPU))
    assert parsed == (CPU, CPU, CPU)
    assert all(device.index is None for device in parsed)


@pytest.mark.parametrize(
    "entries, indices",
    [
        ([0], [0]),
        ([1, 0], [1, 0]),
        ([0, 0, 0], [0, 0, 0]),
        (["cuda:1", 0, torch.device("cuda", 1)], [1, 0, 1]),
        (["cuda"], [1]),
        ([torch.device("cuda"), 0], [1, 0]),
        (range(2), [0, 1]),
        (iter((1, 1)), [1, 1]),
    ],
)
def test_cuda_entries(entries, indices, two_gpus):
    assert parse_devices(entries) == tuple(cuda(i) for i in indices)


def test_numpy_integers_are_indices(two_gpus):
    numpy = pytest.importorskip("numpy")
    assert parse_devices(numpy.arange(2)) == (cuda(0), cuda(1))


def test_parse_device_takes_one(two_gpus):
    assert parse_device("cuda:1", "destination") == cuda(1)
    assert parse_device(-1, "destination") == CPU


def test_an_index_needs_no_driver_call_but_the_count(two_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("opened the device"))
    assert parse_devices([1, "cuda:0"]) == (cuda(1), cuda(0))


@pytest.mark.parametrize(
    "entries, error, message",
    [
        ("cpu", TypeError, r"ids must be a list of devices, not 'cpu': write \['cpu'\]"),
        ("0, 1", TypeError, r"ids must be a list of devices, not '0, 1': write \[0, 1\]"),
        ("cuda:0,cuda:1", TypeError, r"not 'cuda:0,cuda:1': write \['cuda:0', 'cuda:1'\]"),
        (0, TypeError, r"ids must be a list of devices, not 0: write \[0\]"),
        (CPU, TypeError, r"ids must be a list of devices, not device\(type='cpu'\)"),
        (None, TypeError, "ids must be a list of devices, not NoneType"),
        (1.5, TypeError, "ids must be a list of devices, not float"),
        ([], ValueError, "ids is empty: at least one device is needed"),
        ([0, None], TypeError, r"ids\[1\] must be an int, a str or a torch.device, not NoneType"),
        ([True], TypeError, r"ids\[0\] must be an int, a str or a torch.device, not bool"),
        ([0.0], TypeError, r"ids\[0\] must be an int, a str or a torch.device, not float"),
        ([0, -2], ValueError, r"ids\[1\] is -2: a CUDA index starts at 0, and -1 is the host"),
        (["gpu"], ValueError, r"ids\[0\] is 'gpu', which torch does not know"),
        (["meta"], ValueError, r"ids\[0\] is 'meta': fastdp takes CUDA devices and 'cpu'"),
        ([torch.device("xpu", 1)], ValueError, r"ids\[0\] is 'xpu:1': fastdp takes CUDA"),
        (
            ["cpu", 0],
            ValueError,
            r"ids\[1\] is cuda:0, but ids\[0\] is cpu: host and CUDA devices cannot be mixed",
        ),
        ([0, 1, "cpu"], ValueError, r"ids\[2\] is cpu, but ids\[0\] is cuda:0"),
        ([0, 2], ValueError, r"ids\[1\] is cuda:2, but the visible CUDA devices are \[0, 1\]"),
        (["cuda:7"], ValueError, r"ids\[0\] is cuda:7, but the visible CUDA devices are \[0, 1\]"),
        ([1000], ValueError, r"ids\[0\] is cuda:1000, but the visible CUDA devices are \[0, 1\]"),
    ],
)
def test_refusals(entries, error, message, two_gpus):
    with pytest.raises(error, match=message):
        parse_devices(entries, "ids")


@pytest.mark.parametrize("entry", [0, "cuda", "cuda:0", torch.device("cuda")])
def test_cuda_without_a_gpu(entry, no_gpu):
    with pytest.raises(ValueError, match=r"device_ids\[0\] is cuda:0, but torch sees no CUDA"):
        parse_devices([entry])


@pytest.mark.parametrize("ids", [2, torch.device("cuda"), "0,1"])
def test_a_wrapper_wants_a_list_without_a_gpu_too(ids, no_gpu):
    with pytest.raises(TypeError, match="device_ids must be a list of devices, not "):
        fastdp.DataParallel(torch.nn.Linear(2, 2), ids)


@pytest.mark.parametrize("module", [torch.nn.Linear, "net", None])
def test_a_wrapper_wants_a_module(module):
    with pytest.raises(TypeError, match="module is .*: it must be an instance of torch.nn.Module"):
        fastdp.DataParallel(module, ["cpu", "cpu"])


def test_examples():
    assert doctest.testmod(devices).failed == 0
