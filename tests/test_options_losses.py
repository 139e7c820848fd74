"""Losses: `sum_losses` of those that `gather_outputs=False` leaves where they are, and
`loss_weighting`. Integers in fp64 and shares that are powers of two, so that equality holds."""

import pytest
import torch
from nets import Apply, Net, Pair, exact, grads, ints, linear, same
from output_classes import Fields
from torch import nn

import fastdp
from fastdp import sum_losses

row = pytest.mark.row


# sum_losses.


def train(dp, x, labels, weights=None):
    """The gradients of a loss on each replica's output, with the labels on that device."""
    outputs = dp(x)
    pieces = labels.split([len(output) for output in outputs])
    losses = [
        ((output - piece.to(output.device)) ** 2).sum(1).mean()
        for output, piece in zip(outputs, pieces, strict=True)
    ]
    return sum_losses(losses, weights)


@row("C13", "C2")
@pytest.mark.parametrize("sizes", [[2, 2], [1, 3], [3, 1], [4, 4], [1, 1, 2], [8, 4, 4]])
def test_losses_left_on_their_devices_train_as_the_batch(fast, sizes):
    module, plain = Net(), Net()
    x, labels = ints(sum(sizes), 3), ints(sum(sizes), 2, seed=5)
    dp = fast.wrap(module, len(sizes), gather_outputs=False, chunk_sizes=sizes)
    total = train(dp, x, labels, [size / sum(sizes) for size in sizes])
    want = ((plain(x) - labels) ** 2).sum(1).mean()
    assert total.dim() == 0 and total.device == fast.home
    total.backward()
    want.backward()
    if 3 in sizes:  # thirds round
        torch.testing.assert_close(total.cpu(), want, rtol=1e-14, atol=0)
    else:
        same(total, want)
        same(grads(module), grads(plain))


@row("C13", "D3")
def test_sums_of_losses_are_twice_differentiable(fast):
    """In one node, whose backward is one node."""
    module, plain = Net(), Net()
    x, y = ints(4, 3, grad=True), ints(4, 3, grad=True)
    dp = fast.wrap(module, 2, gather_outputs=False, unused_grad="none")
    total = sum_losses([output.sum() for output in dp(x)], [0.5, 2])
    assert [type(node).__name__ for node, _ in total.grad_fn.next_functions] == ["SumBackward0"] * 2
    (slope,) = torch.autograd.grad(total, x, create_graph=True)
    first, second = plain(y).chunk(2)
    (want,) = torch.autograd.grad(first.sum() * 0.5 + second.sum() * 2, y, create_graph=True)
    same(slope, want)
    slope.square().sum().backward()
    want.square().sum().backward()
    same(grads(module), grads(plain))
    same(x.grad, y.grad)


@row("C13", "D3")
def test_third_derivatives_of_a_sum(fast):
    devices = [fast.device(rank) for rank in range(3)]
    leaves = [torch.tensor(2.0 + k).double().to(d).requires_grad_() for k, d in enumerate(devices)]
    weights = [1.0, -2.0, 0.5]
    value = sum_losses([leaf * leaf * leaf * leaf for leaf in leaves], weights)
    for factor in (4, 12, 24):
        slopes = torch.autograd.grad(value, leaves, create_graph=True)
        power = {4: 3, 12: 2, 24: 1}[factor]
        for slope, leaf, weight in zip(slopes, leaves, weights):
            same(slope, factor * weight * leaf.detach() ** power)
        value = sum_losses(list(slopes))


@row("C13")
def test_gradcheck_of_a_sum(fast):
    leaves = [torch.rand(3).double().to(fast.home).requires_grad_() for _ in range(3)]

    def total(*tensors):
        return sum_losses(tensors, [0.3, 1.7, -2.0])

    assert torch.autograd.gradcheck(total, leaves)
    assert torch.autograd.gradgradcheck(total, leaves)


@row("C13")
def test_a_sum_without_gradients_is_new_memory(fast):
    loss = torch.ones((), device=fast.home)
    total = sum_losses([loss])
    total.add_(1)
    assert loss.item() == 1 and not total.requires_grad
    same(sum_losses([loss, loss, loss], [1, 2, 4]), torch.tensor(7.0))
    with torch.no_grad():
        assert not sum_losses([loss.clone().requires_grad_()]).requires_grad


@row("C13")
def test_sums_are_in_the_order_given():
    small, large = torch.tensor(1.0), torch.tensor(2.0**24)
    assert sum_losses([large, small, small]).item() == 2.0**24
    assert sum_losses([small, small, large]).item() == 2.0**24 + 2


one = torch.tensor(1.0)
BAD_LOSSES = [
    ((one,), TypeError, "losses is a Tensor: it must be a list"),
    ((3,), TypeError, "losses is a int"),
    (([],), ValueError, "losses is empty"),
    (([one, 2.0],), TypeError, r"losses\[1\] is a float: it must be a tensor"),
    (([torch.tensor(1)],), TypeError, r"losses\[0\] has dtype torch.int64"),
    (([one, one[None]],), ValueError, r"losses\[1\] has shape \(1,\), but losses\[0\] has \(\)"),
    (([one, one.double()],), ValueError, r"losses\[1\] has dtype torch.float64"),
    (([one, one], [1]), ValueError, "weights has 1 entries: it must have 2"),
    (([one], one), TypeError, "weights is a Tensor"),
    (([one], 3), TypeError, "weights is a int: it must be a list of numbers"),
    (([one], [one]), TypeError, r"weights\[0\] is a Tensor: it must be a number"),
    (([one], ["1"]), TypeError, r"weights\[0\] is a str"),
    (([one], [float("nan")]), ValueError, r"weights\[0\] is nan: it must be finite"),
    (([one], [float("inf")]), ValueError, r"weights\[0\] is inf"),
]


@row("C13")
@pytest.mark.parametrize("arguments, error, words", BAD_LOSSES)
def test_bad_losses_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        sum_losses(*arguments)


@row("C13")
def test_losses_of_two_kinds_of_devices_are_refused(fast):
    if fast.home.type == "cpu":
        pytest.skip("needs 1 GPU: there is one kind of device only")
    with pytest.raises(ValueError, match=r"losses\[1\] has kind of device cuda, but .* has cpu"):
        sum_losses([torch.zeros(()), torch.zeros((), device=fast.home)])


# loss_weighting.


def mean_loss(s, x):
    return s.lin(x).mean()


# Each mean is of a power of two.
UNLIKE = [[2, 2], [1, 1, 2], [2, 4, 2], [4, 2, 1, 1], [1, 1, 2, 2, 2]]


@row("C2")
@pytest.mark.filterwarnings("ignore:Was asked to gather")
@pytest.mark.parametrize("sizes", UNLIKE)
def test_the_mean_of_weighted_losses_is_the_batchs(fast, sizes):
    module, plain, n = Apply(mean_loss), Apply(mean_loss), len(sizes)
    x = ints(sum(sizes), 3)
    losses = fast.wrap(module, n, loss_weighting="chunk", chunk_sizes=sizes)(x)
    assert losses.shape == (n,)
    same(losses.sum(), want := plain(x) * n)  # the mean, without its rounding
    losses.sum().backward()
    want.backward()
    same(grads(module), grads(plain))
    torch.testing.assert_close(losses.mean().cpu(), plain(x), rtol=1e-15, atol=0)


@row("C2")
@pytest.mark.filterwarnings("ignore:Was asked to gather")
@pytest.mark.parametrize("batch, n, sizes", [(5, 2, [3, 2]), (5, 5, [1] * 5), (5, 4, [2, 2, 1])])
def test_weights_are_the_shares_of_the_chunks(fast, batch, n, sizes):
    x, used = ints(batch, 3), len(sizes)
    dp = fast.wrap(Apply(lambda s, x: x.sum()), n, loss_weighting="chunk")
    want = [p.sum() * (size * used / batch) for p, size in zip(x.split(sizes), sizes)]
    same(dp(x), torch.stack(want))


@row("C2")
@pytest.mark.filterwarnings("ignore:Was asked to gather")
def test_every_scalar_of_a_nested_output_is_weighted(fast):
    def forward(s, x, weights=None):
        loss = x.sum()
        out = {"l": loss, "n": (loss.long(), Fields(loss, None)), "c": loss + 0j, "y": x}
        return Pair(out, [loss])

    x = ints(4, 3)
    dp = fast.wrap(Apply(forward), 2, loss_weighting="chunk", chunk_sizes=[1, 3])
    out = dp(x, weights=fastdp.Replicated(ints(7, 3)))
    a, b = (piece.sum() for piece in x.split([1, 3]))
    want = torch.stack([a * 0.5, b * 1.5])
    same(out.a["l"], want)
    same(out.a["n"][0], torch.stack([a, b]).long())
    same(out.a["n"][1].loss, want)
    same(out.a["c"], want + 0j)
    same(out.a["y"], x)
    same(out.b[0], want)


@row("C2")
@pytest.mark.filterwarnings("ignore:Was asked to gather")
@pytest.mark.parametrize("call", ["kwargs", "constants first", "split lists", "marked first"])
def test_the_batch_is_found_among_any_arguments(fast, call):
    x = ints(4, 3)
    options = {"split_lists": True} if call == "split lists" else {}
    arguments = {
        "kwargs": ((), {"x": x}),
        "constants first": ((), {"other": None, "x": x}),
        "split lists": ((), {"x": list(x)}),
        "marked first": ((), {"other": fastdp.Replicated(ints(9, 2)), "x": x}),
    }[call]

    def forward(s, x, other=None):
        return torch.stack(x).sum() if isinstance(x, list) else x.sum()

    dp = fast.wrap(Apply(forward), 2, loss_weighting="chunk", chunk_sizes=[1, 3], **options)
    a, b = x.split([1, 3])
    same(dp(*arguments[0], **arguments[1]), torch.stack([a.sum() * 0.5, b.sum() * 1.5]))


@row("C2", "B13")
@pytest.mark.filterwarnings("ignore:Was asked to gather")
def test_weights_follow_a_scatter_of_ones_own(fast):
    class Own(fastdp.DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            pieces = inputs[0].to(fast.home).split([1, 3])
            pieces = [p.to(fast.device(rank)) for rank, p in enumerate(pieces)]
            return [({"skip": "s", "x": p},) for p in pieces], [{}, {}]

    x = ints(4, 3)
    dp = fast.wrap_as(Own, Apply(lambda s, d: d["x"].sum()), 2, loss_weighting="chunk")
    a, b = x.split([1, 3])
    same(dp(x), torch.stack([a.sum() * 0.5, b.sum() * 1.5]))

    class Numbered(fastdp.DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            rows = [(torch.tensor(7.0), piece) for piece in inputs[0].split([1, 3])]
            return [[t.to(fast.device(r)) for t in row] for r, row in enumerate(rows)], [{}, {}]

    flat = torch.arange(4.0).double()
    dp = fast.wrap_as(Numbered, Apply(lambda s, k, x: x.sum()), 2, loss_weighting="chunk")
    same(dp(flat), torch.stack([flat[:1].sum() * 0.5, flat[1:].sum() * 1.5]))

    class Empty(fastdp.DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            return [(inputs[0][:0].to(fast.device(rank)),) for rank in range(2)], [{}, {}]

    dp = fast.wrap_as(Empty, Apply(lambda s, x: s.lin.bias.sum()), 2, loss_weighting="chunk")
    same(dp(x), torch.stack([linear().bias.sum()] * 2))

    class Opaque(fastdp.DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            return [(object(),), (object(),)], [{}, {}]

    dp = fast.wrap_as(Opaque, Apply(lambda s, o: s.lin.bias.sum()), 2, loss_weighting="chunk")
    with pytest.raises(ValueError, match="cannot tell how many samples replica 0 has"):
        dp(x)
    dp.loss_weighting = None
    assert dp(x).shape == (2,)


@row("C2", "C13")
@pytest.mark.parametrize("sizes", UNLIKE)
def test_weighted_losses_that_stay_where_they_are(fast, sizes):
    module, plain, n = Apply(mean_loss), Apply(mean_loss), len(sizes)
    x = ints(sum(sizes), 3)
    options = {"loss_weighting": "chunk", "gather_outputs": False, "chunk_sizes": sizes}
    total = sum_losses(fast.wrap(module, n, **options)(x))
    same(total, want := plain(x) * n)
    total.backward()
    want.backward()
    same(grads(module), grads(plain))


@row("C2", "B5", "B7")
@pytest.mark.filterwarnings("ignore:Was asked to gather")
def test_calls_without_samples_are_not_weighted(fast):
    dp = fast.wrap(Apply(lambda s, *a: s.lin.bias.sum()), 2, loss_weighting="chunk")
    bias = linear().bias.sum()
    same(dp(3, None), torch.stack([bias, bias]))
    assert dp().shape == (1,) and dp(ints(0, 3)).shape == (1,)
    alone = fast.wrap(Apply(lambda s, x: x.sum()), 1, loss_weighting="chunk")
    same(alone(ints(3, 3)), ints(3, 3).sum())


@row("C2")
@pytest.mark.parametrize("value", ["chunks", "", 1, True])
def test_a_bad_weighting_is_refused(fast, value):
    words = f"loss_weighting is {value!r}: it must be None or one of chunk"
    with pytest.raises(ValueError, match=words):
        fast.wrap(exact(nn.Linear(3, 2)), 2, loss_weighting=value)
    dp = fast.wrap(linear(), 2)
    with pytest.raises(ValueError, match=words):
        dp.loss_weighting = value
    same(dp(ints(4, 3)), linear()(ints(4, 3)))
