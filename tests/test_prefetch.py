"""fastdp.prefetch on host replicas: the same numbers as without it, and no thread left behind."""

import collections
import copy
import gc
import logging
import subprocess
import sys
import threading
import time
import weakref

import fastdp
import pytest
import torch
from engine_cases import steps
from fastdp import Scattered
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import Apply, grads, ints, linear, same
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

fetch = fastdp.prefetch
NAME = "fastdp-prefetch"
Pair = collections.namedtuple("Pair", ["x", "y"])


def wrap(module, n=2, **options):
    return fastdp.DataParallel(module, ["cpu"] * n, **options)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == NAME]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    assert not threads()
    yield
    assert not threads()


def whole(tree):
    """The batch with what was cut put together again."""
    if isinstance(tree, Scattered):
        return tree.gathered()
    if isinstance(tree, dict):
        return type(tree)((key, whole(value)) for key, value in tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(whole, tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map(whole, tree))
    return tree


# The same numbers.


def train(dp, batches):
    """(outputs, weights) of SGD on squared differences."""
    optimizer = torch.optim.SGD(dp.parameters(), lr=2.0**-12)
    outputs = []
    for x, y in batches:
        out = dp(x)
        target = y.gathered() if isinstance(y, Scattered) else y
        optimizer.zero_grad()
        ((out - target) ** 2).sum().backward()
        optimizer.step()
        outputs.append(out.detach())
    return outputs, list(dp.parameters())


@pytest.mark.filterwarnings("ignore::fastdp.DataParallelWarning")
@pytest.mark.parametrize("n, depth", [(1, 2), (2, 1), (2, 2), (3, 5)])
def test_training_is_the_same_to_the_bit(n, depth):
    """Two epochs over a DataLoader whose last batch is uneven."""
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(30, 6), torch.randn(30, 2))
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))
    theirs, ours = wrap(copy.deepcopy(module), n), wrap(module, n)

    def loader():
        generator = torch.Generator().manual_seed(7)
        return DataLoader(data, batch_size=8, shuffle=True, generator=generator)

    plain, fed = loader(), fetch(loader(), ours, depth)
    assert len(fed) == len(plain) == 4
    for _ in range(2):
        same(train(ours, fed), train(theirs, plain))
    same(list(ours.buffers()), list(theirs.buffers()))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk_sizes": [1, 5, 3]},
        {"chunk_sizes": lambda batch, n: [batch]},
        {"dim": 1},
        {"dim": -1},
    ],
    ids=str,
)
def test_gradients_are_those_of_a_plain_call(options):
    across = options.get("dim", 0) != 0
    module = Apply(lambda self, x: self.lin.weight @ x if across else self.lin(x))
    dp = wrap(module, 3, **options)
    shape = (3, 7) if across else (7, 3)
    batches = [ints(*shape, seed=k) for k in range(3)]
    outputs, gradients = [], []
    for batch in batches:
        module.zero_grad()
        out = dp(batch)
        (out**2).sum().backward()
        outputs.append(out.detach())
        gradients.append(grads(module))
    for batch, out, gradient in zip(fetch(batches, dp), outputs, gradients):
        module.zero_grad()
        got = dp(batch)
        (got**2).sum().backward()
        same(got, out)
        same(grads(module), gradient)


def test_a_short_batch_runs_fewer_replicas():
    dp = wrap(Apply(lambda self, x: torch.tensor([float(len(x))])), 4)
    with pytest.warns(fastdp.DataParallelWarning):
        got = [dp(batch).tolist() for batch in fetch([ints(n, 3) for n in (8, 5, 1, 0)], dp)]
    assert got == [[2, 2, 2, 2], [2, 2, 1], [1], [0]]


def leaves():
    tensors = st.integers(0, 9).map(lambda seed: ints(5, 2, seed=seed))
    return st.one_of(tensors, st.integers(), st.text(max_size=2), st.none())


def containers(inner):
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.tuples(inner, inner).map(lambda two: Pair(*two)),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(collections.OrderedDict),
    )


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.recursive(leaves(), containers, max_leaves=6), min_size=1, max_size=3),
    st.integers(1, 3),
)
def test_nested_batches_are_cut_as_a_call_cuts_them(batches, n):
    dp = wrap(linear(), n)
    got = list(fetch(batches, dp))
    assert len(got) == len(batches)
    for ours, theirs in zip(got, batches):
        same(whole(ours), theirs)
        same(rows(dp, ours), rows(dp, theirs))


def rows(dp, batch):
    """What each replica gets."""
    return list(map(list, dp.scatter((batch,), {"batch": batch}, dp.device_ids)))


def test_layouts_are_those_of_a_plain_call():
    image = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    odd = torch.randn(6, 8).t()[:4, 1::2]
    dp = wrap(Apply(lambda self, *xs: [str(x.stride()) for x in xs]), gather_outputs=False)
    (fed,) = fetch([(image, odd, torch.ones(1, 2).expand(4, 2))], dp)
    assert dp(*fed) == dp(image, odd, torch.ones(1, 2).expand(4, 2))


def test_the_callers_tensors_are_not_changed_by_a_forward():
    x = ints(4, 3)
    dp = wrap(Apply(lambda self, x: x.mul_(0)))
    for batch in fetch([x], dp):
        dp(batch)
    same(x, ints(4, 3))


def test_recorded_steps(means):
    """An engine sees plain tensors, and records them."""
    if not means.on_host:
        pytest.skip("on GPUs: test_prefetch_cuda.py")
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    ours, theirs = means.twins(module)
    batches = [(ints(6, 3, seed=k), ints(6, 2, seed=k)) for k in range(8)]
    same(train(ours, fetch(batches, ours)), train(theirs, batches))
    assert steps(ours) == {"eager": 2, "graph": 6}


# What is cut, and what not.


@pytest.mark.parametrize(
    "batch, scatter, cut",
    [
        ({"x": ints(4, 3), "y": ints(4, 2)}, "x", ["x"]),
        ({"x": ints(4, 3), "y": ints(4, 2)}, ["y", "x"], ["x", "y"]),
        ({"x": ints(4, 3), 1: ints(4, 2)}, (1,), [1]),
        ([ints(4, 3), ints(4, 2)], 0, [0]),
        ((ints(4, 3), ints(4, 2), 5), [-2], [1]),
        (Pair(ints(4, 3), ints(4, 2)), "y", [1]),
        (Pair(ints(4, 3), ints(4, 2)), [0], [0]),
        (Pair(ints(4, 3), ints(4, 2)), [], []),
    ],
    ids=str,
)
def test_scatter_names_what_is_cut(batch, scatter, cut):
    (fed,) = fetch([batch], wrap(linear()), scatter=scatter)
    same(whole(fed), batch)
    items = fed.items() if isinstance(fed, dict) else enumerate(fed)
    assert [key for key, value in items if isinstance(value, Scattered)] == cut
    assert type(fed) is type(batch)


def test_a_named_item_is_cut_wherever_it_is_nested():
    batch = {"x": [ints(4, 3), {"m": ints(4)}], "y": [ints(4, 2)]}
    (fed,) = fetch([batch], wrap(linear()), scatter=["x"])
    assert isinstance(fed["x"][0], Scattered) and isinstance(fed["x"][1]["m"], Scattered)
    assert fed["y"][0] is batch["y"][0]
    assert isinstance(batch["x"][0], torch.Tensor), "the loader's own batch is left alone"


@pytest.mark.parametrize(
    "batch, scatter, text",
    [
        ({"x": ints(2, 3)}, "z", r"scatter names 'z', but the batch is a dictionary .*\['x'\]"),
        ([ints(2, 3)], 1, "scatter names 1, but the batch is a list of 1 items"),
        ((ints(2, 3),), "x", "scatter names 'x', but the batch is a tuple of 1 items"),
        (ints(2, 3), [0], r"scatter is \[0\], but the batch is a Tensor"),
    ],
)
def test_a_name_that_is_not_there_is_an_error_at_its_batch(batch, scatter, text):
    good = {"z": 1} if scatter == "z" else Pair(1, 2)
    fed = iter(fetch([good, batch], wrap(linear()), scatter=scatter))
    assert next(fed) == good
    with pytest.raises(ValueError, match=text):
        next(fed)


def test_what_comes_as_it_is():
    packed = pack_sequence([ints(2, 3), ints(1, 3)])
    leaf, module = ints(4, 3, grad=True), linear()
    odd = {
        "leaf": leaf,
        "number": torch.tensor(3),
        "sparse": torch.eye(4).to_sparse(),
        "packed": packed,
        "mark": fastdp.Replicated(ints(4, 3)),
        "words": ["a", "b", "c", "d"],
        "object": module,
    }
    for n in (1, 2):
        (fed,) = fetch([odd], wrap(linear(), n))
        assert all(fed[key] is odd[key] or fed[key] == odd["words"] for key in odd)
    dp = wrap(Apply(lambda self, x: x * 2))
    (fed,) = fetch([leaf], dp)
    dp(fed).sum().backward()
    same(leaf.grad, torch.full((4, 3), 2.0).double())


def test_lists_of_samples_are_left_for_the_wrapper():
    dp = wrap(Apply(lambda self, x, names: [len(x), names]), split_lists=True, gather_outputs=False)
    ((x, names),) = fetch([(ints(3, 3), list("abc"))], dp)
    assert dp(x, names) == [[2, ["a", "b"]], [1, ["c"]]]


def test_what_chunk_sizes_do_not_fit_is_refused_as_in_a_plain_call():
    dp = wrap(Apply(lambda self, x, table: x), chunk_sizes=[1, 3])
    ((x, table),) = fetch([(ints(4, 3), ints(6, 3))], dp)
    with pytest.raises(ValueError, match=r"inputs\[1\] has size 6 along dimension 0"):
        dp(x, table)


def test_user_dicts_keep_their_class():
    class Encoding(collections.UserDict):
        pass

    batch = Encoding(x=ints(4, 3), y=ints(4, 2))
    (fed,) = fetch([batch], wrap(linear()), scatter="x")
    assert type(fed) is Encoding and isinstance(fed["x"], Scattered)
    same(fed["x"].gathered(), batch["x"])
    same(wrap(Apply(lambda self, x, y: self.lin(x) + y))(**fed), linear()(batch["x"]) + batch["y"])
    assert isinstance(batch["x"], torch.Tensor)


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs are used by default here")
def test_a_wrapper_without_replicas_gets_the_batch_itself():
    dp = fastdp.DataParallel(linear())
    x = ints(4, 3)
    (fed,) = fetch([x], dp)
    assert fed.slices[0] is x
    same(dp(fed), linear()(x))


# Loaders.


def test_batches_come_in_order_and_at_most_depth_ahead():
    taken, handed = [], []

    def loader():
        for k in range(20):
            taken.append(k)
            assert k <= len(handed) + 2
            yield torch.full((2, 1), k)

    for batch in fetch(loader(), wrap(linear()), depth=2):
        handed.append(batch.gathered()[0].item())
        time.sleep(0.002)
    assert handed == taken == list(range(20))


def test_the_next_batches_are_loaded_while_a_step_runs():
    loaded = [threading.Event() for _ in range(4)]

    def loader():
        for event in loaded:
            event.set()
            yield ints(2, 3)

    fed = iter(fetch(loader(), wrap(linear()), depth=2))
    next(fed)
    assert loaded[1].wait(10) and loaded[2].wait(10)
    assert not loaded[3].wait(0.05)
    next(fed)
    assert loaded[3].wait(10)
    fed.close()


@pytest.mark.filterwarnings("ignore::fastdp.DataParallelWarning")
def test_workers_and_many_epochs():
    loader = DataLoader(TensorDataset(ints(9, 3)), batch_size=4, num_workers=1)
    dp = wrap(linear())
    fed = fetch(loader, dp)
    for _ in range(2):
        same(torch.cat([dp(x) for (x,) in fed]), dp.module(ints(9, 3)))
    next(iter(fed))


def test_the_loader_runs_in_the_callers_modes():
    seen = []

    def loader():
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        seen.append((torch.is_autocast_enabled("cpu"), threading.current_thread().name))
        yield ints(2, 3)

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        list(fetch(loader(), wrap(linear())))
    assert seen == [(False, False), (True, NAME)]


class Broken(Exception):
    pass


@pytest.mark.parametrize("error", [Broken("here"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_error_of_the_loader_is_raised_where_it_belongs(at, error):
    def loader():
        for k in range(at):
            yield ints(2, 3, seed=k)
        raise error

    got = []
    fed = iter(fetch(loader(), wrap(linear()), depth=4))
    with pytest.raises(type(error)) as info:
        for batch in fed:
            got.append(batch.gathered())
    assert info.value is error
    assert any(entry.name == "loader" for entry in info.traceback)
    same(got, [ints(2, 3, seed=k) for k in range(at)])
    assert next(fed, "over") == "over"


def test_an_error_keeps_nothing_alive():
    class Loader:
        def __iter__(self):
            yield ints(2, 3)
            raise Broken

    gc.collect()
    gc.disable()
    try:
        loader = Loader()
        gone = weakref.ref(loader)
        fed = fetch(loader, wrap(linear()))
        with pytest.raises(Broken):
            list(fed)
        del fed, loader
        assert gone() is None
    finally:
        gc.enable()


def test_batches_are_not_kept_while_the_next_is_waited_for():
    dp = wrap(linear())
    gone = []
    for batch in fetch([ints(2, 3, seed=k) for k in range(3)], dp):
        assert all(ref() is None for ref in gone)
        gone.append(weakref.ref(batch.slices[0]))
        del batch


def test_an_early_end_ends_the_loader():
    ended = []

    def loader():
        try:
            for k in range(100):
                yield ints(2, 3, seed=k)
        finally:
            ended.append(True)

    def leave():
        for batch in fetch(loader(), wrap(linear())):
            return batch

    leave()
    assert ended == [True] and not threads()
    with pytest.raises(Broken):
        for _ in fetch(loader(), wrap(linear())):
            raise Broken
    assert ended == [True, True] and not threads()
    fed = iter(fetch(loader(), wrap(linear())))
    next(fed)
    del fed
    assert ended == [True] * 3 and not threads()
    never_started = iter(fetch(loader(), wrap(linear())))
    del never_started
    assert not threads()


def test_no_batch_is_loaded_after_an_early_end():
    loaded = []

    def loader():
        for k in range(100):
            loaded.append(k)
            time.sleep(0.05)
            yield ints(2, 3)

    for _ in fetch(loader(), wrap(linear()), depth=8):
        break
    count = len(loaded)
    time.sleep(0.1)
    assert len(loaded) == count <= 3


def test_a_loader_that_is_stuck_is_told_of(monkeypatch, caplog):
    monkeypatch.setattr(sys.modules["fastdp.prefetch"], "_JOIN_S", 0.05)
    stuck, free = threading.Event(), threading.Event()

    def loader():
        yield ints(2, 3)
        stuck.set()
        free.wait(30)

    with caplog.at_level(logging.WARNING, "fastdp"):
        for _ in fetch(loader(), wrap(linear())):
            assert stuck.wait(10)
            break
    assert "the loader has not returned a batch for 0.05 s" in caplog.text
    (thread,) = threads()
    free.set()
    thread.join(10)


INTERRUPTED = """
import os, signal, threading, time
import torch, fastdp

dp = fastdp.DataParallel(torch.nn.Linear(3, 2), ["cpu", "cpu"])

def loader():
    for k in range(1000):
        time.sleep({wait})
        yield torch.ones(4, 3)

threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
start = time.monotonic()
try:
    for batch in fastdp.prefetch(loader(), dp):
        dp(batch)
        time.sleep({work})
except KeyboardInterrupt:
    print([t.name for t in threading.enumerate() if "prefetch" in t.name])
    print(time.monotonic() - start < 3)
"""

ENDINGS = {
    "in the step": INTERRUPTED.format(wait=0.0, work=0.05),
    "in the wait": INTERRUPTED.format(wait=0.3, work=0.0),
    "at exit": """
import torch, fastdp
dp = fastdp.DataParallel(torch.nn.Linear(3, 2), ["cpu", "cpu"])
left_open = iter(fastdp.prefetch([torch.ones(4, 3)] * 100, dp))
next(left_open)
print([])
print(True)
""",
    "in a fork": """
import os, time, torch, fastdp
dp = fastdp.DataParallel(torch.nn.Linear(3, 2), ["cpu", "cpu"])
fed = iter(fastdp.prefetch([torch.ones(4, 3)] * 100, dp))
next(fed)
start = time.monotonic()
child = os.fork()
if child == 0:
    del fed
    os._exit(0 if time.monotonic() - start < 2 else 1)
print([])
print(os.waitpid(child, 0)[1] == 0)
""",
}


@pytest.mark.parametrize("name", ENDINGS)
def test_an_end_by_force_leaves_no_thread(name):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ENDINGS[name]],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "[]\nTrue\n"), done.stderr
    assert done.stderr == ""


# Mistakes.


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"loader": 5}, TypeError, "loader is a int: it must be iterable"),
        ({"dp": linear()}, TypeError, "dp is a Linear: it must be a fastdp.DataParallel"),
        ({"depth": 0}, ValueError, "depth is 0: it must be at least 1"),
        ({"depth": 1.5}, TypeError, "depth is 1.5: it must be a whole number"),
        ({"depth": True}, TypeError, "depth is True"),
        ({"scatter": 1.5}, TypeError, "scatter is 1.5: it must be a key or a position"),
    ],
)
def test_mistakes_are_told_at_once(change, error, text):
    arguments = {"loader": [ints(2, 3)], "dp": wrap(linear()), "depth": 2, "scatter": None}
    with pytest.raises(error, match=text):
        fetch(**{**arguments, **change})


def test_a_loader_without_length_has_none():
    with pytest.raises(TypeError, match="has no len"):
        len(fetch(iter([]), wrap(linear())))
