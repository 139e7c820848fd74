"""Memory that goes back in the middle of a step, on pretended GPUs under an oracle (orders.py): who
takes it next must not write it before all who read it have."""

import functools
import gc
import weakref

import pytest
import torch
from ordered_layer import layer_of
from orders import Orders
from pretended_gpus import Stream, can_pretend
from test_orders import WIDTH, Training
from torch import nn

import fastdp
from fastdp import _torch_cuda, streams
from fastdp.buckets import Bucket

pytestmark = can_pretend()


@pytest.fixture(params=["device", "direct", "node"])
def orders(gpus, monkeypatch, request):
    found = Orders(gpus, monkeypatch, request.param)
    yield found
    assert not found.reports, "\n".join(dict.fromkeys(found.reports))


def gradients(training, out, weights):
    """With their graph."""
    found = torch.autograd.grad(out, weights, training.above(out), create_graph=True)
    training.orders.join(training.home(), found)
    for gradient in found:
        training.orders.read(training.home(), gradient.detach(), "a penalty")
    return found


def forget_gradients(orders, weights):
    """Once they are there."""
    orders.join(orders.current(), [weight.grad for weight in weights])
    for weight in weights:
        weight.grad = None


@pytest.mark.parametrize("each", [2, 3, 5])
def test_a_penalty_on_some_gradients_of_a_bucket(orders, each):
    """The others' are zeros, written into memory that another bucket's may have just left."""
    training = Training(orders, bucket_bytes=each * WIDTH * 8)
    weights = list(training.module.weights)
    layer, factor = layer_of(orders), torch.ones(WIDTH).double()
    for _ in range(3):
        found = gradients(training, training.forward(), weights)
        squares = [layer(gradient, factor) for gradient in found[::-2]]
        del found
        torch.autograd.backward(squares, [training.above(each) for each in squares])
        del squares
        orders.join(orders.current(), [w.grad for w in weights])
        training.write("an optimizer")
        for weight in weights:
            weight.grad = None


def test_an_evaluation_on_other_streams_before_a_second_backward(orders):
    training = Training(orders)
    weights = list(training.module.weights)
    for _ in range(3):
        found = gradients(training, training.forward(), weights)
        before = dict(orders.gpus.current)
        orders.other_streams()
        with torch.no_grad():
            training.forward()
        orders.gpus.current.update(before)
        torch.autograd.backward(found, [training.above(g) for g in found])
        forget_gradients(orders, weights)
        del found
        gc.collect()


def test_an_evaluation_of_another_thread_in_the_middle_of_a_second_backward(orders, monkeypatch):
    """Its copies go back just before the backward takes memory."""
    training = Training(orders)
    weights = list(training.module.weights)
    plain = Bucket.take

    def take(bucket, home):
        if not home:
            before = dict(orders.gpus.current)
            orders.other_streams()
            with torch.no_grad():
                training.forward()
            orders.gpus.current.update(before)
        return plain(bucket, home)

    for _ in range(2):
        found = gradients(training, training.forward(), weights)
        with monkeypatch.context() as patch:
            patch.setattr(Bucket, "take", take)
            torch.autograd.backward(found, [training.above(g) for g in found])
        forget_gradients(orders, weights)
        del found
        gc.collect()


def test_gradients_that_were_read_on_other_streams_before_a_backward(orders):
    training = Training(orders)
    weights = list(training.module.weights)
    for _ in range(3):
        out = training.forward()
        before = dict(orders.gpus.current)
        orders.other_streams()
        gradients(training, training.forward(), weights)
        orders.gpus.current.update(before)
        for parameter in training.backward(out):
            parameter.grad = None
        del out
        gc.collect()


def test_two_wrappers_whose_communication_streams_are_the_same(orders, monkeypatch):
    """torch has 32 of a priority, and then gives the first again."""
    make = functools.lru_cache(torch.cuda.Stream)
    monkeypatch.setattr(torch.cuda, "Stream", make)
    one, other = Training(orders), Training(orders)
    for _ in range(3):
        before = dict(orders.gpus.current)
        orders.other_streams()
        with torch.no_grad():
            one.forward()
        orders.gpus.current.update(before)
        other.step()
        gc.collect()


@pytest.mark.parametrize("is_step", [False, True], ids=["evaluation", "step"])
def test_streams_of_other_libraries_that_are_gone_afterwards(orders, is_step):
    """Nobody may ask for them again; what they read is waited for all the same."""
    training = Training(orders)

    def come_after():
        """As a user's stream has to, before parameters are written, or read that were."""
        before[orders.devices[0]].merge(theirs[0].clock)

    for _ in range(2):
        before = dict(orders.gpus.current)
        orders.other_streams()
        theirs = list(orders.gpus.current.values())
        for stream in theirs:
            stream.stream_id = stream.cuda_stream
        if is_step:
            training.step()
            come_after()
        else:
            with torch.no_grad():
                training.forward()
        orders.gpus.current.update(before)
        for stream in theirs:
            stream.step = None  # which a record takes
        gc.collect()
        out = training.forward()
        come_after()
        for parameter in training.backward(out):
            parameter.grad = None
        training.evaluate()
        del out


def test_the_engine_makes_no_zeros_for_a_penalty(gpus, monkeypatch, hidden):
    """It would make them on the communication stream before anybody can wait there."""
    seen, plain = [], Bucket.with_zeros

    def with_zeros(bucket, tensors, flat):
        seen.append([tensor is None for tensor in tensors])
        return plain(bucket, tensors, flat)

    monkeypatch.setattr(Bucket, "with_zeros", with_zeros)
    module = nn.Linear(3, 2).double()
    dp = fastdp.DataParallel(module, ["cpu"] * 2, sequential=True)
    out = dp(torch.ones(4, 3).double())
    found = torch.autograd.grad(out.pow(2).sum(), [module.weight, module.bias], create_graph=True)
    found[0].pow(2).sum().backward()
    assert sorted(map(sorted, seen)) == [[False, True]]
    twin = nn.Linear(3, 2).double()
    twin.load_state_dict(module.state_dict())
    out = twin(torch.ones(4, 3).double())
    found = torch.autograd.grad(out.pow(2).sum(), [twin.weight, twin.bias], create_graph=True)
    found[0].pow(2).sum().backward()
    for mine, other in zip(module.parameters(), twin.parameters()):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("hidden", [True], ids=["beside"])
def test_an_interrupt_lets_go_of_no_gradient_that_is_still_read(gpus, monkeypatch, hidden):
    communication = streams.Communication([torch.device("cpu")] * 2)
    communication.open()
    gradient = torch.ones(3)
    gone = weakref.ref(gradient)
    compute = communication.compute()
    communication.begin(compute)
    home = communication._streams[0]  # a bucket's node runs on it
    with torch.no_grad(), streams.current([home]):
        with communication.in_backward(compute, (gradient,)):
            del gradient
    plain, calls = Stream.wait_event, []

    def interrupted(stream, event):
        calls.append(stream.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        plain(stream, event)

    monkeypatch.setattr(Stream, "wait_event", interrupted)
    with pytest.raises(KeyboardInterrupt):
        communication.release_reads()
    gc.collect()
    assert gone() is not None and calls == ["c0", "c1"]
    communication.release_reads()
    gc.collect()
    assert gone() is None and calls == ["c0", "c1"] * 2
    assert sorted(map(len, communication._spare.values())) == [1, 1]


@pytest.mark.parametrize("hidden", [True], ids=["beside"])
def test_a_wait_is_for_its_own_stream_whatever_runs_in_between(gpus, monkeypatch, hidden):
    """A destructor or a signal handler may enqueue waits on the same thread at any time."""
    first, other, then, last = (Stream(name, gpus.devices[0]) for name in ("a", "b", "c", "d"))
    streams.wait_for(last, other)  # so that there is an event to be used again
    plain = Stream.wait_event

    def broken_in_on(stream, event):
        if stream is then:
            streams.wait_for(last, other)
        plain(stream, event)

    monkeypatch.setattr(Stream, "wait_event", broken_in_on)
    first.step()
    streams.wait_for(then, first)
    assert then.log == ["a"] and then.clock["a"] == first.clock["a"]
    assert last.log == ["b", "b"]


@pytest.mark.parametrize("hidden", [True], ids=["beside"])
def test_what_a_callers_own_graph_reads_is_no_business_of_ours(gpus, monkeypatch, hidden):
    """An event that was recorded inside a capture can never be asked whether it has passed."""
    monkeypatch.setattr(streams, "_held", [])
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(_torch_cuda, "is_capturing", lambda: True)
    streams.hold_pinned(torch.ones(3), gpus.devices)
    assert streams._held == [] and gpus.records == 0
    monkeypatch.setattr(_torch_cuda, "is_capturing", lambda: False)
    streams.hold_pinned(torch.ones(3), gpus.devices)
    assert len(streams._held) == 1 and gpus.records == 2


def in_two(x):
    return fastdp.comm.scatter(x, ["cpu"] * 2)


def into_two(x):
    fastdp.comm.scatter(x, out=[torch.empty(2, WIDTH), torch.empty(2, WIDTH)])


def twice(x):
    fastdp.comm.broadcast(x, ["cpu"] * 2)


def twice_into(x):
    fastdp.comm.broadcast(x, out=[torch.empty(4, WIDTH), torch.empty(4, WIDTH)])


def joined(x):
    fastdp.comm.gather([x, torch.ones(1, WIDTH)], destination="cpu")


def joined_into(x):
    fastdp.comm.gather([x, torch.ones(1, WIDTH)], out=torch.empty(5, WIDTH))


def as_a_gradient(x):
    """Of an output that was gathered."""
    dp = fastdp.DataParallel(nn.Linear(WIDTH, WIDTH), ["cpu"] * 2)
    dp(torch.ones(4, WIDTH)).backward(x)


@pytest.mark.parametrize("hidden", [False], ids=["in line"])
@pytest.mark.parametrize(
    "act", [in_two, into_two, twice, twice_into, joined, joined_into, as_a_gradient]
)
def test_pinned_memory_is_kept_until_a_verb_has_read_it(gpus, monkeypatch, hidden, act):
    """torch's allocator would give it to the next who asks for some."""
    monkeypatch.setattr(streams, "_held", [])
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    gpus.stall(gpus.devices[0])
    x = torch.ones(4, WIDTH)
    held = x.data_ptr()
    act(x)
    assert held in [tensor.data_ptr() for _, tensor in streams._held]
