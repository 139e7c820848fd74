"""BEHAVIOUR B and C: small chunks, and what the errors of unfit arguments and results say."""

import collections
import dataclasses
import re

import pytest
import torch
from nets import Apply, Net, close, exact, grads, ints, linear, same
from torch import nn

row = pytest.mark.row


# Chunks of one sample, and one chunk only.


@row("B6")
@pytest.mark.filterwarnings("ignore::fastdp.DataParallelWarning")
@pytest.mark.parametrize("n", [2, 3])
def test_one_used_replica_is_a_replica_like_any_other(impl, n):
    """Not the module itself, as with one device: attributes set in forward are lost as ever."""
    seen = []

    def forward(self, x):
        self.last = x
        seen.append(self)
        return self.lin(x)

    module, plain = Apply(forward), linear()
    dp = impl.wrap(module, n)
    for batch in (1, n, 1):
        same(out := dp(ints(batch, 3)), want := plain(ints(batch, 3)))
        out.sum().backward()
        want.sum().backward()
    assert len(seen) == n + 2 and not hasattr(module, "last")
    assert all(s is not module and s._is_replica for s in seen)
    same(module.lin.weight.grad, plain.weight.grad)


@row("B6")
@pytest.mark.filterwarnings("ignore::fastdp.DataParallelWarning")
@pytest.mark.parametrize("batch, rank", [(1, 0), (3, 1)])
def test_batch_norm_of_one_sample_is_torchs_error(impl, batch, rank):
    dp = impl.wrap(nn.BatchNorm1d(3).double(), 2)
    text = rf"(?s)in replica {rank} on .*Expected more than 1 value per channel"
    with pytest.raises(ValueError, match=text):
        dp(ints(batch, 3))
    dp.eval()
    close(dp(ints(batch, 3)), dp.module(ints(batch, 3).to(impl.home)))


@row("B6", "C1")
@pytest.mark.filterwarnings("ignore::fastdp.DataParallelWarning")
def test_squeezed_outputs_of_one_sample_each(impl):
    """Every chunk squeezed to 0-dim: a vector, with torch's warning; two-dim ones do not mix."""
    dp = impl.wrap(Apply(lambda s, x: s.lin(x)[:, :1].squeeze()), 2)
    with pytest.warns(UserWarning, match="all input tensors were scalars"):
        out = dp(ints(2, 3))
    same(out, linear()(ints(2, 3))[:, 0])


# What the errors say.


@row("B11")
@pytest.mark.parametrize("where", ["positional", "keyword", "nested"])
def test_the_error_of_a_dict_that_cannot_be_rebuilt_names_it(fast, where):
    bad = collections.defaultdict(list, {"x": ints(4, 3)})
    dp = fast.wrap(Apply(lambda s, x, k=None: s.lin(x)), 2)
    args, named, path = {
        "positional": ((bad,), {}, r"inputs\[0\]"),
        "keyword": ((ints(4, 3),), {"k": bad}, r"kwargs\['k'\]"),
        "nested": (([ints(4, 3), {"a": bad}],), {}, r"inputs\[0\]\[1\]\['a'\]"),
    }[where]
    with pytest.raises(TypeError, match=f"{path}: defaultdict cannot be rebuilt.*override scatter"):
        dp(*args, **named)


@row("B17", "C12")
@pytest.mark.parametrize("place", ["alone", "in a tuple", "in a dict"])
def test_the_error_of_unfit_shapes_names_path_shapes_and_replicas(fast, place):
    make = {
        "alone": lambda y: y,
        "in a tuple": lambda y: (y[:, :1], y),
        "in a dict": lambda y: {"hidden": [y]},
    }[place]
    path = {
        "alone": "output",
        "in a tuple": r"output\[1\]",
        "in a dict": r"output\['hidden'\]\[0\]",
    }
    dp = fast.wrap(Apply(lambda s, x: make(x[:, : x.size(0)])), 2)
    text = (
        rf"{path[place]} cannot be gathered along dimension 0: it has shape \(3, 3\) on replica 0 "
        rf"\({fast.device(0)}\) but \(2, 2\) on replica 1 \({fast.device(1)}\)"
    )
    with pytest.raises(RuntimeError, match=text):
        dp(ints(5, 3))


@row("C12")
@pytest.mark.parametrize(
    "shape, dim", [((2, 3), 2), ((2, 3), -3), ((3,), 1), ((), 1), ((), -1)], ids=str
)
def test_the_error_of_a_dimension_that_outputs_have_not(fast, shape, dim):
    """Numbers become a vector along dimension 0 alone."""
    outputs = [torch.zeros(shape, device=fast.device(rank)) for rank in range(2)]
    text = re.escape(f"has shape {shape} on replica 0: it cannot be gathered along dimension {dim}")
    with pytest.raises(RuntimeError, match=text):
        fast.api.gather(outputs, fast.home_id, dim)


@row("C12", why="replicas whose outputs differ in dtype")
@pytest.mark.parametrize("first, second", [("double", "float"), ("float", "double")])
def test_outputs_are_joined_in_the_dtype_of_the_first_replica(impl, first, second):
    kinds = [getattr(torch, name) for name in (first, second)]
    x = ints(4, 3, grad=True)
    x.data[:, 0] = torch.tensor([0.0, 0.0, 1.0, 1.0])
    dp = impl.wrap(Apply(lambda s, x: s.lin(x).to(kinds[int(x[0, 0])])), 2)
    out = dp(x)
    assert out.dtype == kinds[0]
    out.square().sum().backward()
    y = x.detach().clone().requires_grad_()
    plain = linear()
    same(out.double(), want := plain(y))
    want.square().sum().backward()
    same(x.grad, y.grad)
    same(grads(dp.module.lin), grads(plain))


@dataclasses.dataclass
class Partial:
    y: torch.Tensor
    late: torch.Tensor = dataclasses.field(init=False)


@row("C6")
def test_a_field_that_was_never_set_stays_unset(fast):
    out = fast.wrap(Apply(lambda s, x: [Partial(s.lin(x))]), 2)(ints(5, 3))
    same(out[0].y, linear()(ints(5, 3)))
    assert type(out[0]) is Partial and not hasattr(out[0], "late")


@row("B16")
@pytest.mark.parametrize("way", ["lengths", "own scatter"])
def test_what_to_do_instead_of_packing_outside(fast, way):
    """Pack inside forward; or cut by hand, each chunk padded to the whole batch's length."""

    def forward(self, x, lengths):
        pack, pad = nn.utils.rnn.pack_padded_sequence, nn.utils.rnn.pad_packed_sequence
        packed = pack(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad(self.rnn(packed)[0], batch_first=True, total_length=x.size(1))[0]

    class ByHand(fast.api.DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            rows = tuple(
                (x.to(fast.device(rank)), lengths)
                for rank, (x, lengths) in enumerate(
                    zip(inputs[0].chunk(2), inputs[1].chunk(2), strict=True)
                )
            )
            return rows, ({},) * len(rows)

    def make():
        torch.manual_seed(0)
        module = Apply(forward)
        module.rnn = nn.LSTM(3, 4, batch_first=True).double()
        return module

    module, plain = make(), make().to(fast.home)
    x, lengths = ints(4, 5, 3), torch.tensor([5, 2, 3, 1])
    dp = fast.wrap(module, 2) if way == "lengths" else fast.wrap_as(ByHand, module, 2)
    close(out := dp(x, lengths), want := plain(x.to(fast.home), lengths))
    out.sum().backward()
    want.sum().backward()
    for name, gradient in grads(module.rnn).items():
        close(gradient, grads(plain.rnn)[name])


@row("D14")
@pytest.mark.parametrize("frozen", [False, True])
def test_sparse_parameters(fast, frozen):
    """Copied, and summed into a sparse gradient; torch's own cannot send them."""

    def make():
        module = Apply(lambda s, x: torch.sparse.mm(s.w, x.t()).t())
        weight = torch.tensor([[0.0, 2, 0], [1, 0, 0], [0, 0, 3]]).double().to_sparse()
        module.w = nn.Parameter(weight, requires_grad=not frozen)
        return module

    module, plain = make(), make()
    dp = fast.wrap(module, 2)
    for _ in range(2):
        x, z = ints(5, 3, grad=True), ints(5, 3, grad=True)
        same(out := dp(x), want := plain(z))
        out.sum().backward()
        want.sum().backward()
        same(x.grad, z.grad)
    if frozen:
        assert module.w.grad is None
    else:
        same(module.w.grad.to_dense(), plain.w.grad.to_dense())


# Parameters that are frozen cost no reduction.


@row("D2", "X36")
def test_frozen_parameters_are_not_reduced(fast):
    from fastdp import _C

    module = nn.Sequential(Net(), exact(nn.Linear(2, 2)))
    dp = fast.wrap(module, 2)

    def reduced():
        before = _C.counters().get("bucket_reduce", {}).get("bytes", 0)
        dp.zero_grad()
        dp(ints(4, 3)).sum().backward()
        return _C.counters()["bucket_reduce"]["bytes"] - before

    both = reduced()
    module[0].requires_grad_(False)
    some = reduced()
    assert 0 < some < both / 2 and module[0].first.weight.grad is None
    module[0].requires_grad_(True)
    assert reduced() == both
