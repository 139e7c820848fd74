"""fastdp.comm and autograd: differentiable to any order, backward and forward mode, where torch's
own functions are; detached where they are; and no silent loss through `out=`."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.autograd import gradcheck, gradgradcheck

from comm_cases import same
from fastdp import comm


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


VERBS = {
    "scatter": (lambda x: comm.scatter(x, ["cpu"] * 3, dim=1), [(2, 7)]),
    "scatter by sizes": (lambda x: comm.scatter(x, ["cpu"] * 3, [1, 0, 4]), [(5, 2)]),
    "gather": (lambda *xs: comm.gather(xs, 1), [(2, 3), (2, 1), (2, 2)]),
    "broadcast": (lambda x: comm.broadcast(x, ["cpu"] * 3), [(2, 3)]),
    "reduce_add": (lambda *xs: comm.reduce_add(xs), [(2, 3)] * 3),
}


@pytest.mark.parametrize("verb", VERBS)
def test_gradients_of_every_order(verb):
    function, shapes = VERBS[verb]
    inputs = tuple(leaf(*shape) for shape in shapes)
    assert gradcheck(function, inputs, check_forward_ad=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True)


def test_gradients_equal_those_of_torch():
    ours = leaf(7, 2)
    theirs = ours.detach().clone().requires_grad_()
    weight = torch.randn(7, 2, dtype=torch.float64)
    whole = comm.gather([piece.sin() for piece in comm.scatter(ours, ["cpu"] * 3)])
    (whole * weight).sum().backward()
    (torch.cat([piece.sin() for piece in theirs.chunk(3)]) * weight).sum().backward()
    assert same(ours.grad, theirs.grad)


def test_a_piece_without_gradient_counts_as_zero():
    x = leaf(4)
    comm.scatter(x, ["cpu"] * 2)[1].sum().backward()
    assert x.grad.tolist() == [0, 0, 1, 1]


def test_only_what_requires_grad_gets_one():
    x, constant = leaf(2), torch.ones(2, dtype=torch.float64)
    result = comm.reduce_add([constant, x, constant])
    result.sum().backward()
    assert x.grad.tolist() == [1, 1] and constant.grad is None


def test_complex_gradients():
    z = torch.randn(4, dtype=torch.complex128, requires_grad=True)
    assert gradcheck(lambda z: comm.scatter(z.conj(), ["cpu"] * 2), (z,))
    assert gradcheck(lambda z: comm.reduce_add([z, z.conj()]), (z,))


def test_gradients_under_no_grad_are_off():
    x = leaf(4)
    with torch.no_grad():
        results = [
            *comm.scatter(x, ["cpu"] * 2),
            comm.gather([x, x]),
            *comm.broadcast(x, ["cpu"]),
            comm.reduce_add([x, x]),
        ]
    assert not any(result.requires_grad for result in results)


def test_tangents_of_some_inputs():
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2), torch.full((2,), 3.0))
        plain = torch.zeros(2)
        joined = forward_ad.unpack_dual(comm.gather([plain, dual])).tangent
        total = forward_ad.unpack_dual(comm.reduce_add([plain, dual])).tangent
        untouched = forward_ad.unpack_dual(comm.gather([plain, plain])).tangent
    assert joined.tolist() == [0, 0, 3, 3] and total.tolist() == [3, 3]
    assert untouched is None


@pytest.mark.parametrize(
    "write, name",
    [
        (lambda x, out: comm.scatter(x, out=[out]), "tensor"),
        (lambda x, out: comm.broadcast(x, out=[out]), "tensor"),
        (lambda x, out: comm.gather([torch.ones(0), x], out=out), r"tensors\[1\]"),
    ],
)
def test_out_takes_no_input_that_requires_grad(write, name):
    x, out = torch.ones(2, requires_grad=True), torch.zeros(2)
    with pytest.raises(ValueError, match=f"{name} requires grad, but out= records no gradient"):
        write(x, out)
    assert out.tolist() == [0, 0]
    with torch.no_grad():
        write(x, out)
    assert out.tolist() == [1, 1]


def test_out_that_requires_grad():
    out = torch.zeros(2, requires_grad=True)
    with pytest.raises(ValueError, match=r"out\[0\] requires grad and would be overwritten"):
        comm.broadcast(torch.ones(2), out=[out])
    with torch.no_grad():
        comm.broadcast(torch.ones(2), out=[out])
    assert out.tolist() == [1, 1] and out.requires_grad
