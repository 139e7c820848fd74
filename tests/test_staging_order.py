"""What the copies of a batch wait for, and who waits for them, on pretended GPUs."""

import pytest
import torch
from pretended_gpus import GPUS, Stream, can_pretend
from torch import nn

import fastdp
from fastdp import staging

pytestmark = can_pretend()


class OnGpu(torch.Tensor):
    """A tensor of the host's that says it lies on the second GPU."""

    device = GPUS[1]


@pytest.fixture
def hidden():
    return True


@pytest.fixture
def copy_streams(gpus, monkeypatch):
    found = [Stream(f"b{device.index}", device) for device in GPUS]
    monkeypatch.setattr(staging, "_copy_stream", lambda device: found[device.index])
    monkeypatch.setattr(staging, "_is_plain", lambda tensor: True)
    return found


def test_a_loader_on_a_gpu_may_write_the_next_batch_where_the_last_one_lies(
    gpus, copy_streams, monkeypatch
):
    """What it enqueues next comes after the copies, which come after what it enqueued before."""
    current = [gpus.current[device] for device in GPUS]
    made = current[1].step()
    read = []

    def broadcast(family, source, devices):
        """As the core orders it: in the end the source's stream waits for the read."""
        own, target = gpus.current[GPUS[1]], gpus.current[devices[0]]
        assert [own, target] == [copy_streams[1], copy_streams[devices[0].index]]
        assert own.clock["c1"] >= made
        target.merge(own.clock)
        read.append((target.name, target.step()))
        own.merge(target.clock)
        return (source,)

    monkeypatch.setattr(staging.moves, "broadcast", broadcast)
    dp = fastdp.DataParallel(nn.Linear(3, 2), ["cpu"] * 2)
    stager = staging.Stager(dp, tuple(GPUS), None)
    stager.stage(torch.ones(4, 3).as_subclass(OnGpu))
    assert [name for name, _ in read] == ["b0", "b1"]
    assert all(current[1].clock[name] >= step for name, step in read)
    assert not set(current[0].clock) & {"b0", "b1"}  # whose batch it was not
