"""Every refusal of fastdp.comm, provoked: the message names the argument, its value and the bound.
And nothing is written before all arguments were looked at."""

import pytest
import torch

from fastdp import comm
from fastdp.comm_checks import streams_for
from fastdp.arrays import NUMPY, TORCH

numpy = pytest.importorskip("numpy")

X = torch.arange(12).reshape(4, 3)
CPU2 = ["cpu"] * 2
ROWS = [torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)]
HALVES = [torch.zeros(2, 3, dtype=torch.float16)] * 2




def lazily_conjugated():
    return torch.zeros(4, 3, dtype=torch.complex64).conj()


CASES = {
    # scatter
    "no array": (lambda: comm.scatter([1], CPU2), TypeError, "tensor must be a torch.Tensor.*list"),
    "0-dim": (lambda: comm.scatter(torch.tensor(1), CPU2), ValueError, "tensor has no dimensions"),
    "neither": (lambda: comm.scatter(X), ValueError, "exactly one of devices and out.*not neither"),
    "both": (
        lambda: comm.scatter(X, CPU2, out=ROWS),
        ValueError,
        "exactly one of devices and out must be given, not both",
    ),
    "dim too large": (
        lambda: comm.scatter(X, CPU2, dim=2),
        IndexError,
        r"dim is 2, but tensor of shape \(4, 3\) takes -2 to 1",
    ),
    "dim too small": (lambda: comm.scatter(X, CPU2, dim=-3), IndexError, "dim is -3, but tensor"),
    "dim no int": (lambda: comm.scatter(X, CPU2, dim=0.0), TypeError, "dim must be an int, not fl"),
    "no devices": (lambda: comm.scatter(X, []), ValueError, "devices is empty"),
    "one device": (lambda: comm.scatter(X, "cpu"), TypeError, r"devices must be a list.*\['cpu'\]"),
    "sizes and out": (
        lambda: comm.scatter(X, chunk_sizes=[2, 2], out=ROWS),
        ValueError,
        r"chunk_sizes is \[2, 2\], but with out",
    ),
    "too few sizes": (
        lambda: comm.scatter(X, CPU2, [4]),
        ValueError,
        "chunk_sizes has 1 entries, but devices has 2",
    ),
    "sizes do not add up": (
        lambda: comm.scatter(X, CPU2, [1, 2]),
        ValueError,
        "chunk_sizes add up to 3, but the size of dimension 0 is 4",
    ),
    "negative size": (lambda: comm.scatter(X, CPU2, [5, -1]), ValueError, r"sizes\[1\] is -1, but"),
    "size no int": (
        lambda: comm.scatter(X, CPU2, [2.0, 2]),
        TypeError,
        r"chunk_sizes\[0\] must be an int, not float",
    ),
    "sizes no list": (
        lambda: comm.scatter(X, CPU2, 4),
        TypeError,
        "chunk_sizes must be a list of ints, not int",
    ),
    "stream no stream": (
        lambda: comm.scatter(X, CPU2, streams=[None, "s"]),
        TypeError,
        r"streams\[1\] must be a torch.cuda.Stream or None, not str",
    ),
    "out is one array": (
        lambda: comm.scatter(X, out=ROWS[0]),
        TypeError,
        "out must be a list of arrays, not one Tensor",
    ),
    "out no list": (lambda: comm.scatter(X, out=3), TypeError, "out must be a list of .*, not int"),
    "out empty": (lambda: comm.scatter(X, out=[]), ValueError, "out is empty"),
    "out of what": (
        lambda: comm.scatter(X, out=[ROWS[0], None]),
        TypeError,
        r"out\[1\] must be a torch.Tensor.*NoneType",
    ),
    "out of wrong shape": (
        lambda: comm.scatter(X, out=[ROWS[0], ROWS[0].t()]),
        ValueError,
        r"out\[1\] has shape \(3, 2\), but must agree with tensor, \(4, 3\) in all but dimension 0",
    ),
    "out of other ndim": (
        lambda: comm.scatter(X, out=[torch.zeros(4, dtype=torch.int64)]),
        ValueError,
        r"out\[0\] has shape \(4,\), but must agree",
    ),
    "out does not add up": (
        lambda: comm.scatter(X, out=ROWS[:1]),
        ValueError,
        "out add up to 2 along dimension 0, but tensor's size there is 4",
    ),
    "out of other dtype": (
        lambda: comm.scatter(X, out=HALVES),
        TypeError,
        r"out\[0\] has dtype float16, but the source has int64",
    ),
    "out conjugated": (
        lambda: comm.broadcast(lazily_conjugated(), out=[lazily_conjugated()]),
        ValueError,
        r"out\[0\] is a lazily conjugated or negated view",
    ),
    "out expanded": (
        lambda: comm.scatter(X, out=[torch.zeros(3, dtype=torch.int64).expand(4, 3)]),
        ValueError,
        r"targets\[0\] overlaps itself",
    ),
    "out overlaps the source": (
        lambda: comm.scatter(X, out=[X[1:3], X[:2]]),
        ValueError,
        "overlap",
    ),
    "out overlaps itself": (lambda: comm.scatter(X, out=[ROWS[0]] * 2), ValueError, "overlap"),
    # gather
    "gather nothing": (lambda: comm.gather([]), ValueError, "tensors is empty"),
    "streams no list": (
        lambda: comm.scatter(X, CPU2, streams=3),
        TypeError,
        "streams must be a list of streams, not int",
    ),
    "tensors no list": (
        lambda: comm.broadcast_coalesced(3, CPU2),
        TypeError,
        "tensors must be a list of arrays, not int",
    ),
    "inputs no list": (
        lambda: comm.reduce_add_coalesced(3),
        TypeError,
        "inputs must be a list of lists of arrays, not int",
    ),
    "a rank no list": (
        lambda: comm.reduce_add_coalesced([[X], 3]),
        TypeError,
        r"inputs\[1\] must be a list of arrays, not int",
    ),
    "elsewhere": (
        lambda: comm.gather([X, X.to("meta")]),
        ValueError,
        "an array lies on meta: fastdp takes CUDA devices and 'cpu'",
    ),
    "gather no list": (lambda: comm.gather(3), TypeError, "tensors must be a list of .*, not int"),
    "gather no arrays": (lambda: comm.gather([X, 3]), TypeError, r"tensors\[1\] must be a torch"),
    "gather 0-dim": (
        lambda: comm.gather([torch.tensor(1)] * 2),
        ValueError,
        r"tensors\[0\] has no dimensions to go along: give it one \(unsqueeze",
    ),
    "gather kinds": (
        lambda: comm.gather([X, X.numpy()]),
        TypeError,
        r"tensors\[1\] is a numpy.ndarray, but tensors\[0\] is a torch.Tensor: one call takes one",
    ),
    "gather dim": (lambda: comm.gather([X], 2), IndexError, r"dim is 2, but tensors\[0\] of shape"),
    "gather shapes": (
        lambda: comm.gather([X, X[:, :2]]),
        ValueError,
        r"tensors\[1\] has shape \(4, 2\), but must agree with tensors\[0\], \(4, 3\) in all but "
        "dimension 0",
    ),
    "gather ndims": (lambda: comm.gather([X, X[0]]), ValueError, r"tensors\[1\] has shape \(3,\)"),
    "gather dtypes": (
        lambda: comm.gather([X, X.int()]),
        TypeError,
        r"tensors\[1\] has dtype int32, but tensors\[0\] has int64",
    ),
    "gather twice told": (
        lambda: comm.gather([X], destination="cpu", out=X.clone()),
        ValueError,
        "destination is cpu, but out says where",
    ),
    "gather out shape": (
        lambda: comm.gather([X, X], out=X.clone()),
        ValueError,
        r"out has shape \(4, 3\), but the result has \(8, 3\)",
    ),
    "gather out dtype": (
        lambda: comm.gather([X], out=X.short()),
        TypeError,
        "out has dtype int16, but the source has int64",
    ),
    "gather out list": (lambda: comm.gather([X], out=[X]), TypeError, "out must be a torch.Tensor"),
    "gather nowhere": (lambda: comm.gather([X], 0, "npu"), ValueError, "destination is 'npu'"),
    "gather of sparse": (
        lambda: comm.gather([X.to_sparse()]),
        TypeError,
        r"tensors\[0\] has layout torch.sparse_coo, but must be a strided",
    ),
    # broadcast
    "broadcast neither": (lambda: comm.broadcast(X), ValueError, "exactly one of devices and out"),
    "broadcast out shape": (
        lambda: comm.broadcast(X, out=[X.clone(), X[:2].clone()]),
        ValueError,
        r"out\[1\] has shape \(2, 3\), but tensor has \(4, 3\)",
    ),
    "broadcast lazy": (
        lambda: comm.broadcast(torch.nn.LazyLinear(2).weight, CPU2),
        ValueError,
        "tensor is an uninitialized UninitializedParameter",
    ),
    "broadcast meta": (
        lambda: comm.broadcast(torch.empty(2, device="meta"), CPU2),
        TypeError,
        "meta device",
    ),
    "odd device": (lambda: comm.broadcast(X, ["meta"]), ValueError, r"devices\[0\] is 'meta'"),
    # reduce_add
    "reduce nothing": (lambda: comm.reduce_add([]), ValueError, "inputs is empty"),
    "reduce shapes": (
        lambda: comm.reduce_add([X, X[:2]]),
        ValueError,
        r"inputs\[1\] has shape \(2, 3\), but must agree with inputs\[0\], \(4, 3\)$",
    ),
    "reduce dtypes": (
        lambda: comm.reduce_add([X, X.half()]),
        TypeError,
        r"inputs\[1\] has dtype float16, but inputs\[0\] has int64",
    ),
    "reduce sparse and dense": (
        lambda: comm.reduce_add([X, X.to_sparse()]),
        TypeError,
        r"inputs\[1\] has layout torch.sparse_coo",
    ),
    "reduce float8": (
        lambda: comm.reduce_add([X.to(torch.float8_e5m2)] * 2),
        (TypeError, BufferError),
        "must be a dtype that can be summed|float8 types are not supported by dlpack",
    ),
    # coalesced
    "nowhere": (lambda: comm.broadcast_coalesced([X], []), ValueError, "devices is empty"),
    "kinds": (lambda: comm.broadcast_coalesced([X, "a"], CPU2), TypeError, r"tensors\[1\] must be"),
    "negative buffer": (
        lambda: comm.broadcast_coalesced([X], CPU2, -1),
        ValueError,
        "buffer_size is -1, but must be 0 or more",
    ),
    "buffer no int": (
        lambda: comm.reduce_add_coalesced([[X]], buffer_size=1.5),
        TypeError,
        "buffer_size must be an int, not float",
    ),
    "csr": (
        lambda: comm.broadcast_coalesced([X, X.to_sparse_csr()], CPU2),
        TypeError,
        r"tensors\[1\] has layout torch.sparse_csr",
    ),
    "no ranks": (lambda: comm.reduce_add_coalesced([]), ValueError, "inputs is empty"),
    "ranks of other length": (
        lambda: comm.reduce_add_coalesced([[X], [X, X]]),
        ValueError,
        r"inputs\[1\] has 2 arrays, but inputs\[0\] has 1",
    ),
    "ranks of other kinds": (
        lambda: comm.reduce_add_coalesced([[X, X], [X, X.numpy()]]),
        TypeError,
        r"inputs\[1\]\[1\] is a numpy.ndarray, but inputs\[0\]\[0\] is a torch.Tensor",
    ),
    "ranks of other shapes": (
        lambda: comm.reduce_add_coalesced([[X, X], [X, X[:2]]]),
        ValueError,
        r"inputs\[1\]\[1\] has shape \(2, 3\), but must agree with inputs\[0\]\[1\], \(4, 3\)$",
    ),
    # NumPy and other producers
    "masked": (
        lambda: comm.broadcast(numpy.ma.masked_equal([1, 2], 2), CPU2),
        TypeError,
        "tensor is a masked array, whose mask would be lost",
    ),
    "dates": (
        lambda: comm.gather([numpy.zeros(2, "M8[s]")]),
        TypeError,
        r"tensors\[0\] has dtype datetime64\[s\], but must be of numbers or bool",
    ),
    "objects": (lambda: comm.gather([numpy.array([{}])]), TypeError, "has dtype object"),
    "byte-swapped": (
        lambda: comm.scatter(numpy.zeros(2, numpy.dtype("f4").newbyteorder()), CPU2),
        TypeError,
        "tensor has dtype [<>]f4, but must be .* in native byte order",
    ),
    "read-only out": (
        lambda: comm.gather([numpy.ones(3)], out=numpy.frombuffer(bytes(24))),
        ValueError,
        "out is read-only",
    ),
    "NumPy scalar": (lambda: comm.broadcast(numpy.float32(1), CPU2), TypeError, "not float32"),
}


@pytest.mark.parametrize("case", CASES)
def test_refusal(case):
    call, error, message = CASES[case]
    with pytest.raises(error, match=message):
        call()
    assert X.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert not any(row.any() for row in ROWS)


def test_a_sum_is_made_where_an_input_lies(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for call in (
        lambda: comm.reduce_add([X, X], 1),
        lambda: comm.reduce_add_coalesced([[X], [X]], 1),
    ):
        with pytest.raises(ValueError, match="destination is cuda:1, but a sum is made .*: cpu"):
            call()


def test_numpy_stays_on_the_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"devices\[0\] is cuda:1, but a NumPy array can only lie"):
        comm.scatter(X.numpy(), [1, 0])
    with pytest.raises(ValueError, match="destination is cuda:0, but a NumPy array can only lie"):
        comm.gather([X.numpy()], 0, 0)


def test_streams_are_those_of_their_devices(monkeypatch):
    class Stream:
        device = torch.device("cuda", 1)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    places = [torch.device("cuda", i) for i in range(2)]
    stream = Stream()
    given = [None, stream, "one more than devices"]
    assert streams_for(TORCH, given, places, "devices") == [None, stream]
    assert streams_for(TORCH, [], places, "devices") == [None, None]
    with pytest.raises(ValueError, match=r"streams\[0\] is of cuda:1, but devices\[0\] is cuda:0"):
        streams_for(TORCH, [stream], places, "devices")
    with pytest.raises(ValueError, match=r"streams\[0\] is of cuda:1, but out\[0\] is cpu"):
        streams_for(TORCH, [stream], [torch.device("cpu")], "out")
    with pytest.raises(ValueError, match=r"streams\[0\] is given, but streams are for torch"):
        streams_for(NUMPY, [stream], places, "devices")


def test_out_from_inference_mode():
    with torch.inference_mode():
        out = torch.zeros(2)
    with pytest.raises(ValueError, match=r"out\[0\] was made under inference mode"):
        comm.broadcast(torch.ones(2), out=[out])
