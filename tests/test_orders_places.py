"""What waits for what where ranks are not GPUs in their order: lists that begin with another than
the first GPU, leave some out, or name one several times; a batch, or its output, on yet another;
and batches that do not fill all ranks. Tests of test_orders.py, over such lists."""

import pytest
import torch
from orders import Orders
from pretended_gpus import Gpus, can_pretend
from test_orders import (  # noqa: F401
    WIDTH,
    Aside,
    Net,
    Training,
    Twice,
    test_an_argument_for_all_that_is_differentiated_twice,
    test_evaluation_between_steps,
    test_other_streams_before_a_backward,
    test_other_streams_in_each_step,
    test_replicas_by_hand,
    test_steps,
    test_steps_that_are_differentiated_twice,
    test_steps_with_arguments_for_all,
    test_two_forwards_before_their_backwards,
)

from fastdp import replicas

LISTS = [(2, 0, 3), (1, 3), (0, 1, 0), (0, 0, 1, 1), (3, 1, 1, 0, 3, 2)]
COUNT = 5  # of which the last is in no list
pytestmark = can_pretend(COUNT)


@pytest.fixture(params=LISTS, ids=str)
def gpus(monkeypatch, hidden, request):
    return Gpus(monkeypatch, hidden, COUNT, request.param)


@pytest.fixture(params=["device", "direct"])
def orders(gpus, monkeypatch, request):
    found = Orders(gpus, monkeypatch, request.param)
    yield found
    assert not found.reports, "\n".join(dict.fromkeys(found.reports))


@pytest.mark.parametrize("net", [Net, Aside, Twice])
@pytest.mark.parametrize("timeout_s", [None, 1000])
def test_steps_with_gradients_of_the_batch(orders, net, timeout_s):
    if net is Aside and len(set(orders.places)) < len(orders.places):
        pytest.skip("another replica of the GPU takes what user code has not recorded for a stream")
    training = Training(orders, net, batch_grad=True, timeout_s=timeout_s)
    for _ in range(3):
        training.step()


class Elsewhere(Training):
    """Batches of these sizes in turn, from one GPU, with outputs on another."""

    def __init__(self, orders, rows, source, output, **options):
        super().__init__(orders, batch_grad=True, **options)
        self.rows, self.source = list(rows), source
        orders.output = output
        orders.gpus.elsewhere = [orders.devices[place] for place in (source, output)]
        self.count = 0

    def forward(self, others=()):
        rows = self.rows[self.count % len(self.rows)]
        self.count += 1
        x = torch.ones(rows, WIDTH).double()
        self.orders.put(x, self.source)
        self.orders.write(self.orders.current(self.source), x, "a batch")
        out = self.dp(x.requires_grad_())
        self.orders.read(self.orders.current(self.orders.output), out.detach(), "the user")
        self.orders.write(self.orders.current(self.source), x.detach(), "the next batch")
        return out


@pytest.mark.parametrize("source, output", [(None, -1), (-1, 4), (4, None), (4, 4)])
@pytest.mark.filterwarnings("ignore:.*replicas")
def test_batches_from_elsewhere(orders, source, output):
    """Full, with one rank less, of one row, and full again."""
    first, last = orders.places[0], orders.places[-1]
    place = {None: first, -1: last, 4: 4}
    n = len(orders.places)
    training = Elsewhere(orders, (2 * n, n - 1, 1, n), place[source], place[output])
    for _ in range(8):
        training.step()
        training.evaluate()


@pytest.mark.filterwarnings("ignore:.*replicas")
def test_outputs_of_different_batches_before_their_backwards(orders):
    n, home = len(orders.places), orders.home
    training = Elsewhere(orders, (n, n - 1, 1), home, home)
    for _ in range(3):
        outs = [training.forward() for _ in range(3)]
        for out in outs:
            for parameter in training.backward(out):
                parameter.grad = None
        del outs, out


@pytest.mark.parametrize("when_full", [False, True])
@pytest.mark.filterwarnings("ignore:.*replicas")
def test_moves_that_are_hidden_for_some_batches_only(orders, monkeypatch, when_full):
    """What is worth it is measured for each number of ranks."""
    n = len(orders.places)
    plain = replicas.is_worth_hiding

    def is_worth_hiding(tensors, devices, transport):
        is_full = len(devices) == n
        return is_full is when_full and plain(tensors, devices, transport)

    monkeypatch.setattr(replicas, "is_worth_hiding", is_worth_hiding)
    training = Elsewhere(orders, (n, n - 1, 1), orders.home, orders.home)
    for _ in range(7):
        training.step()
        training.evaluate()
    outs = [training.forward() for _ in range(3)]
    for out in reversed(outs):
        for parameter in training.backward(out):
            parameter.grad = None
