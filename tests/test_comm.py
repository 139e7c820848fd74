"""fastdp.comm on torch tensors: every verb over devices, lengths, dtypes, layouts, against chunk,
cat and sum of torch. Equality is by bits."""

import doctest
import subprocess
import sys

import pytest
import torch

from comm_cases import COUNTS, LAYOUTS, MOVED, SUMMED, disjoint, laid_out, lengths, same, values
from fastdp import comm


def home_of(devices):
    return torch.device("cuda", 0) if devices(1) == [0] else torch.device("cpu")


# scatter


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("count", COUNTS)
def test_scatter_cuts_as_chunk(count, dim, layout, devices):
    for length in lengths(count):
        shape = [3, 4]
        shape[dim] = length
        source = laid_out(values(shape, torch.float32, device=home_of(devices)), layout)
        expected = source.chunk(count, dim)
        pieces = comm.scatter(source, devices(count), dim=dim)
        assert isinstance(pieces, tuple) and len(pieces) == len(expected)
        assert all(same(piece, chunk) for piece, chunk in zip(pieces, expected))


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_scatter_of_any_dtype(dtype, devices):
    source = values((7, 3), dtype, device=home_of(devices))
    for layout in LAYOUTS:
        for dim in (0, 1):
            pieces = comm.scatter(laid_out(source, layout), devices(3), dim=dim)
            assert all(same(a, b) for a, b in zip(pieces, source.chunk(3, dim)))


@pytest.mark.parametrize("sizes", [[3, 7], [0, 10], [10, 0], [1, 0, 9], [2, 2, 2, 4], [10]])
@pytest.mark.parametrize("dim", [0, 1])
def test_scatter_by_chunk_sizes(sizes, dim, devices):
    source = values((10, 10), torch.int32, device=home_of(devices))
    pieces = comm.scatter(source, devices(len(sizes)), iter(sizes), dim)
    assert all(same(a, b) for a, b in zip(pieces, source.split(sizes, dim)))
    assert len(pieces) == len(sizes)


def test_scatter_gives_fewer_pieces_than_devices():
    pieces = comm.scatter(torch.arange(5), ["cpu"] * 4)
    assert [piece.tolist() for piece in pieces] == [[0, 1], [2, 3], [4]]


def test_scatter_of_a_zero_stride_source(devices):
    source = torch.arange(4.0, device=home_of(devices)).unsqueeze(0).expand(6, 4)
    for dim in (0, 1):
        pieces = comm.scatter(source, devices(3), dim=dim)
        assert all(same(a, b) for a, b in zip(pieces, source.chunk(3, dim)))


@pytest.mark.parametrize(
    "source",
    [
        torch.randn(4, 3, 5, 6),
        torch.randn(4, 3, 5, 6).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 3, 2, 5, 6).contiguous(memory_format=torch.channels_last_3d),
        torch.randn(4, 3, 5, 6).transpose(1, 3),
        torch.randn(4, 3, 5, 6)[:, :, ::2],
        torch.randn(4, 3, 1, 6).expand(4, 3, 5, 6),
    ],
)
def test_scatter_lays_out_as_torch_copies(source):
    for dim in range(source.dim()):
        pieces = comm.scatter(source, ["cpu"] * 2, dim=dim)
        # A conversion forces torch to copy under the same rule as a move to another device.
        expected = [chunk.to(torch.float64) for chunk in source.chunk(2, dim)]
        assert [piece.stride() for piece in pieces] == [chunk.stride() for chunk in expected]


def test_scatter_into_out(devices):
    source = values((9, 4), torch.float32, device=home_of(devices))
    for layout in LAYOUTS:
        parts = [torch.full_like(chunk, 77) for chunk in source.split([2, 0, 7])]
        out = [laid_out(part, layout) for part in parts]
        result = comm.scatter(source, out=out)
        assert isinstance(result, tuple)
        assert all(a is b for a, b in zip(result, out))
        assert all(same(a, b) for a, b in zip(out, source.split([2, 0, 7])))


# gather


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("count", COUNTS)
def test_gather_joins_as_cat(count, dim, layout, devices):
    for length in (0, 1, 5, 13):
        sources = []
        for rank in range(count):
            shape = [3, 4]
            shape[dim] = 2 * length if rank == count // 2 else length
            source = values(shape, torch.float32, rank, home_of(devices))
            sources.append(laid_out(source, layout))
        result = comm.gather(iter(sources), dim, devices(1)[0])
        assert same(result, torch.cat(sources, dim))


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_gather_of_any_dtype(dtype, devices):
    sources = [values((2 + rank, 3), dtype, rank, home_of(devices)) for rank in range(3)]
    result = comm.gather(sources, destination=devices(1)[0])
    assert result.shape == (9, 3)
    assert all(same(a, b) for a, b in zip(result.split([2, 3, 4]), sources))


def test_gather_where_one_tensor_comes_several_times():
    x = torch.arange(3)
    assert comm.gather([x, x, x]).tolist() == [0, 1, 2] * 3


FORMATS = {
    "rows": torch.contiguous_format,
    "channels": torch.channels_last,
}


@pytest.mark.parametrize("kinds", [["channels"] * 2, ["rows"] * 2, ["channels", "rows"]], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (3, 1, 1, 1)],
)
def test_gather_keeps_the_common_memory_format(kinds, shape):
    sources = [torch.randn(shape).contiguous(memory_format=FORMATS[kind]) for kind in kinds]
    for dim in range(4):
        result = comm.gather(sources, dim)
        assert result.stride() == torch.cat(sources, dim).stride()
        assert same(result, torch.cat(sources, dim))
    if set(kinds) == {"channels"} and 1 not in shape:
        assert result.is_contiguous(memory_format=torch.channels_last)


def test_gather_keeps_channels_last_of_slices_and_of_volumes():
    image = torch.randn(4, 6, 5, 5).contiguous(memory_format=torch.channels_last)
    slices = [image[:, :3], image[:, 3:]]
    assert not slices[0].is_contiguous(memory_format=torch.channels_last)
    assert comm.gather(slices).is_contiguous(memory_format=torch.channels_last)
    volume = torch.randn(2, 3, 4, 5, 6).contiguous(memory_format=torch.channels_last_3d)
    assert comm.gather([volume] * 2).is_contiguous(memory_format=torch.channels_last_3d)


def test_gather_into_out(devices):
    sources = [values((2, 3), torch.int64, rank, home_of(devices)) for rank in range(3)]
    for layout in LAYOUTS:
        for dim in (0, 1):
            expected = torch.cat(sources, dim)
            out = laid_out(torch.zeros_like(expected), layout)
            assert comm.gather(sources, dim, out=out) is out
            assert same(out, expected)


def test_gather_to_minus_one_warns_and_works():
    with pytest.warns(FutureWarning, match='destination=-1 .* write destination="cpu"'):
        result = comm.gather([torch.ones(1), torch.zeros(1)], 0, -1)
    assert result.tolist() == [1, 0]


# broadcast


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", COUNTS)
def test_broadcast_copies(count, layout, devices):
    for shape in ((), (0,), (1,), (13,), (3, 4), (0, 3), (2, 1, 3)):
        if layout == "stepped" and shape == ():
            continue
        source = laid_out(values(shape, torch.float32, device=home_of(devices)), layout)
        copies = comm.broadcast(source, devices(count))
        assert isinstance(copies, tuple) and len(copies) == count
        assert all(same(copy, source) for copy in copies)


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_broadcast_of_any_dtype(dtype, devices):
    source = values((5, 3), dtype, device=home_of(devices))
    assert all(same(copy, source) for copy in comm.broadcast(source, devices(2)))


def test_broadcast_into_out(devices):
    source = values((3, 4), torch.float32, device=home_of(devices))
    out = [laid_out(torch.zeros_like(source), layout) for layout in LAYOUTS]
    result = comm.broadcast(source, out=out)
    assert all(a is b and same(a, source) for a, b in zip(result, out))


def test_broadcast_keeps_dense_strides():
    for source in (torch.randn(4, 5).t(), torch.randn(2, 3, 4, 5).permute(0, 2, 3, 1)):
        assert all(copy.stride() == source.stride() for copy in comm.broadcast(source, ["cpu"] * 2))


# reduce_add


def exact_sum(tensors):
    """The sum by torch, in a wide dtype, cast back: exact for small whole numbers."""
    dtype = tensors[0].dtype
    if dtype == torch.bool:
        return torch.stack(tensors).any(0)
    wide = torch.complex128 if dtype.is_complex else torch.int64
    return torch.stack([tensor.to(wide) for tensor in tensors]).sum(0).to(dtype)


@pytest.mark.parametrize("dtype", SUMMED, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_reduce_add_is_the_sum(count, dtype, devices):
    for shape in ((), (0,), (1,), (13,), (3, 4), (2, 0, 3), (1031,)):
        inputs = [values(shape, dtype, rank, home_of(devices)) for rank in range(count)]
        assert same(comm.reduce_add(inputs, devices(1)[0]), exact_sum(inputs))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reduce_add_of_any_layout(layout, devices):
    plain = [values((5, 7), torch.float32, rank, home_of(devices)) for rank in range(3)]
    inputs = [laid_out(tensor, layout) for tensor in plain]
    expected = exact_sum(plain)
    assert same(comm.reduce_add(inputs, devices(1)[0]), expected)
    assert same(comm.reduce_add([inputs[0], *plain[1:]], devices(1)[0]), expected)


def test_reduce_add_sums_in_rank_order():
    parts = [torch.tensor([value]) for value in (1e8, 1.0, -1e8, 1.0)]
    assert comm.reduce_add(parts).item() == 1.0  # ((1e8 + 1) - 1e8) + 1 in fp32
    assert comm.reduce_add([parts[i] for i in (0, 2, 1, 3)]).item() == 2.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_reduce_add_rounds_halves_once(dtype):
    big = 2048.0 if dtype == torch.float16 else 256.0  # big + 1 is not representable
    parts = [torch.tensor([value], dtype=dtype) for value in (big, 1.0, 1.0)]
    assert comm.reduce_add(parts).item() == big + 2


def test_reduce_add_wraps_integers():
    parts = [torch.tensor([200, 100], dtype=torch.uint8), torch.tensor([100, 1], dtype=torch.uint8)]
    assert comm.reduce_add(parts).tolist() == [44, 101]


def test_reduce_add_of_one_keeps_its_bits():
    tensor = torch.tensor([-0.0, float("nan"), float("-inf")])
    result = comm.reduce_add([tensor])
    assert same(result, tensor)
    assert disjoint(result, tensor)


def test_reduce_add_is_laid_out_like_the_first():
    first = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert comm.reduce_add([first, torch.randn(2, 3, 4, 5)]).stride() == first.stride()


# What holds for all


def test_host_results_are_new_memory_and_inputs_are_left_alone():
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    before, versions = (x.clone(), y.clone()), (x._version, y._version)
    results = [
        *comm.scatter(x, ["cpu"] * 3),
        *comm.scatter(x, ["cpu"]),
        comm.gather([x, y]),
        comm.gather([x]),
        *comm.broadcast(x, ["cpu"] * 3),
        comm.reduce_add([x, y]),
        comm.reduce_add([x]),
    ]
    assert disjoint(x, y, *results)
    for result in results:
        result.fill_(-1)
    assert same(x, before[0]) and same(y, before[1])
    assert (x._version, y._version) == versions


def test_conjugate_and_negative_views_are_carried_out():
    z = torch.tensor([1 + 2j, 3 - 4j, 5j])
    conj, neg = z.conj(), z.conj().imag
    assert conj.is_conj() and neg.is_neg()
    for lazy in (conj, neg):
        plain = lazy.resolve_conj().resolve_neg()
        assert torch.equal(torch.cat(comm.scatter(lazy, ["cpu"] * 2)), plain)
        assert torch.equal(comm.gather([lazy, lazy]), torch.cat([plain, plain]))
        assert torch.equal(comm.broadcast(lazy, ["cpu"])[0], plain)
        assert torch.equal(comm.reduce_add([lazy, lazy]), plain + plain)
        assert torch.equal(comm.broadcast_coalesced([lazy], ["cpu"])[0][0], plain)
        assert torch.equal(comm.reduce_add_coalesced([[lazy], [lazy]])[0], plain + plain)


def test_parameters_and_subclasses():
    weight = torch.nn.Parameter(torch.randn(4, 2))
    with torch.no_grad():
        assert same(torch.cat(comm.scatter(weight, ["cpu"] * 2)), weight)
        (copy,) = comm.broadcast(weight, ["cpu"])
    assert type(copy) is torch.Tensor and not copy.requires_grad


def test_writing_out_is_an_in_place_change():
    x = torch.tensor([0.5, 1.5], requires_grad=True)
    for write in (
        lambda out: comm.gather([torch.ones(1)] * 2, out=out),
        lambda out: comm.broadcast(torch.ones(2), out=[out]),
        lambda out: comm.scatter(torch.ones(2), out=[out]),
    ):
        w = torch.ones(2)
        loss = (x * w).sum()
        write(w)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_under_inference_mode():
    with torch.inference_mode():
        x = torch.arange(4)
        out = torch.zeros(4, dtype=torch.int64)
        assert comm.gather(comm.scatter(x, ["cpu"] * 2), out=out).tolist() == [0, 1, 2, 3]
    assert [copy.tolist() for copy in comm.broadcast(out, ["cpu"])] == [[0, 1, 2, 3]]


@pytest.mark.parametrize("verb", ["scatter", "gather", "broadcast", "reduce"])
def test_the_bytes_move_in_the_core(verb):
    from fastdp import _C

    call, size_bytes = {
        "scatter": (lambda: comm.scatter(torch.ones(10), ["cpu"] * 2), 40),
        "gather": (lambda: comm.gather([torch.ones(10)] * 2), 80),
        "broadcast": (lambda: comm.broadcast(torch.ones(10), ["cpu"] * 2), 80),
        "reduce": (lambda: comm.reduce_add([torch.ones(10)] * 2), 40),
    }[verb]
    before = _C.counters()[verb]
    call()
    after = _C.counters()[verb]
    assert after["calls"] - before["calls"] == 1
    assert after["bytes"] - before["bytes"] == size_bytes
    _C.arm_fault(verb, 1)
    with pytest.raises(_C.FaultInjected):
        call()
    call()


def test_examples():
    result = doctest.testmod(comm)
    assert result.attempted >= 7 and result.failed == 0


def test_without_numpy():
    code = """
import sys
sys.modules["numpy"] = None
import torch
from fastdp import comm
pieces = comm.scatter(torch.arange(5), ["cpu"] * 2)
assert comm.gather(pieces).tolist() == [0, 1, 2, 3, 4]
try:
    comm.broadcast([1.0], ["cpu"])
except TypeError as error:
    assert "tensor must be a torch.Tensor, a numpy.ndarray or another" in str(error), error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=300)
