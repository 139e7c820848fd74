"""dp.memory() on the host, and with a GPU's figures pretended. GPUs: test_memory_cuda.py."""

import copy
import pickle

import pytest
import torch
from nets import NO_LIST, Apply, linear
from torch import nn

import fastdp
from fastdp import _C, memory
from fastdp.memory import Memory, host_bytes

COLUMNS = {
    *("parameters", "gradients", "replicas", "buckets", "graphs", "others", "activations_peak"),
    *("left_by_validation", "free", "total", "allocated", "reserved", "allocated_peak"),
}


@pytest.fixture(autouse=True)
def _no_scratch():
    _C.scratch(True)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.norm = nn.Linear(10, 20), nn.BatchNorm1d(20)

    def forward(self, x):
        return self.norm(self.lin(x))


def nbytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def test_what_a_wrapper_holds():
    dp = fastdp.DataParallel(Normed(), ["cpu"] * 3)
    found = dp.memory()
    assert isinstance(found, Memory) and list(found) == ["cpu"] and set(found["cpu"]) == COLUMNS
    tensors = nbytes(dp.parameters()) + nbytes(dp.buffers())
    assert found["cpu"]["parameters"] == tensors
    for name in ("gradients", "replicas", "buckets", "graphs", "left_by_validation"):
        assert found["cpu"][name] == 0
    for name in ("others", "activations_peak", "allocated", "reserved", "allocated_peak"):
        assert found["cpu"][name] is None  # nothing counts it
    dp(torch.randn(6, 10)).sum().backward()
    row = dp.memory()["cpu"]
    assert row["parameters"] == tensors
    assert nbytes(p.grad for p in dp.parameters()) <= row["gradients"] < 2 * tensors
    # num_batches_tracked, which may be resized, is in no bucket; slots are aligned.
    laid_out = sum(bucket["bytes"] for bucket in dp.report()["buckets"])
    assert row["replicas"] == pytest.approx(2 * laid_out, abs=3 * 64)
    dp.zero_grad(set_to_none=True)
    assert dp.memory()["cpu"]["gradients"] == 0
    for twin in (copy.deepcopy(dp), pickle.loads(pickle.dumps(dp))):
        assert twin.memory()["cpu"]["parameters"] == tensors


def test_memory_is_counted_once_and_whole():
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    net.register_buffer("part", torch.zeros(100)[:3])
    dp = fastdp.DataParallel(net, ["cpu"])
    assert dp.memory()["cpu"]["parameters"] == 16 * 4 + 100 * 4
    net[0].weight.grad = torch.zeros(4, 8)[:, ::2]
    assert dp.memory()["cpu"]["gradients"] == 32 * 4


@pytest.mark.parametrize(
    "ids", [NO_LIST, pytest.param(["cpu"], id="one"), pytest.param(["cpu"] * 2, id="two")]
)
def test_sparse_gradients(ids):
    dp = fastdp.DataParallel(nn.Embedding(10, 3, sparse=True), ids)
    dp(torch.arange(4)).sum().backward()
    grad = dp.module.weight.grad
    held = grad._indices().untyped_storage().nbytes() + grad._values().untyped_storage().nbytes()
    assert dp.memory()["cpu"]["gradients"] == held >= 4 * 8 + 4 * 3 * 4


def test_scratch_of_the_core():
    # Gradients that are no memory of their own are packed into scratch first.
    dp = fastdp.DataParallel(Apply(lambda self, x: x + self.lin.weight.sum()), ["cpu"] * 2)
    dp(torch.ones(4, 3).double()).sum().backward()
    assert dp.memory()["cpu"]["buckets"] >= nbytes([dp.module.lin.weight])
    held = [each for each in _C.scratch(False) if each[0] == (1, 0)]
    assert held == [((1, 0), dp.memory()["cpu"]["buckets"], 0)]
    assert [each for each in _C.scratch(True) if each[0] == (1, 0)] == [((1, 0), 0, 0)]
    assert dp.memory()["cpu"]["buckets"] == 0
    dp(torch.ones(4, 3).double()).sum().backward()  # and is taken again


def test_text():
    dp = fastdp.DataParallel(nn.Linear(256, 256), ["cpu"] * 2)
    text = str(dp.memory())
    assert text.splitlines()[0].split() == ["cpu"]
    assert [line.split()[0] for line in text.splitlines()[1:]] == ["parameters", "free"]
    assert "parameters  257.0 KiB" in text
    two = Memory()
    for device, size_bytes in (("cuda:0", 2**30), ("cuda:1", 3 * 2**20)):
        two[device] = {**dict.fromkeys(COLUMNS, 0), "others": size_bytes, "free": None}
    assert str(two) == "         cuda:0   cuda:1\nothers  1.0 GiB  3.0 MiB"


def test_free_memory_of_the_host():
    total, free = host_bytes()
    assert 0 < free < total

    def is_seen():
        before = host_bytes()[1]
        held = torch.zeros(2**28)
        held.fill_(1)
        return before - host_bytes()[1] > 2**29  # of the 2**30

    # Other processes let go of as much meanwhile, and not each time.
    assert any(is_seen() for _ in range(10))
    assert fastdp.DataParallel(linear(), ["cpu"]).memory()["cpu"]["total"] == total


GROUPS = {
    "v2": ("3000\n", "1200\n", "anon 5\ninactive_file 200\n", (3000, 2000)),
    "v2, no limit": ("max\n", "1200\n", "inactive_file 200\n", None),
    "v1": ("4000\n", "1500\n", "inactive_file 1\ntotal_inactive_file 1\n", (4000, 2501)),
    "v1, no limit": (f"{2**63 - 4096}\n", "1200\n", "inactive_file 200\n", None),
    "full": ("3000\n", "3500\n", "inactive_file 200\n", (3000, 0)),
    "odd": ("3000\n", "1200\n", "inactive_file\n", None),
}


@pytest.mark.parametrize("name", GROUPS)
def test_a_control_groups_limit(name, tmp_path, monkeypatch):
    *texts, expected = GROUPS[name]
    paths = [tmp_path / f"{k}" for k in range(3)]
    for path, text in zip(paths, texts):
        path.write_text(text)
    monkeypatch.setattr(memory, "_GROUPS", ((*map(str, paths),),))
    monkeypatch.setattr(memory, "_meminfo", lambda: (10_000, 9_000))
    assert host_bytes() == (expected or (10_000, 9_000))
    monkeypatch.setattr(memory, "_meminfo", lambda: (None, None))
    if expected:
        assert host_bytes() == expected


def test_what_torch_counts(monkeypatch):
    dp = fastdp.DataParallel(nn.Linear(10, 10), ["cpu"] * 2)
    dp(torch.randn(4, 10)).sum().backward()
    row = dp.memory()["cpu"]
    known = row["parameters"] + row["gradients"]
    figures = {"total": 10**6, "free": 10**5, "reserved": 10**5}
    figures |= {"allocated": known + 700, "allocated_peak": known + 700 + row["replicas"] + 900}
    monkeypatch.setattr(memory, "usage", lambda device: figures)
    found = dp.memory()["cpu"]
    assert found["others"] == 700
    assert found["activations_peak"] == 900 + row["gradients"]
    assert found["free"] == 10**5
    figures["allocated"] = figures["allocated_peak"] = 0  # other streams may be behind
    assert dp.memory()["cpu"]["others"] == dp.memory()["cpu"]["activations_peak"] == 0


def test_the_devices_of_a_wrapper():
    dp = fastdp.DataParallel(nn.Linear(2, 2))  # without GPUs: no replicas
    if not torch.cuda.is_available():
        assert list(dp.memory()) == ["cpu"]
    assert list(fastdp.DataParallel(nn.Identity(), ["cpu"]).memory()) == ["cpu"]
    lazy = fastdp.DataParallel(nn.LazyLinear(3), ["cpu"])
    assert lazy.memory()["cpu"]["parameters"] == 0


def test_a_recording_holds_what_it_says(means):
    dp = means.wrap(Normed())
    x = torch.randn(6, 10, device=means.home)
    for _ in range(5):
        dp(x).sum().backward()
    graphs = {device: row["graphs"] for device, row in dp.memory().items()}
    assert sum(graphs.values()) == dp.report()["forwards"][0]["bytes"] > 0
    assert graphs[str(means.home)] > 0


def test_notebooks_show_what_print_shows():
    """IPython calls this method of an object whose class has it."""

    class Printer(list):
        text = list.append

    dp = fastdp.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"])
    for thing in (dp.report(), dp.memory(), fastdp.preflight(["cpu", "cpu"])):
        printer = Printer()
        thing._repr_pretty_(printer, False)
        assert printer == [str(thing)] and isinstance(thing, dict)


@pytest.mark.parametrize(
    "fraction, free", [(1.0, 700), (0.8, 700), (0.5, 400), (0.1, 0), (None, 700)]
)
def test_what_is_free_for_a_process_that_may_take_a_part(monkeypatch, fraction, free):
    """Of 1000 bytes 500 are free for the system, and 300 torch's, of which it uses 100."""
    told = None if fraction is None else lambda device: fraction
    figures = {
        "mem_get_info": (500, 1000),
        "memory_allocated": 100,
        "memory_reserved": 300,
        "max_memory_allocated": 150,
    }
    for name, figure in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, figure=figure: figure)
    monkeypatch.setattr(
        torch.cuda.memory, "get_per_process_memory_fraction", told, raising=False
    )
    assert memory.usage(torch.device("cuda", 0))["free"] == free
