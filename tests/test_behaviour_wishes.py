"""BEHAVIOUR, where people wished for more than nn.DataParallel does: by default as there, on
request better. Each test asks for the default on both sides, or for the wish on fastdp's."""

import copy
import math
import pickle
import threading
import warnings

import pytest
import torch
from nets import Apply, Net, exact, grads, ints, linear, same
from torch import nn

import fastdp
from fastdp import Replicated

row = pytest.mark.row


def told(work):
    """What work() gives, and the texts of fastdp's warnings meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = work()
    return result, [str(w.message) for w in caught if w.category is fastdp.DataParallelWarning]


def arguments_of(fast, args, n=2, **options):
    """What each replica got, in rank order; the first argument is the batch, rows 0, 1, ..."""
    seen = []
    module = Apply(lambda s, *args: seen.append(args) or s.lin.bias.expand(1, 2))
    _, texts = told(lambda: fast.wrap(module, n, **options)(*args))
    return sorted(seen, key=lambda args: float(args[0].flatten()[0])), texts


def numbered(rows, width=1):
    return torch.arange(float(rows)).double()[:, None].expand(rows, width)


# Inputs.


@row("B3")
def test_zero_dim_tensors_whole_on_request(fast):
    k = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    module = Apply(lambda s, x, k: s.lin(x) * k)
    for dp, given in (
        (fast.wrap(module, 2, replicate_scalars=True), k),
        (fast.wrap(module, 2), Replicated(k)),
    ):
        k.grad = None
        same(out := dp(ints(5, 3), k=given), 3 * linear()(ints(5, 3)))
        out.sum().backward()
        same(k.grad, linear()(ints(5, 3)).sum())
    said = r"chunk expects at least a 1-dimensional tensor, but kwargs\['k'\] is 0-dim: pass a "
    with pytest.raises(RuntimeError, match=said):
        fast.wrap(module, 2)(ints(5, 3), k=k)


@row("B8", "B9")
def test_lists_are_cut_like_tensors_on_request(fast):
    names = ["a", "b", "c", "d", "e"]
    got, texts = arguments_of(fast, (numbered(5), names), split_lists=True)
    assert [args[1] for args in got] == [["a", "b", "c"], ["d", "e"]] and texts == []
    images = [numbered(3) + k for k in range(4)]
    got, _ = arguments_of(fast, (numbered(4), images, {"k": [1, 2, 3, 4]}), split_lists=True)
    assert [[float(t[0, 0]) for t in args[1]] for args in got] == [[0, 1], [2, 3]]
    assert [args[2] for args in got] == [{"k": [1, 2]}, {"k": [3, 4]}]
    assert all(t.shape == (3, 1) for args in got for t in args[1])


@row("B9")
def test_a_list_as_long_as_the_batch_is_warned_of_once(fast):
    """By default every replica gets all of it, out of step with its chunk."""
    got, texts = arguments_of(fast, (numbered(4), ["a", "b", "c", "d"]))
    assert [args[1] for args in got] == [["a", "b", "c", "d"]] * 2
    assert len(texts) == 1 and "inputs[1] is a list of 4" in texts[0]
    _, texts = arguments_of(fast, (numbered(4), ["a", "b", "c"]))
    assert texts == []
    dp = fast.wrap(Apply(lambda s, x, names: s.lin(x)), 2)
    calls = [told(lambda: dp(ints(4, 3), ["a", "b", "c", "d"])) for _ in range(3)]
    assert [len(texts) for _, texts in calls] == [1, 0, 0]


@row("B10")
def test_a_list_of_images_goes_whole_images_to_each(fast):
    """Detection: images of several sizes and their targets, in lists, by keyword too."""

    def forward(self, images, targets=None):
        assert [len(t["boxes"]) for t in targets] == [i.size(2) for i in images]
        return [self.lin(i.sum((1, 2))[None, :]) * len(t["boxes"])
                for i, t in zip(images, targets, strict=True)]  # fmt: skip

    images = [ints(3, 4, 2 + k % 3, seed=k) for k in range(5)]
    targets = [{"boxes": torch.zeros(i.size(2), 4)} for i in images]
    module, plain = Apply(forward), Apply(forward)
    want = plain(images, targets)
    dp = fast.wrap(module, 2, split_lists=True, gather_outputs=False)
    got = [one for part in dp(images, targets=targets) for one in part]
    same(got, want)
    sum(one.sum().to(fast.home) for one in got).backward()
    sum(one.sum() for one in want).backward()
    same(grads(module), grads(plain))


@row("B13", "H6")
@pytest.mark.parametrize(
    "sizes", [[1, 3], [3, 1], lambda batch, n: [1, batch - 1], lambda batch, n: [batch]]
)
def test_chunk_sizes(fast, sizes):
    module, plain = Net(), Net()
    seen = []
    module.register_forward_pre_hook(lambda m, a: seen.append(a[0].size(0)))
    dp = fast.wrap(module, 2, chunk_sizes=sizes)
    x, z = ints(4, 3, grad=True), ints(4, 3, grad=True)
    same(out := dp(x), want := plain(z))
    wanted = sizes(4, 2) if callable(sizes) else sizes
    assert sorted(seen) == sorted(wanted)
    out.sum().backward()
    want.sum().backward()
    same(x.grad, z.grad)
    same(grads(module), grads(plain))


@row("B13")
def test_chunk_sizes_fit_short_batches_and_refuse_long_ones(fast):
    """Filled from the start: five of [3, 4] are 3 and 2, two are 2 alone."""
    for batch, wanted in ((7, [3, 4]), (5, [3, 2]), (2, [2])):
        got, _ = arguments_of(fast, (numbered(batch),), chunk_sizes=[3, 4])
        assert [len(args[0]) for args in got] == wanted
    with pytest.raises(ValueError, match=r"chunk_sizes is \[3, 4\].*7 samples.*batch has 8"):
        arguments_of(fast, (numbered(8),), chunk_sizes=[3, 4])
    for bad in ([1], [1, 1, 1], [0, 0], [0, 2], [-1, 2]):
        with pytest.raises(ValueError, match=r"chunk_sizes"):
            fast.wrap(linear(), 2, chunk_sizes=bad)
    for bad in (3, "ab", [1.5, 2]):
        with pytest.raises(TypeError, match="chunk_sizes"):
            fast.wrap(linear(), 2, chunk_sizes=bad)


@row("B14")
def test_replicated_inputs_go_whole_to_each_and_sum_their_gradients(fast):
    table = ints(7, 3, seed=5, grad=True)
    module = Apply(lambda s, x, table, box: s.lin(x + table[:5].sum(0)) + box["m"][0].sum())
    dp = fast.wrap(module, 3)
    mask = ints(2, 2, seed=8)
    box = Replicated({"m": [mask], "s": "x"})
    out, texts = told(lambda: dp(ints(6, 3), Replicated(table), box=box))
    same(out, linear()(ints(6, 3) + table[:5].sum(0)) + mask.sum())
    assert texts == []
    out.sum().backward()
    twin = ints(7, 3, seed=5, grad=True)
    linear()(ints(6, 3) + twin[:5].sum(0)).sum().backward()
    same(table.grad, twin.grad)


@row("B14")
def test_tensors_of_unequal_first_size_are_warned_of_once(fast):
    dp = fast.wrap(Apply(lambda s, x, table: s.lin(x)), 2)
    texts = [told(lambda: dp(ints(4, 3), ints(100, 8)))[1] for _ in range(2)]
    assert len(texts[0]) == 1 and texts[1] == []
    assert "inputs[1] has size 100 along dimension 0 and inputs[0] has 4" in texts[0][0]
    assert told(lambda: dp(ints(4, 3), Replicated(ints(100, 8))))[1] == []


# Outputs and losses.


@row("C3")
def test_a_loss_over_the_batch_sees_its_chunk_only(impl):
    """A contrastive loss inside forward: the sum over each chunk's own pairs, by both."""

    def pairs(x):
        return (x @ x.t()).sum()

    x = ints(5, 3)
    dp = impl.wrap(Apply(lambda s, x: pairs(x)), 2)
    with pytest.warns(UserWarning, match="scalars"):
        out = dp(x)
    same(out, torch.stack([pairs(chunk) for chunk in x.chunk(2)]))
    assert out.sum().item() != pairs(x).item()


@row("C2")
@pytest.mark.parametrize("batch, n", [(5, 2), (7, 4), (4, 2), (1, 3)])
@pytest.mark.parametrize("weighting", [None, "chunk"])
def test_the_mean_of_the_losses(fast, weighting, batch, n):
    """By default the mean of the chunks' means; on request the batch's mean, gradients too."""
    x = ints(batch, 3)
    module, plain = Apply(lambda s, x: s.lin(x).mean()), linear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = fast.wrap(module, n, loss_weighting=weighting)(x).mean()
    loss.backward()
    if weighting == "chunk":
        want = plain(x).mean()
    else:
        want = torch.stack([plain(chunk).mean() for chunk in x.chunk(n)]).mean()
    want.backward()
    close = torch.testing.assert_close
    close(loss.detach().cpu(), want.detach(), rtol=1e-14, atol=1e-14)
    close(module.lin.weight.grad.cpu(), plain.weight.grad, rtol=1e-14, atol=1e-14)


@row("C12", "C13")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_outputs_left_where_they_are(fast, n):
    """A list, one entry for each used replica, of any shapes."""
    module = Apply(lambda s, x: {"y": s.lin(x), "rows": x[:, : x.size(0)], "n": x.size(0)})
    outs = fast.wrap(module, n, gather_outputs=False)(x := ints(5, 3))
    assert type(outs) is list and [out["n"] for out in outs] == [c.size(0) for c in x.chunk(n)]
    for rank, (out, chunk) in enumerate(zip(outs, x.chunk(n), strict=True)):
        assert out["y"].device == fast.device(rank)
        same(out["y"], linear()(chunk))
        same(out["rows"], chunk[:, : chunk.size(0)])


@row("C13", "D1")
@pytest.mark.parametrize("weights", [None, [0.75, 0.25]])
def test_a_loss_on_each_device_summed_in_one_node(fast, weights):
    module, plain = Net(), Net()
    dp = fast.wrap(module, 2, gather_outputs=False)
    targets = ints(4, 2, seed=6).chunk(2)
    losses = [
        (out - target.to(out.device)).pow(2).sum()
        for out, target in zip(dp(ints(4, 3)), targets, strict=True)
    ]
    total = fastdp.sum_losses(losses, weights)
    assert total.device == losses[0].device and total.dim() == 0
    assert [node for node, _ in total.grad_fn.next_functions] == [loss.grad_fn for loss in losses]
    total.backward()
    terms = [
        (plain(x) - t).pow(2).sum() * w
        for x, t, w in zip(ints(4, 3).chunk(2), targets, weights or [1, 1], strict=True)
    ]
    sum(terms).backward()
    same(total, sum(terms))
    same(grads(module), grads(plain))


# The wrapper.


class Speaker(nn.Module):
    """A model with another method, an attribute and a property."""

    def __init__(self):
        super().__init__()
        self.lin = linear()
        self.config = {"width": 3}
        self._hidden = 1

    @property
    def width(self):
        return self.config["width"]

    def forward(self, x):
        return self.lin(x)

    def generate(self, x, times=1):
        """Calls forward on itself, as transformers' does."""
        self.config.setdefault("threads", []).append(threading.get_ident())
        return self(x) * times


@row("F2")
def test_attributes_are_forwarded_on_request(fast):
    module = Speaker()
    dp = fast.wrap(module, 2, forward_attributes=True)
    assert dp.config is module.config and dp.width == 3 and dp.module is module
    with pytest.raises(AttributeError, match="nothing"):
        _ = dp.nothing
    with pytest.raises(AttributeError, match="_hidden"):
        _ = dp._hidden
    dp(ints(4, 3))
    for twin in (copy.deepcopy(dp), pickle.loads(pickle.dumps(dp)), copy.copy(dp)):
        assert twin.config == module.config and twin.width == 3
        same(twin(ints(4, 3)), linear()(ints(4, 3)))
    assert not hasattr(fast.wrap(Speaker(), 2), "config")


@row("F3")
def test_another_method_runs_in_parallel_on_request(fast):
    module, plain = Speaker(), linear()
    dp = fast.wrap(module, 2)
    same(dp.module.generate(ints(5, 3).to(fast.home), times=2), 2 * plain(ints(5, 3)))
    assert module.config.pop("threads") == [threading.get_ident()]
    same(out := dp.call("generate", ints(5, 3), times=2), 2 * plain(ints(5, 3)))
    assert len(set(module.config["threads"])) == 2
    out.sum().backward()
    same(module.lin.weight.grad, 2 * ints(5, 3).sum(0).expand(2, 3))
    with pytest.raises(AttributeError, match="no_such"):
        dp.call("no_such", ints(5, 3))


@row("F3")
def test_a_part_of_the_module_runs_in_parallel(fast):
    module = nn.Sequential(linear(), exact(nn.Linear(2, 2)))
    same(fast.wrap(module, 2).call("0.forward", ints(5, 3)), linear()(ints(5, 3)))


# Random numbers and code that is not made for threads.


@row("I4", "I5", "F10")
@pytest.mark.parametrize("n", [2, 3])
def test_random_numbers_are_reproducible_in_sequence(fast, n):
    """Twice from one seed: equal; the replicas' masks are not each other's."""
    dp = fast.wrap(nn.Dropout(0.5), n, sequential=True)
    x = torch.ones(8 * n, 16).double()
    runs = []
    for _ in range(3):
        torch.manual_seed(7)
        runs.append(dp(x).cpu())
    same(runs[1], runs[0])
    same(runs[2], runs[0])
    torch.manual_seed(7)
    want = torch.cat([nn.functional.dropout(c, 0.5) for c in x.to(fast.home).chunk(n)])
    if fast.gpus == 1:
        same(runs[0], want)
        assert not torch.equal(*runs[0].chunk(n)[:2])


@row("I7")
@pytest.mark.parametrize("n", [2, 3])
def test_code_that_is_not_made_for_threads_runs_in_sequence(fast, n):
    """One thread, replica after replica in order, with state that only one may touch at a time."""
    inside, order = [], []

    def forward(self, x):
        inside.append(1)
        assert len(inside) == 1, "two replicas at once"
        order.append((int(x[0, 0]), threading.get_ident()))
        y = self.lin(x)
        inside.pop()
        return y

    module, plain = Apply(forward), linear()
    dp = fast.wrap(module, n, sequential=True)
    x = numbered(2 * n, 3)
    for _ in range(2):
        order.clear()
        same(out := dp(x), want := plain(x))
        out.sum().backward()
        want.sum().backward()
        assert order == [(2 * rank, threading.get_ident()) for rank in range(n)]
    same(module.lin.weight.grad, plain.weight.grad)


@row("B13", "C2", "F2", "I7")
@pytest.mark.parametrize(
    "option, value",
    [
        ("loss_weighting", "sum"),
        ("split_lists", 1),
        ("gather_outputs", None),
        ("sequential", "yes"),
        ("forward_attributes", 0),
        ("replicate_scalars", math.nan),
    ],
)
def test_bad_options_name_themselves_and_their_value(fast, option, value):
    with pytest.raises((TypeError, ValueError), match=rf"{option} is {value!r}"):
        fast.wrap(linear(), 2, **{option: value})
