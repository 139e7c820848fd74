"""BEHAVIOUR B: how the arguments of a call are divided among the replicas."""

import collections

import numpy as np
import pytest
import torch
from nets import Apply, Net, Pair, Recorder, exact, grads, ints, linear, same
from torch import nn

row = pytest.mark.row


def calls_of(impl, n, *args, **kwargs):
    """What each replica was called with, sorted: threads come in any order."""
    module = Recorder()
    impl.wrap(module, n)(*args, **kwargs)
    return sorted(module.calls, key=repr)


def sizes_of(impl, n, *args):
    return sorted((args[0].size(0) for args, _ in calls_of(impl, n, *args)), reverse=True)


@row("B2", "B6")
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 7, 8, 36])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_chunk_sizes_are_those_of_chunk(impl, batch, n):
    want = [c.size(0) for c in torch.zeros(batch, 2).chunk(n)]
    assert sizes_of(impl, n, torch.zeros(batch, 2)) == want


@row("B2", "B6")
@pytest.mark.parametrize("batch, n", [(1, 2), (5, 4), (7, 3), (3, 8)])
def test_small_batches_train(impl, batch, n):
    module, plain = Net(), Net()
    x = ints(batch, 3)
    same(out := impl.wrap(module, n)(x), want := plain(x))
    out.sum().backward()
    want.sum().backward()
    same(grads(module), grads(plain))


@row("B6")
def test_squeeze_of_a_one_sample_chunk(impl):
    """B=3 on two: chunks of 2 and 1; squeeze() drops the batch of the second, gather refuses."""
    with pytest.raises(RuntimeError):
        impl.wrap(Apply(lambda s, x: s.lin(x).squeeze()), 2)(ints(3, 3))


@row("B1")
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_constants_do_not_raise_the_number_of_replicas(fast, batch):
    """Tensors alone decide; a flag by keyword used to call surplus replicas without the tensor."""
    module = Apply(lambda s, x, flag, size=None: s.lin(x) if flag else None)
    dp = fast.wrap(module, 4)
    x = ints(batch, 3)
    want = linear()(x)
    same(dp(x, flag=True), want)
    same(dp(x, True, size=[1, 2, 3, 4, 5]), want)
    same(dp(x=x, flag=1, size=None), want)
    same(dp(flag=True, size={"a": (1, "b")}, x=x), want)


@row("B1")
def test_positional_constants_beside_a_short_tensor(impl):
    calls = calls_of(impl, 4, ints(2, 3), 7, "s", None)
    assert [args[1:] for args, _ in calls] == [(7, "s", None)] * 2


@row("B1")
def test_short_tensor_by_keyword_with_positional_constant(fast):
    calls = calls_of(fast, 4, 7, x=ints(2, 3))
    assert [args for args, _ in calls] == [(7,)] * 2


@row("B3")
def test_zero_dim_tensor_is_refused(impl):
    with pytest.raises(RuntimeError, match="chunk expects at least a 1-dimensional tensor"):
        impl.wrap(Apply(lambda s, x, k: s.lin(x)), 2)(ints(4, 3), k=torch.tensor(3))


@row("B4")
@pytest.mark.parametrize("extra", [{}, {"e": []}, {"e": {}}, {"e": ()}, {"e": None}])
def test_kwargs_only(impl, extra):
    seen = []
    module = Apply(lambda s, x, e=0: seen.append(e) or s.lin(x))
    same(impl.wrap(module, 2)(x=ints(4, 3), **extra), linear()(ints(4, 3)))
    assert seen == [extra.get("e", 0)] * 2
    assert all(type(e) is type(extra.get("e", 0)) for e in seen)


@row("B5")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_no_arguments_run_once(impl, n):
    module = Recorder()
    same(impl.wrap(module, n)(), linear().bias.expand(1, 2))
    assert module.calls == [((), {})]


@row("B5", "L6")
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("args, kwargs", [((3,), {}), ((), {"k": "s"}), ((None, [1]), {"k": 2.5})])
def test_constants_only_run_on_every_replica(impl, n, args, kwargs):
    module = Recorder()
    out = impl.wrap(module, n)(*args, **kwargs)
    same(out, linear().bias.expand(n, 2))
    assert module.calls == [(args, kwargs)] * n
    out.sum().backward()
    assert module.lin.bias.grad.tolist() == [n, n]


@row("B5", "L6")
def test_none_and_numbers_beside_kwargs(impl):
    """Counts that agree: torch itself handles these."""
    calls = calls_of(impl, 2, ints(4, 3), None, 3, k=None, j=1.5)
    assert len(calls) == 2
    for args, kwargs in calls:
        assert args[1:] == (None, 3) and kwargs == {"k": None, "j": 1.5}


@row("B7")
@pytest.mark.parametrize("n", [1, 2])
def test_zero_size_batch(impl, n):
    module = Net()
    out = impl.wrap(module, n)(ints(0, 3))
    assert out.shape == (0, 2)
    out.sum().backward()
    same(grads(module), {k: torch.zeros_like(p) for k, p in Net().named_parameters()})


@row("B7")
def test_zero_size_batch_runs_once(fast):
    assert sizes_of(fast, 3, ints(0, 3)) == [0]


# Containers.


@row("B8")
def test_lists_are_recursed_and_the_shortest_decides(impl):
    """rand(4) gives four chunks, rand(2) two: two replicas, and chunks three and four are lost."""
    calls = calls_of(impl, 4, [ints(4, 2), ints(2, 2, seed=2)])
    want = [[ints(4, 2)[i : i + 1], ints(2, 2, seed=2)[i : i + 1]] for i in range(2)]
    assert len(calls) == 2
    for got in want:
        assert any(
            type(args[0]) is list and all(map(torch.equal, (t.cpu() for t in args[0]), got))
            for args, _ in calls
        )


@row("B9")
def test_list_of_strings_goes_whole_to_every_replica(impl):
    names = ["a", "b", "c", "d"]
    calls = calls_of(impl, 2, ints(4, 3), names)
    assert [args[1] for args, _ in calls] == [names, names]


@row("B10")
def test_list_of_images_is_cut_through_the_images(impl):
    calls = calls_of(impl, 2, [ints(3, 8, 8)] * 4)
    assert sorted([tuple(t.shape) for t in args[0]] for args, _ in calls) == [
        [(1, 8, 8)] * 4,
        [(2, 8, 8)] * 4,
    ]


class Mine(dict):
    pass


@row("B11")
@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, Mine])
def test_dicts_keep_their_type_and_order(impl, kind):
    calls = calls_of(impl, 2, kind([("z", ints(4, 3)), ("a", 1)]))
    assert len(calls) == 2
    for args, _ in calls:
        assert type(args[0]) is kind and list(args[0]) == ["z", "a"]
        assert args[0]["z"].shape == (2, 3) and args[0]["a"] == 1


@row("B11")
def test_named_tuples_keep_their_type(impl):
    for args, _ in calls_of(impl, 2, Pair(ints(4, 3), (ints(4, 3), [1]))):
        assert type(args[0]) is Pair and args[0].a.shape == (2, 3)
        assert type(args[0].b) is tuple and args[0].b[0].shape == (2, 3) and args[0].b[1] == [1]


@row("B11")
def test_user_dict_is_shared_unsplit(impl):
    box = collections.UserDict(x=ints(4, 3))
    assert all(args[0] is box for args, _ in calls_of(impl, 2, box))


@row("B11")
def test_default_dict_cannot_be_rebuilt(impl):
    with pytest.raises(TypeError):
        impl.wrap(Recorder(), 2)(collections.defaultdict(list, {"x": ints(4, 3)}))


@row("B11", "L8")
@pytest.mark.parametrize("n", [1, 2])
def test_containers_are_rebuilt_for_each_replica(impl, n):
    def forward(self, box, items):
        box["new"] = 1
        items.append(1)
        return self.lin(box.pop("x"))

    box, items = {"x": ints(4, 3)}, [ints(4, 3)]
    same(impl.wrap(Apply(forward), n)(box, items), linear()(ints(4, 3)))
    assert list(box) == ["x"] and len(items) == 1


@row("B8")
def test_empty_containers_and_nested_ones(impl):
    for args, kwargs in calls_of(impl, 2, ints(4, 3), [], (), {}, [[], ({}, ints(4, 1))]):
        assert args[1:4] == ([], (), {}) and kwargs == {}
        assert args[4][0] == [] and args[4][1][0] == {} and args[4][1][1].shape == (2, 1)
        assert type(args[4][1]) is tuple


@row("B12")
def test_objects_are_shared_by_identity(impl):
    thing = object()
    for args, kwargs in calls_of(impl, 3, ints(6, 3), thing, k=[thing]):
        assert args[1] is thing and kwargs["k"][0] is thing


@row("B12", why="NumPy arrays are constants")
def test_numpy_arrays_are_constants(impl):
    array = np.zeros(4)
    assert all(args[1] is array for args, _ in calls_of(impl, 2, ints(4, 3), array))


@row("B14")
def test_unequal_tensors_are_split_each_by_its_own_length(impl):
    for args, _ in calls_of(impl, 2, ints(4, 3), ints(100, 8)):
        assert args[0].shape == (2, 3) and args[1].shape == (50, 8)


@row("B15")
@pytest.mark.parametrize("dim", [1, 2, -1, -2])
def test_other_dim(impl, dim):
    module = Apply(lambda s, x: x * 2)
    x = ints(5, 4, 3, grad=True)
    out = impl.wrap(module, 2, dim=dim)(x)
    same(out, x * 2)
    out.backward(ints(5, 4, 3, seed=3).to(out.device))
    same(x.grad, 2 * ints(5, 4, 3, seed=3))


@row("B15")
def test_scalar_outputs_with_other_dim_are_refused(impl):
    with pytest.raises((IndexError, RuntimeError)):
        impl.wrap(Apply(lambda s, x: x.sum()), 2, dim=1)(ints(4, 4))


@row("B16")
def test_packed_sequence_is_refused(fast):
    packed = nn.utils.rnn.pack_sequence([ints(5, 3), ints(3, 3)])
    module = nn.LSTM(3, 2).double()
    with pytest.raises(TypeError, match="PackedSequence"):
        fast.wrap(module, 2)(packed)
    with pytest.raises(TypeError, match="PackedSequence"):
        fast.wrap(Recorder(), 2)(ints(2, 3), k=[packed])


@row("B17")
def test_padded_lengths_that_differ_are_refused(impl):
    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0]

    with pytest.raises(RuntimeError, match=r"(?s)2, 5, 3.*2, 2, 3|2, 2, 3.*2, 5, 3"):
        impl.wrap(Apply(forward), 2)(ints(4, 5, 3), torch.tensor([5, 5, 2, 2]))


# Where the input lies, and its gradient.


LAYOUTS = {
    "transposed": lambda: ints(3, 5).t(),
    "strided": lambda: ints(10, 6)[::2, ::2],
    "expanded": lambda: ints(1, 3).expand(5, 3),
    "offset": lambda: ints(7, 3)[2:],
    "negative numbers of a view": lambda: ints(5, 3).neg(),
    "overlapping": lambda: torch.arange(7.0).double().as_strided((5, 3), (1, 1)),
    "channels": lambda: ints(5, 3, 1, 1).to(memory_format=torch.channels_last).flatten(1),
}


@row("B19", "X14")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_input_layouts(impl, layout):
    x = LAYOUTS[layout]()
    before = x.clone()
    same(impl.wrap(Net(), 2)(x), Net()(x))
    same(x, before)


@row("B19", "X14")
@pytest.mark.parametrize("memory", [torch.channels_last, torch.contiguous_format])
def test_images_keep_their_memory_format(impl, memory):
    seen = []
    module = Apply(lambda s, x: seen.append(x.is_contiguous(memory_format=memory)) or x * 2)
    x = ints(5, 3, 4, 4).to(memory_format=memory)
    out = impl.wrap(module, 2)(x)
    same(out, x * 2)
    assert seen == [True] * 2


@row("B19")
def test_conjugated_and_negated_inputs(fast):
    """torch's own refuses the first: it views complex numbers as real."""
    x = torch.complex(ints(4, 3), ints(4, 3, seed=2))
    module = Apply(lambda s, x: x * 2)
    same(fast.wrap(module, 2)(x.conj()), x.conj().resolve_conj() * 2)
    same(fast.wrap(module, 2)(x.conj().imag), x.imag.neg() * 2)


@row("B19")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
def test_input_dtypes(impl, dtype):
    x = ints(5, 3).to(dtype)
    same(impl.wrap(Apply(lambda s, x: x.clone()), 2)(x), x)


@row("B19", why="a forward that writes into its input; mutant: scatter that returns views")
@pytest.mark.parametrize("n", [2, 3])
def test_input_written_in_forward_leaves_the_callers_tensor(impl, n):
    x = ints(6, 3)
    out = impl.wrap(Apply(lambda s, x: x.add_(1)), n)(x)
    same(out, ints(6, 3) + 1)
    same(x, ints(6, 3))


@row("B19", why="a forward that writes into its input; mutant: scatter that returns views")
def test_input_written_by_the_caller_before_backward(impl):
    """Chunks saved for backward are copies: as with a host input of nn.DataParallel."""
    module = linear()
    x = ints(4, 3)
    out = impl.wrap(module, 2)(x)
    x.zero_()
    out.sum().backward()
    same(module.weight.grad, ints(4, 3).sum(0).expand(2, 3))


@row("B20")
@pytest.mark.parametrize("batch, n", [(4, 2), (5, 3), (1, 2)])
def test_gradient_to_the_input(impl, batch, n):
    x, y = ints(batch, 3, grad=True), ints(batch, 3, grad=True)
    impl.wrap(Net(), n)(x).sum().backward()
    Net()(y).sum().backward()
    same(x.grad, y.grad)


@row("B20")
def test_gradient_to_nested_inputs(impl):
    a, b = ints(4, 3, grad=True), ints(4, 3, seed=2, grad=True)
    module = Apply(lambda s, box, k: s.lin(box["a"][0] * k))
    impl.wrap(module, 2)({"a": [a, 1]}, k=b).sum().backward()
    row_sums = exact(nn.Linear(3, 2)).weight.sum(0).detach()
    same(a.grad, b.detach() * row_sums)
    same(b.grad, a.detach() * row_sums)


@row("B20")
def test_second_derivative_to_the_input(impl):
    def penalty(module, x):
        (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        (gradient**2).sum().backward()
        return x.grad

    same(
        penalty(impl.wrap(Net(), 2), ints(5, 3, grad=True)),
        penalty(Net(), ints(5, 3, grad=True)),
    )
