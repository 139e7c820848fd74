"""BEHAVIOUR C: how the replicas' results become one."""

import collections.abc
import typing
import warnings

import pytest
import torch
from nets import Apply, Net, exact, gathered, grads, ints, linear, same
from torch import nn

row = pytest.mark.row

SCALARS = (
    "Was asked to gather along dimension 0, but all input tensors were scalars; "
    "will instead unsqueeze and return a vector."
)
Out = collections.namedtuple("Out", "first second")


class Typed(typing.NamedTuple):
    y: torch.Tensor
    rest: typing.Any = None


# Scalars.


@row("C1")
@pytest.mark.parametrize("batch, n, used", [(4, 2, 2), (5, 4, 3), (1, 3, 1)])
def test_scalars_become_a_vector_with_a_warning(impl, batch, n, used):
    x = ints(batch, 3)
    with pytest.warns(UserWarning) as caught:
        out = gathered(impl, lambda s, x: x.sum(), n, x)
    same(out, torch.stack([c.sum() for c in x.chunk(n)]))
    assert out.shape == (used,)
    plain = [w for w in caught if w.category is UserWarning]  # others are of idle replicas
    assert [str(w.message) for w in plain] == [SCALARS]


@row("C1")
def test_scalar_loss_trains(impl):
    module, plain = Net(), Net()
    dp = impl.wrap(Apply(lambda s, x: s.net(x).sum()), 2)
    dp.module.net = module.to(impl.home)
    with pytest.warns(UserWarning, match="scalars"):
        dp(ints(5, 3)).sum().backward()
    plain(ints(5, 3)).sum().backward()
    same(grads(module), grads(plain))


@row("C1")
def test_one_device_returns_the_scalar_itself(impl):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = gathered(impl, lambda s, x: x.sum(), 1)
    assert out.shape == ()


@row("C2")
def test_mean_of_means(impl):
    x = ints(5, 3)
    with pytest.warns(UserWarning, match="scalars"):
        out = gathered(impl, lambda s, x: x.mean(), 2, x)
    same(out, torch.stack([x[:3].mean(), x[3:].mean()]))


# Containers.


@row("C4")
@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_dicts(impl, kind):
    x = ints(4, 3)
    out = gathered(impl, lambda s, x: kind([("z", x), ("a", None), ("b", [x])]))
    same(out, kind([("z", x), ("a", None), ("b", [x])]))


class Encoding(collections.UserDict):
    pass


class ReadOnly(collections.abc.Mapping):
    def __init__(self, pairs):
        self.pairs = dict(pairs)

    def __getitem__(self, key):
        return self.pairs[key]

    def __iter__(self):
        return iter(self.pairs)

    def __len__(self):
        return len(self.pairs)


@row("C4", why="torch refuses it")
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"gather_outputs": False}, {"loss_weighting": "chunk"}])
@pytest.mark.parametrize("kind", [Encoding, ReadOnly])
def test_mappings_that_are_no_dicts(fast, n, options, kind):
    """By their keys and values: as a sequence a UserDict is its keys."""
    net = Apply(lambda s, x: kind({"y": s.lin(x), "loss": s.lin(x).mean()}))
    dp, x = fast.wrap(net, n, **options), ints(5, 3)
    out = dp(x)
    if options == {"gather_outputs": False}:
        assert len(out) == n and all(type(each) is kind for each in out)
        out = {"y": torch.cat([each["y"] for each in out])}
    else:
        assert type(out) is kind and list(out) == ["y", "loss"]
    same(out["y"], net.lin(x))
    if options == {"loss_weighting": "chunk"}:
        torch.testing.assert_close(out["loss"].mean(), net.lin(x).mean())


@row("C4")
def test_dicts_of_unequal_length_are_refused(impl):
    with pytest.raises(ValueError, match="All dicts must have the same number of keys"):
        gathered(impl, lambda s, x: dict.fromkeys(range(x.size(0)), x), x=ints(3, 3))


@row("C4")
def test_dicts_with_other_keys_are_refused(fast):
    with pytest.raises(ValueError, match="key"):
        gathered(fast, lambda s, x: {f"key{x.size(0)}": x}, x=ints(3, 3))


@row("C4")
def test_dicts_with_keys_in_another_order(impl):
    def forward(self, x):
        pairs = [("a", x), ("b", x + 1)]
        return dict(pairs if x.size(0) == 2 else reversed(pairs))

    x = ints(3, 3)
    same(gathered(impl, forward, x=x), {"a": x, "b": x + 1})


@row("C5")
def test_named_tuples(impl):
    x = ints(4, 3)
    same(gathered(impl, lambda s, x: Out(x, (x,))), Out(x, (x,)))
    out = gathered(impl, lambda s, x: [Typed(x, Out(x, Typed(x)))])
    same(out, [Typed(x, Out(x, Typed(x, None)))])


@row("C11")
def test_nested_containers(impl):
    x = ints(4, 3)
    make = lambda x: [x, (x, {"k": [x, collections.OrderedDict(q=x)]}), (), [], {}]  # noqa: E731
    same(gathered(impl, lambda s, x: make(x)), make(x))


@row("C7")
@pytest.mark.parametrize("n", [2, 3])
def test_none_everywhere(impl, n):
    assert gathered(impl, lambda s, x: None, n, ints(6, 3)) is None
    same(gathered(impl, lambda s, x: (x, None), n, ints(6, 3)), (ints(6, 3), None))


@row("C7")
@pytest.mark.parametrize("size", [1, 2])
def test_none_from_some_replicas_is_refused(fast, size):
    with pytest.raises(ValueError, match="None"):
        gathered(fast, lambda s, x: None if x.size(0) == size else x, x=ints(3, 3))


@row("C7")
@pytest.mark.parametrize("other", [3, "s", [1], {"k": None}, ()])
def test_none_beside_something_else_is_refused(fast, other):
    """None on replica 0 would swallow what the others return."""
    with pytest.raises(ValueError, match="None"):
        gathered(fast, lambda s, x: None if x.size(0) == 2 else other, x=ints(3, 3))
    with pytest.raises(ValueError, match="None"):
        gathered(fast, lambda s, x: None if x.size(0) == 1 else other, x=ints(3, 3))


LEAVES = {"int": 3, "float": 2.5, "bool": True, "str": "ok", "bytes": b"ok", "empty str": ""}


@row("C8", "C9")
@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("n, used", [(2, 2), (3, 3), (4, 3)])
def test_numbers_and_strings_become_a_list(fast, leaf, n, used):
    """One entry per used replica, in order; alone and inside containers."""
    value = LEAVES[leaf]
    x = ints(5, 3)
    assert gathered(fast, lambda s, x: value, n, x) == [value] * used
    out = gathered(fast, lambda s, x: (x, {"k": [value]}), n, x)
    same(out, (x, {"k": [[value] * used]}))


@row("C8")
def test_numbers_come_in_the_order_of_the_replicas(fast):
    assert gathered(fast, lambda s, x: x.size(0), 3, ints(8, 3)) == [3, 3, 2]
    assert gathered(fast, lambda s, x: str(x[0, 0].item()), 2, ints(2, 1)) == [
        str(v.item()) for v in ints(2, 1)[:, 0]
    ]


@row("C8")
def test_mixed_leaves_are_refused(fast):
    with pytest.raises((TypeError, ValueError)):
        gathered(fast, lambda s, x: x if x.size(0) == 2 else 3, x=ints(3, 3))


@row("C8", why="other leaves")
def test_what_cannot_be_gathered_is_named(fast):
    class Opaque:
        pass

    with pytest.raises(TypeError, match="Opaque"):
        gathered(fast, lambda s, x: Opaque())


@row("C10")
@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_of_unequal_length_are_refused(impl, kind):
    with pytest.raises(ValueError):
        gathered(impl, lambda s, x: kind([x] * x.size(0)), x=ints(3, 3))


class Bag:
    """An iterable that is neither list, tuple nor dict."""

    def __init__(self, items):
        self.items = list(items)

    def __iter__(self):
        return iter(self.items)


@row("C11", "L5")
def test_other_iterables(impl):
    x = ints(4, 3)
    out = gathered(impl, lambda s, x: Bag([x, Bag([]), [x + 1]]))
    assert type(out) is Bag and type(out.items[1]) is Bag and out.items[1].items == []
    same([out.items[0], out.items[2]], [x, [x + 1]])
    queue = gathered(impl, lambda s, x: collections.deque([x]))
    assert type(queue) is collections.deque
    same(queue[0], x)


# Shapes, dtypes, devices.


@row("C12")
def test_shapes_that_differ_are_refused_by_name(impl):
    # torch's own on a GPU names what it expects of the second instead of what the first has.
    shapes = r"(?s)(2, 3.*1, 1|1, 1.*(2, 3|expected \[1, 3))"
    with pytest.raises(RuntimeError, match=shapes):
        gathered(impl, lambda s, x: x if x.size(0) == 2 else x[:, :1], x=ints(3, 3))


@row("C12")
def test_the_error_names_the_path(fast):
    with pytest.raises(RuntimeError, match="boxes"):
        gathered(fast, lambda s, x: {"boxes": [x, x[:, : x.size(0)]]}, x=ints(3, 3))


@row("C14")
@pytest.mark.parametrize("spelled", ["cpu", torch.device("cpu")])
def test_output_device(fast, spelled):
    out = gathered(fast, lambda s, x: s.lin(x), output_device=spelled)
    assert out.device.type == "cpu"
    same(out, linear()(ints(4, 3)))


@row("C14")
def test_output_device_minus_one_is_the_host(impl):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        out = gathered(impl, lambda s, x: s.lin(x), output_device=-1)
    assert out.device.type == "cpu"
    same(out, linear()(ints(4, 3)))


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


@row("C15")
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_dtypes(impl, dtype):
    x = ints(5, 3)
    same(gathered(impl, lambda s, x: x.to(dtype), 3, x), x.to(dtype))


@row("C15")
def test_outputs_of_many_kinds_at_once(impl):
    x = ints(5, 3)
    make = lambda x: (x > 0, x.half(), x.argmax(1), x.t().t(), x[:, ::2], x[:, :0])  # noqa: E731
    out = gathered(impl, lambda s, x: (*make(x), s.lin(x), s.lin(x).detach()), 2, x)
    same(out[:6], make(x))
    assert [t.requires_grad for t in out] == [False] * 6 + [True, False]


@row("C15", why="tokens only where a real input requires grad")
def test_detached_outputs_do_not_require_grad(impl):
    out = gathered(impl, lambda s, x: {"logits": s.lin(x).detach(), "labels": x.argmax(1)})
    assert not out["logits"].requires_grad and out["logits"].grad_fn is None
    out["logits"].cpu().numpy()


@row("C15", why="zero-size pieces")
def test_zero_size_pieces(impl):
    """A data-dependent selection that is empty on one replica."""
    x = torch.tensor([[1.0], [2.0], [-1.0], [-2.0]]).double()
    out = gathered(impl, lambda s, x: x[x[:, 0] > 0], 2, x)
    same(out, x[:2])


@row("C11", "L13")
def test_views_and_inputs_as_outputs(impl):
    x = ints(4, 4, grad=True)
    module, plain_module = exact(nn.Linear(4, 4)), exact(nn.Linear(4, 4))

    class Views(nn.Module):
        def __init__(self, lin):
            super().__init__()
            self.lin = lin

        def forward(self, x):
            y = self.lin(x * 0 + 1)
            return x, *y.split(2, 1), *y.chunk(4, 1), x[:, :1], y.t().t()

    dp, plain = impl.wrap(Views(module), 2), Views(plain_module)
    out, want = dp(x), plain(z := ints(4, 4, grad=True))
    same(out, want)
    sum(t.sum() for t in out).backward()
    sum(t.sum() for t in want).backward()
    same(x.grad, z.grad)
    same(module.bias.grad, plain_module.bias.grad)
