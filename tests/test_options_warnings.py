"""`DataParallelWarning`: when it is given, how often, for which line, and when it is not."""

import copy
import pickle
import warnings

import pytest
import torch
from nets import Apply, Net, ints, linear, same
from torch import nn

import fastdp
from fastdp import DataParallelWarning, Replicated

row = pytest.mark.row


class Anything(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = linear()

    def forward(self, *args, **kwargs):
        return self.lin.bias.expand(1, 2)

    work = forward


def told(dp, *args, **kwargs):
    """The warnings of one call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dp(*args, **kwargs)
    # Files that earlier tests left open may be closed now, with a word.
    caught = [w for w in caught if not issubclass(w.category, ResourceWarning)]
    assert {w.category for w in caught} <= {DataParallelWarning}
    assert {w.filename for w in caught} <= {__file__}
    return [str(w.message) for w in caught]


LISTS = [
    ((["a", "b", "c", "d"],), {}, "inputs[1]"),
    ((), {"names": [{"k": 1}] * 4}, "kwargs['names']"),
    (({"deep": ([1, 2, 3, 4],)},), {}, "inputs[1]['deep'][0]"),
    (([None] * 4,), {}, "inputs[1]"),
]


@row("B9")
@pytest.mark.parametrize("args, kwargs, place", LISTS)
def test_a_list_as_long_as_the_batch_that_is_not_cut(fast, args, kwargs, place):
    dp = fast.wrap(Anything(), 2)
    (text,) = told(dp, ints(4, 3), *args, **kwargs)
    assert text == (
        f"{place} is a list of 4, as many as the batch has samples, but lists are not cut: every "
        "replica gets all of it. Pass split_lists=True to cut lists of samples, or "
        "fastdp.Replicated(...) if it is meant so"
    )
    assert told(dp, ints(4, 3), *args, **kwargs) == []


@row("B9")
@pytest.mark.parametrize(
    "arg",
    [
        ["a", "b", "c"],
        ("a", "b", "c", "d"),
        [],
        "abcd",
        {"a": 1, "b": 2, "c": 3, "d": 4},
        [torch.zeros(4)] * 4,
        [[torch.zeros(4)], 2, 3, 4],
        Replicated(["a", "b", "c", "d"]),
        [Replicated(["a", "b", "c", "d"])],
    ],
)
def test_what_is_no_list_of_samples(fast, arg):
    assert told(fast.wrap(Anything(), 2), ints(4, 3), arg) == []


@row("B14")
def test_tensors_of_unequal_first_size(fast):
    dp = fast.wrap(Anything(), 2)
    (text,) = told(dp, ints(4, 3), table=ints(100, 8))
    assert text == (
        "kwargs['table'] has size 100 along dimension 0 and inputs[0] has 4: each is cut for "
        "itself, into pieces that do not belong together. Pass fastdp.Replicated(...) for what "
        "every replica is to get whole, or split_lists=True to cut lists of samples"
    )
    assert told(dp, ints(4, 3), table=ints(100, 8)) == []
    assert told(dp, ints(6, 3), table=ints(100, 8)) == []  # another size at the same place
    assert len(told(dp, ints(4, 3), ints(100, 8))) == 1  # another place


@row("B14", "B10")
def test_each_unequal_tensor_of_a_nest_is_named(fast):
    boxes = [{"boxes": ints(5, 4)}, {"boxes": ints(2, 4)}]
    texts = told(fast.wrap(Anything(), 2), [ints(2, 8, 8)] * 2, targets=boxes)
    assert [text.split(" has ")[0] for text in texts] == ["kwargs['targets'][0]['boxes']"]
    texts = told(fast.wrap(Anything(), 2, dim=1), (ints(2, 4), ints(2, 6)), ints(2, 5))
    assert [text.split(" and ")[0] for text in texts] == [
        "inputs[0][1] has size 6 along dimension 1",
        "inputs[1] has size 5 along dimension 1",
    ]


@row("B14", "F12")
def test_one_entry_for_each_replica_is_no_surprise(fast):
    """transformers' Trainer passes its count of items so."""
    assert told(fast.wrap(Anything(), 2), ints(4, 3), num_items=torch.tensor([7, 7])) == []
    assert len(told(fast.wrap(Anything(), 2), ints(4, 3), hidden=ints(2, 4, 3))) == 1


@row("B14")
def test_marked_and_scalar_tensors_are_not_compared(fast):
    dp = fast.wrap(Anything(), 2, replicate_scalars=True)
    assert told(dp, ints(4, 3), Replicated(ints(9, 2)), torch.tensor(3)) == []


@row("J6", "B2")
@pytest.mark.parametrize("batch, n, used", [(1, 2, 1), (5, 4, 3), (36, 7, 6)])
def test_replicas_without_work(fast, batch, n, used):
    dp = fast.wrap(Net(), n)
    assert told(dp, ints(n, 3)) == []
    words = f"a batch of {batch} gave work to {used} of {n} replicas only"
    assert told(dp, ints(batch, 3)) == [words]
    assert told(dp, ints(batch, 3)) == []
    assert told(dp, ints(1, 3)) == []


@row("J6", "B5", "B7")
def test_calls_without_samples_leave_nobody_without_work(fast):
    dp = fast.wrap(Anything(), 2)
    assert told(dp) == [] and told(dp, ints(0, 3)) == [] and told(dp, 3, k="s") == []
    assert told(dp, Replicated(ints(1, 3))) == []


@row("J6", "B13")
def test_chunk_sizes_of_a_callable_are_meant(fast):
    assert told(fast.wrap(Net(), 2, chunk_sizes=lambda b, n: [b]), ints(4, 3)) == []
    assert len(told(fast.wrap(Net(), 2, chunk_sizes=[4, 4]), ints(4, 3))) == 1


@row("B9", "B10")
def test_lists_that_are_cut_are_no_surprise(fast):
    dp = fast.wrap(Anything(), 2, split_lists=True)
    images = [ints(3, 4 + i, 2) for i in range(4)]
    targets = [{"boxes": ints(i, 4)} for i in range(4)]
    assert told(dp, images, targets, names=list("abcd"), x=ints(4, 3)) == []


@row("B9", "J6", "B14", "F9")
def test_one_replica_or_none_is_never_surprised(fast):
    alone = fast.wrap(Anything(), 1)
    direct = fastdp.DataParallel(Anything())
    direct.device_ids = []  # as on a machine without GPUs
    for dp in (alone, direct):
        assert told(dp, ints(1, 3).to(fast.home), ["a"], ints(7, 2).to(fast.home)) == []


@row("B9", "J6")
def test_copies_of_a_wrapper_speak_for_themselves(fast):
    dp = fast.wrap(Anything(), 2)
    assert len(told(dp, ints(1, 3))) == 1
    for twin in (copy.deepcopy(dp), pickle.loads(pickle.dumps(dp))):
        assert len(told(twin, ints(1, 3))) == 1 and told(twin, ints(1, 3)) == []
    assert told(dp, ints(1, 3)) == []


@row("B9", "B14", "J6")
def test_they_are_silenced_by_their_class_alone(fast):
    assert issubclass(DataParallelWarning, UserWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DataParallelWarning)
        fast.wrap(Anything(), 4)(ints(5, 3), list("abcde"), ints(9, 2))


@row("B9", "B14", "J6")
def test_as_errors_they_come_each_time_and_leave_the_wrapper_usable(fast):
    dp = fast.wrap(Apply(lambda s, x, names=None: s.lin(x)), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataParallelWarning)
        for _ in range(2):
            with pytest.raises(DataParallelWarning, match="is a list of 4"):
                dp(ints(4, 3), list("abcd"))
            with pytest.raises(DataParallelWarning, match="1 of 2 replicas"):
                dp(ints(1, 3))
        same(dp(ints(4, 3)), linear()(ints(4, 3)))


@row("L11", "B14")
def test_the_functional_form_tells_too(fast):
    module = Anything().to(fast.home)

    def call(*inputs):
        fastdp.data_parallel(module, inputs, fast.ids(2))

    assert len(told(call, ints(4, 3), ints(100, 8))) == 1
    assert told(call, ints(4, 3), ints(100, 8)) == []
    assert len(told(call, ints(1, 3))) == 1


@row("F3", "B9", "L3")
def test_the_line_is_the_callers_whatever_the_way(fast):
    class Own(fastdp.DataParallel):
        pass

    outer = nn.Sequential(fast.wrap(Anything(), 2))  # below torch's own Sequential
    assert len(told(outer, ints(1, 3))) == 1
    assert len(told(fast.wrap_as(Own, Anything(), 2), ints(1, 3))) == 1
    dp = fast.wrap(Anything(), 2)
    assert len(told(lambda x: dp.call("work", x), ints(1, 3))) == 1
    compiled = torch.compile(lambda x: dp(x, list("abcd")), backend="eager")
    assert len(told(compiled, ints(4, 3))) == 1


@row("B9", "B14")
def test_the_functions_alone_say_nothing(fast):
    ids = fast.ids(2)
    assert told(lambda *a: fastdp.scatter_kwargs(a, {"n": ["a"]}, ids), ints(1, 3), ints(9)) == []
    assert told(lambda x: fastdp.scatter([x, ["a"]], ids), ints(1, 3)) == []


@row("B14", "G3")
def test_a_wrapper_says_a_bounded_number_of_things(fast):
    dp = fast.wrap(Anything(), 2)
    texts = [told(dp, x=ints(4, 1), **{f"key{k}": ints(9, 1)}) for k in range(100)]
    assert [len(text) for text in texts] == [1] * 64 + [0] * 36
