"""docs/migrating.md, from nn.DataParallel: what its tables say about numbers and errors is so, on
both sides. One test per row, named by the row's first cell; nn.DataParallel's side is torch's own
code (oracle.py)."""

import dataclasses
import warnings

import fastdp
import oracle
import pytest
import torch
from differences import OURS, THEIRS, Rows, call, per_replica, rank_of, wrap
from differences import cells as readme_cells
from docs_page import table
from nets import Apply, ints, linear, same
from torch import nn

# What stays as it is.

stays = Rows()


def test_each_row_that_stays_has_a_test():
    assert [cells[0] for cells in table("### Nothing to do")] == list(stays)


def both():
    return (THEIRS, OURS)


def wrap_n(side, module, n):
    if side == THEIRS:
        return oracle.DataParallel(module, device_ids=list(range(n)))
    return fastdp.DataParallel(module, device_ids=["cpu"] * n)


@pytest.mark.filterwarnings("ignore::fastdp.DataParallelWarning")
@stays("chunks")
def test_chunks():
    for side in both():
        for rows, sizes in ((10, [3, 3, 3, 1]), (5, [2, 2, 1])):
            seen = []
            module = Apply(lambda self, x, seen=seen: (seen.append(len(x)), x)[1])
            wrap_n(side, module, 4)(ints(rows, 3))
            assert sorted(seen, reverse=True) == sizes


@stays("0-dim outputs, such as a loss computed in `forward`")
def test_scalars():
    for side in both():
        with pytest.warns(UserWarning, match="scalars"):
            out = call(side, lambda self, x: self.lin(x).sum())
        assert out.shape == (2,)


@stays("the mean of that vector")
@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0")
def test_mean_of_means():
    x = torch.tensor([0.0, 0.0, 0.0, 0.0, 10.0]).double()
    for side in both():
        assert call(side, lambda self, x: x.mean(), x).mean() == (0 + 5) / 2.0 != x.mean()


@stays("batch norm")
def test_batch_norm():
    x = ints(4, 3)
    want = nn.BatchNorm1d(3).double()
    outs = want(x[:2])
    statistics = want.running_mean.clone()
    outs = torch.cat([outs, want(x[2:])])
    for side in both():
        norm = nn.BatchNorm1d(3).double()
        same(wrap(side, norm)(x), outs)
        same(norm.running_mean, statistics)


@stays("attributes set in `forward`")
def test_attributes():
    def forward(self, x):
        self.seen = len(x)
        return x

    for side in both():
        module = Apply(forward)
        wrap(side, module)(ints(4, 3))
        assert not hasattr(module, "seen")


@stays("a parameter that nothing used")
def test_unused_parameter():
    def unused(side, **options):
        module = Apply(lambda self, x: self.lin(x))
        module.unused = nn.Parameter(torch.ones(2))
        wrap(side, module, **options)(ints(4, 3)).sum().backward()
        return module.unused.grad

    for side in both():
        same(unused(side), torch.zeros(2))
    assert unused(OURS, unused_grad="none") is None


@stays("a list or tuple argument")
def test_lists():
    for side in both():
        seen = []
        module = Apply(lambda self, items, seen=seen: (seen.append(items), items[0])[1])
        wrap(side, module)([ints(4, 3), "ab"])
        assert [(len(tensor), text) for tensor, text in seen] == [(2, "ab")] * 2


@stays("methods other than `forward`")
def test_methods():
    class Model(nn.Linear):
        def generate(self, x):
            return len(x)

    for side in both():
        dp = wrap(side, Model(3, 2))
        assert dp.module.generate(ints(4, 3)) == 4
        with pytest.raises(AttributeError):
            dp.generate(ints(4, 3))


@stays("attributes of the model")
def test_attribute_access():
    for side in both():
        module = linear()
        module.config = 5
        dp = wrap(side, module)
        assert dp.module.config == 5
        with pytest.raises(AttributeError, match="config"):
            _ = dp.config


# What gets better.

better = Rows()


def test_each_row_that_got_better_has_a_test():
    assert [cells[0] for cells in table("### What gets better")] == list(better)


@better("overhead of a step")
def test_replicas_and_threads_are_kept():
    import threading

    threads, places = set(), []

    def forward(self, x):
        threads.add(threading.get_ident())
        places.append(id(self.lin))
        return x

    dp = wrap(OURS, Apply(forward))
    for _ in range(5):
        dp(ints(4, 3))
    assert len(threads) == 2 and len(set(places)) == 2


@better("`next(self.parameters())` in `forward`")
def test_parameters_in_forward():
    assert per_replica(THEIRS, lambda self: len(list(self.parameters()))) == [0, 0]
    assert per_replica(OURS, lambda self: len(list(self.parameters()))) == [2, 2]


@pytest.mark.filterwarnings("ignore::fastdp.DataParallelWarning")
@better("a last batch with fewer rows than devices, and a constant argument")
def test_short_batch():
    def forward(self, x, flag=False):
        return self.lin(x)

    with pytest.raises(TypeError, match="missing"):
        call(THEIRS, forward, ints(1, 3), flag=True)
    same(call(OURS, forward, ints(1, 3), flag=True), linear()(ints(1, 3)))


@dataclasses.dataclass
class Output:
    logits: torch.Tensor


@better("a dataclass as output")
def test_dataclass():
    with pytest.raises(TypeError):
        call(THEIRS, lambda self, x: Output(self.lin(x)))
    same(call(OURS, lambda self, x: Output(self.lin(x))).logits, linear()(ints(4, 3)))


@better("numbers and strings in the output")
def test_numbers():
    with pytest.raises(TypeError):
        call(THEIRS, lambda self, x: (x, 3))
    assert call(OURS, lambda self, x: (x, 3, "ok"))[1:] == ([3, 3], ["ok", "ok"])


@better("autocast")
def test_autocast_dtype():
    with torch.autocast("cpu", torch.float16):
        assert call(OURS, lambda self, x: self.lin(x).float(), ints(4, 3)) is not None
        seen = per_replica(OURS, lambda self: torch.get_autocast_dtype("cpu"))
    assert seen == [torch.float16] * 2


class Odd(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


@better("an error in a replica")
def test_error():
    def forward(self, x):
        raise Odd("a", "b")

    with pytest.raises(RuntimeError):
        call(THEIRS, forward)
    with pytest.raises(Odd, match="replica 0") as caught:
        call(OURS, forward)
    assert type(caught.value.__cause__) is Odd


@better("outputs that cannot be joined")
def test_unequal_shapes():
    with pytest.raises(RuntimeError, match="replica 1") as caught:
        call(OURS, lambda self, x: {"y": x[:, : 1 + rank_of(x)]}, torch.tensor([[0, 0], [1, 1]]))
    assert "'y'" in str(caught.value) and "(1, 2)" in str(caught.value)


@better("the same inputs twice")
def test_same_bits():
    module = nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 2))
    dp, x = fastdp.DataParallel(module, device_ids=["cpu"] * 4), torch.randn(64, 3)
    first, second = (
        torch.autograd.grad(dp(x).square().sum(), list(module.parameters())) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@better("a machine without GPUs")
def test_host_replicas():
    assert len(per_replica(OURS, id)) == 2


# What differs: README.md's rows, which have tests of their own on both sides.


def test_rows_that_differ_are_rows_of_the_readme():
    titles = ("Devices and inputs", "Outputs", "Replicas", "Threads, errors, gradients")
    ours = [cells[0] for cells in table("### What differs")]
    assert len(ours) > 5 and not set(ours) - set(readme_cells(*titles))


@pytest.mark.parametrize("way", ["del", "functional_call"])
def test_ways_around_an_assigned_weight(way):
    def assign(self, x):
        doubled = self.lin.weight * 2
        if way == "functional_call":
            return torch.func.functional_call(self.lin, {"weight": doubled}, (x,))
        del self.lin.weight
        self.lin.weight = doubled
        return self.lin(x)

    plain = Apply(lambda self, x: nn.functional.linear(x, self.lin.weight * 2, self.lin.bias))
    same(call(OURS, assign), plain(ints(4, 3)))


def test_frozen_before_the_forward():
    module = linear()
    module.weight.requires_grad_(False)
    wrap(OURS, module)(ints(4, 3)).sum().backward()
    assert module.weight.grad is None and module.bias.grad is not None


def test_packing_in_the_forward():
    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        out, _ = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, total_length=x.size(1))
        return out

    x, lengths = ints(4, 5, 3), torch.tensor([5, 2, 3, 1])
    want = x * (torch.arange(5) < lengths.unsqueeze(1)).unsqueeze(2)
    same(call(OURS, forward, x, lengths), want)


# What no table of the page has.


@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0")
def test_options_that_no_block_shows():
    dp = wrap(OURS, Apply(lambda self, x, k: x * k), replicate_scalars=True)
    same(dp(ints(4, 3), torch.tensor(3)), ints(4, 3) * 3)
    with pytest.raises(ValueError, match="room for 4 samples, but the batch has 5"):
        wrap(OURS, linear(), chunk_sizes=[1, 3])(ints(5, 3))
    module = linear()
    same(wrap(OURS, module, transport="local")(ints(4, 3)), module(ints(4, 3)))


def test_the_engine_says_why_nothing_is_recorded_on_the_host():
    module = linear()
    dp = fastdp.DataParallel(module, device_ids=["cpu", "cpu"], engine="auto")
    same(dp(ints(4, 3)), module(ints(4, 3)))
    assert "on the host, where there is nothing to record" in str(dp.report())


def test_warnings_come_once_for_each_argument():
    dp = wrap(OURS, Apply(lambda self, x, names: x))
    with pytest.warns(fastdp.DataParallelWarning, match="split_lists"):
        dp(ints(4, 3), ["a", "b", "c", "d"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dp(ints(4, 3), ["a", "b", "c", "d"])


def test_batch_norm_refuses_a_chunk_of_one_row():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        wrap(OURS, nn.BatchNorm1d(3).double())(ints(3, 3))


def test_gradients_arrive_on_the_model_once_per_step():
    module, seen = linear(), []
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    wrap(OURS, module)(ints(4, 3)).sum().backward()
    assert len(seen) == 1
    same(seen[0], module.weight.grad)
