"""The seam without the interpreter's lock: threads that call everything of the core at once. For a
free-threaded Python, best one that was built with ThreadSanitizer, over an extension that was too:

    ./configure --disable-gil --with-thread-sanitizer && make    (of CPython 3.13 or newer)
    FASTDP_SANITIZE=thread FASTDP_CUDA=0 python setup.py build_ext --inplace
    PYTHON_GIL=0 PYTHONPATH=. python tests/free_threading.py

fastdp does not declare that it can do without the lock (csrc/py_compat.h): a free-threaded Python
turns it on at the import unless PYTHON_GIL=0 says otherwise."""

import argparse
import sys
import threading

import numpy
import torch

from fastdp import _C, comm


def arrays(k):
    a = numpy.arange(24, dtype=numpy.float64).reshape(6, 4) + k
    parts = comm.scatter(a, ["cpu"] * 3)
    assert (comm.gather(parts, destination="cpu") == a).all()
    assert (comm.reduce_add([a, a]) == 2 * a).all()
    assert all((copy == a).all() for copy in comm.broadcast(a, ["cpu"] * 2))


def tensors(k):
    source = torch.arange(12.0).view(4, 3) + k
    targets = (torch.empty(2, 3), torch.empty(2, 3))
    _C.scatter(source, targets, 0)
    assert torch.equal(torch.cat(targets), source)
    back = torch.empty(4, 3)
    _C.gather(targets, back, 0)
    assert torch.equal(back, source)


def buckets(k):
    shapes = [torch.empty(3, 2), torch.empty(5)]
    bucket = _C.Bucket(tuple(shapes), None, None)
    values = tuple(torch.full_like(t, float(k % 7)) for t in shapes)
    flat = torch.empty(bucket.size_elems)
    bucket.broadcast(values, (flat,))
    assert all(map(torch.equal, bucket.split(flat), values))
    total = torch.empty(bucket.size_elems)
    bucket.reduce((values, values), total)
    assert torch.equal(bucket.split(total)[0], 2 * values[0])


def exchange(k):
    there, back = _C.Handoff(), _C.Handoff()

    def serve():
        back.put(there.take(10.0) + 1)

    thread = threading.Thread(target=serve)
    thread.start()
    there.put(k)
    assert back.take(10.0) == k + 1
    thread.join()


def looks(k):
    _C.counters()
    assert "operations" in _C.dump()
    _C.describe((torch.empty(k % 5),))
    _C.set_deadline(0)
    try:
        _C.scatter(torch.ones(2), (torch.ones(3),), 0)
    except ValueError:
        pass


WORK = (arrays, tensors, buckets, exchange, looks)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--threads", type=int, default=5)
    chosen = parser.parse_args()
    failures = []
    start = threading.Barrier(chosen.threads)

    def run(number):
        try:
            start.wait()
            for k in range(chosen.rounds):
                WORK[(number + k) % len(WORK)](k)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(chosen.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    lock = "on" if has_lock else "off"
    ran = f"{chosen.threads} threads, {chosen.rounds} rounds each, lock {lock}"
    print(f"{ran}: {len(failures)} failed")
    for failure in failures:
        print(repr(failure))
    return len(failures) > 0


if __name__ == "__main__":
    sys.exit(main())
