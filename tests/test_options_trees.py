"""Arguments of any nesting under the options that cut them, by hypothesis: beside a cut made by
hand in ten lines, and beside torch where the options are at their defaults."""

import collections
import warnings

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from nets import Recorder, same
from test_trees import CONSTANTS, SETTINGS, Pair, tensors, trees

import oracle
from fastdp import Replicated

row = pytest.mark.row


def calls_of(fast, n, args, kwargs, **options):
    module = Recorder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast.wrap(module, n, sequential=True, **options)(*args, **kwargs)
    return module.calls


def cut(tree, start, size, split_lists=False):
    """The part of a tree that belongs to samples start to start + size."""
    part = slice(start, start + size)
    if isinstance(tree, Replicated):
        return tree.value
    if isinstance(tree, torch.Tensor):
        return tree[part]
    if isinstance(tree, dict):
        return type(tree)((k, cut(v, start, size, split_lists)) for k, v in tree.items())
    if isinstance(tree, list) and split_lists and tree:
        return tree[part]
    if isinstance(tree, Pair):
        return Pair(*(cut(item, start, size, split_lists) for item in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(cut(item, start, size, split_lists) for item in tree)
    return tree


def compositions(batch):
    """Sizes that add up to the batch, for one to five replicas, some of them idle at the end."""
    return st.lists(st.integers(1, 4), min_size=1, max_size=5).map(lambda raw: _clipped(raw, batch))


def _clipped(raw, batch):
    sizes = []
    for size in raw:
        sizes.append(min(size, batch - sum(sizes)))
    sizes[0] += batch - sum(sizes)
    return sizes


def whole(children):
    return children.map(Replicated)


CUT = st.integers(1, 7).flatmap(
    lambda batch: st.tuples(
        tensors(batch),
        trees(st.one_of(tensors(batch), CONSTANTS, whole(tensors(3)), whole(trees(tensors(2))))),
        compositions(batch),
    )
)


@row("B13", "B14")
@SETTINGS
@hypothesis.given(case=CUT, is_callable=st.booleans())
def test_own_chunk_sizes_of_any_nesting(fast, case, is_callable):
    first, tree, sizes = case
    option = (lambda batch, n: sizes) if is_callable else sizes
    calls = calls_of(fast, len(sizes), (first, tree), {"k": tree}, chunk_sizes=option)
    used = [size for size in sizes if size > 0]
    assert len(calls) == len(used)
    start = 0
    for (args, kwargs), size in zip(calls, used, strict=True):
        same(args, cut((first, tree), start, size))
        same(kwargs, {"k": cut(tree, start, size)})
        start += size


def samples(batch):
    """Lists of one thing for each sample, of tensors of any shape among others."""
    item = st.one_of(tensors(2), tensors(3), CONSTANTS, trees(tensors(2)))
    return st.lists(item, min_size=batch, max_size=batch)


def groups(leaves):
    """Nests without lists: those are for samples."""
    keys = st.sampled_from(["a", "b"])
    return st.recursive(
        leaves,
        lambda children: st.one_of(
            st.lists(children, max_size=3).map(tuple),
            st.dictionaries(keys, children, max_size=2),
            st.dictionaries(keys, children, max_size=2).map(collections.OrderedDict),
            st.builds(Pair, children, children),
        ),
        max_leaves=6,
    )


LISTED = st.integers(1, 7).flatmap(
    lambda batch: st.tuples(
        st.one_of(tensors(batch), samples(batch)),
        groups(st.one_of(tensors(batch), samples(batch), CONSTANTS)),
        st.one_of(st.none(), compositions(batch)),
        st.just(batch),
    )
)


@row("B9", "B10")
@SETTINGS
@hypothesis.given(case=LISTED, n=st.integers(1, 4))
def test_lists_of_samples_in_any_nest(fast, case, n):
    first, tree, sizes, batch = case
    n = n if sizes is None else len(sizes)
    calls = calls_of(fast, n, (first,), {"k": tree}, split_lists=True, chunk_sizes=sizes)
    used = sizes or [len(piece) for piece in torch.zeros(batch).chunk(n)]
    used = [size for size in used if size > 0]
    start = 0
    for (args, kwargs), size in zip(calls, used, strict=True):
        same(args, cut((first,), start, size, True))
        same(kwargs, {"k": cut(tree, start, size, True)})
        start += size


MIXED = st.lists(st.integers(0, 7).flatmap(tensors), min_size=1, max_size=4)


@row("B8", "B14")
@SETTINGS
@hypothesis.given(leaves=MIXED, named=st.booleans(), n=st.integers(1, 5))
def test_unequal_sizes_are_cut_as_by_torch(fast, leaves, named, n):
    hypothesis.assume(any(len(leaf) for leaf in leaves))
    args, kwargs = ((), {"k": leaves}) if named else (tuple(leaves), {})
    got = fast.api.scatter_kwargs(args, kwargs, fast.ids(n))
    want = oracle.scatter_kwargs(args, kwargs, list(range(n)))
    same(tuple(map(tuple, got)), tuple(map(tuple, want)))
