"""The options that say how arguments are divided: `chunk_sizes`, `split_lists` and
`replicate_scalars`. Each against the arithmetic of the plain module on pieces cut by hand, with
equality. The mark `Replicated` by itself: test_options_replicated.py."""

import pytest
import torch
from nets import Apply, Net, Pair, calls_of, exact, grads, ints, linear, same
from torch import nn

import fastdp
from fastdp import Replicated

row = pytest.mark.row


def lengths_of(fast, n, batch, **options):
    return [args[0].size(0) for args, _ in calls_of(fast, n, (ints(batch, 3),), **options)]


def balanced(batch, n):
    """A callable for chunk_sizes: the first replica gets what the others leave."""
    rest = [batch // (2 * n)] * (n - 1)
    return [batch - sum(rest), *rest]


# chunk_sizes.


@row("B13")
@pytest.mark.parametrize(
    "sizes, batch, want",
    [
        ([1, 3], 4, [1, 3]),
        ((3, 1), 4, [3, 1]),
        ([3, 1], 3, [3]),
        ([3, 1], 2, [2]),
        ([2, 5, 1], 8, [2, 5, 1]),
        ([2, 5, 1], 4, [2, 2]),
        ([4, 0], 3, [3]),
        ([2, 2], 0, [0]),
        (balanced, 8, [6, 2]),
        (balanced, 1, [1]),
        (balanced, 0, [0]),
        (lambda batch, n: [batch], 5, [5]),
    ],
)
def test_a_list_is_filled_and_a_callable_asked(fast, sizes, batch, want):
    n = 2 if callable(sizes) else len(sizes)
    assert lengths_of(fast, n, batch, chunk_sizes=sizes) == want


@row("B13")
@pytest.mark.parametrize("sizes", [[1, 4], [4, 1], balanced])
def test_own_chunk_sizes_train_as_the_plain_module(fast, sizes):
    module, plain = Net(), Net()
    x, y = ints(5, 3, grad=True), ints(5, 3, grad=True)
    same(out := fast.wrap(module, 2, chunk_sizes=sizes)(x), want := plain(y))
    out.square().sum().backward()
    want.square().sum().backward()
    same(grads(module), grads(plain))
    same(x.grad, y.grad)


@row("B13", "D3")
def test_own_chunk_sizes_are_twice_differentiable(fast):
    module, plain = Net(), Net()
    x, y = ints(5, 3, grad=True), ints(5, 3, grad=True)
    dp = fast.wrap(module, 2, chunk_sizes=[4, 1], unused_grad="none")
    for model, inputs in ((dp, x), (plain, y)):
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        slope.square().sum().backward()
    same(grads(module), grads(plain))
    same(x.grad, y.grad)


@row("B13")
def test_own_chunk_sizes_reach_all_nested_tensors_and_keywords(fast):
    x = ints(4, 3)
    calls = calls_of(
        fast, 2, ([x, (x,)], Pair(x, "s")), {"k": {"deep": x}, "c": 7}, chunk_sizes=[1, 3]
    )
    for (args, kwargs), piece in zip(calls, x.split([1, 3]), strict=True):
        same(args, ([piece, (piece,)], Pair(piece, "s")))
        same(kwargs, {"k": {"deep": piece}, "c": 7})


@row("B13", "B15")
def test_own_chunk_sizes_along_another_dim(fast):
    x = ints(2, 5, 3)
    calls = calls_of(fast, 2, (x,), chunk_sizes=[4, 1], dim=1)
    for (args, _), piece in zip(calls, x.split([4, 1], 1), strict=True):
        same(args, (piece,))


@row("B13")
def test_the_callable_is_told_batch_and_replicas(fast):
    asked = []

    def sizes(batch, n):
        asked.append((batch, n))
        return [1] * batch

    assert lengths_of(fast, 4, 3, chunk_sizes=sizes) == [1, 1, 1]
    assert asked == [(3, 4)]


@row("B13")
def test_own_chunk_sizes_without_a_tensor_change_nothing(fast):
    assert len(calls_of(fast, 2, (3, "s"), {"k": None}, chunk_sizes=[1, 3])) == 2
    assert len(calls_of(fast, 2, chunk_sizes=[1, 3])) == 1


BAD_SIZES = [
    ([4], ValueError, r"chunk_sizes is \[4\], with 1 entries: it must have 2"),
    ([1, 2, 3], ValueError, "with 3 entries: it must have 2"),
    ([0, 4], ValueError, r"chunk_sizes\[0\] is 0: it must be at least 1"),
    ([-1, 4], ValueError, r"chunk_sizes\[0\] is -1"),
    ([4, -1], ValueError, r"chunk_sizes\[1\] is -1"),
    ([0, 0], ValueError, "at least one replica"),
    ([1.5, 2], TypeError, r"chunk_sizes\[0\] is 1.5: it must be a whole number"),
    ([True, 2], TypeError, r"chunk_sizes\[0\] is True"),
    ("ab", TypeError, "chunk_sizes is 'ab': it must be a list of sizes, or a callable"),
    (4, TypeError, "chunk_sizes is 4"),
]


@row("B13")
@pytest.mark.parametrize("sizes, error, words", BAD_SIZES)
def test_bad_chunk_sizes_are_refused_at_once(fast, sizes, error, words):
    with pytest.raises(error, match=words):
        fast.wrap(linear(), 2, chunk_sizes=sizes)


@row("B13")
@pytest.mark.parametrize(
    "sizes, error, words",
    [
        ([2, 1], ValueError, r"chunk_sizes is \[2, 1\], which is room for 3 .* the batch has 4"),
        (lambda b, n: [1, 2], ValueError, r"is \[1, 2\]: it must .* add up to 4"),
        (lambda b, n: [2, 1, 1], ValueError, "at most 2 entries"),
        (lambda b, n: [-1, 5], ValueError, r"a batch of 4 and 2 replicas\[0\] is -1"),
        (lambda b, n: 4, TypeError, "a batch of 4 and 2 replicas is 4: it must be a list"),
        (lambda b, n: [2.0, 2.0], TypeError, r"\[0\] is 2.0"),
    ],
)
def test_sizes_that_do_not_fit_the_batch_leave_the_wrapper_usable(fast, sizes, error, words):
    dp = fast.wrap(linear(), 2, chunk_sizes=sizes)
    with pytest.raises(error, match=words):
        dp(ints(4, 3))
    dp.chunk_sizes = [2, 2]
    same(dp(ints(4, 3)), linear()(ints(4, 3)))


@row("B13", "B14")
def test_a_tensor_of_another_size_is_refused_by_name(fast):
    dp = fast.wrap(Apply(lambda s, x, table=None: s.lin(x)), 2, chunk_sizes=[1, 3])
    words = r"kwargs\['table'\] has size 100 along dimension 0, but chunk_sizes cut a batch of 4"
    with pytest.raises(ValueError, match=words):
        dp(ints(4, 3), table=ints(100, 2))
    same(dp(ints(4, 3), table=Replicated(ints(100, 2))), linear()(ints(4, 3)))


# split_lists.


@row("B9", "B10")
@pytest.mark.parametrize("batch, n", [(4, 2), (5, 2), (5, 4), (1, 3), (0, 2)])
def test_lists_of_samples_are_cut_like_tensors(fast, batch, n):
    x, names = ints(batch, 3), [f"name {i}" for i in range(batch)]
    images = [ints(3, 4 + i, 2) for i in range(batch)]
    targets = [{"boxes": ints(i, 4), "id": torch.tensor(i), "n": i} for i in range(batch)]
    calls = calls_of(fast, n, (x, names), {"i": images, "t": (targets,)}, split_lists=True)
    start = 0
    for rank, ((args, kwargs), piece) in enumerate(zip(calls, x.chunk(n))):
        part = slice(start, start + len(piece))
        start += len(piece)
        same(args, (piece, names[part]))
        same(kwargs, {"i": images[part], "t": (targets[part],)})
        for image in kwargs["i"]:
            assert image.device == fast.device(rank)
    assert start == batch


@row("B10", "B13")
def test_lists_without_tensors_follow_chunk_sizes(fast):
    calls = calls_of(fast, 2, (list("abcd"),), split_lists=True, chunk_sizes=[1, 3])
    assert [args[0] for args, _ in calls] == [["a"], ["b", "c", "d"]]
    calls = calls_of(fast, 3, (list("abcde"),), {"k": 1}, split_lists=True)
    assert [args[0] for args, _ in calls] == [["a", "b"], ["c", "d"], ["e"]]


@row("B10", "B20")
def test_gradients_reach_the_samples_of_a_list(fast):
    def forward(s, images):
        return torch.stack([s.lin(image).sum() * image.sum() for image in images])

    images = [ints(1 + i, 3, seed=i, grad=True) for i in range(3)]
    twins = [image.detach().clone().requires_grad_() for image in images]
    module, plain = Apply(forward), Apply(forward)
    same(out := fast.wrap(module, 2, split_lists=True)(images), want := plain(twins))
    out.sum().backward()
    want.sum().backward()
    same(grads(module), grads(plain))
    same([i.grad for i in images], [t.grad for t in twins])


@row("B9", "B10")
def test_tuples_and_marks_are_no_lists_of_samples(fast):
    x = ints(4, 3)
    calls = calls_of(fast, 2, ((x, "s"), Replicated([1, 2]), []), split_lists=True)
    for (args, _), piece in zip(calls, x.chunk(2), strict=True):
        same(args, ((piece, "s"), [1, 2], []))


@row("B9", "B10")
@pytest.mark.parametrize("length", [1, 3, 5])
def test_a_list_of_another_length_is_refused_by_name(fast, length):
    dp = fast.wrap(Apply(lambda s, x, names=None: s.lin(x)), 2, split_lists=True)
    words = rf"kwargs\['names'\] is a list of {length}, but split_lists=True .* the batch has 4"
    with pytest.raises(ValueError, match=words):
        dp(ints(4, 3), names=["a"] * length)
    same(dp(ints(4, 3), names=["a"] * 4), linear()(ints(4, 3)))


@row("B9", "B10")
def test_lists_are_not_changed_and_samples_keep_their_identity(fast):
    samples = [object(), {"k": "v"}, "s", None]
    before = list(samples)
    calls = calls_of(fast, 2, (samples,), split_lists=True)
    assert samples == before and calls[0][0][0][0] is samples[0]
    assert [s for args, _ in calls for s in args[0]] == before


# replicate_scalars.


@row("B3")
def test_scalars_go_whole_on_request(fast):
    x, count = ints(5, 3), torch.tensor(3)
    calls = calls_of(fast, 3, (x,), {"k": count}, replicate_scalars=True)
    assert [kwargs["k"].item() for _, kwargs in calls] == [3, 3, 3]
    assert {kwargs["k"].dim() for _, kwargs in calls} == {0}
    calls = calls_of(fast, 3, (x[:1], [count]), replicate_scalars=True, split_lists=False)
    assert len(calls) == 1
    assert len(calls_of(fast, 3, (count,), replicate_scalars=True)) == 3


@row("B3")
def test_scalars_are_refused_without_and_usable_after(fast):
    dp = fast.wrap(Apply(lambda s, x, k: s.lin(x) * k), 2)
    with pytest.raises(RuntimeError, match="0-dimensional|zero-dim|1-dimensional"):
        dp(ints(4, 3), torch.tensor(3.0))
    dp.replicate_scalars = True
    k = torch.tensor(3.0, dtype=torch.double, requires_grad=True)
    dp(ints(4, 3), k).sum().backward()
    same(k.grad, linear()(ints(4, 3)).sum())


@row("B3", "B10")
def test_scalars_and_lists_together(fast):
    calls = calls_of(
        fast, 2, (torch.tensor(2), list("abc")), replicate_scalars=True, split_lists=True
    )
    assert [args[1] for args, _ in calls] == [["a", "b"], ["c"]]


FLAGS = ["split_lists", "replicate_scalars", "gather_outputs", "sequential", "forward_attributes"]


@row("B9", "B3", "C13", "I7", "F2")
@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_flags_are_true_or_false(name, value):
    with pytest.raises(TypeError, match=rf"{name} is {value!r}: it must be True or False"):
        fastdp.DataParallel(exact(nn.Linear(2, 2)), ["cpu", "cpu"], **{name: value})
