"""fastdp.comm on CUDA tensors against torch.nn.parallel.comm itself: values, devices, strides, and
which results are the inputs themselves."""

import warnings

import pytest
import torch
from torch.nn.parallel import comm as torch_comm

from conftest import no_cuda_reason
from gpu_lists import PAIRS, need

from fastdp import comm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(no_cuda_reason() is not None, reason=str(no_cuda_reason())),
]


@pytest.fixture(params=[(0, 0), (0, 1), (1, 0), *PAIRS], ids=str)
def pair(request):
    return need(request.param)


HOMES = ["cpu", "cuda:0"]
FORMATS = [torch.contiguous_format, torch.channels_last]


def image(rank=0, device="cpu", memory_format=torch.contiguous_format):
    values = torch.arange(2 * 6 * 4 * 4.0).reshape(2, 6, 4, 4) + rank
    return values.to(device).contiguous(memory_format=memory_format)


def shares(result, tensor):
    return result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def agree(ours, theirs, inputs=(), strides=True):
    assert len(ours) == len(theirs)
    for x, y in zip(ours, theirs):
        assert x.device == y.device and x.dtype == y.dtype and x.layout == y.layout
        if x.is_sparse:
            assert x.is_coalesced() == y.is_coalesced()
            x, y = x.to_dense(), y.to_dense()
        assert torch.equal(x, y)
        assert not strides or x.stride() == y.stride()
        for tensor in inputs:
            assert shares(x, tensor) == shares(y, tensor)


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter(pair, home, dim, memory_format):
    x = image(0, home, memory_format)
    for devices in (pair, pair[:1], [*pair, pair[0]]):
        agree(comm.scatter(x, devices, None, dim), torch_comm.scatter(x, devices, None, dim), [x])
    streams = [torch.cuda.Stream(device) for device in pair]
    ours = comm.scatter(x, pair, None, dim, streams)
    theirs = torch_comm.scatter(x, pair, None, dim, streams)
    for device in pair:
        torch.cuda.synchronize(device)
    agree(ours, theirs, [x])


@pytest.mark.parametrize("home", HOMES)
def test_broadcast(pair, home):
    x = image(0, home)
    agree(comm.broadcast(x, pair[:1]), torch_comm.broadcast(x, pair[:1]), [x])
    copies = comm.broadcast(x, pair)
    agree(copies, torch_comm.broadcast(x, pair))
    own = [copy for copy in copies if shares(copy, x)]
    # Each further entry for the tensor's own device is a replica of its own; torch repeats it.
    assert len(own) == (home == "cuda:0" and 0 in pair) and all(copy is x for copy in own)


@pytest.mark.parametrize("destination", [None, 0, "cuda", "cpu", -1], ids=str)
@pytest.mark.parametrize("formats", [FORMATS[:1] * 2, FORMATS[1:] * 2, FORMATS], ids=str)
def test_gather(pair, destination, formats):
    tensors = [image(i, pair[i], formats[i]) for i in range(2)]
    for dim in (0, 1, -1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of -1, by both
            ours = comm.gather(tensors, dim, destination)
            theirs = torch_comm.gather(tensors, dim, destination)
        agree([ours], [theirs], tensors)


@pytest.mark.parametrize("formats", [FORMATS[:1] * 2, FORMATS[1:] * 2], ids=str)
def test_reduce_add(pair, formats):
    tensors = [image(i, pair[i], formats[i]) for i in range(2)]
    for destination in (None, *pair):
        theirs = torch_comm.reduce_add(tensors, destination)
        agree([comm.reduce_add(tensors, destination)], [theirs])
    assert comm.reduce_add(tensors[:1], pair[0]) is tensors[0]


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("count", [2**23 - 1, 2**23, 2**23 + 1, 2**25 + 3])
def test_large_sums(pair, late, count):
    """About the size from which a tensor is copied to its destination first (csrc/limits.h), one
    GPU later than the other; the inputs are written again right after the call."""
    torch.manual_seed(0)
    on_host = [torch.randint(-1000, 1000, (count,)).float() for _ in range(2)]
    tensors = [values.to(f"cuda:{index}") for values, index in zip(on_host, pair)]
    for index in pair:
        torch.cuda.synchronize(index)
    for _ in range(2):
        with torch.cuda.device(pair[late]):
            torch.cuda._sleep(20_000_000)  # some 10 ms
        for tensor in tensors:
            tensor.mul_(2)
        total = comm.reduce_add(tensors, pair[0])
        for tensor in tensors:
            tensor.div_(2)
        assert torch.equal(total.cpu(), 2 * (on_host[0] + on_host[1]))


def mixed(rank, device):
    places, entries = torch.tensor([[0, 1, 1], [2, 0, 0]]), torch.tensor([1.0, 2, 3]) + rank
    sparse = torch.sparse_coo_tensor(places, entries, (3, 4), check_invariants=True)
    dense = [torch.arange(5.0), torch.arange(7), torch.tensor(3.0), torch.ones(2, 3).bool()]
    tensors = [*(tensor + (rank if tensor.dtype != torch.bool else False) for tensor in dense)]
    return [tensor.to(device) for tensor in (*tensors, sparse, sparse.coalesce())]


@pytest.mark.parametrize("buffer_size", [1, 20, 10485760])
def test_coalesced(pair, buffer_size):
    ranks = [mixed(i, f"cuda:{pair[i]}") for i in range(2)]
    ours = comm.broadcast_coalesced(ranks[0], pair, buffer_size)
    theirs = torch_comm.broadcast_coalesced(ranks[0], pair, buffer_size)
    for x, y in zip(ours, theirs):
        agree(x, y)
    assert all(x is y for x, y in zip(ours[0], ranks[0]))
    for destination in (None, *pair):
        agree(
            comm.reduce_add_coalesced(ranks, destination, buffer_size),
            torch_comm.reduce_add_coalesced(ranks, destination, buffer_size),
        )


def test_gradients(pair):
    x = torch.ones(4, 2, device=pair[0], requires_grad=True)
    copies = comm.broadcast(comm.gather(comm.scatter(x, pair), 0, pair[1]), pair)
    total = comm.reduce_add([copy * (1 + i) for i, copy in enumerate(copies)], pair[1])
    total.sum().backward()
    assert x.grad.device.index == pair[0] and (x.grad == 3).all()


def test_each_sum_needs_an_input_at_its_destination():
    ranks = [[torch.ones(2, device=0), torch.ones(2)]]
    with pytest.raises(ValueError, match="destination is cuda:0, but a sum is made .*: cpu"):
        comm.reduce_add_coalesced(ranks, 0)


def test_other_producers_on_a_gpu():
    cupy = pytest.importorskip("cupy")
    pieces = comm.scatter(cupy.arange(6, dtype="float32"), [0, 0])
    assert [torch.from_dlpack(piece).tolist() for piece in pieces] == [[0, 1, 2], [3, 4, 5]]
    assert torch.from_dlpack(comm.gather(pieces)).device == torch.device("cuda", 0)


@pytest.mark.parametrize("verb", ["scatter", "broadcast", "gather"])
def test_pinned_memory_that_is_let_go_of_at_once(pair, verb):
    """The next that is taken is not where a copy, which is held up, has yet to read."""

    def pinned(k):
        return torch.full((2, 1 << 18), float(k)).pin_memory()

    results = []
    for k in range(4):
        for index in set(pair):
            with torch.cuda.device(index):
                torch.cuda._sleep(20_000_000)  # some 10 ms
        if verb == "gather":
            results.append([comm.gather([pinned(k), pinned(k)], destination=pair[0])])
        else:
            results.append(getattr(comm, verb)(pinned(k), pair))
    for k, parts in enumerate(results):
        for part in parts:
            assert part.eq(k).all()
