"""dp.grad_norm, dp.clip_grad_norm_ and dp.nonfinite: the numbers of torch.nn.utils, of gradients
that lie in buckets and of gradients that lie anywhere."""

import copy
import math

import fastdp
import pytest
import torch
from fastdp.buckets import Bucket
from fastdp.flat_gradients import joined
from nets import Net, ints, linear
from torch import nn

# The stated bounds.
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-12}
ORDERS = [2, 1, 3.5, math.inf, "inf"]


def wrap(module, n=2, **options):
    return fastdp.DataParallel(module, ["cpu"] * n, **options)


@pytest.fixture(params=[False, True], ids=["apart", "one-storage"])
def storage(request, monkeypatch):
    """Slots as tensors by themselves, as on the host, or of the bucket's storage, as on GPUs."""
    if request.param:
        monkeypatch.setattr(Bucket, "slots", lambda self, flat: self.core.split(flat))


def mixed(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3).to(memory_format=torch.channels_last),
        nn.BatchNorm2d(5),
        nn.Flatten(),
        nn.Linear(45, 7),
        nn.Tanh(),
        nn.Linear(7, 3),
    ).to(dtype)


def trained(module, dtype=torch.float32, n=2, **options):
    dp = wrap(module, n, **options)
    torch.manual_seed(2)
    (dp(torch.randn(6, 2, 5, 5, dtype=dtype)) ** 2).sum().backward()
    return dp


def theirs(module, order):
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]), float(order))


def near(got, want, dtype):
    assert got.dtype == dtype and got.shape == ()
    torch.testing.assert_close(got, want, rtol=CLOSE[dtype], atol=0)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("order", ORDERS)
def test_the_norm_is_that_of_all_gradients(order, dtype, storage):
    dp = trained(mixed(dtype), dtype)
    near(dp.grad_norm(order), theirs(dp.module, order), dtype)
    if hasattr(torch.nn.utils, "get_total_norm"):
        gradients = [p.grad for p in dp.parameters()]
        near(dp.grad_norm(order), torch.nn.utils.get_total_norm(gradients, float(order)), dtype)


def test_exact_sums_are_exact(storage):
    dp = wrap(Net(), 3)
    dp(ints(7, 3)).sum().backward()
    every = torch.cat([p.grad.flatten() for p in dp.parameters()])
    assert dp.grad_norm(1).item() == every.abs().sum().item()
    assert dp.grad_norm(math.inf).item() == every.abs().max().item()
    near(dp.grad_norm(), (every**2).sum().sqrt(), torch.float64)


@pytest.mark.parametrize("max_norm", [0, 1e-3, 1.0, 1e9])
@pytest.mark.parametrize("order", [2, math.inf])
def test_clipping_is_torchs(max_norm, order, storage):
    dp = trained(mixed())
    twin = copy.deepcopy(dp.module)
    for own, other in zip(dp.parameters(), twin.parameters()):
        other.grad = own.grad.clone()
    before = [(p.grad, p.grad._version) for p in dp.parameters()]
    got = dp.clip_grad_norm_(max_norm, order)
    want = torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm, order)
    near(got, want, torch.float32)
    for p, other, (gradient, version) in zip(dp.parameters(), twin.parameters(), before):
        torch.testing.assert_close(p.grad, other.grad, rtol=2e-5, atol=0)
        assert p.grad is gradient and p.grad._version > version
    if max_norm == 1e9:
        near(dp.grad_norm(order), got, torch.float32)


def test_clipped_gradients_are_those_of_one_more_step():
    """Steps with clipping train as with torch's."""
    ours, plain = wrap(mixed(torch.float64)), wrap(mixed(torch.float64))
    for dp in (ours, plain):
        optimizer = torch.optim.SGD(dp.parameters(), lr=0.1, momentum=0.9)
        for seed in range(4):
            torch.manual_seed(seed)
            optimizer.zero_grad(set_to_none=seed % 2 == 0)
            (dp(torch.randn(5, 2, 5, 5, dtype=torch.float64)) ** 2).sum().backward()
            if dp is ours:
                dp.clip_grad_norm_(0.5)
            else:
                torch.nn.utils.clip_grad_norm_(dp.parameters(), 0.5)
            optimizer.step()
    for got, want in zip(ours.parameters(), plain.parameters()):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_many_tensors_are_few():
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(200)))
    dp = wrap(module)
    dp(torch.randn(4, 4)).sum().backward()
    gradients = [p.grad for p in module.parameters()]
    assert len(gradients) == 400
    assert len(joined(module, gradients)) == 2  # weights side by side, biases with gaps
    near(dp.grad_norm(), theirs(module, 2), torch.float32)


def test_gradients_that_move_are_found_anew():
    dp = trained(mixed())
    first = dp.grad_norm()
    for p in dp.parameters():
        p.grad = p.grad * 2
    near(dp.grad_norm(), first * 2, torch.float32)
    for p in list(dp.parameters())[1:]:
        p.grad = None
    near(dp.grad_norm(), theirs(dp.module, 2), torch.float32)


def test_without_gradients_it_is_zero():
    dp = wrap(mixed())
    assert dp.grad_norm().item() == 0
    assert dp.clip_grad_norm_(1.0).item() == 0
    assert not dp.nonfinite() and dp.nonfinite().count == 0


def test_half_precision_does_not_overflow():
    """The norm of each tensor would be rounded to float16, or not fit it."""
    for dtype in (torch.float16, torch.bfloat16):
        dp = wrap(nn.Linear(64, 64).to(dtype))
        for p in dp.parameters():
            p.grad = torch.full_like(p, 60000)
        near(dp.grad_norm(), theirs(dp.module.float(), 2), torch.float32)


def test_gradients_of_several_dtypes():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).double())
    dp = wrap(module)
    for p in dp.parameters():
        p.grad = torch.randn_like(p)
    doubled = [p.grad.double().flatten() for p in dp.parameters()]
    want = torch.linalg.vector_norm(torch.cat(doubled))
    torch.testing.assert_close(dp.grad_norm(), want, rtol=1e-6, atol=0)
    dp.clip_grad_norm_(want.item() / 2, error_if_nonfinite=True)
    torch.testing.assert_close(dp.grad_norm(), want / 2, rtol=1e-5, atol=0)


def test_complex_gradients():
    module = nn.Linear(3, 2, dtype=torch.complex128)
    dp = wrap(module)
    for p in dp.parameters():
        p.grad = torch.randn_like(p)
    parts = [torch.view_as_real(p.grad).flatten() for p in dp.parameters()]
    near(dp.grad_norm(), torch.linalg.vector_norm(torch.cat(parts)), torch.float64)
    dp.clip_grad_norm_(0.25)
    torch.testing.assert_close(dp.grad_norm().item(), 0.25, rtol=1e-4, atol=0)


def test_gradients_that_are_lazily_negated():
    """As autograd may leave them; torch's own functions for lists do not write to such."""
    dp = wrap(nn.Linear(3, 2).double())
    for p in dp.parameters():
        p.grad = torch._neg_view(torch.randn_like(p))
    before = [p.grad.clone() for p in dp.parameters()]
    want = theirs(dp.module, 2)
    near(dp.clip_grad_norm_(want.item() / 2), want, torch.float64)
    for p, old in zip(dp.parameters(), before):
        torch.testing.assert_close(p.grad.resolve_neg(), old / 2, rtol=1e-5, atol=0)


def test_gradients_that_are_lazily_conjugated():
    """The core does not read them: each stands alone, and an empty one is left out."""
    module = nn.Linear(3, 2, dtype=torch.complex128)
    module.none = nn.Parameter(torch.zeros(0, dtype=torch.complex128))
    dp = wrap(module)
    for p in dp.parameters():
        p.grad = torch.randn_like(p).conj()
    gradients = [p.grad for p in dp.parameters()]
    assert [tuple(part.shape) for part in joined(module, gradients)] == [(2, 3), (2,)]
    before = [gradient.resolve_conj().clone() for gradient in gradients]
    want = torch.linalg.vector_norm(torch.cat([torch.view_as_real(g).flatten() for g in before]))
    near(dp.clip_grad_norm_(want.item() / 2), want, torch.float64)
    for gradient, old in zip(gradients, before):
        torch.testing.assert_close(gradient.resolve_conj(), old / 2, rtol=1e-5, atol=0)


@pytest.mark.parametrize("coalesced", [False, True])
def test_sparse_gradients(coalesced):
    module = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 1))
    dp = wrap(module)
    dp(torch.tensor([[0, 1], [1, 1], [5, 0]])).sum().backward()
    table = module[0].weight
    if not coalesced:
        indices = torch.tensor([[1, 1, 4]])
        table.grad = torch.sparse_coo_tensor(indices, torch.randn(3, 3), (6, 3))
    dense = [p.grad.to_dense().flatten().clone() for p in dp.parameters()]
    want = torch.linalg.vector_norm(torch.cat(dense))
    near(dp.grad_norm(), want, torch.float32)
    near(dp.clip_grad_norm_(want.item() / 2), want, torch.float32)
    for p, before in zip(dp.parameters(), dense):
        torch.testing.assert_close(p.grad.to_dense().flatten(), before / 2)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_that_have_gradients():
    """Those of a backward that is to be differentiated again, an empty one among them."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    module.none = nn.Parameter(torch.zeros(0))
    dp = wrap(module.double())
    dp(ints(4, 3)).square().sum().backward(create_graph=True)
    assert module[0].weight.grad.requires_grad
    want = theirs(module, 2)
    near(dp.grad_norm(), want.detach(), torch.float64)
    dp.clip_grad_norm_(want.item() / 2)
    torch.testing.assert_close(dp.grad_norm(), want.detach() / 2, rtol=1e-5, atol=0)
    assert dp.nonfinite().count == 0
    for p in module.parameters():
        p.grad = None  # a cycle with its parameter


def test_gradients_in_rows_of_a_sparse_matrix():
    """Of a parameter that is one itself: its values are scaled."""
    table = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, -2.0]]).to_sparse_csr()
    module = nn.Linear(2, 2)
    module.table = nn.Parameter(table)
    dp = wrap(module)
    module.table.grad = table.detach().clone()
    near(dp.grad_norm(), torch.tensor(3.0), torch.float32)
    near(dp.clip_grad_norm_(1.5), torch.tensor(3.0), torch.float32)
    torch.testing.assert_close(module.table.grad.to_dense(), table.to_dense() / 2)


def test_a_gradient_that_a_graph_has_saved_is_not_changed_under_it(storage):
    dp = wrap(linear())
    x = ints(4, 3)
    dp(x).square().sum().backward()
    weight = dp.module.weight
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    kept = [(p.grad * scale).sum() for p in dp.parameters()]
    dp.clip_grad_norm_(1.0)
    for each in kept:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            each.backward()
    assert weight.grad.norm() < 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs are used by default here")
def test_a_wrapper_without_replicas():
    dp = fastdp.DataParallel(linear())
    dp(ints(4, 3)).square().sum().backward()
    near(dp.grad_norm(), theirs(dp.module, 2), torch.float64)


def test_norms_one_by_one(monkeypatch):
    """In a torch whose function for lists is gone."""
    from fastdp import _torch_tensors

    dp = trained(mixed())
    want = dp.grad_norm()
    monkeypatch.delattr(torch, "_foreach_norm")
    monkeypatch.setattr(
        _torch_tensors, "_norms_take_dtype", _torch_tensors._norms_take_dtype.__wrapped__
    )
    near(dp.grad_norm(), want, torch.float32)


# What is not finite.


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named_and_counted(value, storage):
    dp = trained(mixed())
    assert not dp.nonfinite()
    assert dp.nonfinite().parameters == {} and dp.nonfinite().count == 0
    dp.module[3].weight.grad[2, 5] = value
    dp.module[3].weight.grad[1, 0] = value
    dp.module[5].bias.grad[0] = value
    found = dp.nonfinite()
    assert found and found.count == 3
    assert found.parameters == {"3.weight": 2, "5.bias": 1}
    assert repr(found) == "NonFinite({'3.weight': 2, '5.bias': 1})"
    assert not math.isfinite(dp.grad_norm())
    with pytest.raises(RuntimeError, match="the norm of order 2 of the gradients is (nan|inf)"):
        dp.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert dp.module[0].weight.grad.isfinite().all() and dp.module[0].weight.grad.ne(0).any()


def test_parameters_without_gradients_take_no_others_name():
    dp = trained(mixed())
    dp.module[0].weight.grad = dp.module[3].bias.grad = None
    dp.module[3].weight.grad[0, 0] = math.nan
    dp.module[5].bias.grad[1] = math.inf
    assert dp.nonfinite().parameters == {"3.weight": 1, "5.bias": 1}


def test_parameters_that_the_module_does_not_name_have_names():
    class Hiding(nn.Linear):
        def named_parameters(self, *args, **kwargs):
            named = super().named_parameters(*args, **kwargs)
            return ((name, parameter) for name, parameter in named if name != "bias")

    dp = fastdp.DataParallel(Hiding(3, 2), ["cpu"] * 2)
    (dp(torch.ones(4, 3)) * math.inf).sum().backward()
    assert dp.nonfinite().parameters == {"weight": 6, "bias": 2}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_unless_asked_what_is_not_finite_is_clipped_as_torchs(value):
    dp = trained(mixed())
    twin = copy.deepcopy(dp.module)
    for own, other in zip(dp.parameters(), twin.parameters()):
        other.grad = own.grad.clone()
        own.grad.flatten()[0] = other.grad.flatten()[0] = value
    got = dp.clip_grad_norm_(1.0)
    want = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    torch.testing.assert_close(got, want, equal_nan=True)
    for own, other in zip(dp.parameters(), twin.parameters()):
        torch.testing.assert_close(own.grad, other.grad, equal_nan=True)


def test_large_numbers_are_finite():
    """Their sum is not."""
    dp = wrap(nn.Linear(8, 8))
    for p in dp.parameters():
        p.grad = torch.full_like(p, 3e38)
    assert not dp.nonfinite()
    dp.module.weight.grad[0, 0] = math.inf
    assert dp.nonfinite().parameters == {"weight": 1}


def test_details_are_counted_when_they_are_asked_for():
    dp = trained(mixed())
    dp.module[5].bias.grad[0] = math.nan
    found = dp.nonfinite()
    dp.module.zero_grad(set_to_none=True)
    assert found.parameters == {"5.bias": 1}


# Mistakes.


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda dp: dp.grad_norm(0), ValueError, "norm_type is 0: it must be above 0"),
        (lambda dp: dp.grad_norm(-1), ValueError, "norm_type is -1: it must be above 0"),
        (lambda dp: dp.grad_norm(math.nan), ValueError, "norm_type is nan"),
        (lambda dp: dp.grad_norm("two"), TypeError, "norm_type is 'two': it must be a number"),
        (lambda dp: dp.grad_norm(None), TypeError, "norm_type is None"),
        (lambda dp: dp.clip_grad_norm_(-1), ValueError, "max_norm is -1: it must be at least 0"),
        (lambda dp: dp.clip_grad_norm_(math.nan), ValueError, "max_norm is nan"),
        (lambda dp: dp.clip_grad_norm_("1"), TypeError, "max_norm is '1': it must be a number"),
        (lambda dp: dp.clip_grad_norm_(True), TypeError, "max_norm is True: it must be a number"),
        (lambda dp: dp.grad_norm(True), TypeError, "norm_type is True: it must be a number"),
    ],
)
def test_mistakes_are_named(call, error, text):
    dp = trained(mixed())
    before = [p.grad.clone() for p in dp.parameters()]
    with pytest.raises(error, match=text):
        call(dp)
    assert all(torch.equal(p.grad, old) for p, old in zip(dp.parameters(), before))
