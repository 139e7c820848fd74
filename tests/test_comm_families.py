"""fastdp.comm for NumPy arrays and for any other producer of DLPack: NumPy in, NumPy out; others
get objects that export DLPack. Any of them may be `out=`."""

import itertools

import pytest
import torch

from comm_cases import COUNTS, LegacyProducer, Producer, lengths, same, values
from fastdp import _C, comm

numpy = pytest.importorskip("numpy")

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]


def array(shape, dtype="float32", rank=0):
    count = int(numpy.prod(shape, dtype=int))
    number = numpy.arange(count) * 7 + rank * 3
    if dtype == "bool":
        return (number % 3 == 0).reshape(shape)
    if numpy.dtype(dtype).kind == "c":
        return (number % 15 + 1j * (number % 11)).astype(dtype).reshape(shape)
    return (number % 15).astype(dtype).reshape(shape)


def equal(actual, expected):
    assert type(actual) is numpy.ndarray
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    return actual.tobytes() == expected.tobytes()


def chunks(source, count, dim):
    """numpy.array_split cuts otherwise: torch's rule by hand."""
    length = source.shape[dim]
    step = max(-(-length // count), 1)
    edges = [min(i * step, length) for i in range(count + 1)]
    pieces = [numpy.take(source, range(a, b), dim) for a, b in zip(edges, edges[1:])]
    return [piece for piece in pieces if length == 0 or piece.shape[dim] > 0]


LAYOUTS = {
    "rows": lambda a: a.copy(),
    "columns": lambda a: numpy.asfortranarray(a),
    "reversed": lambda a: a[::-1, ::-1].copy()[::-1, ::-1],
    "stepped": lambda a: numpy.repeat(a, 2, axis=1)[:, ::2],
    "read-only": lambda a: numpy.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
    "offset": lambda a: numpy.pad(a, 1)[1:-1, 1:-1],
    "misaligned": lambda a: numpy.frombuffer(b"x" + a.tobytes(), a.dtype, -1, 1).reshape(a.shape),
    "field": lambda a: numpy.stack([a, a], -1).view([("a", a.dtype), ("b", a.dtype)])[..., 0]["a"],
    "odd field": lambda a: odd_field(a),
}


def odd_field(source):
    """A field of packed records: its strides are no multiple of its size."""
    records = numpy.zeros(source.shape, [("tag", "u1"), ("value", source.dtype)])
    records["value"] = source
    return records["value"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", COUNTS)
def test_numpy_scatter_and_gather(count, layout):
    for length, dim in itertools.product(lengths(count), (0, 1)):
        shape = [3, 3]
        shape[dim] = length
        source = LAYOUTS[layout](array(shape))
        pieces = comm.scatter(source, ["cpu"] * count, dim=dim)
        expected = chunks(source, count, dim)
        assert len(pieces) == len(expected)
        assert all(equal(a, b) for a, b in zip(pieces, expected))
        assert equal(comm.gather(pieces, dim), numpy.concatenate(expected, dim))
        assert not any(numpy.shares_memory(piece, source) for piece in pieces)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numpy_broadcast_and_reduce(layout):
    sources = [LAYOUTS[layout](array((5, 3), rank=rank)) for rank in range(3)]
    copies = comm.broadcast(sources[1], ["cpu"] * 3)
    assert len(copies) == 3 and all(equal(copy, sources[1]) for copy in copies)
    assert equal(comm.reduce_add(sources), sources[0] + sources[1] + sources[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_dtypes(dtype):
    sources = [array((7, 3), dtype, rank) for rank in range(3)]
    assert equal(numpy.concatenate(comm.scatter(sources[0], ["cpu"] * 2)), sources[0])
    assert equal(comm.gather(sources, 1), numpy.concatenate(sources, 1))
    assert equal(comm.broadcast(sources[0], ["cpu"])[0], sources[0])
    assert equal(comm.reduce_add(sources), sources[0] + sources[1] + sources[2])


def test_numpy_long_double_moves():
    source = array((4,), "longdouble")
    if source.itemsize > 16:
        pytest.skip("no DLPack number for it here")
    pieces = comm.scatter(source, ["cpu"] * 2)
    assert numpy.array_equal(numpy.concatenate(pieces), source)
    with pytest.raises(TypeError, match="must be a dtype that can be summed"):
        comm.reduce_add([source, source])


def test_numpy_zero_stride_and_zero_dim():
    source = numpy.broadcast_to(array((1, 4)), (6, 4))
    assert all(equal(a, b) for a, b in zip(comm.scatter(source, ["cpu"] * 2), chunks(source, 2, 0)))
    zero_dim = numpy.array(3.5)
    assert equal(comm.broadcast(zero_dim, ["cpu"])[0], zero_dim)
    assert equal(comm.reduce_add([zero_dim, zero_dim]), numpy.array(7.0))


def test_numpy_results_keep_the_order_of_dimensions():
    columns = numpy.asfortranarray(array((6, 4)))
    assert all(piece.flags.f_contiguous for piece in comm.scatter(columns, ["cpu"] * 2, dim=1))
    assert comm.broadcast(columns, ["cpu"])[0].flags.f_contiguous
    assert comm.gather([columns, columns]).flags.f_contiguous
    assert comm.gather([columns, array((6, 4))]).flags.c_contiguous


@pytest.mark.parametrize("buffer_size", [0, 40, 10485760])
def test_numpy_coalesced(buffer_size):
    shapes = [(5,), (), (3, 4), (0,), (1,), (13,)]
    ranks = [
        [array(shape, dtype, rank) for shape in shapes for dtype in ("float32", "int64", "bool")]
        for rank in range(3)
    ]
    ranks[0][6] = numpy.asfortranarray(ranks[0][6])
    for row in comm.broadcast_coalesced(ranks[0], ["cpu"] * 2, buffer_size):
        assert all(equal(copy, source) for copy, source in zip(row, ranks[0]))
    sums = comm.reduce_add_coalesced(ranks, buffer_size=buffer_size)
    assert all(equal(total, a + b + c) for total, a, b, c in zip(sums, *ranks))


def test_numpy_subclasses_come_out_plain(tmp_path):
    mapped = numpy.memmap(tmp_path / "data", "float32", "w+", shape=(4, 2))
    mapped[:] = array((4, 2))
    for source in (mapped, numpy.asmatrix(array((4, 2)))):
        assert equal(numpy.concatenate(comm.scatter(source, ["cpu"] * 2)), numpy.asarray(source))
        assert equal(comm.broadcast(source, ["cpu"])[0], numpy.asarray(source))


def test_numpy_out():
    source = array((6, 4))
    out = [numpy.zeros((2, 4), "float32"), numpy.zeros((4, 8), "float32")[::-1, ::2]]
    result = comm.scatter(source, out=out)
    assert result[0] is out[0] and result[1] is out[1]
    assert equal(out[0], source[:2]) and equal(out[1], source[2:])
    whole = numpy.zeros((6, 4), "float32", order="F")
    assert comm.gather(out, out=whole) is whole
    assert equal(whole, source)


# Other producers


def tensors_of(results):
    return [torch.from_dlpack(result) for result in results]


@pytest.mark.parametrize("kind", [Producer, LegacyProducer])
def test_dlpack_in_dlpack_out(kind):
    base = values((7, 3), torch.bfloat16)
    source = kind(base)
    pieces = comm.scatter(source, ["cpu"] * 3, dim=0)
    assert all(type(piece) is _C.Array for piece in pieces)
    assert all(same(a, b) for a, b in zip(tensors_of(pieces), base.chunk(3)))
    assert same(torch.from_dlpack(comm.gather(pieces)), base)
    assert same(torch.from_dlpack(comm.gather([source, source], 1)), torch.cat([base, base], 1))
    copies = comm.broadcast(source, ["cpu"] * 2)
    assert all(same(copy, base) for copy in tensors_of(copies))
    total = comm.reduce_add([source, comm.gather(pieces)])
    assert same(torch.from_dlpack(total), base + base)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.cfloat], ids=str)
def test_dlpack_coalesced(dtype):
    bases = [[values(shape, dtype, rank) for shape in ((5,), (), (3, 4))] for rank in range(3)]
    ranks = [[Producer(base) for base in row] for row in bases]
    for row in comm.broadcast_coalesced(ranks[0], ["cpu"] * 2):
        assert all(same(a, b) for a, b in zip(tensors_of(row), bases[0]))
    sums = comm.reduce_add_coalesced(ranks)
    assert all(same(a, x + y + z) for a, x, y, z in zip(tensors_of(sums), *bases))


def test_dlpack_of_odd_layouts():
    base = values((6, 8), torch.float32)
    for view in (base.t(), base[:, ::2], base[1:, 1:], base[:1].expand(6, 8)):
        pieces = comm.scatter(Producer(view), ["cpu"] * 2)
        assert all(same(a, b) for a, b in zip(tensors_of(pieces), view.chunk(2)))


def test_results_outlive_their_arrays():
    (copy,) = comm.broadcast(Producer(torch.arange(1000)), ["cpu"])
    tensor, other = torch.from_dlpack(copy), numpy.from_dlpack(copy)
    del copy
    assert tensor.tolist() == other.tolist() == list(range(1000))


def test_out_may_be_of_another_kind():
    source = values((4, 2), torch.float32)
    rows = numpy.zeros((1, 2), "float32")
    other = Producer(torch.zeros(1, 2))
    plain = torch.zeros(2, 2)
    assert comm.scatter(source, out=[rows, other, plain]) == (rows, other, plain)
    assert rows.tolist() == source[:1].tolist()
    assert same(torch.from_dlpack(other), source[1:2]) and same(plain, source[2:])
    result = numpy.zeros((4, 2), "float32")
    assert comm.gather([source[:3], source[3:]], out=result) is result
    assert result.tolist() == source.tolist()
    assert comm.broadcast(result, out=[torch.zeros(4, 2)])[0].tolist() == source.tolist()
