"""Operators that are run once, by themselves, to see what they take."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastdp import probes
from fastdp.ledger import Ledger
from fastdp.probes import Probe, Probes

CPU = torch.device("cpu")


@pytest.fixture
def counted(monkeypatch):
    """Products are run, and take 1,000 bytes beside their result; with the calls."""
    calls = []

    def ever_allocated(device):
        calls.append(device)
        return 0 if len(calls) % 2 else 1000 + 512

    monkeypatch.setattr(probes, "_RUN", {"cpu": ("mm", "cat", "topk")})
    monkeypatch.setattr(probes, "ever_allocated", ever_allocated)
    return calls


def test_each_kind_of_call_is_run_once(counted):
    found = Probes({})
    with FakeTensorMode(), Ledger(found) as ledger:
        x = torch.empty(5, 4)
        for _ in range(3):
            y = x @ x.t()
        assert len(counted) == 2 and type(y).__name__ == "FakeTensor"
        assert ledger.peak[CPU] == 80 + 100 + 100 + 1000  # y of before is there still
        torch.empty(6, 4) @ x.t()
        assert len(counted) == 4
        x.t() @ x  # other strides
        assert len(counted) == 6
        torch.cat([x, x])
        torch.cat([x, x])
        assert len(counted) == 8


def test_sizes_of_results_are_those_of_the_library(counted, monkeypatch):
    """As where torch knows no better than that there is something."""
    monkeypatch.setattr(probes, "_run", lambda *call: Probe(0, (4000, 500)))
    with FakeTensorMode(), Ledger(Probes({})) as ledger:
        kept = torch.empty(10).topk(2)
        assert ledger.live[CPU] == 4000 + 500
        del kept
        assert ledger.live[CPU] == 0


def test_what_fails_takes_nothing(counted, monkeypatch):
    monkeypatch.setattr(probes, "_zeros", lambda tree: 1 / 0)
    with FakeTensorMode(), Ledger(Probes({})) as ledger:
        x = torch.empty(5, 5)
        x @ x
        assert ledger.peak[CPU] == 200


def test_arguments_of_all_kinds():
    tree = (torch.ones(2, 3).t(), [torch.ones(2).int(), None], 3, {"a": torch.ones(1)}, "text")
    made = probes._zeros(tree)
    assert made[0].shape == (3, 2) and made[0].stride() == (1, 3) and not made[0].any()
    assert type(made[1]) is list and made[1][0].dtype == torch.int32 and made[1][1] is None
    assert made[2] == 3 and made[3]["a"].item() == 0 and made[4] == "text"
    assert probes._spec(tree) == probes._spec(made)
    assert hash(probes._spec(tree[:3])) is not None
    assert probes._spec(tree[0]) != probes._spec(tree[0].contiguous())


def test_sizes_on_gpus_are_rounded_as_torch_does():
    assert [probes.rounded(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert probes.ever_allocated(CPU) == 0
