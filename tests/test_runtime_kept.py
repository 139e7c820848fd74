"""What a wrapper keeps from one forward to the next, and what makes it start anew."""

import pytest
import torch
from torch import nn

import fastdp


def wrapper():
    dp = fastdp.DataParallel(nn.Linear(2, 2), device_ids=["cpu", "cpu"])
    dp(torch.ones(4, 2))
    return dp, dp._fastdp_get_runtime()


def test_it_is_kept():
    dp, runtime = wrapper()
    assert runtime.is_for(dp.module, dp)
    dp.device_ids = ["cpu", "cpu"]  # another list of the same
    dp(torch.ones(3, 2)).sum().backward()
    assert dp._fastdp_get_runtime() is runtime


def other_module(dp):
    dp.module = nn.Linear(2, 2)


def longer_list(dp):
    dp.device_ids.append("cpu")


def other_list(dp):
    dp.device_ids = ["cpu"] * 4


def other_buckets(dp):
    dp.bucket_bytes = 17


def other_zeros(dp):
    dp.unused_grad = "none"


def other_transport(dp):
    dp.transport = "local"


CHANGES = (other_module, longer_list, other_list, other_buckets, other_zeros, other_transport)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_it_is_left(change):
    dp, runtime = wrapper()
    change(dp)
    assert not runtime.is_for(dp.module, dp)
    x = torch.ones(8, 2)
    assert torch.equal(dp(x), dp.module(x))
    assert dp._fastdp_get_runtime() is not runtime


def test_a_shorter_list_and_another_spelling_are_looked_at_closely():
    dp, runtime = wrapper()
    dp.device_ids = ["cpu", torch.device("cpu")]
    assert not runtime.is_for(dp.module, dp)
    x = torch.ones(4, 2)
    assert torch.equal(dp(x), dp.module(x))
    assert dp.scatter((x,), {}, [torch.device("cpu"), -1])[0][1][0].shape == (2, 2)
    with pytest.raises(TypeError, match="device_ids"):
        dp.scatter((x,), {}, "cpu")
