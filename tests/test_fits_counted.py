"""What dp.fits takes into account: the order of several replicas' backwards, when autocast lets go
of what it has cast, the layers of attention that are one operator, what libraries take, and what is
held at the call and gone before the step. Beside the peak that torch's profiler counts on the host
where it can be seen there."""

import pytest
import torch
from host_peak import host_peak
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import linear

import fastdp
from fastdp import fast_paths, probes
from fastdp.ledger import Ledger
from fastdp.probes import Probes

WIDTH = 64


def perceptron():
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(20)))


def step_bytes(fit):
    (row,) = fit.devices.values()
    return row.step_bytes


def train(dp, x):
    dp.zero_grad(set_to_none=True)
    dp(x).sum().backward()


@pytest.mark.parametrize("sequential", [False, True], ids=["on threads", "in turn"])
def test_gradients_of_one_replica_wait_for_those_of_the_other(sequential):
    # The weights outweigh all else, and nearly each has a bucket to itself.
    dp = fastdp.DataParallel(
        perceptron(), ["cpu"] * 2, sequential=sequential, bucket_bytes=WIDTH * WIDTH * 4
    )
    x = torch.randn(4, WIDTH)
    fit = dp.fits(x)
    for _ in range(40):  # until the caller's thread has counted one forward more than the other
        train(dp, x)
    dp.zero_grad(set_to_none=True)
    # What the other replica's thread makes is not seen: it is little.
    peak, _ = host_peak(lambda: dp(x).sum().backward())
    size_bytes = sum(p.nbytes for p in dp.parameters())
    assert step_bytes(fit) == pytest.approx(peak, rel=0.1)
    # On threads the first replica's are all there before any copy of the other's has gone.
    assert (peak > 1.8 * size_bytes) == (not sequential)


@pytest.mark.parametrize("ids", [[], ["cpu"]], ids=["no list", "one"])
def test_what_autocast_has_cast_goes_with_the_graph(ids, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # where [] is no error
    dp, x = fastdp.DataParallel(perceptron(), ids), torch.randn(4, WIDTH)
    found = []
    for keeps in (True, False):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=keeps):
            found.append(step_bytes(dp.fits(x)))
            assert torch.is_autocast_enabled("cpu")
            assert torch.is_autocast_cache_enabled() == keeps
    assert found[0] == found[1]  # each parameter is cast once, and is the graph's

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            output = dp(x)
        output.sum().backward()

    step()
    dp.zero_grad(set_to_none=True)
    peak, _ = host_peak(step)
    assert found[0] <= 1.1 * peak


def test_what_is_used_twice_is_cast_once():
    class Twice(nn.Linear):
        def forward(self, x):
            return super().forward(super().forward(x))

    dp, x = fastdp.DataParallel(Twice(300, 300), ["cpu"]), torch.randn(4, 300)
    with torch.autocast("cpu", torch.bfloat16):
        cached = step_bytes(dp.fits(x))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        again = step_bytes(dp.fits(x))
    assert again > cached


# Attention in evaluation


BATCH, LENGTH, HEADS = 6, 48, 4
UNIT = BATCH * LENGTH * WIDTH * 4
SCORES = BATCH * HEADS * LENGTH * LENGTH * 4


class Attention(nn.MultiheadAttention):
    def __init__(self, **options):
        super().__init__(WIDTH, HEADS, batch_first=True)
        self.options = options

    def forward(self, x, mask=None):
        return super().forward(x, x, x, key_padding_mask=mask, **self.options)


def encoder(dim_feedforward=4 * WIDTH, **options):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, dim_feedforward, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = encoder()

    def forward(self, x, mask):
        return self.encoder(x, src_key_padding_mask=mask)


LAYERS = {
    "encoder": lambda: encoder(),
    "norm first": lambda: encoder(norm_first=True, activation="gelu"),
    "wide": lambda: encoder(dim_feedforward=16 * WIDTH),
    "wide norm first": lambda: encoder(dim_feedforward=16 * WIDTH, norm_first=True),
    "no weights": lambda: Attention(need_weights=False),
    "weights": lambda: Attention(),
    "weights of each head": lambda: Attention(average_attn_weights=False),
    "masked": lambda: Masked(),
    "masked weights": lambda: Attention(),
}


@pytest.fixture
def ran(monkeypatch):
    """Names of the operators that were taken apart."""
    names = []
    for packet, steps in list(fast_paths.IN_STEPS.items()):

        def noted(*args, packet=packet, steps=steps):
            names.append(packet.__name__)
            return steps(*args)

        monkeypatch.setitem(fast_paths.IN_STEPS, packet, noted)
    return names


@pytest.mark.parametrize("as_one", [True, False], ids=["as one", "plain"])
@pytest.mark.parametrize("name", LAYERS)
def test_attention_in_evaluation_takes_what_was_estimated(name, as_one, ran):
    dp, x = fastdp.DataParallel(LAYERS[name](), ["cpu"]), torch.randn(BATCH, LENGTH, WIDTH)
    mask = [torch.arange(LENGTH).expand(BATCH, LENGTH) > 40] if "masked" in name else []
    dp.eval()
    before = torch.backends.mha.get_fastpath_enabled(), torch.get_num_threads()
    torch.backends.mha.set_fastpath_enabled(as_one)
    torch.set_num_threads(1)  # each has a workspace
    try:
        with torch.no_grad():
            fit = dp.fits(x, *mask, mode="eval")
            dp(x, *mask)
            peak, _ = host_peak(lambda: dp(x, *mask))
    finally:
        torch.backends.mha.set_fastpath_enabled(before[0])
        torch.set_num_threads(before[1])
    assert bool(ran) == as_one
    # The plain way's own attention on the host has a workspace that is small beside the rest.
    assert step_bytes(fit) == pytest.approx(peak, rel=0.02 if as_one else 0.1)


def test_nested_tensors_have_sizes_that_are_values():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, batch_first=True)
    model = Masked()
    model.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)
    dp, x = fastdp.DataParallel(model, ["cpu"]), torch.randn(BATCH, LENGTH, WIDTH)
    mask = torch.arange(LENGTH).expand(BATCH, LENGTH) > 40
    assert dp.fits(x, mask)
    with torch.no_grad(), pytest.raises(RuntimeError, match="nested tensors; nn.*=False has none"):
        dp.fits(x, mask, mode="eval")


def test_a_mask_that_is_looked_at_is_told():
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    dp, x = fastdp.DataParallel(model, ["cpu"] * 2), torch.ones(4, 3, 8)
    mask = fastdp.Replicated(nn.Transformer.generate_square_subsequent_mask(3))
    with pytest.raises(RuntimeError, match="in _detect_is_causal_mask of transformer.py, line"):
        dp.fits(x, mask=mask)
    assert dp.fits(x, mask=mask, is_causal=True)


def counted(call, *shapes):
    """The most that call(*tensors) takes beside its arguments."""
    with FakeTensorMode(), torch.no_grad():
        given = [torch.empty(shape) for shape in shapes]
        with Ledger(Probes({})) as ledger:
            ledger.ignore(given)
            result = call(*given)
            return ledger.peak[torch.device("cpu")], result


def test_attention_that_is_fused(monkeypatch):
    """As on GPUs: no scores; the projections, what they weigh, and the output."""

    def attend(x, packed, bias, out, out_bias):
        return torch._native_multi_head_attention(
            x, x, x, WIDTH, HEADS, packed, bias, out, out_bias, need_weights=False
        )

    shapes = [(BATCH, LENGTH, WIDTH), (3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)]
    whole, (output, weights) = counted(attend, *shapes)
    assert output.shape == shapes[0] and weights is None
    assert whole == 3 * UNIT + max(3 * UNIT, SCORES)
    monkeypatch.setattr(fast_paths, "_has_fused", lambda device: True)
    fused, (output, weights) = counted(attend, *shapes)
    assert output.shape == shapes[0] and weights is None and fused == 5 * UNIT


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_in_steps_gives_what_the_operator_gives(need_weights, average):
    layer, x = Attention(), torch.randn(BATCH, LENGTH, WIDTH)
    given = x, x, x, WIDTH, HEADS, layer.in_proj_weight, layer.in_proj_bias
    given += layer.out_proj.weight, layer.out_proj.bias, None, need_weights, average
    with torch.no_grad():
        made = torch._native_multi_head_attention(*given), fast_paths.attention(*given)
    shapes = [[None if part is None else part.shape for part in each] for each in made]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    "width, masked, need_weights",
    [(WIDTH, True, False), (WIDTH, False, True), (60, False, False)],
    ids=["masked", "weights", "odd width"],
)
def test_attention_that_cannot_be_fused(width, masked, need_weights, monkeypatch):
    """Where the kernels are there that take no mask, give no weights and want eights."""
    monkeypatch.setattr(fast_paths, "_has_fused", lambda device: True)

    def attend(x, packed, bias, out, out_bias):
        mask = torch.empty(LENGTH, LENGTH) if masked else None
        return torch._native_multi_head_attention(
            x, x, x, width, HEADS, packed, bias, out, out_bias, mask, need_weights
        )

    shapes = [(BATCH, LENGTH, width), (3 * width, width), (3 * width,), (width, width), (width,)]
    unit = BATCH * LENGTH * width * 4
    assert counted(attend, *shapes)[0] >= 3 * unit + SCORES


def test_an_encoder_layer_that_is_fused(monkeypatch):
    monkeypatch.setattr(fast_paths, "_has_fused", lambda device: True)
    dp = fastdp.DataParallel(encoder(), ["cpu"])
    # The slice; then the layer's: what is kept beside the hidden tensor, that, and the output.
    with torch.no_grad():
        fit = dp.fits(torch.empty(BATCH, LENGTH, WIDTH), mode="eval")
    # The second layer has the first one's output beside the slice.
    assert step_bytes(fit) == pytest.approx(2 * UNIT + (1 + 4 + 1) * UNIT, rel=0.01)


# What libraries take


class Library:
    """An operator like convolution_backward, whose parts have workspaces, one after another."""

    overloadpacket = torch.ops.aten.convolution_backward
    workspaces = (3000 * 512, 5000 * 512, 0)

    def __init__(self, monkeypatch):
        self.allocated = 0
        make = torch.empty_strided

        def empty_strided(*args, **kwargs):
            tensor = make(*args, **kwargs)
            self.allocated += probes.rounded(tensor.nbytes)
            return tensor

        monkeypatch.setattr(torch, "empty_strided", empty_strided)
        monkeypatch.setattr(probes, "ever_allocated", lambda device: self.allocated)
        monkeypatch.setattr(probes, "_RUN", {"cpu": ("convolution_backward",)})

    def __call__(self, gradient, x, weight, mask):
        results = []
        for wanted, like, workspace in zip(mask, (x, weight, weight[0]), self.workspaces):
            if wanted:
                self.allocated += workspace
            results.append(torch.empty_strided(like.shape, like.stride()) if wanted else None)
        return tuple(results)


@pytest.mark.parametrize(
    "mask, wanted",
    [
        ([True, True, True], 5000 * 512),
        ([True, False, True], 3000 * 512),
        ([False, False, True], 0),
        ([False, False, False], 0),
    ],
    ids=["all", "input", "bias", "none"],
)
def test_workspaces_of_a_convolutions_backward_are_there_in_turn(mask, wanted, monkeypatch):
    library = Library(monkeypatch)
    x, weight = torch.zeros(50, 100), torch.zeros(30, 7)
    probe = Probes({}).look(library, (x, x, weight, mask), {}, torch.device("cpu"))
    assert probe.workspace == wanted  # and nothing for the arguments that the probe has made
    sizes = x.nbytes, weight.nbytes, weight[0].nbytes
    assert probe.results == tuple(size for size, there in zip(sizes, mask) if there)


def test_its_parts_are_those_of_torch():
    """One by one they give what they give together."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    gradient = torch.randn(2, 4, 6, 6)
    pair = [1, 1], [0, 0]
    args = gradient, x, weight, [4], *pair, [1, 1], False, [0, 0], 1, [True, True, True]
    backward = torch.ops.aten.convolution_backward.default
    together = backward(*args)
    parts = probes._parts(backward.overloadpacket, args)
    assert len(parts) == 3
    for k, part in enumerate(parts):
        assert part[-1] == [k == i for i in range(3)]
        torch.testing.assert_close(backward(*part)[k], together[k])
    assert probes._parts(torch.ops.aten.convolution, args) == [args]


def test_gradients_that_were_summed_are_let_go_of_first():
    dp, x = fastdp.DataParallel(perceptron(), ["cpu"] * 2), torch.randn(4, WIDTH)
    dp(x)
    held = dp._fastdp_get_runtime().replicator._communication._retiring
    for mode in ("train", "eval"):
        held.append(([], [torch.ones(WIDTH)]))
        dp.fits(x, mode=mode)
        held = dp._fastdp_get_runtime().replicator._communication._retiring
        assert held == []


def test_linear_is_one_operator_here():
    """What fast_paths.py counts on: a product with its bias is one tensor."""
    shapes = [(BATCH, LENGTH, WIDTH), (WIDTH, WIDTH), (WIDTH,)]
    assert counted(linear, *shapes)[0] == UNIT
