"""The waits that fastdp makes in Python, on pretended GPUs under an oracle (orders.py): whole steps,
with parameters beside and in line with compute, in which no two accesses may be without an order.
`build_tools/python_mutation.py` leaves out one wait at a time; then something here has to fail."""

import gc
import weakref

import pytest
import torch
from orders import Orders
from pretended_gpus import GPUS, Gpus
from torch import nn

import fastdp
from fastdp import streams

pytestmark = pytest.mark.skipif(
    torch.backends.cuda.is_built() and not torch.cuda.is_available(),
    reason="needs GPUs, or a torch without CUDA: this one asks the driver that is not there",
)

WIDTH, LAYERS = 4, 5


class Net(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = [layer]
        self.weights = nn.ParameterList(
            nn.Parameter(torch.full((WIDTH,), float(k + 1)).double()) for k in range(LAYERS)
        )
        self.idle = nn.Parameter(torch.ones(WIDTH).double())

    def forward(self, x):
        for weight in self.weights:
            x = self.layer[0](x, weight)
        return x


class Training:
    """Training steps that tell the oracle what the user's own code does."""

    def __init__(self, orders, batch_grad=False, **options):
        self.orders = orders
        self.module = Net(orders.layer())
        options = {"bucket_bytes": 1, "sequential": True, **options}
        self.dp = fastdp.DataParallel(self.module, ["cpu"] * 2, **options)
        self.batch_grad = batch_grad

    def home(self):
        return self.orders.current()

    def forward(self):
        x = torch.ones(4, WIDTH).double().requires_grad_(self.batch_grad)
        self.orders.write(self.home(), x.detach(), "a batch")
        out = self.dp(x)
        self.orders.read(self.home(), out.detach(), "the user")
        self.orders.write(self.home(), x.detach(), "the next batch")
        return out

    def backward(self, out):
        above = torch.ones_like(out)
        self.orders.write(self.home(), above, "a loss")
        self.orders._block(above, None).ready = dict(self.home().clock)
        out.backward(above)
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        self.orders.join(self.home(), [p.grad for p in parameters])
        self.orders.write(self.home(), above, "the user, after a backward")
        return parameters

    def step(self):
        for parameter in self.backward(self.forward()):
            self.orders.read(self.home(), parameter.grad, "an optimizer")
            self.orders.write(self.home(), parameter.detach(), "an optimizer")
            parameter.grad = None

    def evaluate(self):
        with torch.no_grad():
            self.forward()


@pytest.fixture(params=[True, False], ids=["beside", "in line"])
def hidden(request):
    return request.param


@pytest.fixture
def gpus(monkeypatch, hidden):
    return Gpus(monkeypatch, hidden)


@pytest.fixture
def orders(gpus, monkeypatch):
    found = Orders(gpus, monkeypatch)
    yield found
    assert not found.reports, "\n".join(dict.fromkeys(found.reports))


def test_steps(orders):
    training = Training(orders)
    for _ in range(4):
        training.step()


def test_steps_with_gradients_of_the_batch(orders):
    training = Training(orders, batch_grad=True)
    for _ in range(3):
        training.step()


def test_evaluation_between_steps(orders):
    training = Training(orders)
    for _ in range(3):
        training.step()
        training.evaluate()
        training.evaluate()


def test_gradients_that_are_nobodys_are_given_back(orders):
    training = Training(orders, unused_grad="none")
    for _ in range(4):
        training.step()


def test_other_streams_in_each_step(orders):
    training = Training(orders)
    for _ in range(4):
        training.step()
        orders.other_streams()


def test_other_streams_before_a_backward(orders):
    training = Training(orders)
    for _ in range(3):
        out = training.forward()
        orders.other_streams()
        for parameter in training.backward(out):
            parameter.grad = None


def test_two_forwards_before_their_backwards(orders):
    training = Training(orders)
    for _ in range(2):
        outs = [training.forward(), training.forward()]
        for out in reversed(outs):
            for parameter in training.backward(out):
                parameter.grad = None


def test_replicas_by_hand(orders):
    """Forwards whose copies have to be there when `replicate` returns."""
    training = Training(orders)
    dp = training.dp
    for _ in range(3):
        x = torch.ones(4, WIDTH).double()
        orders.write(orders.current(), x, "a batch")
        rows, named = dp.scatter((x,), {}, dp.device_ids)
        replicas = dp.replicate(dp.module, dp.device_ids)
        weights = [list(replica.weights) for replica in replicas]
        for rank, row in enumerate(weights):
            for weight in row:
                orders.read(orders.current(rank), weight.detach(), "the user")
        out = dp.gather(dp.parallel_apply(replicas, rows, named), dp.output_device)
        training.backward(out)
        del replicas, weights, rows, out


def test_pinned_memory_is_kept_until_it_was_read(gpus, monkeypatch):
    class Pinned:
        device = torch.device("cpu")

        def is_pinned(self):
            return True

    monkeypatch.setattr(streams, "_held", [])
    gpus.stall(GPUS[1])
    tensor = Pinned()
    gone = weakref.ref(tensor)
    streams.hold_pinned(tensor, GPUS)
    del tensor
    other = Pinned()
    streams.hold_pinned(other, GPUS)
    gc.collect()
    assert gone() is not None
    gpus.resume()
    streams.hold_pinned(other, GPUS)
    gc.collect()
    assert gone() is None
