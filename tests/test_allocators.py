"""Memory that is freed while another stream reads it, where torch's allocator does not keep it for
the stream that it was taken on (allocators.py)."""

import cuda_child
import pytest
import torch
from conftest import no_cuda_reason
from pretended_gpus import GPUS, can_pretend
from torch import nn

import fastdp
from fastdp import allocators, streams

OURS, OTHERS = 4096, 1 << 20


@pytest.fixture
def cuda(monkeypatch):
    """A torch with GPUs whose memory it can tell of."""

    def segment(address, **known):
        return {"address": address, "total_size": 512, **known}

    def set_up(backend, *segments):
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
        found = [segment(address, **known) for address, known in segments]
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: found)
        monkeypatch.setattr(torch, "empty", lambda *sizes, **options: Probe())

    class Probe:
        def data_ptr(self):
            return OURS + 8

    return set_up


@pytest.mark.parametrize(
    "segments, told",
    [
        ([], False),
        ([(OURS, {})], False),  # of a torch that does not say
        ([(OURS, {"is_expandable": False}), (OTHERS, {"is_expandable": True})], False),
        ([(OTHERS, {"is_expandable": False}), (OURS, {"is_expandable": True})], True),
        ([(OURS - 512, {"is_expandable": True})], False),  # ends where ours begins
    ],
    ids=["none", "silent", "others", "ours", "beside"],
)
def test_expandable_segments_are_told_of_readers(cuda, segments, told):
    cuda("native", *segments)
    assert allocators.has_to_be_told(GPUS) is told
    assert not allocators.has_to_be_told([])


@pytest.mark.parametrize("backend", ["cudaMallocAsync", "pluggable"])
def test_other_allocators_are_told_of_readers(cuda, backend):
    cuda(backend)
    assert allocators.has_to_be_told(GPUS)


@can_pretend()
@pytest.mark.parametrize("hidden", [True, False], ids=["beside", "in line"])
@pytest.mark.parametrize("tells", [True, False], ids=["told", "not told"])
def test_all_memory_of_communication_streams_is_recorded_for_its_readers(
    gpus, monkeypatch, hidden, tells
):
    monkeypatch.setattr(streams, "has_to_be_told", lambda devices: tells)
    places = [torch.device("cpu"), torch.device("cpu")]
    recorded = []

    def record_stream(tensor, stream):
        recorded.append((tensor.numel(), stream.name))

    def readers(communication, device):
        """Of both GPUs: here all memory is the host's."""
        found = [plain(communication, gpu) for gpu in GPUS]
        return [stream for each in found for stream in each]

    plain = streams.Communication.readers
    monkeypatch.setattr(streams.Communication, "readers", readers)
    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    module = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 100, bias=False))
    dp = fastdp.DataParallel(module, places, sequential=True)
    dp(torch.arange(4)).sum().backward()
    found = {size for size, _ in recorded}
    if not (hidden and tells):
        assert recorded == []
        return
    assert {name for _, name in recorded} == {"c0", "c1"}
    flats = {bucket.length for bucket in dp._fastdp_get_runtime().replicator.plan_in_use().buckets}
    assert flats <= found
    assert {4, 4 * 3} <= found, "the indices and values of a sparse gradient"
    gpus.current[GPUS[1]] = other = streams.current_stream(GPUS[1]).__class__("d1", GPUS[1])
    recorded.clear()
    dp(torch.arange(4)).sum().backward()
    assert {name for _, name in recorded} == {"c0", "c1", other.name}


@pytest.fixture(scope="module")
def children():
    if no_cuda_reason() or torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    started = {
        setting: cuda_child.start(
            "freed", [0, 1], PYTORCH_CUDA_ALLOC_CONF=setting, FASTDP_OVERLAP="always"
        )
        for setting in SETTINGS
    }
    yield started
    cuda_child.stop(started.values())


SETTINGS = {
    "backend:native": False,
    "expandable_segments:True": True,
    "backend:cudaMallocAsync": True,
}


@pytest.mark.gpu
@pytest.mark.parametrize("setting", SETTINGS)
def test_memory_that_is_given_back_while_it_is_read(children, setting):
    found = cuda_child.answer(children[setting])
    assert found["wrong"] == []
    assert found["told"] and set(found["told"]) == {SETTINGS[setting]}
