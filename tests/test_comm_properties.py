"""fastdp.comm under hypothesis: shapes, strides, chunk sizes, dtypes and buffer sizes that nobody
chose, against torch and NumPy. Equality is by bits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_cases import MOVED, SUMMED, disjoint, same, values
from fastdp import comm
from fastdp.arrays import _memory_format
from test_comm import exact_sum

numpy = pytest.importorskip("numpy")

SETTINGS = settings(max_examples=200, deadline=None)
shapes = st.lists(st.integers(0, 5), min_size=0, max_size=5).map(tuple)
shapes_with_dims = st.lists(st.integers(0, 6), min_size=1, max_size=5).map(tuple)


@st.composite
def in_some_layout(draw, tensor):
    """The same values with other strides: dimensions permuted in memory, and room in between."""
    order = draw(st.permutations(range(tensor.dim())))
    room = [draw(st.integers(1, 2)) for _ in order]
    offset = draw(st.integers(0, 3))
    sizes = [tensor.size(dim) * step for dim, step in zip(order, room)]
    buffer = torch.empty(offset + math.prod(sizes), dtype=tensor.dtype)[offset:].view(sizes)
    window = buffer[tuple(slice(None, None, step) for step in room)]
    back = sorted(range(tensor.dim()), key=order.__getitem__)
    return window.permute(back).copy_(tensor)


@st.composite
def tensors(draw, shape=shapes, dtypes=MOVED, rank=0):
    tensor = values(draw(shape), draw(st.sampled_from(dtypes)), rank)
    return draw(in_some_layout(tensor))


@st.composite
def splits(draw, length, parts):
    edges = sorted(draw(st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1)))
    return [b - a for a, b in zip([0, *edges], [*edges, length])]


@SETTINGS
@given(st.data())
def test_scatter_then_gather(data):
    source = data.draw(tensors(shapes_with_dims))
    dim = data.draw(st.integers(-source.dim(), source.dim() - 1))
    count = data.draw(st.integers(1, 8))
    if data.draw(st.booleans()):
        sizes = data.draw(splits(source.size(dim), count))
        expected = source.split(sizes, dim)
    else:
        sizes = None
        expected = source.chunk(count, dim)
    pieces = comm.scatter(source, ["cpu"] * count, sizes, dim)
    assert len(pieces) == len(expected)
    assert all(same(piece, chunk) for piece, chunk in zip(pieces, expected))
    assert disjoint(source, *pieces)
    whole = comm.gather(pieces, dim)
    assert same(whole, source)
    assert disjoint(whole, *pieces)


@SETTINGS
@given(st.data())
def test_scatter_and_gather_into_out(data):
    source = data.draw(tensors(shapes_with_dims))
    dim = data.draw(st.integers(-source.dim(), source.dim() - 1))
    sizes = data.draw(splits(source.size(dim), data.draw(st.integers(1, 4))))
    chunks = source.split(sizes, dim)
    out = [data.draw(in_some_layout(torch.zeros_like(chunk))) for chunk in chunks]
    assert all(a is b for a, b in zip(comm.scatter(source, dim=dim, out=out), out))
    assert all(same(piece, chunk) for piece, chunk in zip(out, chunks))
    target = data.draw(in_some_layout(torch.zeros_like(source)))
    assert comm.gather(out, dim, out=target) is target
    assert same(target, source)


@SETTINGS
@given(st.data())
def test_gather_is_laid_out_as_cat(data):
    shape = data.draw(st.lists(st.integers(1, 3), min_size=4, max_size=5).map(tuple))
    dim = data.draw(st.integers(0, len(shape) - 1))
    sources = [
        data.draw(in_some_layout(values(shape, torch.float32, rank)))
        for rank in range(data.draw(st.integers(1, 3)))
    ]
    result, expected = comm.gather(sources, dim), torch.cat(sources, dim)
    assert same(result, expected)
    # torch.cat and torch's own gather choose the memory format by one rule: that of all inputs.
    assert result.stride() == expected.stride()


@SETTINGS
@given(st.data())
def test_memory_format_is_that_of_torch(data):
    prims = pytest.importorskip("torch._prims_common")
    shape = data.draw(st.lists(st.integers(0, 3), min_size=3, max_size=5).map(tuple))
    tensor = data.draw(in_some_layout(torch.zeros(shape)))
    if tensor.numel() > 0:
        assert _memory_format(tensor) == prims.suggest_memory_format(tensor)


@SETTINGS
@given(tensors(), st.integers(1, 8))
def test_broadcast(source, count):
    copies = comm.broadcast(source, ["cpu"] * count)
    assert len(copies) == count and all(same(copy, source) for copy in copies)
    assert disjoint(source, *copies)
    if source.numel() > 0:
        assert copies[0].stride() == torch.empty_like(source).stride()


@SETTINGS
@given(st.data())
def test_reduce_add(data):
    shape, dtype = data.draw(shapes), data.draw(st.sampled_from(SUMMED))
    plain = [values(shape, dtype, rank) for rank in range(data.draw(st.integers(1, 8)))]
    inputs = [data.draw(in_some_layout(tensor)) for tensor in plain]
    total = comm.reduce_add(inputs)
    assert same(total, exact_sum(plain))
    assert disjoint(total, *inputs)


@SETTINGS
@given(st.data())
def test_coalesced(data):
    limit = data.draw(st.sampled_from([0, 1, 16, 64, 256, 10485760]))
    count = data.draw(st.integers(1, 4))
    kinds = data.draw(st.lists(st.tuples(shapes, st.sampled_from(SUMMED)), max_size=8))
    ranks = [
        [data.draw(in_some_layout(values(shape, dtype, rank))) for shape, dtype in kinds]
        for rank in range(count)
    ]
    rows = comm.broadcast_coalesced(ranks[0], ["cpu"] * count, limit)
    assert len(rows) == count
    for row in rows:
        assert len(row) == len(kinds)
        assert all(same(copy, tensor) for copy, tensor in zip(row, ranks[0]))
    sums = comm.reduce_add_coalesced(ranks, buffer_size=limit)
    assert len(sums) == len(kinds)
    assert all(same(total, exact_sum(group)) for total, group in zip(sums, zip(*ranks)))
    assert disjoint(*sums, *(copy for row in rows for copy in row), *ranks[0])


@st.composite
def numpy_arrays(draw):
    """Any strides: permuted, stepped, backward, repeated."""
    array = numpy.arange(math.prod(shape := draw(shapes_with_dims)), dtype="int32").reshape(shape)
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    steps = [draw(st.sampled_from([1, 2, -1, -3])) for _ in array.shape]
    array = array[tuple(slice(None, None, step) for step in steps)]
    if draw(st.booleans()):
        array = numpy.broadcast_to(array, (draw(st.integers(0, 4)), *array.shape))
    return array


@SETTINGS
@given(st.data())
def test_numpy(data):
    source = data.draw(numpy_arrays())
    dim = data.draw(st.integers(0, source.ndim - 1))
    sizes = data.draw(splits(source.shape[dim], data.draw(st.integers(1, 8))))
    edges = numpy.cumsum(sizes)[:-1]
    pieces = comm.scatter(source, ["cpu"] * len(sizes), sizes, dim)
    expected = numpy.split(source, edges, dim)
    assert len(pieces) == len(expected)
    for piece, chunk in zip(pieces, expected):
        assert piece.dtype == chunk.dtype and numpy.array_equal(piece, chunk)
        assert not numpy.shares_memory(piece, source)
    assert numpy.array_equal(comm.gather(pieces, dim), source)
    assert numpy.array_equal(comm.broadcast(source, ["cpu"])[0], source)
    assert numpy.array_equal(comm.reduce_add([source, source]), source + source)
    ((copy,),) = comm.broadcast_coalesced([source], ["cpu"])
    assert numpy.array_equal(copy, source)
