"""DLPack's exchange table on a tensor's type: tables made by hand, of each kind that is used and of
those that are not."""

import ctypes

import numpy as np
import pytest
import torch
from seam_producers import BORROW, FROM_PY, READ_ONLY, STREAM, Producer, Table, table_capsule

from fastdp import _C

pytestmark = pytest.mark.seam

# DLPack keeps them for ever, so does this list.
TABLES = []


def make_table(**entries):
    table = Table(major=1, minor=3, **entries)
    TABLES.append(table)
    return table


def test_table_that_only_gives_owning_tensors():
    @FROM_PY
    def from_py(obj, out):
        out[0] = ctypes.addressof(obj.managed)
        return 0

    older = make_table(managed_from_py=from_py)
    newer = make_table(previous=ctypes.addressof(older))
    newer.major = 2

    class Carrier(Producer):
        __dlpack_c_exchange_api__ = table_capsule(newer)

    carrier = Carrier((2, 3))
    assert _C.layout(carrier)[:2] == ((2, 3), (3, 1))
    assert carrier.deleted == 1 and carrier.calls == []
    frozen = Carrier((2,), flags=READ_ONLY)
    with pytest.raises(ValueError, match="^target: read-only, cannot be written"):
        _C.reduce((torch.ones(2),), frozen)
    assert frozen.deleted == 1


@pytest.mark.parametrize("attribute", ["empty table", "wrong major", "integer"])
def test_without_a_usable_table_the_capsule_is_used(attribute):
    table = make_table()
    table.major = 2 if attribute == "wrong major" else 1

    class Carrier(Producer):
        __dlpack_c_exchange_api__ = 7 if attribute == "integer" else table_capsule(table)

    carrier = Carrier((2, 3))
    assert _C.layout(carrier)[0] == (2, 3)
    assert len(carrier.calls) == 1


def test_table_that_borrows_and_tells_streams():
    asked = []

    @BORROW
    def borrow(obj, out):
        ctypes.memmove(out, ctypes.byref(obj.managed.dl_tensor), ctypes.sizeof(out[0]))
        return 0

    @STREAM
    def current(kind, ordinal, out):
        asked.append((kind, ordinal))
        out[0] = 0x1000 + ordinal
        return 0

    former = _C._use_exchange_table(True)  # forgets which table tells streams

    class Carrier(Producer):
        __dlpack_c_exchange_api__ = table_capsule(
            make_table(borrow=borrow, current_work_stream=current)
        )

    try:
        tensors = tuple(Carrier(device=(2, k % 2)) for k in range(6))
        assert _C.borrow(tensors) == 36
        assert asked == [(2, 0), (2, 1)]  # once per device and call
        plain = Producer(device=(2, 1))
        _C.borrow((plain,))
        assert plain.calls == [{"max_version": (1, 3), "stream": 0x1001}]
        host = tuple(Carrier() for _ in range(3))
        del asked[:]
        _C.borrow(host)
        assert asked == []
    finally:
        _C._use_exchange_table(former)


def test_many_types_do_not_confuse_the_memory_of_types():
    for k in range(40):
        kind = type(f"Kind{k}", (Producer,), {})
        assert _C.layout(kind((k + 1,)))[0] == (k + 1,)
        assert _C.layout(torch.ones(k, 2))[0] == (k, 2)
        assert _C.layout(torch.nn.Parameter(torch.ones(3)))[0] == (3,)
        assert _C.layout(np.ones(2))[0] == (2,)


@pytest.mark.parametrize("entry", ["borrow", "managed_from_py"])
def test_a_table_that_fails_without_an_error(entry):
    kind = BORROW if entry == "borrow" else FROM_PY
    table = make_table(**{entry: kind(lambda obj, out: -1)})

    class Carrier(Producer):
        __dlpack_c_exchange_api__ = table_capsule(table)

    with pytest.raises(SystemError, match=r"^tensors\[1\]: the producer failed without an error$"):
        _C.borrow((torch.ones(1), Carrier()))
