"""On which streams a backward of fastdp.comm's verbs moves, and what these wait for, on pretended
GPUs."""

import pytest
import torch
from pretended_gpus import Stream, can_pretend

from fastdp import comm, moves

pytestmark = can_pretend()
DEVICES = ["cpu"] * 2


def ones():
    return torch.ones(4, requires_grad=True)


VERBS = {
    "scatter": ("gather", lambda: comm.scatter(ones(), DEVICES)),
    "gather": ("scatter", lambda: [comm.gather([ones(), ones()], destination="cpu")]),
    "broadcast": ("reduce", lambda: comm.broadcast(ones(), DEVICES)),
    "reduce_add": ("broadcast", lambda: [comm.reduce_add([ones(), ones()], destination="cpu")]),
}


@pytest.fixture
def hidden():
    return False


@pytest.mark.parametrize("verb", VERBS)
def test_a_backward_moves_on_the_streams_of_the_forward(gpus, monkeypatch, verb):
    """The engine makes the node's stream current, and has another one on the other GPU."""
    inverse, forward = VERBS[verb]
    results = forward()
    other = Stream("engine", gpus.devices[1])
    gpus.current[gpus.devices[1]] = other
    engine, node = other.step(), gpus.current[gpus.devices[0]].step()
    plain, seen = getattr(moves, inverse), []

    def moved(*arguments):
        seen.append((gpus.names(), dict(gpus.current[gpus.devices[1]].clock)))
        return plain(*arguments)

    monkeypatch.setattr(moves, inverse, moved)
    torch.autograd.backward(results, [torch.ones_like(result) for result in results])
    ((names, clock),) = seen
    assert names == ["c0", "c1"]
    assert clock["engine"] >= engine and clock["c0"] >= node
    assert gpus.names() == ["c0", "engine"] and other.clock["c1"] > 0
