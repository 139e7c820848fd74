"""Calls that nobody would write: nested inputs, device lists, option values and dimensions made by
hypothesis. They work, and then give what the module itself gives on each piece; or raise one of the
documented types, with a text that says something. `--long` takes 2,000 examples of each."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import fastdp

# IndexError is torch's own word for a dimension that a tensor does not have.
DOCUMENTED = (ValueError, TypeError, RuntimeError, NotImplementedError, IndexError)


@pytest.fixture
def examples(request):
    count = 2000 if request.config.getoption("--long") else 60
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=count == 60,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


DTYPES = [torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64, torch.bfloat16]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.zeros(shape, dtype=draw(st.sampled_from(DTYPES)))
    if tensor.numel() and tensor.dtype != torch.bool:
        tensor = torch.arange(tensor.numel()).view(shape).to(tensor.dtype)
    kind = draw(st.sampled_from(["plain", "turned", "wide", "every other"]))
    if kind == "turned" and tensor.dim() > 1:
        tensor = tensor.transpose(0, -1)
    elif kind == "wide" and tensor.dim() > 0 and tensor.shape[-1] > 0:
        tensor = tensor[..., :1].expand(*tensor.shape[:-1], 3)
    elif kind == "every other" and tensor.dim() > 0:
        tensor = tensor[::2]
    return tensor


LEAVES = st.one_of(
    tensors(),
    st.none(),
    st.integers(),
    st.floats(allow_nan=False),
    st.booleans(),
    st.text(max_size=3),
    st.binary(max_size=3),
)
KEYS = st.one_of(st.text(max_size=2), st.integers(0, 3), st.none())
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=8,
)
ODD = st.one_of(
    st.none(), st.integers(-3, 80), st.floats(), st.text(max_size=6), st.lists(st.integers(-2, 3))
)
DEVICES = st.lists(
    st.one_of(
        st.sampled_from(["cpu", "cpu:0", "meta", "cuda", "cuda:99", "", "xpu", "tpu:1", -1, 0, 7]),
        st.just(torch.device("cpu")),
        ODD,
    ),
    max_size=5,
)


class Echo(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, *inputs, **named):
        return inputs, named


def outcome(act):
    """The result; None where it raised one of the documented types."""
    try:
        return act()
    except DOCUMENTED as error:
        assert str(error).strip(), f"{type(error).__name__} without a text"
        return None


def count_tensors(tree):
    if isinstance(tree, torch.Tensor):
        return 1
    if isinstance(tree, dict):
        tree = list(tree.values())
    return sum(map(count_tensors, tree)) if isinstance(tree, (list, tuple)) else 0


@pytest.mark.filterwarnings("ignore")
def test_inputs(examples):
    """What is cut and joined again is what it was, where it can be joined at all."""
    joined = 0

    @examples
    @given(tree=TREES, n=st.integers(1, 4), dim=st.integers(-2, 3))
    def run(tree, n, dim):
        nonlocal joined
        rows, named = outcome(
            lambda: fastdp.scatter_kwargs((tree,), {"named": tree}, ["cpu"] * n, dim)
        ) or ((), ())
        assert len(rows) == len(named) <= n
        for row, each in zip(rows, named, strict=True):
            assert count_tensors(row) == count_tensors(each) == count_tensors(tree)
        dp = fastdp.DataParallel(Echo(), ["cpu"] * n, dim=dim)
        if outcome(lambda: dp(tree, named=tree)) is not None:
            joined += 1
        assert dp._fastdp_get_runtime().leases() == []

    run()
    assert joined > 5


@pytest.mark.filterwarnings("ignore")
def test_tensors_come_back_as_they_were(examples):
    @examples
    @given(tensor=tensors(), n=st.integers(1, 4), dim=st.integers(0, 3))
    def run(tensor, n, dim):
        pieces = outcome(lambda: fastdp.scatter(tensor, ["cpu"] * n, dim))
        if pieces is None:
            assert dim >= tensor.dim()
            return
        if dim < tensor.dim() and tensor.shape[dim] > 0:
            assert [p.shape for p in pieces] == [c.shape for c in tensor.chunk(n, dim)]
            back = fastdp.gather(list(pieces), "cpu", dim)
            assert back.dtype == tensor.dtype and torch.equal(back, tensor)

    run()


def test_device_lists(examples):
    worked = 0

    @examples
    @given(
        devices=st.one_of(DEVICES, ODD, st.lists(st.just("cpu"), max_size=3)),
        output=st.one_of(st.none(), ODD),
    )
    def run(devices, output):
        nonlocal worked
        dp = outcome(lambda: fastdp.DataParallel(nn.Linear(2, 2), devices, output))
        outcome(lambda: fastdp.comm.broadcast(torch.ones(2), devices))
        outcome(lambda: fastdp.scatter(torch.ones(4, 2), devices))
        if dp is not None:
            worked += 1
            x = torch.ones(4, 2)
            got = outcome(lambda: dp(x))
            home = next(dp.module.parameters()).device  # a GPU, where all are taken
            assert got is None or torch.equal(got, dp.module(x.to(home)).to(got.device))

    run()
    assert worked > 3


OPTIONS = {
    "dim": ODD,
    "chunk_sizes": st.one_of(ODD, st.lists(st.integers(-1, 4), max_size=4)),
    "split_lists": st.one_of(st.booleans(), ODD),
    "replicate_scalars": st.one_of(st.booleans(), ODD),
    "gather_outputs": st.one_of(st.booleans(), ODD),
    "loss_weighting": st.one_of(st.sampled_from(["batch", "samples", "mean", ""]), ODD),
    "sequential": st.one_of(st.booleans(), ODD),
    "forward_attributes": st.one_of(st.booleans(), ODD),
    "unused_grad": st.one_of(st.sampled_from(["zero", "none"]), ODD),
    "bucket_bytes": st.one_of(st.integers(-1, 10**20), ODD),
    "transport": st.one_of(st.sampled_from(["auto", "local", "peer", "nccl", "host"]), ODD),
    "engine": st.one_of(st.sampled_from(["eager", "auto", "graph"]), ODD),
    "compile": st.one_of(st.just(False), st.text(max_size=3), st.integers(), st.none()),
    "timeout_s": st.one_of(st.integers(-1, 10**20), st.floats(), ODD),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPTIONS)
def test_option_values(examples, name):
    @examples
    @given(value=OPTIONS[name])
    def run(value):
        def act():
            dp = fastdp.DataParallel(nn.Linear(2, 2), ["cpu"] * 2, **{name: value})
            return dp, dp(torch.ones(4, 2))

        made = outcome(act)
        if made is not None and isinstance(made[1], torch.Tensor):
            made[1].sum().backward()

    run()


def test_the_options_are_all_of_them():
    import inspect

    given_by = inspect.signature(fastdp.DataParallel.__init__).parameters
    others = {"self", "module", "device_ids", "output_device"}
    assert set(given_by) - others == set(OPTIONS)
