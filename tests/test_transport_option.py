"""The transport that a bucket demands, and what is said about the choice."""

import pytest
import torch
from conftest import no_cuda_reason
from gpu_lists import PAIRS, need
from nets import Net, grads, ints, same

import fastdp
from fastdp import _C
from fastdp.buckets import Bucket, find_transport, transport_or_lack
from fastdp.streams import Communication

HOST = torch.device("cpu")
CPU, CUDA = 1, 2  # DLPack's numbers


def bucket(transport):
    tensors = [torch.arange(5.0), torch.arange(7.0).reshape(7, 1)]
    devices = [HOST, HOST]
    return Bucket(
        tensors, (0, 1), (True, True), devices, Communication(devices), "zero", None, transport
    )


@pytest.mark.parametrize("transport", [None, "auto", "local", "host"])
def test_any_means_that_joins_gives_the_same(transport):
    made = bucket(transport)
    tensors = [torch.arange(5.0), torch.arange(7.0).reshape(7, 1)]
    copies = made.copies(tensors, True, made.take(True))
    assert all(torch.equal(a, b) for a, b in zip(copies, tensors * 2))
    sums = made.sums([*copies[:2], *copies[2:]], made.take_for_sums())
    assert all(torch.equal(a, 2 * b) for a, b in zip(sums, tensors))


@pytest.mark.parametrize("transport", ["peer", "nccl"])
def test_an_impossible_choice_says_what_is_missing(transport):
    made = bucket(transport)
    words = f"transport={transport} does not join the devices: cpu:0 is no GPU"
    with pytest.raises(NotImplementedError) as broadcast:
        made.copies([torch.zeros(5), torch.zeros(7, 1)], True, made.take(True))
    assert str(broadcast.value) == words
    with pytest.raises(NotImplementedError) as reduce:
        made.sums([torch.zeros(5), torch.zeros(7, 1)] * 2, made.take_for_sums())
    assert str(reduce.value) == words
    with pytest.raises(NotImplementedError) as reason:
        find_transport([HOST, HOST], transport)
    assert str(reason.value) == words
    assert transport_or_lack([HOST, HOST], transport) == (None, words)


def test_the_reason_of_a_choice():
    first = ("local", "it is the first that is tried")
    assert find_transport([HOST, HOST], None) == transport_or_lack([HOST, HOST], None) == first
    assert find_transport([HOST, HOST, HOST], "auto") == first
    assert transport_or_lack([HOST], None) is transport_or_lack([], None) is None
    assert find_transport([HOST, HOST], "host") == ("host", "transport asks for it")


@pytest.mark.parametrize(
    "call, error, words",
    [
        (
            lambda: bucket("pigeon"),
            ValueError,
            'transport is "pigeon": must be one of auto|local|peer|nccl|host',
        ),
        (lambda: bucket(3), TypeError, "transport: expected None or a str, got int"),
        (lambda: bucket("\ud800"), UnicodeEncodeError, "surrogates not allowed"),
        (lambda: find_transport([HOST, HOST], ""), ValueError, 'transport is "": must be one of'),
        (lambda: find_transport([HOST, HOST], 3), TypeError, "wanted: expected None or a str"),
        (lambda: _C.transport(((CPU, 0),) * 2), TypeError, "transport() takes 2 positional"),
        (
            lambda: _C.transport(((CPU, 0),), None),
            TypeError,
            "devices: expected a tuple of 2 to 65 devices, got ((1, 0),)",
        ),
        (lambda: _C.transport(((CPU, 0),) * 66, None), TypeError, "a tuple of 2 to 65 devices"),
        (
            lambda: _C.transport(((CPU, 0), 0), None),
            TypeError,
            "devices[1]: expected a tuple of two integers, got 0",
        ),
        (lambda: _C.transport(((CPU, 0), (CPU,)), None), TypeError, "devices: two integers each"),
        (
            lambda: _C.transport(((CPU, 0), (CPU, 3)), None),
            ValueError,
            "device cpu:3: the host has ordinal 0 only",
        ),
        (
            lambda: _C.transport(((7, 0), (CPU, 0)), None),
            NotImplementedError,
            "only the host and CUDA devices are supported",
        ),
    ],
)
def test_refusals(call, error, words):
    with pytest.raises(error) as raised:
        call()
    assert words in str(raised.value)


# The keyword of the wrapper.


def trained(ids, transport):
    """(wrapper, module, reference) after one step with the same numbers."""
    device = torch.device("cuda", ids[0]) if isinstance(ids[0], int) else HOST
    module, reference = Net().to(device), Net()
    dp = fastdp.DataParallel(module, ids, transport=transport)
    x = ints(6, 3)
    out, want = dp(x.to(device)), reference(x)
    same(out, want)
    out.sum().backward()
    want.sum().backward()
    return dp, module, reference


@pytest.mark.parametrize("transport", [None, "auto", "local", "host"])
def test_the_keyword_trains_as_one_module(transport):
    dp, module, reference = trained(["cpu", "cpu"], transport)
    same(grads(module), grads(reference))
    name = "host" if transport == "host" else "local"
    assert dp.report()["transport"][0] == name


def test_the_report_says_which_and_why():
    def report(ids, transport):
        return fastdp.DataParallel(Net(), ids, transport=transport).report()

    assert "transport  host, since transport asks for it" in str(report(["cpu"] * 2, "host"))
    impossible = report(["cpu"] * 3, "peer")
    words = "transport=peer does not join the devices: cpu:0 is no GPU"
    assert impossible["transport"] == (None, words)
    assert f"transport  {words}" in str(impossible)
    assert report(["cpu"], "peer")["transport"] is None


@pytest.mark.parametrize("transport", ["peer", "nccl"])
def test_a_wrapper_with_an_impossible_keyword_says_so_at_its_forward(transport):
    words = f"transport={transport} does not join the devices: cpu:0 is no GPU"
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=words):
            trained(["cpu", "cpu"], transport)


@pytest.fixture(params=[(0, 0), (0, 1), (1, 0), *PAIRS], ids=str)
def ids(request):
    if no_cuda_reason():
        pytest.skip(no_cuda_reason())
    return need(request.param)


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["local", "peer", "host"])
def test_the_keyword_on_gpus(ids, transport):
    if transport == "local" and ids[0] != ids[1]:
        words = "transport=local does not join the devices: "
        words += "cuda:. and cuda:. are different memories"
        with pytest.raises(NotImplementedError, match=words):
            trained(ids, transport)
        return
    dp, module, reference = trained(ids, transport)
    same(grads(module), grads(reference))
    assert dp.report()["transport"] == (transport, "transport asks for it")
