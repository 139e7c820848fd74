"""fastdp.prefetch on host replicas: the same numbers as without it, and no thread left behind."""

import collections
import copy
import threading

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
Pair = collections.namedtuple("Pair", ["x", "y"])


def wrap(module, n=2, **options):
    return fastdp.DataParallel(module, ["cpu"] * n, **options)


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
        pytest.param({"chunk_sizes": lambda batch, n: [batch]}, id="all-to-the-first"),
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
    same(fed["y"][0], batch["y"][0])
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
def test_a_wrapper_without_replicas_gets_the_batch_in_one_slice():
    dp = fastdp.DataParallel(linear())
    x = ints(4, 3)
    (fed,) = fetch([x], dp)
    same(fed.slices, (x,))
    same(dp(fed), linear()(x))


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch's wrapper has devices then")
def test_a_wrapper_of_torchs_own_that_is_older_than_the_patch():
    made = nn.DataParallel(linear())
    with fastdp.patch():
        (fed,) = fetch([ints(4, 3)], made)
        same(made(fed), linear()(ints(4, 3)))


@pytest.mark.parametrize("scatter", [None, ["x"], ["y"]])
@pytest.mark.parametrize("ids", [None, ["cpu"], ["cpu"] * 2], ids=str)
def test_a_loader_that_writes_all_its_batches_into_the_same_tensors(ids, scatter):
    ahead = threading.Event()  # the loader has written what comes after the batch in use

    def loader():
        memory = {"x": torch.empty(4, 3).double(), "y": torch.empty(4).double()}
        for i in range(3):
            memory["x"].fill_(i)
            memory["y"].fill_(i)
            if i == 2:
                ahead.set()
            yield memory

    seen = []
    for batch in fetch(loader(), fastdp.DataParallel(linear(), ids), scatter=scatter):
        assert ahead.wait(10)
        seen.append([whole(batch)[key].unique().tolist() for key in ("x", "y")])
    assert seen == [[[i], [i]] for i in range(3)]
