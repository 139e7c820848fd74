"""BEHAVIOUR A: the weights of recurrent nets that cuDNN wants in one chunk of memory."""

import copy
import gc
import warnings

import pytest
import torch
from nets import close, grads, ints, same
from torch import nn
from torch.nn.utils import parametrizations

from fastdp.flat_weights import RnnWeights

row = pytest.mark.row


def flatten_by_hand(rnn):
    """As `flatten_parameters` leaves the weights on a GPU: views of one buffer, matrices first,
    which is not the order of the parameters. Without biases there is room for them, zeros."""
    weights = sorted(rnn.named_parameters(), key=lambda item: item[0].startswith("bias"))
    room = 0 if rnn.bias else sum(2 * w.shape[0] for name, w in weights if "weight_ih" in name)
    flat = torch.zeros(sum(w.numel() for _, w in weights) + room, dtype=weights[0][1].dtype)
    end = 0
    for _, weight in weights:
        begin, end = end, end + weight.numel()
        weight.data = flat[begin:end].view(weight.shape).copy_(weight.data)
    return rnn


def places(rnn):
    """Where each weight begins, in bytes from the first in memory."""
    begins = [weight.data_ptr() for weight in rnn._flat_weights]
    return [begin - min(begins) for begin in begins]


class Between(nn.Module):
    """An RNN between layers. Notes what its replicas' weights are."""

    def __init__(self, rnn):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, rnn.input_size)
        self.rnn = rnn
        self.last = nn.Linear(rnn.hidden_size, 512)
        self.double()
        self.seen = []

    def forward(self, x):
        weight = self.rnn._flat_weights[0]
        end = max(self.rnn._flat_weights, key=torch.Tensor.data_ptr)
        behind = weight.as_strided((0,), (1,))
        if weight.is_cuda:  # host replicas: each weight is a storage of its own
            behind = behind.new_empty(0).set_(weight.untyped_storage())
            behind = behind[end.storage_offset() + end.numel() :]
        self.seen.append((places(self.rnn), behind.tolist()))
        return self.last(self.rnn(self.first(x))[0])


def check_step(dp, module, home):
    """A step of the wrapper and one of a copy of the module agree. Gives what was seen."""
    x = ints(7, 4, 3)
    plain = copy.deepcopy(module)
    module.seen.clear()
    dp.zero_grad()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single contiguous chunk")  # the copy
        close(out := dp(x), want := plain(x.to(home)))
    out.sum().backward()
    want.sum().backward()
    wanted = grads(plain)
    for name, gradient in grads(module).items():
        if gradient is not None or wanted[name] is not None:
            close(gradient, wanted[name])
    return list(module.seen)


@row("A22")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bucket_bytes", [2**20, 64])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_flat_weights_are_flat_in_replicas(fast, kind, bias, bucket_bytes):
    module = Between(kind(3, 5, 2, batch_first=True, bias=bias))
    dp = fast.wrap(module, 3, bucket_bytes=bucket_bytes)
    if fast.home.type == "cpu":
        check_step(dp, module, fast.home)
        flatten_by_hand(module.rnn)  # after the first call: it must be seen
    wanted = places(module.rnn)
    assert len(set(wanted)) == len(wanted) and max(wanted) > 0
    assert bias == (sorted(wanted) != wanted)
    rows = sum(2 * w.shape[0] for name, w in module.rnn.named_parameters() if "weight_ih" in name)
    zeros = [0.0] * rows if fast.home.type == "cuda" and not bias else []
    for _ in range(2):
        assert check_step(dp, module, fast.home) == [(wanted, zeros)] * 3


@row("A22")
@pytest.mark.parametrize("is_flat", [True, False])
def test_what_follows_an_rnn_without_biases_is_not_its_biases(fast, is_flat):
    """These sizes put the weights, unless they are kept apart, just where cuDNN expects them, with
    the next layer's where it looks for biases."""
    module = Between(nn.LSTM(16, 16, batch_first=True, bias=False))
    module.first = nn.Linear(3, 16, bias=False).double()
    module.first.weight.requires_grad_(False)
    dp = fast.wrap(module, 2)
    if not is_flat:
        for weight in module.rnn.parameters():
            weight.data = weight.data.clone()
    check_step(dp, module, fast.home)


@row("A22")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_zeros_stand_where_biases_would(fast, kind, monkeypatch):
    """Whatever was in the memory of a replica's weights before: cuDNN reads it as biases."""
    empty = torch.empty

    def dirty(*size, **options):
        made = empty(*size, **options)
        return made.fill_(7) if made.is_floating_point() and made.numel() else made

    rnn = kind(3, 5, batch_first=True, bias=False).double()
    dp = fast.wrap(rnn, 3)
    if fast.home.type == "cpu":  # on a GPU it is flat already
        flatten_by_hand(rnn)
    plan = dp._fastdp_get_runtime().replicator.plan_for(3, True)
    [bucket] = plan.buckets
    monkeypatch.setattr(torch, "empty", dirty)
    flats = bucket.take(True)
    bucket.copies(tuple(rnn.parameters()), True, flats)
    rows = 2 * rnn.weight_ih_l0.shape[0]
    for flat in flats:
        same(flat[: -rows], torch.cat([w.detach().flatten() for w in rnn.parameters()]))
        same(flat[-rows:], torch.zeros(rows).double())


def found(module):
    return RnnWeights(module.modules()).find(tuple(module.parameters()))


@row("A22")
def test_flat_weights_that_are_found():
    module = Between(flatten_by_hand(nn.LSTM(3, 4, batch_first=True)))
    flatten_by_hand(module.rnn)  # double() undid the first
    [flat] = found(module)
    # first has places 0 and 1; the biases' order in memory is that of the names
    assert flat == ((2, 3, 4, 5), (0, 48, 112, 128), 144)
    module = Between(nn.GRU(3, 4, 2, bidirectional=True))
    flatten_by_hand(module.rnn)
    [flat] = found(module)
    weights = [tuple(module.parameters())[place] for place in flat.places]
    assert flat.offsets == tuple(weight.storage_offset() for weight in weights)
    assert sorted(flat.places) == list(range(2, 18)) != list(flat.places)
    assert flat.length == sum(weight.numel() for weight in weights)


@row("A22")
@pytest.mark.parametrize("bias", [True, False])
def test_weights_that_are_not_flat(bias):
    """With biases there is nothing to keep apart; without them they keep together."""
    apart = [] if bias else [((0, 1), None, 0)]
    rnn = nn.LSTM(3, 4, bias=bias)
    assert found(rnn) == apart
    [flat] = found(flatten_by_hand(rnn))
    assert flat.offsets is not None
    longer = torch.zeros(flat.length + 1)
    for weight in rnn.parameters():
        weight.data = longer.as_strided(weight.shape, weight.stride(), weight.storage_offset())
    assert found(rnn) == apart
    flatten_by_hand(rnn)
    rnn.weight_hh_l0.data = rnn.weight_ih_l0.data.as_strided((16, 4), (4, 1), 47)  # one in common
    assert [flat.offsets for flat in found(rnn)] == [None] * len(apart)
    flatten_by_hand(rnn).weight_hh_l0.requires_grad_(False)
    assert found(rnn) == []


@row("A22")
def test_weights_of_two_rnns_go_to_the_first():
    module = nn.ModuleList([flatten_by_hand(nn.LSTM(4, 4)), nn.LSTM(4, 4)])
    for name in list(module[0]._parameters):
        setattr(module[1], name, getattr(module[0], name))
    assert [flat.places for flat in found(module)] == [(0, 1, 2, 3)]


@row("A22")
def test_a_parametrized_weight_is_not_asked_for():
    rnn = flatten_by_hand(nn.LSTM(3, 4))
    parametrizations.weight_norm(rnn, "weight_hh_l0")
    rnn.parametrizations.weight_hh_l0.forward = None  # would raise
    assert found(rnn) == []


@row("A22")
def test_modules_without_rnns_cost_nothing():
    weights = RnnWeights(nn.Sequential(nn.Linear(2, 2), nn.LSTMCell(2, 2)).modules())
    assert weights.describe() == b"" and weights.find(()) == []


@row("A22", why="RNNs of which nothing can be kept together")
def test_weights_that_are_one_or_gone():
    rnn = flatten_by_hand(nn.GRU(4, 4, bias=False))
    known = RnnWeights([rnn])
    assert len(known.find(tuple(rnn.parameters()))) == 1
    missing = nn.GRU(4, 4, 2, bias=False)
    missing.weight_hh_l1 = None
    assert found(missing) == [] and RnnWeights([missing]).describe() == b"[0, 0, 0]"
    rnn.weight_hh_l0 = rnn.weight_ih_l0
    assert found(rnn) == []
    del rnn
    gc.collect()
    assert known.find(()) == [] and known.describe() == b"[]"


@row("A22", "E9")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_flat_weights_of_a_scripted_rnn_are_found():
    module = torch.jit.script(nn.Sequential(nn.LSTM(3, 4)))
    with torch.no_grad():
        flatten_by_hand(module[0])
    [flat] = found(module)
    assert flat == ((0, 1, 2, 3), (0, 48, 112, 128), 144)
