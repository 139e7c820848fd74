"""Memory of GPUs around a move, tried where there is none: what is asked of torch, and when."""

import contextlib
import os

import pytest
import torch

from fastdp import buckets, comm, comm_coalesced, moves, peers, streams
from fastdp.streams import Communication

HOST = torch.device("cpu")
GPUS = [torch.device("cuda", index) for index in range(3)]


class Short:
    """A core that is short of memory for its first calls."""

    def __init__(self, failures):
        self.failures = failures
        self.calls = []

    def broadcast(self, sources, flats):
        self.calls.append("broadcast")
        if len(self.calls) <= self.failures:
            raise MemoryError("cuda:1: no memory for 512 bytes")

    def reduce(self, rows, flat):
        self.broadcast(rows, flat)

    size_elems = 3


@pytest.fixture
def cache(monkeypatch):
    """The devices whose cache was emptied, each while it was the current one."""
    current, emptied = [None], []

    @contextlib.contextmanager
    def device(which):
        before, current[0] = current[0], which
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(current[0]))
    return emptied


def a_bucket(devices, failures):
    host = [HOST, HOST]
    made = buckets.Bucket([torch.ones(3)], (0,), (True,), host, Communication(host), "zero")
    made.devices, made.device, made.core = devices, devices[0], Short(failures)
    return made


MOVES = {
    "broadcast": lambda bucket: bucket._move(bucket.core.broadcast, (), ()),
    "reduce": lambda bucket: bucket._move(bucket.core.reduce, (), ()),
}


@pytest.mark.parametrize("move", MOVES)
def test_short_memory_empties_torchs_caches_and_tries_again(cache, move):
    bucket = a_bucket([GPUS[0], GPUS[1], GPUS[0]], 1)
    MOVES[move](bucket)
    assert len(bucket.core.calls) == 2
    assert cache == [GPUS[0], GPUS[1]]


@pytest.mark.parametrize("move", MOVES)
def test_memory_that_stays_short_is_an_error(cache, move):
    bucket = a_bucket([GPUS[0], GPUS[1]], 2)
    with pytest.raises(MemoryError, match="cuda:1: no memory for 512 bytes"):
        MOVES[move](bucket)
    assert len(bucket.core.calls) == 2


def test_the_host_has_no_cache_to_empty(cache):
    bucket = a_bucket([HOST, HOST], 1)
    with pytest.raises(MemoryError):
        MOVES["broadcast"](bucket)
    assert len(bucket.core.calls) == 1 and cache == []


def test_both_moves_of_a_bucket_try_again(cache):
    """copies() and sums() go that way."""
    bucket = a_bucket([GPUS[0], GPUS[1]], 1)
    bucket.slots = lambda flat: [flat]
    flat = torch.zeros(3)
    bucket.copies([torch.ones(3)], False, (flat,))
    bucket.core.calls.clear()
    bucket.sums([torch.ones(3)], flat)
    assert len(bucket.core.calls) == 2 and len(cache) == 4


def test_the_moves_of_a_recorded_step_try_again(cache, monkeypatch):
    bucket = a_bucket([GPUS[0], GPUS[1]], 1)
    bucket.broadcast((torch.ones(3),), (torch.zeros(3),))
    bucket.core.calls.clear()
    bucket.reduce(((torch.ones(3),),), torch.zeros(3))
    assert len(bucket.core.calls) == 2
    short = Short(1)
    monkeypatch.setattr(buckets, "_C", short)
    bucket.reduce_flats((torch.ones(3),), torch.zeros(5))
    assert len(short.calls) == 2 and len(cache) == 6


@pytest.fixture
def copied(monkeypatch):
    """The (source, target) pairs between which torch was made to copy."""
    pairs = []

    class Cell:
        def __init__(self, size, device):
            self.device = device

        def to(self, target):
            pairs.append((self.device.index, target.index))

    monkeypatch.setattr(torch, "empty", lambda size, device: Cell(size, device))
    monkeypatch.setattr(peers, "_open", set())
    return pairs


def test_torch_opens_its_memory_before_the_first_move(copied):
    peers.open_peers([GPUS[0], HOST, GPUS[1]])
    assert sorted(copied) == [(0, 1), (1, 0)]
    peers.open_peers([GPUS[1], GPUS[0], GPUS[0]])
    assert len(copied) == 2
    peers.open_peers(iter(GPUS))
    assert sorted(copied) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    for _ in range(2):  # each wrapper has two of these
        streams.Communication(GPUS, beside=False).open()
    assert len(copied) == 6


def test_memory_that_could_not_be_opened_is_opened_at_the_next_move(copied, monkeypatch):
    makes = torch.empty

    def fails(size, device):
        raise MemoryError

    monkeypatch.setattr(torch, "empty", fails)
    with pytest.raises(MemoryError):
        peers.open_peers(GPUS)
    monkeypatch.setattr(torch, "empty", makes)
    peers.open_peers(GPUS)
    assert len(copied) == 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_knows_nothing_of_its_parents_memory():
    peers._open.add(frozenset(GPUS))
    try:
        child = os.fork()
        if child == 0:
            os._exit(len(peers._open))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert frozenset(GPUS) in peers._open
    finally:
        peers._open.discard(frozenset(GPUS))


@pytest.mark.parametrize("devices", [[], [HOST, HOST], [GPUS[0], HOST], [GPUS[1], GPUS[1]]])
def test_one_gpu_has_nothing_to_open(copied, devices):
    peers.open_peers(devices)
    assert copied == []


def test_every_move_opens_first(monkeypatch):
    from fastdp.arrays import TORCH

    asked = []
    monkeypatch.setattr(moves, "open_peers", lambda devices: asked.append(list(devices)))
    tensor = torch.arange(4.0)
    moves.scatter(TORCH, tensor, [HOST, HOST], [2, 2], 0)
    moves.gather(TORCH, [tensor, tensor], 0, HOST)
    moves.broadcast(TORCH, tensor, [HOST, HOST])
    moves.reduce(TORCH, [tensor, tensor], HOST)
    assert asked == [[HOST] * 3] * 4


def test_every_move_into_memory_that_is_there_opens_first(monkeypatch):
    asked = []
    monkeypatch.setattr(comm, "open_peers", lambda devices: asked.append(list(devices)))
    tensor, halves = torch.arange(4.0), [torch.empty(2), torch.empty(2)]
    comm.scatter(tensor, out=halves)
    comm.gather(halves, out=torch.empty(4))
    comm.broadcast(tensor, out=[torch.empty(4), torch.empty(4)])
    assert asked == [[HOST] * 3] * 3


def test_buckets_of_comm_open_first(monkeypatch):
    asked = []
    monkeypatch.setattr(comm_coalesced, "open_peers", lambda devices: asked.append(set(devices)))
    tensors = [torch.arange(4.0), torch.arange(3.0)]
    comm.broadcast_coalesced(tensors, ["cpu", "cpu"])
    comm.reduce_add_coalesced([tensors, tensors], "cpu")
    assert asked == [{HOST}] * 2
