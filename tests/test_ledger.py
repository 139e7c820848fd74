"""What operators make is counted from then on until nothing refers to it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastdp.ledger import Ledger
from fastdp.probes import Probes

CPU = torch.device("cpu")


@pytest.fixture(params=["real", "fake"])
def ledger(request):
    if request.param == "real":
        yield Ledger(Probes({}))
    else:
        with FakeTensorMode():
            yield Ledger(Probes({}))


def test_views_and_results_in_place_count_once(ledger):
    with ledger:
        x = torch.empty(10, 10)
        rows = x[2:], x.t(), x.detach(), x.add_(1)
        assert ledger.live[CPU] == ledger.peak[CPU] == 400
        del x
        assert ledger.live[CPU] == 400  # a view keeps the whole
        del rows
        assert ledger.live[CPU] == 0 and ledger.peak[CPU] == 400


def test_what_a_graph_saves_lives_as_long_as_it(ledger):
    weight = torch.empty(10, 10, requires_grad=True)
    with ledger:
        ledger.ignore([weight])
        x = torch.empty(5, 10)
        out = (x @ weight).tanh().sum()
        del x
        assert ledger.live[CPU] == 5 * 10 * 4 * 2 + 4  # x and tanh's result are saved
        out.backward()
        del out
        assert ledger.live[CPU] == weight.grad.nbytes == 400
        weight.grad = None
        assert ledger.live[CPU] == 0


def test_peaks_beside_the_profilers():
    from host_peak import host_peak

    def act():
        x = torch.randn(50, 60, requires_grad=True)
        ((x @ x.t()).softmax(1) @ x).square().sum().backward()

    act()
    ledger = Ledger(Probes({}))
    with ledger:
        act()
    peak, left = host_peak(act)
    assert left == 0 and ledger.live[CPU] == 0
    assert ledger.peak[CPU] == pytest.approx(peak, rel=0.01)


def test_what_was_there_and_what_is_to_count_for_nothing():
    given = torch.ones(100)
    ledger = Ledger(Probes({}))
    with ledger:
        ledger.ignore([given])
        given.mul_(2)
        given[:5].add_(1)
        ledger.counts = False
        other = torch.ones(100)
        ledger.counts = True
        other.add_(1)
        assert ledger.live.get(CPU, 0) == 0 == ledger.peak.get(CPU, 0)
        del other
        assert ledger.live.get(CPU, 0) == 0


def test_workspace_is_there_while_an_operator_runs():
    ledger = Ledger(Probes({torch.ops.aten.mm: 1000}))
    with ledger:
        x = torch.ones(5, 5)
        x + x
        assert ledger.peak[CPU] == 200
        x @ x
        assert ledger.peak[CPU] == 100 + 100 + 1000 and ledger.live[CPU] == 100


def test_sparse_tensors_are_left_out():
    ledger = Ledger(Probes({}))
    with ledger:
        torch.ones(3, 3).to_sparse().coalesce()
    assert ledger.live[CPU] >= 0
