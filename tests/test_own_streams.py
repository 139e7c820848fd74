"""Streams of fastdp's own (own_streams.py): one for each use and GPU, and none of torch's."""

import threading

import pytest
import torch
from conftest import no_cuda_reason
from fastdp import _C, own_streams

GPU = torch.device("cuda", 0)
USES = ("captures", "beside a capture", "arguments", "batches")


def test_threads_that_meet_get_one(monkeypatch):
    made, meeting = [], threading.Barrier(4)

    def opened(device):
        made.append(device)
        return object()

    def ask():
        meeting.wait()
        got.append(own_streams.own_stream("captures", GPU))

    monkeypatch.setattr(own_streams, "_streams", {})
    monkeypatch.setattr(own_streams, "_opened", opened)
    got = []
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [GPU] and len(set(map(id, got))) == 1
    assert own_streams.own_stream("batches", GPU) not in got


@pytest.mark.parametrize("device", [3, (2,), ("cuda", 0), (1, 0)], ids=str)
def test_what_is_no_gpu(device):
    expected = ValueError if device == (1, 0) else TypeError
    with pytest.raises(expected):
        _C.open_stream(device)


@pytest.mark.skipif(_C.build_info()["cuda"], reason="this build has CUDA")
def test_a_build_without_cuda_says_so():
    with pytest.raises(NotImplementedError, match="cuda:0: this build has no CUDA backend"):
        _C.open_stream((2, 0))


@pytest.mark.gpu
@pytest.mark.skipif(no_cuda_reason() is not None, reason=str(no_cuda_reason()))
def test_torch_gives_them_to_nobody():
    """It gives the same 32 again and again."""
    theirs = {torch.cuda.Stream(GPU).cuda_stream for _ in range(100)}
    assert len(theirs) < 100
    ours = {own_streams.own_stream(use, GPU).cuda_stream for use in USES}
    assert len(ours) == len(USES) and not ours & theirs


@pytest.mark.gpu
@pytest.mark.skipif(no_cuda_reason() is not None, reason=str(no_cuda_reason()))
def test_what_another_thread_launches_is_not_recorded():
    """However many streams it has: it is run at once, and not by a replay."""
    stream = own_streams.own_stream("captures", GPU)
    static, other = (torch.zeros(8, device=GPU) for _ in range(2))
    graph = torch.cuda.CUDAGraph()

    def launch():
        for _ in range(64):
            with torch.cuda.stream(torch.cuda.Stream(GPU)):
                other.add_(1.0)

    torch.cuda.synchronize(GPU)
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            static.add_(1.0)
            thread = threading.Thread(target=launch)
            thread.start()
            thread.join()
        finally:
            graph.capture_end()
    torch.cuda.synchronize(GPU)
    before = other.clone()
    graph.replay()
    torch.cuda.synchronize(GPU)
    assert static.tolist() == [1.0] * 8 and torch.equal(other, before)
