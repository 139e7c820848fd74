"""What waits for what in recorded steps, on pretended GPUs under an oracle (orders.py,
recorded_orders.py): two, more, and lists in any order and with repeats."""

import gc
import weakref

import pytest
import torch
from engine_cases import WATCHED, steps
from orders import Orders
from pretended_gpus import Gpus, can_pretend
from recorded_orders import Recorder, watch
from test_orders import WIDTH, Net, Training

from fastdp import streams, tapes

LISTS = [(0, 1), (2, 0, 3, 1), (0, 1, 0), (0, 0, 1, 1)]
pytestmark = can_pretend(4)


@pytest.fixture(params=LISTS, ids=str)
def gpus(monkeypatch, hidden, request):
    return Gpus(monkeypatch, hidden, 4, request.param)


@pytest.fixture
def orders(gpus, monkeypatch):
    found = Orders(gpus, monkeypatch)
    yield found
    assert not found.reports, "\n".join(dict.fromkeys(found.reports))


@pytest.fixture(params=["packed", "where they are made"])
def training(orders, monkeypatch, request):
    """Of a wrapper whose steps are recorded from the third on."""
    monkeypatch.setattr(tapes, "_LARGE_BYTES", 2**40 if request.param == "packed" else 0)
    found = Training(orders, Net, engine="graph")
    recorder = Recorder(orders)
    watch(orders, recorder, monkeypatch)
    found.dp._fastdp_get_runtime().recorder = recorder
    return found


def test_steps(training):
    for _ in range(WATCHED["graph"] + 5):
        training.step()
    assert steps(training.dp) == {"eager": WATCHED["graph"], "graph": 5}


def settle(training):
    for _ in range(WATCHED["graph"] + 1):
        training.step()


def test_evaluation_between_steps(training):
    settle(training)
    for _ in range(WATCHED["graph"] + 3):
        training.evaluate()
        training.evaluate()
        training.step()
    assert steps(training.dp)["graph"] > 8


def test_other_streams_in_each_step(training, orders):
    settle(training)
    for _ in range(4):
        orders.other_streams()
        training.step()


def test_other_streams_before_a_backward(training, orders):
    settle(training)
    for _ in range(3):
        out = training.forward()
        orders.other_streams()
        for parameter in training.backward(out):
            parameter.grad = None


def test_gradients_that_were_read_after_the_next_forward(training, orders):
    """Their memory is the next backward's."""
    settle(training)
    training.backward(training.forward())
    for _ in range(3):
        out = training.forward()
        for parameter in training.module.parameters():
            orders.read(orders.current(), parameter.grad, "an optimizer that is late")
            parameter.grad = None
        training.backward(out)


@pytest.mark.filterwarnings("ignore:.*replicas")
def test_batches_that_do_not_fill_all_ranks(training, orders):
    """Each size has a recording of its own, and all share communication streams."""
    n = training.ranks
    sizes = [2 * n, 2 * n - 2, 1]

    def forward(rows):
        x = torch.ones(rows, WIDTH).double()
        orders.write(orders.current(), x, "a batch")
        out = training.dp(x)
        orders.read(orders.current(), out.detach(), "the user")
        orders.write(orders.current(), x, "the next batch")
        return out

    for k in range(12):
        training.forward = lambda: forward(sizes[k % len(sizes)])
        training.step()
    assert steps(training.dp)["graph"] >= 5


def test_a_pinned_batch_is_kept_until_it_was_read(training, orders, gpus, monkeypatch):
    settle(training)
    monkeypatch.setattr(streams, "_held", [])
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)

    def forward():
        x = torch.ones(2 * training.ranks, WIDTH).double()
        orders.write(orders.current(), x, "a batch")
        training.dp(x)
        gc.collect()
        return weakref.ref(x)

    gpus.stall(gpus.ranks[-1])
    first = forward()
    assert first() is not None
    gpus.resume()
    forward()
    assert first() is None
