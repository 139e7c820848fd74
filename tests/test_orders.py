"""The waits that fastdp makes in Python, on pretended GPUs under an oracle (orders.py): whole
steps, with parameters beside and in line with compute, in which no two accesses may be without an
order. `build_tools/python_mutation.py` leaves out one wait at a time; then something here has to
fail."""

import functools
import gc
import weakref

import pytest
import torch
from ordered_layer import layer_of
from orders import Orders
from pretended_gpus import GPUS, can_pretend
from torch import nn

import fastdp
from fastdp import streams

pytestmark = can_pretend()

WIDTH, LAYERS = 4, 5


class Net(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = [layer]
        self.weights = nn.ParameterList(
            nn.Parameter(torch.full((WIDTH,), float(k + 1)).double()) for k in range(LAYERS)
        )
        self.last = nn.Module()  # whose bucket nobody reads
        self.last.idle = nn.Parameter(torch.ones(WIDTH).double())

    def forward(self, x, *others):
        """`others` are read, each as a layer's weight."""
        for weight in (*others, *self.weights):
            x = self.layer[0](x, weight)
        return x


class Aside(Net):
    """Half of the layers on a side stream."""

    def forward(self, x):
        for k, weight in enumerate(self.weights):
            if k % 2 == 0:
                act = functools.partial(self.layer[0], x, weight)
                x = self.orders[0].aside(self.orders[0].place_of(x), act)
            else:
                x = self.layer[0](x, weight)
        return x


class Twice(Net):
    """Two outputs of one input, whose gradients the engine adds up."""

    def forward(self, x):
        return self.layer[0](x, self.weights[0]), self.layer[0](x, self.weights[1])


class Training:
    """Training steps that tell the oracle what the user's own code does."""

    def __init__(self, orders, net=Net, batch_grad=False, **options):
        self.orders = orders
        self.module = net(layer_of(orders))
        self.module.orders = [orders]
        options = {"bucket_bytes": 1, "sequential": True, **options}
        self.ranks = len(orders.places)
        self.dp = fastdp.DataParallel(self.module, ["cpu"] * self.ranks, **options)
        self.batch_grad = batch_grad

    def home(self):
        return self.orders.current()

    def forward(self, others=()):
        x = torch.ones(2 * self.ranks, WIDTH).double().requires_grad_(self.batch_grad)
        self.orders.write(self.home(), x.detach(), "a batch")
        out = self.dp(x, *others)
        for each in out if isinstance(out, tuple) else (out,):
            self.orders.read(self.orders.current(self.orders.output), each.detach(), "the user")
        self.orders.write(self.home(), x.detach(), "the next batch")
        return out

    def above(self, out):
        above = torch.ones_like(out)
        self.orders.write(self.orders.current(self.orders.output), above, "a loss")
        self.orders.is_made(above)
        return above

    def backward(self, out):
        outs = out if isinstance(out, tuple) else (out,)
        above = [self.above(each) for each in outs]
        torch.autograd.backward(outs, above)
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        self.orders.join(self.home(), [p.grad for p in parameters])
        for each in above:
            self.orders.write(self.home(), each, "the user, after a backward")
        return parameters

    def step(self):
        for parameter in self.backward(self.forward()):
            self.orders.read(self.home(), parameter.grad, "an optimizer")
            self.orders.write(self.home(), parameter.detach(), "an optimizer")
            parameter.grad = None

    def write(self, what):
        for parameter in self.module.parameters():
            self.orders.write(self.home(), parameter.detach(), what)

    def evaluate(self):
        with torch.no_grad():
            self.forward()
        self.write("an average of parameters")


@pytest.fixture(params=["device", "direct"])
def orders(gpus, monkeypatch, request):
    found = Orders(gpus, monkeypatch, request.param)
    yield found
    assert not found.reports, "\n".join(dict.fromkeys(found.reports))


@pytest.mark.parametrize("orders", ["device", "direct", "node", "blind"], indirect=True)
def test_steps(orders):
    training = Training(orders)
    for _ in range(4):
        training.step()


@pytest.mark.parametrize("net", [Net, Aside, Twice])
@pytest.mark.parametrize("timeout_s", [None, 1000])
def test_steps_with_gradients_of_the_batch(orders, net, timeout_s):
    training = Training(orders, net, batch_grad=True, timeout_s=timeout_s)
    for _ in range(3):
        training.step()


def test_steps_with_arguments_for_all(orders):
    training = Training(orders, batch_grad=True)
    for _ in range(3):
        whole = torch.ones(WIDTH).double().requires_grad_()
        orders.write(orders.current(), whole.detach(), "an argument")
        for parameter in training.backward(training.forward([fastdp.Replicated(whole)])):
            parameter.grad = None
        orders.write(orders.current(), whole.detach(), "the next argument")


@pytest.mark.parametrize("orders", ["device", "direct", "node"], indirect=True)
@pytest.mark.parametrize("timeout_s", [None, 1000])
def test_steps_that_are_differentiated_twice(orders, timeout_s):
    training = Training(orders, timeout_s=timeout_s)
    for _ in range(3):
        out = training.forward()
        weights = list(training.module.weights)
        found = torch.autograd.grad(out, weights, training.above(out), create_graph=True)
        orders.join(orders.current(), found)
        for gradient in found:
            orders.read(orders.current(), gradient.detach(), "a penalty")
        torch.autograd.backward(found, [training.above(g) for g in found])
        orders.join(orders.current(), [w.grad for w in weights])
        training.write("an optimizer")
        for weight in weights:
            weight.grad = None
        del out, found


def test_an_argument_for_all_that_is_differentiated_twice(orders):
    training = Training(orders)
    for _ in range(3):
        whole = torch.ones(WIDTH).double().requires_grad_()
        out = training.forward([fastdp.Replicated(whole)])
        (found,) = torch.autograd.grad(out, whole, training.above(out), create_graph=True)
        orders.join(orders.current(), [found])
        found.backward(training.above(found))
        orders.join(orders.current(), [p.grad for p in training.module.weights])
        for parameter in training.module.parameters():
            parameter.grad = None
        del out, found


def test_steps_that_are_differentiated_three_times(orders):
    training = Training(orders)
    weights = list(training.module.weights)
    for _ in range(3):
        found = [training.forward()]
        for _ in range(2):
            above = [training.above(each).requires_grad_() for each in found]
            found = torch.autograd.grad(found, weights, above, create_graph=True)
            orders.join(orders.current(), found)
        torch.autograd.backward(found, [training.above(each) for each in found])
        orders.join(orders.current(), [weight.grad for weight in weights])
        training.write("an optimizer")
        for weight in weights:
            weight.grad = None
        del found


def test_second_derivatives_again_and_again(orders):
    training = Training(orders)
    weights = list(training.module.weights)
    out = training.forward()
    found = torch.autograd.grad(out, weights, training.above(out), create_graph=True)
    orders.join(orders.current(), found)
    for _ in range(3):
        above = [training.above(gradient) for gradient in found]
        again = torch.autograd.grad(found, weights, above, retain_graph=True)
        orders.join(orders.current(), again)
        for gradient in again:
            orders.read(orders.current(), gradient.detach(), "the user")
        del again


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
        x = torch.ones(2 * training.ranks, WIDTH).double()
        orders.write(orders.current(), x, "a batch")
        rows, named = dp.scatter((x,), {}, dp.device_ids)
        replicas = dp.replicate(dp.module, dp.device_ids)
        training.write("the user")
        weights = [list(replica.weights) for replica in replicas]
        for rank, row in enumerate(weights):
            for weight in row:
                orders.read(orders.current(orders.places[rank]), weight.detach(), "the user")
        out = dp.gather(dp.parallel_apply(replicas, rows, named), dp.output_device)
        training.backward(out)
        del replicas, weights, rows, out


def test_gradients_are_held_no_longer_than_they_must(orders, hidden):
    training = Training(orders)
    for _ in range(3):
        training.step()
        communication = training.dp._fastdp_get_runtime().replicator.plan_in_use().communication
        assert communication.apart is hidden
        held = len(communication._retiring)
        assert held == (streams._MAX_RETIRING if hidden else 0)
        assert len(training.module.weights) > held
        out = training.forward()
        assert communication._retiring == []
        del out


@pytest.mark.parametrize("is_whole", [False, True], ids=["cut", "whole"])
def test_a_pinned_batch_is_kept_until_it_was_read(gpus, monkeypatch, is_whole):
    monkeypatch.setattr(streams, "_held", [])
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    dp = fastdp.DataParallel(nn.Linear(WIDTH, 2).double(), ["cpu"] * 2)
    gpus.stall(GPUS[1])
    x = torch.ones(4, WIDTH).double()
    gone = weakref.ref(x)
    dp(fastdp.Replicated(x) if is_whole else x)
    del x
    gc.collect()
    assert gone() is not None
    gpus.resume()
    dp(torch.ones(4, WIDTH).double())
    gc.collect()
    assert gone() is None


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
