"""Sums on GPUs are those of the host to the last bit: whatever the run, the bucket size, the
transport and the number of replicas (cuda_sums.py)."""

import cuda_child
import pytest
import torch
from conftest import no_cuda_reason
from cuda_sums import DTYPES, all_wrong_sums, summed, terms, wrong_training
from gpu_lists import MANY, ON_ONE, here, need

ONE_GPU = [[0, 0], [0, 0, 0], [0, 0, 0, 0, 0], list(ON_ONE)]
TWO_GPUS = [[0, 1], [1, 0], [0, 1, 0, 1], [0, 1, 1], [1, 0, 0, 1, 0]]
MORE_GPUS = [[0, 1, 2], [3, 0, 3, 1, 2], *map(list, MANY)]
SEVERAL = TWO_GPUS + MORE_GPUS
TRANSPORTS = {"local": ONE_GPU, "peer": ONE_GPU + SEVERAL, "host": ONE_GPU + SEVERAL}


def gpu_test(function):
    reason = no_cuda_reason()
    return pytest.mark.gpu(pytest.mark.skipif(reason is not None, reason=str(reason))(function))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_order_gives_other_bits(dtype):
    """Else equality would say little."""
    rows = terms(3, dtype, 1)
    assert not torch.equal(summed(rows), summed(rows.flip(0)))
    assert rows.isfinite().all() and summed(rows).isfinite().all()


def test_replicas_on_the_host():
    for n in (2, 3, 5, 8):
        assert all_wrong_sums(["cpu"] * n) == {}
    for n in (3, 8):
        assert wrong_training(["cpu"] * n) == []


@gpu_test
@pytest.mark.parametrize("ids", ONE_GPU + SEVERAL, ids=str)
def test_sums_have_the_bits_of_the_host(ids):
    need(ids)
    assert all_wrong_sums(ids, seeds=(1, 1, 2)) == {}


@gpu_test
@pytest.mark.parametrize("ids", ONE_GPU + SEVERAL, ids=str)
def test_exact_training(ids):
    need(ids)
    assert wrong_training(ids) == []
    assert wrong_training(ids, bucket_bytes=1) == []


@pytest.fixture(scope="module")
def children():
    if no_cuda_reason():
        pytest.skip(no_cuda_reason())
    started = {
        name: cuda_child.start("sums", *here(lists), FASTDP_TRANSPORT=name)
        for name, lists in TRANSPORTS.items()
    }
    yield started
    cuda_child.stop(started.values())


@gpu_test
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_transports_give_the_same_bits(children, transport):
    lists = here(TRANSPORTS[transport])
    found = cuda_child.answer(children[transport])
    assert dict(zip(map(str, lists), found, strict=True)) == {str(ids): {} for ids in lists}
