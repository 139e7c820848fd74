"""Nested arguments and results of any shape: fastdp's walks beside torch's, by hypothesis."""

import collections

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from nets import Apply, same

import oracle

row = pytest.mark.row

Pair = collections.namedtuple("Pair", "left right")
DTYPES = [torch.float64, torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64]
SETTINGS = hypothesis.settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[
        hypothesis.HealthCheck.function_scoped_fixture,
        hypothesis.HealthCheck.too_slow,
    ],
)


def tensors(batch):
    """Tensors of `batch` samples: any dtype, one to three dimensions, some of them not dense."""

    def make(tail, dtype, step, seed):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(-4, 5, (batch * step, *tail), generator=generator)
        return values.to(dtype)[::step]

    tails = st.lists(st.integers(0, 3), max_size=2)
    return st.builds(make, tails, st.sampled_from(DTYPES), st.integers(1, 2), st.integers(0, 99))


def trees(leaves):
    def grow(children):
        keys = st.sampled_from(["a", "b", "c"])
        return st.one_of(
            st.lists(children, max_size=3),
            st.lists(children, max_size=3).map(tuple),
            st.dictionaries(keys, children, max_size=3),
            st.dictionaries(keys, children, max_size=2).map(collections.OrderedDict),
            st.builds(Pair, children, children),
        )

    return st.recursive(leaves, grow, max_leaves=8)


CONSTANTS = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.booleans(), st.just(()))
CASES = st.integers(1, 7).flatmap(
    lambda batch: st.tuples(tensors(batch), trees(st.one_of(tensors(batch), CONSTANTS)))
)
PURE = st.integers(1, 7).flatmap(
    lambda batch: st.tuples(tensors(batch), trees(tensors(batch)), st.just(batch))
)
REPLICAS = st.integers(1, 5)


@row("B8", "B11")
@SETTINGS
@hypothesis.given(case=CASES, n=REPLICAS)
def test_scatter_is_torchs(fast, case, n):
    """Whatever lies beside a tensor: the same number of parts, of the same structure."""
    got = fast.api.scatter(list(case), fast.ids(n))
    want = oracle.scatter(list(case), list(range(n)))
    same(list(got), list(want))


@row("B4", "B8")
@SETTINGS
@hypothesis.given(case=CASES, n=REPLICAS, named=st.booleans())
def test_scatter_kwargs_is_torchs(fast, case, n, named):
    args = (case[0],)
    kwargs = {"x": case[0], "tree": case[1]} if named else {}
    got = fast.api.scatter_kwargs(args, kwargs, fast.ids(n))
    want = oracle.scatter_kwargs(args, kwargs, list(range(n)))
    same(tuple(map(tuple, got)), tuple(map(tuple, want)))


@row("C11")
@SETTINGS
@hypothesis.given(case=PURE, n=REPLICAS)
def test_gather_undoes_scatter(fast, case, n):
    """Where every leaf is a tensor; empty containers come back empty."""
    tree = list(case[:2])
    parts = fast.api.scatter(tree, fast.ids(n))
    same(fast.api.gather(list(parts), fast.home_id), tree)
    same(oracle.gather(list(oracle.scatter(tree, list(range(n)))), 0), tree)


@row("L13")
@SETTINGS
@hypothesis.given(case=PURE, n=st.integers(2, 4))
def test_identity_over_the_wrapper(fast, case, n):
    first, tree, batch = case
    dp = fast.wrap(Apply(lambda s, *args, **kwargs: (args, kwargs)), n)
    same(dp(first, tree, k=tree), ((first, tree), {"k": tree}))


@row("B20", why="gradients through nested arguments and results")
@SETTINGS
@hypothesis.given(
    batch=st.integers(1, 6),
    n=st.integers(2, 4),
    shape=trees(st.sampled_from([0, 1, 2])),
)
def test_gradients_through_any_nesting(fast, batch, n, shape):
    """Leaves are numbers of inputs; an input's gradient is how often it stands in the tree."""
    inputs = [torch.ones(batch, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def fill(tree, make):
        if isinstance(tree, int):
            return make(tree)
        if isinstance(tree, dict):
            return type(tree)((k, fill(v, make)) for k, v in tree.items())
        if isinstance(tree, Pair):
            return Pair(*(fill(v, make) for v in tree))
        return type(tree)(fill(v, make) for v in tree)

    def leaves(tree):
        if isinstance(tree, torch.Tensor):
            return [tree]
        values = tree.values() if isinstance(tree, dict) else tree
        return [leaf for value in values for leaf in leaves(value)]

    args = fill(shape, lambda k: inputs[k])
    count = collections.Counter()
    fill(shape, lambda k: count.update([k]))
    dp = fast.wrap(Apply(lambda s, always, tree: (always * 2, tree)), n)
    out = dp(inputs[0], args)
    sum(leaf.sum() for leaf in leaves(out)).backward()
    for k, tensor in enumerate(inputs):
        want = count[k] + (2 if k == 0 else 0)
        if want == 0:
            assert tensor.grad is None or not tensor.grad.any()
        else:
            same(tensor.grad, torch.full((batch, 2), float(want), dtype=torch.float64))
