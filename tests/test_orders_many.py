"""What waits for what with more than two GPUs, on eight that are pretended: tests of
test_orders.py, whose steps run here over eight replicas, and how many waits they make."""

import pytest
import torch
from orders import Orders
from pretended_gpus import Gpus, can_pretend
from test_orders import (  # noqa: F401
    Training,
    test_an_argument_for_all_that_is_differentiated_twice,
    test_evaluation_between_steps,
    test_gradients_are_held_no_longer_than_they_must,
    test_other_streams_before_a_backward,
    test_other_streams_in_each_step,
    test_replicas_by_hand,
    test_steps,
    test_steps_that_are_differentiated_twice,
    test_steps_with_arguments_for_all,
    test_steps_with_gradients_of_the_batch,
    test_two_forwards_before_their_backwards,
)
from torch import nn

import fastdp
from fastdp import _torch_cuda

COUNT = 8
pytestmark = can_pretend(COUNT)


@pytest.fixture
def gpus(monkeypatch, hidden):
    return Gpus(monkeypatch, hidden, COUNT)


@pytest.fixture(params=["device", "direct"])
def orders(gpus, monkeypatch, request):
    found = Orders(gpus, monkeypatch, request.param)
    yield found
    assert not found.reports, "\n".join(dict.fromkeys(found.reports))


def census(hidden, count):
    """Records of events, waits for them, and accesses to streams that a step makes."""
    with pytest.MonkeyPatch.context() as patch:
        gpus = Gpus(patch, hidden, count)
        asked, raw_stream = [0], _torch_cuda.raw_stream

        def counted(index):
            asked[0] += 1
            return raw_stream(index)

        patch.setattr(_torch_cuda, "raw_stream", counted)
        module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
        dp = fastdp.DataParallel(module, ["cpu"] * count, bucket_bytes=1)
        x = torch.ones(2 * count, 4)
        for _ in range(3):
            dp(x).sum().backward()
        gpus.waits()
        before, asked[0] = gpus.records, 0
        dp(x).sum().backward()
        return gpus.records - before, sum(map(len, gpus.waits().values())), asked[0]


def test_the_work_of_the_host_grows_no_faster_than_the_gpus_do(hidden):
    """From 2 to 4 GPUs and from 4 to 8: as much for each GPU that is added."""
    two, four, eight = (census(hidden, count) for count in (2, 4, 8))
    for few, more, most in zip(two, four, eight):
        assert most - more == 2 * (more - few)
    assert two[1] > 0
