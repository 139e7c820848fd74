"""The coalesced functions of fastdp.comm: any mix of dtypes, shapes, strides and sparse tensors, at
any buffer size, equals moving the tensors one by one."""

import pytest
import torch

from comm_cases import COUNTS, LAYOUTS, MOVED, SUMMED, disjoint, laid_out, same, values
from fastdp import comm
from fastdp.arrays import TORCH
from fastdp.comm_coalesced import _groups, broadcast
from test_comm import exact_sum, home_of

BUFFER_SIZES = [0, 1, 40, 100, 10485760]


def mixed(dtypes, rank=0, device="cpu"):
    """Tensors of interleaved dtypes, small, empty and 0-dim, some in odd layouts."""
    shapes = [(5,), (), (3, 4), (0,), (1,), (2, 0, 3), (13,), (1031,), (4, 4)]
    layouts = [name for name in LAYOUTS if name != "stepped"]
    return [
        laid_out(values(shape, dtype, rank, device), layouts[(i + j) % len(layouts)])
        for i, shape in enumerate(shapes)
        for j, dtype in enumerate(dtypes)
    ]


def sparse(rank, dtype=torch.float64, size=(4, 3), coalesced=False):
    """Two entries of which one is doubled; their places depend on the rank."""
    rows = torch.tensor([[rank % 4, 3, 3], [0, 2, 2]])
    entries = torch.tensor([1 + rank, 2, 3]).to(dtype)
    tensor = torch.sparse_coo_tensor(rows, entries, size, check_invariants=True)
    return tensor.coalesce() if coalesced else tensor


@pytest.mark.parametrize("buffer_size", BUFFER_SIZES)
@pytest.mark.parametrize("count", COUNTS)
def test_broadcast_coalesced_keeps_order_and_bits(count, buffer_size, devices):
    tensors = mixed([torch.float32, torch.int64, torch.bool], device=home_of(devices))
    rows = comm.broadcast_coalesced(iter(tensors), devices(count), buffer_size)
    assert isinstance(rows, tuple) and len(rows) == count
    for row in rows:
        assert isinstance(row, tuple) and len(row) == len(tensors)
        assert all(same(copy, tensor) for copy, tensor in zip(row, tensors))


def test_nothing_is_sent_where_the_tensors_are_all_that_is_asked_for():
    """As on one GPU, the one they lie on."""
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.int64)]
    assert broadcast(TORCH, tensors, (), 100) == []


def test_broadcast_coalesced_of_all_dtypes_at_once():
    tensors = mixed(MOVED)
    for row in comm.broadcast_coalesced(tensors, ["cpu"] * 2):
        assert all(same(copy, tensor) for copy, tensor in zip(row, tensors))


@pytest.mark.parametrize("buffer_size", BUFFER_SIZES)
@pytest.mark.parametrize("count", COUNTS)
def test_reduce_add_coalesced_sums_each_group(count, buffer_size, devices):
    dtypes = [torch.float32, torch.int64, torch.bool]
    ranks = [mixed(dtypes, rank, home_of(devices)) for rank in range(count)]
    sums = comm.reduce_add_coalesced(map(iter, ranks), devices(1)[0], buffer_size)
    assert isinstance(sums, tuple) and len(sums) == len(ranks[0])
    assert all(same(total, exact_sum(group)) for total, group in zip(sums, zip(*ranks)))


def test_reduce_add_coalesced_of_all_dtypes_at_once():
    ranks = [mixed(SUMMED, rank) for rank in range(3)]
    sums = comm.reduce_add_coalesced(ranks)
    assert all(same(total, exact_sum(group)) for total, group in zip(sums, zip(*ranks)))


def test_reduce_add_coalesced_sums_in_rank_order():
    ranks = [[torch.tensor([value])] for value in (1e8, 1.0, -1e8, 1.0)]
    assert comm.reduce_add_coalesced(ranks)[0].item() == 1.0
    assert comm.reduce_add_coalesced([ranks[i] for i in (0, 2, 1, 3)])[0].item() == 2.0


def test_groups_fill_buffers_by_dtype():
    floats = [torch.empty(2) for _ in range(5)]  # 8 bytes each
    longs = [torch.empty(2, dtype=torch.int64) for _ in range(2)]  # 16 bytes each
    order = [floats[0], longs[0], floats[1], floats[2], longs[1], floats[3], floats[4]]

    def groups(limit):
        return sorted(_groups(TORCH, [order], limit))

    assert groups(16) == [[0, 2], [1], [3, 5], [4], [6]]
    assert groups(24) == [[0, 2, 3], [1], [4], [5, 6]]
    assert groups(1000) == [[0, 2, 3, 5, 6], [1, 4]]
    assert groups(0) == [[i] for i in range(7)]


def test_one_core_call_for_each_bucket():
    from fastdp import _C

    tensors = [torch.ones(4), torch.ones(2, dtype=torch.int64), torch.zeros(4)]
    before = _C.counters()
    comm.broadcast_coalesced(tensors, ["cpu"] * 3)
    comm.reduce_add_coalesced([tensors, tensors])
    comm.reduce_add_coalesced([tensors, tensors], buffer_size=16)
    after = _C.counters()
    calls = {verb: after[verb]["calls"] - before[verb]["calls"] for verb in after}
    assert calls["bucket_broadcast"] == 2 and calls["bucket_reduce"] == 2 + 3
    for verb, call in {
        "bucket_broadcast": lambda: comm.broadcast_coalesced(tensors, ["cpu"]),
        "bucket_reduce": lambda: comm.reduce_add_coalesced([tensors]),
    }.items():
        _C.arm_fault(verb, 2)
        with pytest.raises(_C.FaultInjected):
            call()
        call()


def test_results_are_new_have_own_versions_and_leave_inputs_alone():
    ranks = [[torch.randn(3), torch.randn(2, 2)] for _ in range(2)]
    before = [[tensor.clone() for tensor in rank] for rank in ranks]
    rows = comm.broadcast_coalesced(ranks[0], ["cpu"] * 2)
    sums = comm.reduce_add_coalesced(ranks)
    results = [*rows[0], *rows[1], *sums, *comm.reduce_add_coalesced(ranks[:1])]
    assert disjoint(*ranks[0], *ranks[1], *results)
    for result in results:
        assert not result._is_view()
        versions = [other._version for other in results if other is not result]
        result.add_(1)
        assert [other._version for other in results if other is not result] == versions
    assert all(same(a, b) for x, y in zip(ranks, before) for a, b in zip(x, y))


def test_an_in_place_change_of_one_result_spares_graphs_of_the_others():
    (row,) = comm.broadcast_coalesced([torch.ones(2), torch.ones(2)], ["cpu"])
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * row[0]).sum()
    row[1].add_(1)
    loss.backward()
    assert weight.grad.tolist() == [1, 1]


def test_results_carry_no_autograd():
    x = torch.randn(3, requires_grad=True)
    ((copy,),) = comm.broadcast_coalesced([x], ["cpu"])
    (total,) = comm.reduce_add_coalesced([[x], [x * 2]])
    assert not copy.requires_grad and not total.requires_grad


def test_dense_strides_are_kept():
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    matrix = torch.randn(4, 5).t()
    ((a, b),) = comm.broadcast_coalesced([image, matrix], ["cpu"])
    c, d = comm.reduce_add_coalesced([[image, matrix]] * 2)
    assert a.stride() == c.stride() == image.stride()
    assert b.stride() == d.stride() == matrix.stride()


def test_nothing_to_move():
    assert comm.broadcast_coalesced([], ["cpu"] * 2) == ((), ())
    assert comm.reduce_add_coalesced([[], []]) == ()


# Sparse tensors


def parts(tensor):
    return tensor._indices(), tensor._values()


@pytest.mark.parametrize("buffer_size", BUFFER_SIZES)
@pytest.mark.parametrize("coalesced", [False, True])
def test_broadcast_coalesced_of_sparse_tensors(buffer_size, coalesced):
    tensors = [
        torch.arange(3.0),
        sparse(1, coalesced=coalesced),
        sparse(2, torch.int64, (5, 4), coalesced),
        torch.zeros(2, 2).to_sparse(),
        torch.randn(4, 3).to_sparse(1),  # hybrid
        torch.arange(2),
    ]
    for row in comm.broadcast_coalesced(tensors, ["cpu"] * 3, buffer_size):
        for copy, tensor in zip(row, tensors):
            assert copy.layout == tensor.layout and copy.shape == tensor.shape
            if not tensor.is_sparse:
                assert same(copy, tensor)
                continue
            assert copy.is_coalesced() == tensor.is_coalesced()
            for ours, theirs in zip(parts(copy), parts(tensor)):
                assert same(ours, theirs) and disjoint(ours, theirs)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_reduce_add_of_sparse_tensors(count):
    inputs = [sparse(rank) for rank in range(count)]
    expected = sum(tensor.to_dense() for tensor in inputs)
    total = comm.reduce_add(inputs)
    assert total.is_sparse and torch.equal(total.to_dense(), expected)
    (again,) = comm.reduce_add_coalesced([[tensor] for tensor in inputs])
    assert again.is_sparse and torch.equal(again.to_dense(), expected)
    assert all(disjoint(total._values(), tensor._values()) for tensor in inputs)


def test_reduce_add_coalesced_of_sparse_and_dense_groups():
    ranks = [
        [sparse(rank), torch.full((4, 3), rank, dtype=torch.float64), sparse(rank, torch.int32)]
        for rank in range(3)
    ]
    ranks[1][1] = sparse(5)  # a group in which only some are sparse
    a, b, c = comm.reduce_add_coalesced(ranks)
    assert a.is_sparse and not b.is_sparse and c.is_sparse
    for total, group in zip((a, b, c), zip(*ranks)):
        assert torch.equal(total.to_dense(), sum(tensor.to_dense() for tensor in group))


def test_sparse_sums_run_in_rank_order():
    def entry(value):
        return torch.tensor([0, value, 0]).to_sparse()

    inputs = [entry(value) for value in (1e8, 1.0, -1e8, 1.0)]
    assert comm.reduce_add(inputs).to_dense().tolist() == [0, 1, 0]
    assert comm.reduce_add([inputs[i] for i in (0, 2, 1, 3)]).to_dense().tolist() == [0, 2, 0]
