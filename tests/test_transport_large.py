"""Moves that are large enough to go in chunks, on GPUs, while their streams are held up: the
sources are made late, and spoiled right after the call, on their own streams. Whole numbers, so all
sums are exact. The chunks' arithmetic and waits are tested without GPUs in tests/c."""

import pytest
import torch
from conftest import no_cuda_reason
from gpu_lists import EIGHT, FOUR, ON_ONE, need

from fastdp import comm

ELEMS = 12_500_003  # 50 MB of float32: three chunks
HELD_CYCLES = 20_000_000  # some 10 ms


LISTS = [(0, 0), (0, 1), (1, 0), (0, 1, 0, 1), ON_ONE, (3, 1), FOUR[1], EIGHT[0], EIGHT[2]]


@pytest.fixture(params=LISTS, ids=str)
def devices(request):
    if no_cuda_reason():
        pytest.skip(no_cuda_reason())
    return [torch.device("cuda", index) for index in need(request.param)]


def numbers(rank, count=ELEMS):
    return (torch.arange(count) * 7 + rank * 3).remainder(101).float()


def hold(devices):
    for device in set(devices):
        with torch.cuda.device(device):
            torch.cuda._sleep(HELD_CYCLES)


def late(tensor, device):
    """A tensor that gets its numbers only when the device's stream gets there."""
    made = torch.full(tensor.shape, float("nan"), device=device)
    return made, tensor.to(device)


@pytest.mark.gpu
def test_reduce(devices):
    ranks = [numbers(rank) for rank in range(len(devices))]
    pairs = [late(rank, device) for rank, device in zip(ranks, devices)]
    sources = [made for made, _ in pairs]
    for _ in range(3):
        hold(devices)
        for made, real in pairs:
            made.copy_(real)
        total = comm.reduce_add(sources, devices[0])
        for made in sources:
            made.fill_(float("nan"))
        assert torch.equal(total.cpu(), sum(ranks[1:], ranks[0]))


@pytest.mark.gpu
def test_broadcast_of_a_bucket(devices):
    shapes = [3, ELEMS // 2, 1000, ELEMS // 3, 1]
    wanted = [numbers(k, count) for k, count in enumerate(shapes)]
    pairs = [late(tensor, devices[0]) for tensor in wanted]
    sources = [made for made, _ in pairs]
    for _ in range(3):
        hold(devices)
        for made, real in pairs:
            made.copy_(real)
        rows = comm.broadcast_coalesced(sources, devices, buffer_size=2**30)
        for made in sources:
            made.fill_(float("nan"))
        # The first are the sources themselves.
        for row, device in zip(rows[1:], devices[1:], strict=True):
            assert all(tensor.device == device for tensor in row)
            assert all(torch.equal(got.cpu(), want) for got, want in zip(row, wanted))


@pytest.mark.gpu
def test_reduce_of_a_bucket(devices):
    shapes = [3, ELEMS // 2, 1000, ELEMS // 3, 1]
    ranks = [[numbers(r + k, n) for k, n in enumerate(shapes)] for r in range(len(devices))]
    pairs = [[late(t, device) for t in rank] for rank, device in zip(ranks, devices)]
    sources = [[made for made, _ in row] for row in pairs]
    for _ in range(3):
        hold(devices)
        for row in pairs:
            for made, real in row:
                made.copy_(real)
        sums = comm.reduce_add_coalesced(sources, devices[0], buffer_size=2**30)
        for row in sources:
            for made in row:
                made.fill_(float("nan"))
        for got, *parts in zip(sums, *ranks):
            assert torch.equal(got.cpu(), sum(parts[1:], parts[0]))
