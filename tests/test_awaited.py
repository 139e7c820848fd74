"""Gate and AwaitedDict: every way to read a value waits for its bucket, once per stream and bucket;
all else is a dictionary's. The streams are pretended, so no GPU is needed."""

import copy
import gc
import pickle
import sys
import weakref

import pytest

from fastdp import _C

pytestmark = pytest.mark.seam


class Streams:
    """What a gate is given: the stream that is current, and who waited for what."""

    def __init__(self):
        self.current = 10
        self.waited = []
        self.gate = _C.Gate(1, self.wait, self.raw_stream)
        self.gate.close(["e0", "e1", "e2"])

    def wait(self, event):
        self.waited.append((self.current, event))

    def raw_stream(self, index):
        assert index == 1
        return self.current

    def taken(self):
        waited, self.waited = self.waited, []
        return waited


@pytest.fixture
def streams():
    """Without the exchange table the gate asks for the stream by the function it was given."""
    former = _C._use_exchange_table(False)
    yield Streams()
    _C._use_exchange_table(former)


@pytest.fixture
def awaited(streams):
    made = _C.AwaitedDict(streams.gate)
    made["a"], made["b"] = "A", "B"
    made.bucket = 1
    assert streams.taken() == []
    return made


READS = {
    "[]": lambda d: d["a"],
    "[] of nothing": lambda d: pytest.raises(KeyError, d.__getitem__, "x"),
    "get": lambda d: d.get("a"),
    "get of nothing": lambda d: d.get("x", 1),
    "items": lambda d: list(d.items()),
    "values": lambda d: list(d.values()),
    "iter": lambda d: list(d),
    "dict()": dict,
    "dict(**)": lambda d: dict(**d),
    "{**}": lambda d: {**d},
    "update": lambda d: {}.update(d),
    "|": lambda d: d | {},
    "| from the right": lambda d: {} | d,
    "==": lambda d: d == {},
    "== from the right": lambda d: {} == d,
    "!=": lambda d: d != {},
    "repr": repr,
    "copy": lambda d: d.copy(),
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "pop": lambda d: d.pop("a"),
    "pop of nothing": lambda d: d.pop("x", None),
    "popitem": lambda d: d.popitem(),
    "setdefault": lambda d: d.setdefault("a"),
}


@pytest.mark.parametrize("way", READS)
def test_every_read_waits(awaited, streams, way):
    READS[way](awaited)
    assert streams.taken() == [(10, "e1")]


NO_READS = {
    "in": lambda d: "a" in d,
    "len": len,
    "keys": lambda d: list(d.keys()),
    "bool": bool,
    "write": lambda d: d.__setitem__("c", 1),
    "del": lambda d: d.__delitem__("a"),
    "clear": lambda d: d.clear(),
    "update of it": lambda d: d.update(c=1),
}


@pytest.mark.parametrize("way", NO_READS)
def test_names_and_writes_do_not_wait(awaited, streams, way):
    NO_READS[way](awaited)
    assert streams.taken() == []


def test_results_are_those_of_a_dictionary(awaited):
    plain = {"a": "A", "b": "B"}
    assert awaited == plain and plain == awaited and not (awaited != plain)
    assert awaited != {"a": "A"} and awaited != 1
    assert isinstance(awaited, dict) and len(awaited) == 2 and "b" in awaited and "x" not in awaited
    assert awaited["a"] == awaited.get("a") == awaited.setdefault("a", 1) == "A"
    assert awaited.get("x") is None and awaited.get("x", 3) == 3
    assert list(awaited) == list(awaited.keys()) == ["a", "b"]
    assert list(reversed(awaited)) == ["b", "a"]
    assert list(awaited.values()) == ["A", "B"] and list(awaited.items()) == list(plain.items())
    assert repr(awaited) == repr(plain) and str(awaited) == str(plain)
    for made in (
        awaited.copy(),
        copy.copy(awaited),
        copy.deepcopy(awaited),
        pickle.loads(pickle.dumps(awaited)),
        dict(awaited),
        awaited | {},
    ):
        assert type(made) is dict and made == plain and list(made) == ["a", "b"]
    awaited |= {"c": "C"}
    assert type(awaited) is _C.AwaitedDict
    assert awaited.pop("c") == "C" and awaited.popitem() == ("b", "B")
    assert awaited.pop("x", 5) == 5
    del awaited["a"]
    assert awaited == {} and not awaited
    for raises, call in (
        (KeyError, lambda: awaited["x"]),
        (KeyError, lambda: awaited.pop("x")),
        (KeyError, awaited.popitem),
        (TypeError, awaited.get),
        (TypeError, lambda: awaited.get(1, 2, 3)),
        (TypeError, lambda: awaited.pop(1, 2, 3)),
        (TypeError, lambda: awaited.items(1)),
        (TypeError, lambda: awaited[[]]),
        (TypeError, lambda: hash(awaited)),
    ):
        with pytest.raises(raises):
            call()


def test_a_value_that_is_no_bucket_s_is_not_waited_for(awaited, streams):
    for bucket in (-1, 3, 100, -7):
        awaited.bucket = bucket
        assert awaited["a"] == "A"
    assert streams.taken() == [] and awaited.bucket == -7


def test_once_per_bucket_and_stream(awaited, streams):
    gate = streams.gate
    for _ in range(3):
        assert awaited["a"] == "A"
    assert streams.taken() == [(10, "e1")]
    gate.wait_for(0)
    gate.wait_for(1)
    assert streams.taken() == []
    gate.wait_for(2)
    gate.wait_for(2)
    assert awaited["b"] == "B"
    assert streams.taken() == [(10, "e2")]
    streams.current = 11
    assert awaited["b"] == awaited.get("b") == "B"
    assert streams.taken() == [(11, "e1")]
    streams.current = 10
    assert awaited["b"] == "B"
    assert streams.taken() == []


def test_a_null_stream_is_a_stream(awaited, streams):
    streams.current = 0
    awaited["a"], awaited["b"]
    assert awaited["a"] == "A" and streams.taken() == [(0, "e1")]


def test_a_new_forward_waits_anew(awaited, streams):
    assert awaited["a"] == "A"
    streams.gate.close(["f0", "f1"])
    assert awaited["a"] == awaited["b"].replace("B", "A") == "A"
    assert streams.taken() == [(10, "e1"), (10, "f1")]
    streams.gate.close([])
    assert awaited["a"] == "A" and streams.taken() == []


def test_many_streams_are_forgotten_but_never_missed(awaited, streams):
    for stream in [*range(1, 10), *range(1, 10)]:
        streams.current = stream
        awaited["a"]
        assert set(streams.taken()) <= {(stream, "e1")}
    streams.gate.close(["g0", "g1"])
    for stream in range(1, 10):
        streams.current = stream
        for _ in range(2):
            assert awaited["a"] == "A"
        assert streams.taken() == [(stream, "g1")]


def test_an_error_of_the_wait_is_raised_and_nothing_counts_as_waited_for(streams):
    failing = [True]

    def wait(event):
        if failing[0]:
            raise ZeroDivisionError
        streams.wait(event)

    gate = _C.Gate(1, wait, streams.raw_stream)
    gate.close(["e0"])
    awaited = _C.AwaitedDict(gate)
    awaited["a"], awaited.bucket = "A", 0
    for way in READS.values():
        with pytest.raises(ZeroDivisionError):
            way(awaited)
    failing[0] = False
    assert awaited["a"] == "A" and streams.taken() == [(10, "e0")]


def test_a_forward_that_begins_while_one_waits_is_waited_for(streams):
    """The wait runs Python: what it passed belongs to the former forward."""
    waited = []

    def wait(event):
        waited.append(event)
        if event == "e0":
            gate.close(["f0"])

    gate = _C.Gate(1, wait, streams.raw_stream)
    gate.close(["e0"])
    gate.wait_for(0)
    gate.wait_for(0)
    gate.wait_for(0)
    assert waited == ["e0", "f0"]


def test_errors_name_the_argument(streams):
    gate = streams.gate
    for call in (
        lambda: _C.AwaitedDict(),
        lambda: _C.AwaitedDict({}),
        lambda: _C.AwaitedDict(gate, gate),
        lambda: _C.AwaitedDict(gate=gate),
    ):
        with pytest.raises(TypeError, match="AwaitedDict takes one Gate"):
            call()
    with pytest.raises(ValueError, match="ordinal: -1, must be 0 or more"):
        _C.Gate(-1, print, print)
    with pytest.raises(TypeError, match="no keyword arguments"):
        _C.Gate(1, print, raw_stream=print)
    with pytest.raises(TypeError, match="Gate"):
        _C.Gate(1, print)
    with pytest.raises(TypeError):
        gate.close(3)
    with pytest.raises(TypeError):
        gate.wait_for("1")
    with pytest.raises(AttributeError):
        _C.AwaitedDict(gate).gate = None
    with pytest.raises(TypeError):
        class Below(_C.AwaitedDict):
            pass


class Thing:
    pass


def test_references(streams):
    event, value, gate = Thing(), Thing(), streams.gate
    held = (event, value, gate, _C.Gate, _C.AwaitedDict)

    def is_flat():
        before = [sys.getrefcount(each) for each in held]
        for _ in range(20):
            gate.close([event, event])
            awaited = _C.AwaitedDict(gate)
            awaited["a"], awaited.bucket = value, 1
            for way in READS:
                if way not in ("pickle", "deepcopy", "pop", "popitem"):
                    READS[way](awaited)
            assert awaited.pop("a") is value
            awaited["a"] = value
            assert awaited.popitem() == ("a", value)
            awaited["a"] = value
            awaited.__init__(gate)
            streams.waited.clear()
        del awaited
        gate.close([])
        return [sys.getrefcount(each) for each in held] == before

    gc.collect()
    # Classes count their instances, and some that earlier tests had left may go meanwhile.
    assert any(is_flat() for _ in range(3))


@pytest.mark.parametrize("through", ["value", "event", "wait"])
def test_cycles_are_collected(through):
    thing = Thing()
    gate = _C.Gate(0, thing.__class__ if through != "wait" else thing.__init__, print)
    awaited = _C.AwaitedDict(gate)
    thing.held = awaited
    if through == "value":
        awaited["a"] = thing
    if through == "event":
        gate.close([thing])
    gone = weakref.ref(thing)
    del thing, awaited, gate
    gc.collect()
    assert gone() is None
