"""fastdp.Scattered by itself: slices made by hand, and how a wrapper takes them."""

import warnings

import fastdp
import pytest
import torch
from fastdp import Scattered
from nets import Apply, Net, grads, ints, linear, same
from torch import nn


def scattered(tensor, sizes, dim=0):
    return Scattered(tensor.split(sizes, dim), dim)


def test_it_measures_as_the_tensor_does():
    whole = ints(5, 3, 2)
    for dim, sizes in ((0, [2, 3]), (1, [1, 1, 1]), (-1, [2])):
        cut = scattered(whole, sizes, dim)
        assert len(cut) == len(whole) == 5
        assert cut.size() == cut.shape == whole.shape
        assert [cut.size(d) for d in range(-3, 3)] == [whole.size(d) for d in range(-3, 3)]
        assert cut.dim() == 3 and cut.dtype == whole.dtype
        assert cut.sizes == tuple(sizes) and cut.cut_dim == dim % 3
        same(cut.gathered(), whole)
        same(cut.gathered("cpu"), whole)
    assert repr(scattered(whole, [2, 3])) == (
        "Scattered(shape=(5, 3, 2), dtype=torch.float64, sizes=(2, 3), devices=[cpu, cpu])"
    )


def test_one_slice_is_the_whole():
    whole = ints(4, 3)
    assert Scattered([whole]).gathered() is whole


def test_gathered_is_new_memory_and_carries_gradients():
    parts = [ints(2, 3, grad=True), ints(1, 3, grad=True)]
    whole = Scattered(parts).gathered()
    (whole * ints(3, 3, seed=5)).sum().backward()
    same(parts[0].grad, ints(3, 3, seed=5)[:2])
    same(parts[1].grad, ints(3, 3, seed=5)[2:])


@pytest.mark.parametrize(
    "slices, dim, error, text",
    [
        ([], 0, ValueError, "slices is empty"),
        (torch.ones(3), 0, TypeError, "slices is a Tensor: it must be a list of tensors"),
        ({torch.ones(3)}, 0, TypeError, "slices is a set"),
        ([torch.ones(3), 4], 0, TypeError, r"slices\[1\] is a int: it must be a tensor"),
        ([torch.ones(3, 2)], 2, ValueError, r"dim is 2: slices\[0\] has 2 dimensions"),
        ([torch.tensor(1.0)], 0, ValueError, r"dim is 0: slices\[0\] has 0 dimensions"),
        ([torch.ones(3, 2), torch.ones(3, 1)], 0, ValueError, r"slices\[1\] has shape \(3, 1\)"),
        ([torch.ones(3, 2), torch.ones(3)], 0, ValueError, r"slices\[1\] has shape \(3,\)"),
        ([torch.ones(2, 3), torch.ones(2)], 1, ValueError, r"slices\[1\] has shape \(2,\)"),
        ([torch.ones(2), torch.ones(2).long()], 0, ValueError, r"slices\[1\] .* torch.int64"),
    ],
)
def test_what_does_not_fit_is_refused(slices, dim, error, text):
    with pytest.raises(error, match=text):
        Scattered(slices, dim)


# In a wrapper.


def test_slices_are_taken_as_they_are():
    """No copy: each replica gets the very memory."""
    seen = []
    dp = fastdp.DataParallel(Apply(lambda self, x: seen.append(x) or x * 2), ["cpu"] * 3)
    cut = scattered(ints(6, 3), [1, 4, 1])
    same(dp(cut), ints(6, 3) * 2)
    assert {x.data_ptr() for x in seen} == {part.data_ptr() for part in cut.slices}


@pytest.mark.parametrize("sizes", [[1, 4], [5], [2, 2, 1]])
def test_slices_of_any_sizes_decide_the_replicas(sizes):
    """Also of tensors beside them, of which the weights of losses know."""
    dp = fastdp.DataParallel(
        Apply(lambda self, x, y, scale: ((self.lin(x) - y) * scale).mean()),
        ["cpu"] * 3,
        loss_weighting="chunk",
    )
    x, y = ints(5, 3), ints(5, 2, seed=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = dp(scattered(x, sizes), y=y, scale=2.0)
    assert len(out) == len(sizes)
    torch.testing.assert_close(out.mean(), dp.module(x, y, 2.0), rtol=1e-12, atol=0)


def test_gradients_are_those_of_the_batch():
    module = Net()
    dp = fastdp.DataParallel(module, ["cpu"] * 2, chunk_sizes=[4, 4])
    dp(ints(7, 3)).sum().backward()
    want = grads(module)
    module.zero_grad()
    dp(scattered(ints(7, 3), [1, 6])).sum().backward()
    same(grads(module), want)


def test_lists_of_samples_are_cut_beside_slices():
    dp = fastdp.DataParallel(
        Apply(lambda self, x, names: [len(x), names]),
        ["cpu"] * 2,
        split_lists=True,
        gather_outputs=False,
    )
    out = dp(scattered(ints(5, 3), [1, 4]), list("abcde"))
    assert out == [[1, ["a"]], [4, ["b", "c", "d", "e"]]]


def test_a_replicated_one_goes_whole_to_every_replica():
    dp = fastdp.DataParallel(Apply(lambda self, x, t: x + t.sum()), ["cpu"] * 2)
    cut = scattered(ints(4, 3), [2, 2])
    same(dp(cut, fastdp.Replicated(cut)), ints(4, 3) + ints(4, 3).sum())


@pytest.mark.parametrize("options", [{"device_ids": ["cpu"]}, {}])
def test_a_module_that_is_called_directly_gets_the_whole(options):
    if not options and torch.cuda.is_available():
        pytest.skip("GPUs are used by default here")
    dp = fastdp.DataParallel(linear(), **options)
    same(dp(Scattered([ints(4, 3)])), dp.module(ints(4, 3)))
    if not options:
        same(dp(scattered(ints(4, 3), [1, 3])), dp.module(ints(4, 3)))


def test_mistakes_are_told_by_place():
    dp = fastdp.DataParallel(Apply(lambda self, x: self.lin(x["a"])), ["cpu"] * 2)
    three = scattered(ints(3, 3), [1, 1, 1])
    with pytest.raises(ValueError, match=r"inputs\[0\]\['a'\] is a fastdp.Scattered on cpu, cpu, "):
        dp({"a": three})
    across = scattered(ints(4, 4), [2, 2], dim=1)
    with pytest.raises(ValueError, match="cut along dimension 1, but the wrapper cuts along 0"):
        dp({"a": across})
    with pytest.raises(
        ValueError, match="has size 3 along dimension 0, but a fastdp.Scattered beside it cut a "
    ):
        dp({"a": scattered(ints(4, 3), [2, 2]), "b": ints(3, 3)})
    with pytest.raises(ValueError, match=r"\['b'\] .* in pieces of \[2, 2\], but .* of \[1, 3\]"):
        dp({"a": scattered(ints(4, 3), [1, 3]), "b": scattered(ints(4, 3), [2, 2])})


def test_scatter_by_hand():
    cut = scattered(ints(4, 3), [1, 3])
    first, second = fastdp.scatter((cut, 5), ["cpu"] * 2)
    assert first[0] is cut.slices[0] and second[0] is cut.slices[1] and first[1] == second[1] == 5


class Twice(nn.Module):
    """A wrapper in a wrapper: the inner one calls its module directly, in a replica."""

    def __init__(self):
        super().__init__()
        self.inner = fastdp.DataParallel(linear(), ["cpu"] * 2)

    def forward(self, x):
        return self.inner(x)


def test_a_wrapper_in_a_wrapper():
    dp = fastdp.DataParallel(Twice(), ["cpu"] * 2)
    same(dp(scattered(ints(4, 3), [1, 3])), dp.module.inner.module(ints(4, 3)))


# What loops ask of an item of a batch.


def test_it_is_described_as_the_tensor_is():
    whole = ints(5, 3, 2).float()
    cut = scattered(whole, [2, 3])
    names = ("shape", "dtype", "device", "is_cuda", "layout", "requires_grad", "ndim", "nbytes")
    for name in names:
        assert getattr(cut, name) == getattr(whole, name), name
    for name in ("size", "dim", "numel", "element_size", "type"):
        assert getattr(cut, name)() == getattr(whole, name)(), name
    assert scattered(whole.requires_grad_(), [2, 3]).requires_grad


def test_to_where_it_is_leaves_it_in_slices(fast):
    parts = [torch.ones(2, 3, device=fast.device(rank)) for rank in range(2)]
    cut = Scattered(parts)
    home = fast.device(0)
    assert cut.to(home) is cut and cut.to(str(home)) is cut and cut.to(device=home) is cut
    assert cut.to(home, non_blocking=True) is cut and cut.to() is cut
    assert cut.to(home.type) is cut and cut.to(torch.device(home.type)) is cut
    assert cut.to(cut.dtype) is cut and cut.to(torch.empty(0, device=home)) is cut
    assert cut.pin_memory() is cut
    if home.type == "cuda":
        assert cut.cuda() is cut and cut.cuda(0) is cut and cut.cuda(0, non_blocking=True) is cut
        other = torch.device("cuda", torch.cuda.device_count() - 1)
        if other != home:
            same(cut.to(other), torch.ones(4, 3, device=other))
            same(cut.cuda(other.index), torch.ones(4, 3, device=other))
        same(cut.to("cpu"), torch.ones(4, 3))
        same(cut.to("cpu", torch.float64), torch.ones(4, 3).double())
    elif not torch.cuda.is_available():
        for move in (cut.cuda, lambda: cut.to("cuda"), lambda: cut.to("cuda:0")):
            with pytest.raises(ValueError, match="torch sees no CUDA device here"):
                move()
    same(cut.cpu(), torch.ones(4, 3))
    assert isinstance(cut.cpu(), torch.Tensor)


CONVERSIONS = ("bfloat16", "bool", "double", "float", "half", "int", "long")


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_keep_the_slices(name):
    whole = ints(5, 3)
    cut = scattered(whole, [2, 3])
    wanted = getattr(whole, name)()
    found = [getattr(cut, name)(), cut.to(wanted.dtype), cut.to("cpu", wanted.dtype)]
    found += [cut.to(dtype=wanted.dtype), cut.type(wanted.dtype), cut.to(wanted)]
    for each in found:
        assert isinstance(each, Scattered) and each.sizes == (2, 3) and each.dtype == wanted.dtype
        same(each.gathered(), wanted)


def test_copies_and_layouts():
    whole = ints(4, 2, 3, 3)
    cut = scattered(whole, [1, 3])
    for made in (cut.to(torch.float64, copy=True), cut.to("cpu", None, False, True)):
        assert made is not cut and made.slices[0].data_ptr() != cut.slices[0].data_ptr()
        same(made.gathered(), whole)
    last = cut.to(memory_format=torch.channels_last)
    assert all(part.is_contiguous(memory_format=torch.channels_last) for part in last.slices)
    assert all(part.is_contiguous() for part in last.contiguous().slices)
    assert not scattered(whole.requires_grad_(), [1, 3]).detach().requires_grad


@pytest.mark.parametrize(
    "act",
    [
        lambda cut: cut.mean(),
        lambda cut: cut.view(-1),
        lambda cut: cut.T,
        lambda cut: cut[0],
        lambda cut: list(cut),
        lambda cut: torch.relu(cut),
        lambda cut: torch.add(torch.ones(5, 3).double(), cut),
        lambda cut: nn.functional.cross_entropy(cut, cut),
        lambda cut: cut + 1,
        lambda cut: 1 - cut,
        lambda cut: cut / 255,
        lambda cut: ints(5, 3) * cut,
        lambda cut: cut @ ints(3, 2),
        lambda cut: ints(2, 5) @ cut,
        lambda cut: 2**cut,
        lambda cut: 1 in cut,
        lambda cut: -cut,
        lambda cut: cut > 0,
        lambda cut: cut == ints(5, 3),
        lambda cut: ints(5, 3) == cut,
        lambda cut: ints(5, 3) != cut,
    ],
    ids=(
        "mean view T index iterate function sum loss plus minus over times at behind power in neg "
        "above equal alike unlike"
    ).split(),
)
def test_all_else_says_what_to_do(act):
    with pytest.raises((AttributeError, TypeError), match=r"a fastdp.Scattered .* gathered\(\)"):
        act(scattered(ints(5, 3), [2, 3]))


def test_it_is_itself_and_nothing_else():
    one, other = scattered(ints(5, 3), [2, 3]), scattered(ints(5, 3), [2, 3])
    assert one == one and one != other and one != 1 and one is not None
    assert one in [None, 1, other, one] and len({one, other, one}) == 2


def test_dimensions_that_it_does_not_have():
    halves = Scattered([torch.zeros(2, 3), torch.zeros(1, 3)])
    for dim in (2, -3):
        with pytest.raises(IndexError, match=f"dim is {dim}: it must be from -2 to 1"):
            halves.size(dim)
        with pytest.raises(IndexError, match=f"dim is {dim}: it must be from -2 to 1"):
            fastdp.DataParallel(nn.Identity(), ["cpu", "cpu"], dim=dim)(halves)
    for dim in (1.5, True, "0"):
        with pytest.raises(TypeError, match=f"dim is {dim!r}: it must be an int"):
            Scattered([torch.zeros(2, 3)], dim)


def test_names_that_no_tensor_has():
    cut = scattered(ints(5, 3), [2, 3])
    with pytest.raises(AttributeError, match="^'Scattered' object has no attribute 'nonsense'$"):
        cut.nonsense
    assert not hasattr(cut, "mean") and not hasattr(cut, "__array__") and hasattr(cut, "to")
    with pytest.raises(TypeError, match="dtype is 'half': it must be a torch.dtype"):
        cut.to("cpu", "half")
    with pytest.raises(TypeError, match="dtype is 'torch.HalfTensor': it must be a torch.dtype"):
        cut.type("torch.HalfTensor")


def test_a_loop_that_moves_what_it_gets():
    dp, twin = fastdp.DataParallel(linear(), ["cpu", "cpu"]), linear()
    batches = [ints(5, 3, seed=seed) for seed in range(3)]
    for batch, x in zip(batches, fastdp.prefetch(batches, dp)):
        x = x.to("cpu", non_blocking=True).double()
        assert isinstance(x, Scattered)
        same(dp(x), twin(batch))
