"""README.md, "What differs from nn.DataParallel": threads, errors, gradients, and the known limits.
One test per row, named by the row's first cell, on torch's own code (oracle.py) and on fastdp. The
order in which NCCL adds cannot be shown without GPUs: that row looks at fastdp only.
"""

import os
import re
import signal
import sys
import threading
from pathlib import Path

import fastdp
import pytest
import torch
from differences import OURS, THEIRS, Rows, call, cells, rank_of, ranked, wrap
from fastdp import devices
from nets import Apply, as_a_loader_that_pins_memory, ints, linear, same
from torch import nn

row = Rows()


def test_every_row_of_the_page_has_a_test():
    assert cells("Threads, errors, gradients") == list(row)


@row("threads")
def test_threads():
    for side in (THEIRS, OURS):
        runs = []
        dp = wrap(side, Apply(lambda self, x: (runs.append(threading.current_thread()), x)[1]))
        dp(ints(4, 3))
        first, runs[:] = set(runs), []
        dp(ints(4, 3))
        kept = side == OURS
        assert (first == set(runs)) == kept
        assert (threading.current_thread() in runs) == kept
        others = {thread for thread in first if thread is not threading.current_thread()}
        assert (others <= set(threading.enumerate())) == kept
        assert not kept or all(thread.daemon for thread in others)


@row("state that replicas see")
def test_thread_state():
    def look(self):
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            torch.empty(()).device.type,
        )

    def under(side):
        torch.set_default_device("meta")
        try:
            with torch.autocast("cpu", torch.float16, cache_enabled=False), torch.no_grad():
                seen = []
                wrapped = wrap(side, module)
                module.function = lambda self, x: (seen.append(look(self)), x)[1]
                with torch.inference_mode():
                    wrapped(x)
        finally:
            torch.set_default_device(None)
        return seen

    module, x = Apply(None), ints(4, 3)
    standard = torch.bfloat16
    assert under(THEIRS) == [(False, False, True, standard, True, "cpu")] * 2
    assert under(OURS) == [(False, True, True, torch.float16, False, "meta")] * 2


@row("number of threads of torch's operators on the host")
def test_operators_threads():
    seen, before = [], torch.get_num_threads()
    module, x = Apply(lambda self, x: (seen.append(torch.get_num_threads()), x)[1]), ints(4, 3)
    torch.set_num_threads(3)
    try:
        kept = wrap(OURS, module)
        kept(x)
        as_a_loader_that_pins_memory()
        for dp, expected in ((wrap(THEIRS, module), 1), (wrap(OURS, module), 3), (kept, 3)):
            seen.clear()
            dp(x)
            assert seen == [expected] * 2
        torch.set_num_threads(2)
        seen.clear()
        kept(x)
        assert seen == [2, 2]
    finally:
        torch.set_num_threads(before)


@row("signal mask and CPU affinity, changed after the first forward")
def test_what_a_thread_has_from_its_birth():
    def look(self, x):
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        seen[rank_of(x)] = signal.pthread_sigmask(signal.SIG_BLOCK, []), cpus
        return x

    wrapped = [wrap(side, Apply(look)) for side in (THEIRS, OURS)]
    seen = {}
    wrapped[1](ranked())
    before = seen[0]
    assert before == seen[1]
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    if before[1] > 1:
        cpus = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cpus)})
    try:
        for dp, ranks in zip(wrapped, ([0, 1], [0])):
            seen.clear()
            dp(ranked())
            for rank in (0, 1):
                new = before[0] | {signal.SIGUSR2}, 1
                assert seen[rank] == (new if rank in ranks else before)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before[0])
        if before[1] > 1:
            os.sched_setaffinity(0, cpus)


@row(
    "what a forward leaves set for its thread: autocast past `torch.autocast`, "
    "`threading.local` values"
)
def test_what_a_forward_leaves():
    def forward(self, x):
        kept.calls = getattr(kept, "calls", 0) + 1
        counts.append(kept.calls)
        torch.set_autocast_enabled("cpu", True)
        torch.set_grad_enabled(False)
        return x

    for side in (THEIRS, OURS):
        kept, counts = threading.local(), []
        dp = wrap(side, Apply(forward))
        for _ in range(2):
            try:
                dp(ints(4, 3))
                assert torch.is_autocast_enabled("cpu") == (side == OURS)
            finally:
                torch.set_autocast_enabled("cpu", False)
            assert torch.is_grad_enabled()
        assert sorted(counts) == ([1, 1, 1, 1] if side == THEIRS else [1, 1, 2, 2])


def test_denormals_are_zero_where_they_are_for_the_caller():
    """As in torch's own, whose threads are new: they have it from the caller."""
    module = Apply(lambda self, x: x / 2)
    x = torch.full((2,), sys.float_info.min, dtype=torch.float64)
    for side in (THEIRS, OURS):
        dp = wrap(side, module)
        for flushes in (False, True, False):
            assert torch.set_flush_denormal(flushes)
            try:
                out = dp(x)
            finally:
                torch.set_flush_denormal(False)
            assert (out == 0.0).tolist() == [flushes] * 2


@row("saved-tensor hooks, function and dispatch modes")
def test_hooks_and_modes():
    def forward(self, x):
        places.append(torch.empty(()).device.type)
        return self.lin(x).exp()

    for side, packed_by, on_meta in ((THEIRS, 0, 0), (OURS, 1, 2)):
        threads, places = set(), []

        def pack(tensor):
            threads.add(threading.current_thread())
            return tensor

        module, x = Apply(forward), ints(4, 3)
        dp = wrap(side, module)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            dp(x)
        assert len(threads) == packed_by
        places.clear()
        with torch.device("meta"):
            dp(x)
        assert places.count("meta") == on_meta and len(places) == 2


class Two(Exception):
    def __init__(self, first, second):
        super().__init__(first, second)


@row("an error in a replica")
def test_error():
    def forward(self, x):
        raise error

    for error, theirs in ((KeyError("k"), KeyError), (Two(1, 2), RuntimeError)):
        for side, kind in ((THEIRS, theirs), (OURS, type(error))):
            with pytest.raises(kind, match=f"Caught {type(error).__name__} in replica 0") as caught:
                call(side, forward)
            assert type(caught.value) is kind
            cause = error if side == OURS else None
            assert caught.value.__cause__ is cause
        assert error.__traceback__ is None


@row("`SystemExit` in a replica")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_system_exit():
    def forward(self, x):
        if rank_of(x) == 1:
            raise SystemExit(3)
        return x

    with pytest.raises(KeyError):
        call(THEIRS, forward, ranked())
    with pytest.raises(SystemExit):
        call(OURS, forward, ranked())


@row("sums of gradients")
def test_order_of_sums():
    # 2**53 + 1 is rounded down: only one order of three terms keeps the 1.
    terms = torch.tensor([[2.0**53], [-(2.0**53)], [1.0]], dtype=torch.float64)
    for order, total in (([0, 1, 2], 1.0), ([0, 2, 1], 0.0), ([2, 0, 1], 0.0)):
        module = nn.Linear(1, 1, bias=False).double()
        dp = fastdp.DataParallel(module, device_ids=["cpu"] * 3)
        dp(terms[order]).sum().backward()
        assert module.weight.grad.item() == total


@row("sparse gradients")
def test_entries_of_sparse_gradients():
    for side in (THEIRS, OURS):
        words = nn.Embedding(4, 3, sparse=True).double()
        wrap(side, words)(torch.tensor([1, 1, 2, 1])).sum().backward()
        (indices,) = words.weight.grad._indices().tolist()
        assert (indices == [1, 2]) == (side == OURS) and set(indices) == {1, 2}
        assert words.weight.grad.to_dense()[:, 0].tolist() == [0.0, 3.0, 1.0, 0.0]


@row("`torch.func` transforms of the wrapper")
def test_function_transforms():
    for side, text in ((THEIRS, "setup_context"), (OURS, "Call the module itself")):
        dp = wrap(side, linear())
        with pytest.raises(RuntimeError, match=re.escape(text)):
            torch.func.grad(lambda x: dp(x).sum())(ints(4, 3))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_known_limits():
    with pytest.raises(ValueError, match="device_ids has 65 entries.*at most 64"):
        fastdp.DataParallel(linear(), device_ids=["cpu"] * 65)
    limits = (Path(__file__).resolve().parent.parent / "csrc" / "limits.h").read_text()
    assert f"#define FDP_MAX_REPLICAS {devices.MAX_REPLICAS}\n" in limits
    forward_ad = torch.autograd.forward_ad
    for side in (THEIRS, OURS):
        with forward_ad.dual_level(), pytest.raises(NotImplementedError):
            wrap(side, linear())(forward_ad.make_dual(ints(4, 3), ints(4, 3)))
