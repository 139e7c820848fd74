"""What the seam may not do over thousands of calls: leak, or hold the GIL while memory moves."""

import gc
import sys
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from seam_producers import OldProducer, Producer

from fastdp import _C

pytestmark = pytest.mark.seam

CALLS = 2000


def live_tensors():
    for _ in range(10):  # what a finalizer lets go of is found by the next one
        if gc.collect() == 0:
            break
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def good_calls():
    source = torch.arange(12.0).view(4, 3)
    targets = (torch.empty(2, 3), torch.empty(2, 3))
    wide = torch.empty(4, 3)
    array = np.ones((4, 3), np.float32)
    leaf = torch.nn.Parameter(torch.ones(4, 3))
    whole = torch.ones(2, dtype=torch.complex64)
    bucket = _C.Bucket((source, leaf))
    flat = torch.empty(bucket.size_elems)
    things = (source, *targets, wide, array, leaf, whole, bucket, flat)

    def run():
        _C.scatter(source, targets, 0)
        _C.gather(targets, wide, 0)
        _C.broadcast(leaf, (wide, array))
        _C.reduce((source, array, leaf), wide)
        _C.borrow(things[:-2])
        _C.layout(array)
        _C.describe((source, leaf, array, whole))
        _C.Bucket((source, leaf))
        bucket.broadcast((source, leaf), (flat,))
        bucket.reduce(((source, None), (None, leaf)), flat)
        bucket.views(flat)
        assert bucket.slots and bucket.count == 2
        _C.Array((3,), (2, 32, 1), (1, 0)).__dlpack__()
        _C.counters(), _C.env_table(), _C.build_info()

    return run, things


def bad_calls():
    good = torch.ones(2)
    sparse = torch.eye(2).to_sparse()
    frozen = np.ones(2, np.float32)
    frozen.flags.writeable = False
    conj = torch.ones(2, dtype=torch.complex64).conj()
    meta = torch.empty(2, device="meta")
    bucket = _C.Bucket((good, good))
    things = (good, sparse, frozen, conj, meta, bucket)
    calls = [
        lambda: _C.borrow((good, sparse)),
        lambda: _C.borrow((good, meta)),
        lambda: _C.borrow((good, conj)),
        lambda: _C.broadcast(good, (frozen,)),
        lambda: _C.reduce((good, 3), good),
        lambda: _C.scatter(good, (good,), 5),
        lambda: _C.gather((good,), conj, 0),
        lambda: _C.describe((good, sparse)),
        lambda: _C.layout(conj),
        lambda: _C.Bucket((good, good.int())),
        lambda: bucket.reduce(((good, None), (sparse, None)), good),
        lambda: bucket.broadcast((good, good), (good,)),
        lambda: bucket.views(good),
        lambda: _C.Array((1 << 58,), (2, 32, 1), (1, 0)),
        lambda: _C.Array((2,), (2, 32, 1), (1, 0)).__dlpack__(stream=3),
        lambda: _C.arm_fault("nowhere", 1),
    ]

    def run():
        for call in calls:
            try:
                call()
            except (TypeError, ValueError, BufferError, MemoryError):
                continue
            raise AssertionError("a bad call went through")

    return run, things


@pytest.mark.parametrize("table", [True, False], ids=["table", "capsule"])
@pytest.mark.parametrize("calls", [good_calls, bad_calls])
def test_no_references_and_no_objects_are_left(calls, table):
    former = _C._use_exchange_table(table)
    try:
        run, things = calls()
        run()
        counts = [sys.getrefcount(thing) for thing in things]
        tensors, blocks = live_tensors(), sys.getallocatedblocks()
        none = sys.getrefcount(None)
        for _ in range(CALLS // 2):
            run()
        assert [sys.getrefcount(thing) for thing in things] == counts
        assert live_tensors() <= tensors  # fewer are what earlier tests had left
        # One block or reference for each run would be 1,000; other threads of the process, those of
        # pytest's workers among them, come and go with some hundred.
        assert sys.getallocatedblocks() - blocks < CALLS // 4
        assert abs(sys.getrefcount(None) - none) < CALLS // 4
    finally:
        _C._use_exchange_table(former)


@pytest.mark.parametrize("kind", [Producer, OldProducer])
def test_capsules_are_given_back_every_time(kind):
    producer = kind((4,))
    target = torch.empty(4)
    for k in range(CALLS):
        _C.broadcast(producer, (target,))
        producer.capsules.clear()
        producer.calls.clear()
        assert producer.deleted == k + 1
    alive = weakref.ref(producer)
    del producer
    gc.collect()
    assert alive() is None


def test_capsules_are_given_back_when_a_later_argument_fails():
    producers = tuple(Producer((4,)) for _ in range(40))
    with pytest.raises(TypeError, match=r"^tensors\[40\]: expected a tensor"):
        _C.borrow((*producers, 3))
    assert [producer.deleted for producer in producers] == [1] * 40


def test_resident_memory_of_many_large_calls():
    def resident_kib():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

    tensors = tuple(torch.ones(2) for _ in range(400))
    bucket = _C.Bucket(tensors)
    flat = torch.empty(bucket.size_elems)

    def run():
        bucket.reduce((tensors, tensors), flat)
        bucket.views(flat)

    run()
    before = resident_kib()
    for _ in range(2000):
        run()
    # A leak of the views alone would be 800 MB; the address sanitizer keeps 256 MB of the freed.
    assert resident_kib() - before < 400 * 1024


def test_tensors_are_not_kept():
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    _C.broadcast(tensor, (torch.empty(3),))
    bucket = _C.Bucket((tensor,))
    _C.describe((tensor,))
    del tensor
    assert alive() is None
    assert bucket.count == 1


def test_classes_are_let_go_in_the_end():
    # A type is remembered while it is among the last few, and not for ever.
    kind = type("Passing", (Producer,), {})
    _C.layout(kind())
    alive = weakref.ref(kind)
    del kind
    for k in range(8):
        _C.layout(type(f"Other{k}", (Producer,), {})())
    gc.collect()
    assert alive() is None


def test_other_threads_run_while_memory_moves():
    # The switch interval is so long that a thread runs only when the GIL is given up.
    source = torch.ones(1 << 27, dtype=torch.uint8)
    target = torch.empty_like(source)
    _C.broadcast(source, (target,))
    ticks, during, stop = [0], [], threading.Event()

    def tick():
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0)

    former = sys.getswitchinterval()
    thread = threading.Thread(target=tick)
    thread.start()
    sys.setswitchinterval(100)
    try:
        for _ in range(10):
            before = ticks[0]
            _C.broadcast(source, (target,))
            during.append(ticks[0] - before)
    finally:
        sys.setswitchinterval(former)
        stop.set()
        thread.join()
    assert max(during) > 10


def test_many_threads_borrow_at_once():
    wrong = []

    def work(k):
        source = torch.full((64,), float(k))
        for _ in range(300):
            a, b = torch.empty(64), np.empty(64, np.float32)
            _C.broadcast(source, (a, b))
            _C.reduce((a, b, source), a)
            if not torch.equal(a, source * 3):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
