"""What a bucket moves: tensors that memory says all of at once, and others by a way of their own,
whichever came first."""

import pytest
import torch
from torch_features import HAS_TABLE

import fastdp
from fastdp import _C, _torch_autograd, functions, plans
from fastdp.buckets import make_buckets
from fastdp.streams import Communication

HOST = torch.device("cpu")


def bucket_of(tensors):
    devices = [HOST] * 2
    communication = Communication(devices)
    (made,) = make_buckets(tensors, (), len(tensors), devices, communication, 1 << 20, "zero")
    return made


def negative(values):
    """A real tensor with the negative bit."""
    tensor = torch.complex(torch.zeros(3), -torch.tensor(values)).conj().imag
    assert tensor.is_neg() and tensor.tolist() == values
    return tensor


def sparse(values):
    return torch.tensor(values).to_sparse()


KINDS = {"plain": torch.tensor, "negative": negative, "sparse": sparse}


@pytest.mark.parametrize("kinds", [(a, b, c) for a in KINDS for b in KINDS for c in ("plain", a)])
def test_sums(kinds):
    bucket = bucket_of([torch.zeros(3), torch.zeros(2)])
    for kind in kinds:
        first, second = torch.tensor([1.0, 2, 3]), torch.tensor([4.0, 5])
        gradients = [first, second, KINDS[kind]([10.0, 20, 30]), None]
        sums = bucket.sums(gradients, bucket.take_for_sums())
        assert [each.tolist() for each in sums] == [[11.0, 22, 33], [4.0, 5]]


@pytest.mark.parametrize("kinds", [("plain", "negative", "plain"), ("negative",) * 2])
def test_copies(kinds):
    for kind in kinds:
        bucket = bucket_of([torch.zeros(3)])
        copies = bucket.copies([KINDS[kind]([1.0, 2, 3])], False, bucket.take(False))
        assert [each.tolist() for each in copies] == [[1.0, 2, 3]] * 2
        assert not any(each.is_neg() for each in copies)


def test_another_refusal_is_the_cores_own():
    bucket = bucket_of([torch.zeros(3)])
    for _ in range(2):
        with pytest.raises(ValueError, match="shape"):
            bucket.sums([torch.zeros(4), torch.zeros(3)], bucket.take_for_sums())
        with pytest.raises(ValueError, match="shape"):
            bucket.copies([torch.zeros(4)], True, bucket.take(True))
        bucket.sums([negative([1.0, 2, 3]), None], bucket.take_for_sums())


def test_the_core_reads_no_negative_bit():
    bucket = _C.Bucket((torch.zeros(3),))
    flat = torch.zeros(bucket.size_elems)
    with pytest.raises(ValueError, match=r"sources\[0\]: the negative bit is set"):
        bucket.broadcast((negative([1.0, 2, 3]),), (flat,))
    with pytest.raises(ValueError, match=r"gradients\[0\]\[0\]: the negative bit is set"):
        bucket.reduce(((negative([1.0, 2, 3]),), (None,)), flat)
    assert not flat.any()


def test_a_function_transform_is_refused():
    module = torch.nn.Linear(2, 2)

    def inside(x):
        fastdp.replicate(module, ["cpu", "cpu"])
        return x.sum()

    # An older torch does not export a tensor inside of one.
    with pytest.raises((RuntimeError, TypeError), match="setup_context|cannot be replicated"):
        torch.func.grad(inside)(torch.ones(2))


def test_parameters_that_outlived_a_function_transform_are_refused():
    kept = []
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(torch.ones(2))
    module = torch.nn.Linear(2, 2)
    module._parameters["bias"] = kept[0]
    if HAS_TABLE:
        with pytest.raises(TypeError, match="bias"):
            fastdp.replicate(module, ["cpu", "cpu"])
    else:  # an older torch exports what it was made of
        for replica in fastdp.replicate(module, ["cpu", "cpu"]):
            assert torch.equal(replica.bias.detach(), torch.ones(2))


def test_applied_at_once_is_apply():
    assert plans.Broadcast is functions.Broadcast
    for kind in (functions.Broadcast, functions.Land):
        assert _torch_autograd.applied_at_once(kind) != kind.apply
    copies = (torch.ones(2), torch.zeros(3))
    link = torch.empty(0, requires_grad=True)
    landed = _torch_autograd.applied_at_once(functions.Land)(copies, link)
    assert len(landed) == 2 and all(a is b for a, b in zip(landed, copies))
    assert all(type(each.grad_fn).__name__ == "LandBackward" for each in landed)
