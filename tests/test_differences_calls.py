"""README.md, "What differs from nn.DataParallel": inputs and outputs. One test per row, named by
the row's first cell, on torch's own code (oracle.py) and on fastdp. That torch's piece for the
input's own device is a view cannot be shown without a GPU: that row looks at fastdp only.
"""

import collections
import dataclasses

import fastdp
import pytest
import torch
from differences import OURS, THEIRS, Rows, call, cells, per_replica, rank_of, ranked, wrap
from nets import Apply, ints, linear, same
from torch import nn

row = Rows()


def test_every_row_of_the_page_has_a_test():
    assert cells("Devices and inputs", "Outputs") == list(row)


# Devices and inputs.


@row("the same device several times in `device_ids`")
def test_repeated_device():
    places = per_replica(OURS, lambda self: self.lin.weight.data_ptr())
    assert len(places) == len(set(places)) == 2


@row('`"cpu"` in `device_ids`')
@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU torch ignores the list")
def test_cpu_ids():
    assert nn.DataParallel(linear(), device_ids=["cpu", "cpu"]).device_ids == []
    assert fastdp.DataParallel(linear(), device_ids=["cpu", "cpu"]).device_ids == [
        torch.device("cpu")
    ] * 2


@row("a module that spans devices")
def test_spanning_module():
    def module():
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))

    theirs = wrap(THEIRS, module())
    with pytest.raises(RuntimeError, match="device: meta"):
        theirs(torch.ones(4, 3))
    with pytest.raises(ValueError, match="spans the devices cpu, meta"):
        wrap(OURS, module())


@row("`dp(x, flag=True)` with fewer rows than devices")
def test_constants():
    def forward(self, x, flag=False):
        return self.lin(x)

    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        call(THEIRS, forward, ints(1, 3), flag=True)
    same(call(OURS, forward, ints(1, 3), flag=True), linear()(ints(1, 3)))


@row("a batch in which every tensor is empty")
def test_empty_batch():
    for side, calls in ((THEIRS, 2), (OURS, 1)):
        seen = []
        out = call(side, lambda self, x: (seen.append(x.shape), self.lin(x))[1], ints(0, 3))
        assert len(seen) == calls and out.shape == (0, 2)


@row("an input piece for the input's own device")
def test_input_pieces():
    x = ints(4, 3)
    call(OURS, lambda self, x: x.zero_(), x)
    same(x, ints(4, 3))


@row("`PackedSequence` as input")
def test_packed_sequence():
    packed = nn.utils.rnn.pack_sequence([ints(4, 3), ints(2, 3)])

    def lengths(self, packed):
        return torch.tensor(nn.utils.rnn.pad_packed_sequence(packed)[1].tolist())

    try:
        assert call(THEIRS, lengths, packed).tolist() != [4, 2]
    except (RuntimeError, ValueError):
        pass  # the pieces may also be too wrong to be unpacked
    with pytest.raises(TypeError, match="PackedSequence"):
        call(OURS, lengths, packed)


# Outputs.


@row("number, bool, string or bytes")
def test_listed_leaves():
    for leaf in (3, 2.5, True, "ok", b"ok"):
        assert call(OURS, lambda self, x, leaf=leaf: (x, leaf))[1] == [leaf, leaf]
    assert call(OURS, lambda self, x: (x, 3), ints(1, 3))[1] == [3]
    for leaf in (3, 2.5, True):
        with pytest.raises(TypeError, match="not iterable"):
            call(THEIRS, lambda self, x, leaf=leaf: (x, leaf))
    assert call(THEIRS, lambda self, x: (x, "ok"))[1].startswith("<map object")


@dataclasses.dataclass
class Result:
    y: torch.Tensor
    made: int = dataclasses.field(init=False, default=0)


@row("dataclass")
def test_dataclass():
    def forward(self, x):
        return Result(self.lin(x))

    with pytest.raises(TypeError, match="not iterable"):
        call(THEIRS, forward)
    out = call(OURS, forward)
    assert type(out) is Result and out.made == [0, 0]
    same(out.y, linear()(ints(4, 3)))


@row("a mapping that is no `dict`, such as a `UserDict`")
def test_mapping():
    def forward(self, x):
        return collections.UserDict(y=self.lin(x))

    with pytest.raises(ValueError, match="too many values to unpack"):
        call(THEIRS, forward)
    out = call(OURS, forward)
    assert type(out) is collections.UserDict
    same(out["y"], linear()(ints(4, 3)))


@row("`None` on some replicas only")
def test_none_on_some():
    def none_on(rank):
        return lambda self, x: None if rank_of(x) == rank else x

    assert call(THEIRS, none_on(0), ranked()) is None
    with pytest.raises(AttributeError):
        call(THEIRS, none_on(1), ranked())
    for rank in (0, 1):
        with pytest.raises(ValueError, match="NoneType on replica"):
            call(OURS, none_on(rank), ranked())


@row("shapes, keys or lengths that do not fit")
def test_what_does_not_fit():
    cases = {
        "shape": (
            lambda x, r: [{"a": x[:, : r + 1]}],
            RuntimeError,
            r"output\[0\]\['a'\].*\(1, 2\)",
        ),
        "keys": (lambda x, r: [{"ab"[r]: x}], ValueError, r"output\[0\]: replica 1 has no key 'a'"),
        "length": (lambda x, r: [[x] * (r + 1)], ValueError, r"output\[0\].*\(1, 2\)"),
    }
    for make, kind, text in cases.values():
        with pytest.raises((RuntimeError, ValueError, KeyError)):
            call(THEIRS, lambda self, x, make=make: make(x, rank_of(x)), ranked())
        with pytest.raises(kind, match=text):
            call(OURS, lambda self, x, make=make: make(x, rank_of(x)), ranked())


@row("an output that requires grad but used no parameter")
def test_no_parameter_used():
    for side, options in ((THEIRS, {}), (OURS, {}), (OURS, {"unused_grad": "none"})):
        module = Apply(lambda self, x: x * 2)
        wrap(side, module, **options)(ints(4, 3, grad=True)).sum().backward()
        if side == OURS and not options:
            same(module.lin.weight.grad, torch.zeros(2, 3).double())
        else:
            assert module.lin.weight.grad is None
