"""The module itself: what it says of the build, arguments of the verbs, errors, faults, counters,
log, and a forked child."""

import os
import subprocess
import sys

import pytest
import torch

from fastdp import _C

pytestmark = pytest.mark.seam


def test_build_info():
    info = _C.build_info()
    assert set(info) == {
        "version",
        "cuda",
        "cuda_toolkit",
        "cuda_archs",
        "compiler",
        "commit",
        "dlpack",
    }
    assert info["dlpack"] == "1.3" and isinstance(info["cuda"], bool)


def test_env_table():
    table = _C.env_table()
    assert all(len(row) == 4 and all(isinstance(text, str) for text in row) for row in table)
    names = [row[0] for row in table]
    assert len(set(names)) == len(names) and "FASTDP_TIMEOUT_MS" in names


def test_nothing():
    assert _C.nothing() is None


def test_exceptions():
    assert issubclass(_C.Error, RuntimeError)
    for kind in (_C.DeviceError, _C.TimeoutError, _C.AbortedError, _C.FaultInjected):
        assert issubclass(kind, _C.Error) and kind.__module__ == "fastdp._C"
    assert issubclass(_C.TimeoutError, TimeoutError)


ones = torch.ones


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: _C.scatter(ones(2)), TypeError, "scatter() takes 3 positional arguments, 1 given"),
        (lambda: _C.gather(), TypeError, "gather() takes 3 positional arguments, 0 given"),
        (lambda: _C.broadcast(1, 2, 3), TypeError, "broadcast() takes 2 positional arguments, 3"),
        (lambda: _C.reduce(1), TypeError, "reduce() takes 2 positional arguments, 1 given"),
        (lambda: _C.arm_fault("scatter"), TypeError, "arm_fault() takes 2 positional arguments, 1"),
        (lambda: _C.scatter(ones(2), (), 1 << 40), ValueError, f"dim: {1 << 40} is out of range"),
        (lambda: _C.scatter(ones(2), (), "0"), TypeError, "integer"),
        (lambda: _C.gather((), ones(2), 1.5), TypeError, "integer"),
        (lambda: _C.scatter(ones(2), [1], 0), TypeError, "targets: expected a tuple, got list"),
        (lambda: _C.reduce(ones(2), ones(2)), TypeError, "sources: expected a tuple, got Tensor"),
        (lambda: _C.borrow(None), TypeError, "tensors: expected a tuple, got NoneType"),
        (
            lambda: _C.borrow((None,) * ((1 << 20) + 1)),
            ValueError,
            f"tensors: {(1 << 20) + 1} tensors, must be at most {1 << 20}",
        ),
        (lambda: _C.broadcast(ones(2), ()), ValueError, "number of targets is 0, must be 1 to 64"),
        (lambda: _C.broadcast(ones(2), (ones(3),)), ValueError, "targets[0] has shape (3,)"),
        (lambda: _C.broadcast(ones(2), (ones(2).int(),)), TypeError, "targets[0] is int32"),
        (lambda: _C.scatter(ones(2), (ones(2),), 1), ValueError, "dim is 1, must be 0 to 0"),
        (
            lambda: _C.broadcast(ones(4), (ones(1).expand(4),)),
            ValueError,
            "targets[0] overlaps itself",
        ),
        (lambda: _C.arm_fault("nowhere", 1), ValueError, "point: 'nowhere' is no fault point"),
        (lambda: _C.arm_fault("scatter", -1), ValueError, "nth_call: -1, must be 0 or more"),
        (lambda: _C.arm_fault(3, 1), TypeError, ""),
        (lambda: _C.arm_fault("scatter", "x"), TypeError, "integer"),
    ],
)
def test_arguments(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)
    assert type(caught.value) is error


VERBS = {
    "scatter": lambda: _C.scatter(ones(4), (ones(2), ones(2)), 0),
    "gather": lambda: _C.gather((ones(2), ones(2)), ones(4), 0),
    "broadcast": lambda: _C.broadcast(ones(4), (ones(4),)),
    "reduce": lambda: _C.reduce((ones(4), ones(4)), ones(4)),
    "bucket_broadcast": lambda: _C.Bucket((ones(4),)).broadcast((ones(4),), (ones(16),)),
    "bucket_reduce": lambda: _C.Bucket((ones(4),)).reduce(((ones(4),),), ones(16)),
    "memory_take": lambda: _C.Array((4,), (2, 32, 1), (1, 0)),
}


@pytest.mark.parametrize("point", VERBS)
def test_faults(point):
    _C.arm_fault(point, 2)
    try:
        VERBS[point]()
        with pytest.raises(_C.FaultInjected, match=point):
            VERBS[point]()
        VERBS[point]()  # fails once only
        _C.arm_fault(point, 1)
    finally:
        _C.arm_fault(point, 0)
    VERBS[point]()


def test_counters():
    _C.reset_counters()
    assert all(entry == {"calls": 0, "bytes": 0, "chunks": 0} for entry in _C.counters().values())
    VERBS["scatter"]()
    VERBS["scatter"]()
    VERBS["broadcast"]()
    counters = _C.counters()
    assert set(counters) == set(VERBS) - {"memory_take"}
    assert counters["scatter"]["calls"] == 2 and counters["scatter"]["bytes"] == 32
    assert counters["broadcast"]["calls"] == 1 and counters["broadcast"]["bytes"] == 16
    assert counters["reduce"]["calls"] == 0
    _C.reset_counters()


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_log_level_that_makes_no_sense_is_refused_at_the_first_verb():
    code = """
import torch
from fastdp import _C
try:
    _C.reduce((torch.ones(1),), torch.ones(1))
except ValueError as error:
    print(error)
"""
    done = run(code, FASTDP_LOG="loud")
    assert "FASTDP_LOG" in done.stdout and "loud" in done.stdout, done.stderr


def test_log_goes_to_logging():
    code = """
import logging, torch
logging.basicConfig(level=logging.DEBUG, format="%(name)s %(levelname)s %(message)s")
from fastdp import _C
_C.reduce((torch.ones(1),), torch.ones(1))
"""
    done = run(code, FASTDP_LOG="debug")
    assert done.returncode == 0
    assert "fastdp DEBUG transport local" in done.stderr
    assert "fastdp" not in run(code, FASTDP_LOG="off").stderr


def test_a_broken_log_handler_breaks_no_verb():
    code = """
import logging, sys, torch
class Broken(logging.Handler):
    def emit(self, record): raise LookupError("broken handler")
logging.getLogger().addHandler(Broken()); logging.getLogger().setLevel(10)
from fastdp import _C
target = torch.zeros(1)
_C.reduce((torch.ones(1),), target)
print(target.item())
"""
    done = run(code, FASTDP_LOG="debug")
    assert done.stdout == "1.0\n" and "broken handler" in done.stderr


def test_importing_starts_no_thread_and_reads_no_environment():
    count = "import os; print(len(os.listdir('/proc/self/task')))"
    alone = run("import torch; " + count).stdout
    assert run("from fastdp import _C; " + count, FASTDP_LOG="loud").stdout == alone


def test_a_forked_child_can_use_host_memory():
    _C.broadcast(ones(3), (torch.empty(3),))  # the parent has a context
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            target = torch.empty(3)
            _C.broadcast(torch.arange(3.0), (target,))
            bucket = _C.Bucket((target,))
            flat = torch.zeros(bucket.size_elems)
            bucket.broadcast((target,), (flat,))
            os.write(writer, repr(flat[:3].tolist()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "[0.0, 1.0, 2.0]"
    assert os.waitpid(child, 0)[1] == 0
    _C.broadcast(ones(3), (torch.empty(3),))


def test_a_second_module_object_has_a_state_of_its_own():
    code = """
import importlib.util, sys, torch
from fastdp import _C
spec = importlib.util.spec_from_file_location("fastdp._C", _C.__file__)
other = importlib.util.module_from_spec(spec)
spec.loader.exec_module(other)
assert other is not _C and other.Error is not _C.Error and other.Bucket is not _C.Bucket
target = torch.zeros(2)
other.reduce((torch.ones(2), torch.ones(2)), target)
_C.reduce((target, target), target)
print(target.tolist())
import gc
del other, spec; gc.collect()
_C.reduce((target, target), target)
print(target.tolist())
"""
    done = run(code)
    assert done.stdout == "[4.0, 4.0]\n[8.0, 8.0]\n", done.stderr


class Undecided:
    def __bool__(self):
        raise KeyError("neither")


def test_scratch_tells_of_each_opened_device():
    target = ones(2)
    _C.broadcast(ones(2), (target,))  # the host is open now
    rows = _C.scratch(False)
    assert all(len(row) == 3 and len(row[0]) == 2 for row in rows)
    held = {device: (size, pinned) for device, size, pinned in rows}
    assert held[1, 0][0] >= 0 and held[1, 0][1] == 0
    assert {device: row for device, *row in _C.scratch(True)}[1, 0] == [0, 0]
    with pytest.raises(KeyError, match="neither"):
        _C.scratch(Undecided())
    with pytest.raises(TypeError):
        _C.scratch()
