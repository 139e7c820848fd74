"""dp.fits of several devices, which are pretended: who is acted out, in which order, and what is
added up; pieces that a user's own scatter cuts; and models whose replicas are not simply copies."""

import types

import pytest
import torch
from nets import Apply, linear
from test_fits import REPLICAS, Named, Ones, leaves, step_bytes
from torch import nn
from torch.nn.parallel import scatter_gather

import fastdp
from fastdp import fits

GPUS = [torch.device("cuda", index) for index in range(4)]


@pytest.fixture
def acted(monkeypatch):
    """fit(ids, rows, ...) of a wrapper whose replicas are taken to lie on those GPUs; with what was
    acted out. Each replica takes 100 bytes for a row, and gives 10."""
    places = []

    def rehearse(step, place):
        rows = [len(part.row[0]) for part in place.parts]
        places.append((place.device, [part.rank for part in place.parts], rows))
        places[-1] += (place.outputs_bytes,)
        return fits.Taken(100 * sum(rows), 10 * sum(rows))

    def run(ids, rows, output_device=0, **options):
        places.clear()
        devices = tuple(GPUS[k] for k in ids)
        dp = fastdp.DataParallel(linear(), ["cpu"] * len(ids), **options)
        output = GPUS[output_device] if output_device is not None else torch.device("cpu")
        monkeypatch.setattr(fits, "parse_devices", lambda ids, name: devices)
        monkeypatch.setattr(fits, "parse_device", lambda device, name: output)
        x = torch.ones(rows, 3).double()
        taken = fits._taken(dp, (x,), {}, True, None)
        return taken, list(places)

    monkeypatch.setattr(fits, "rehearse", rehearse)
    return run


def test_the_device_that_joins_comes_last(acted):
    taken, places = acted([0, 1], 5)
    assert places == [(GPUS[1], [1], [2], None), (GPUS[0], [0], [3], 20)]
    assert taken == {GPUS[0]: 300, GPUS[1]: 200}
    taken, places = acted([0, 1], 5, output_device=1)
    assert places == [(GPUS[0], [0], [3], None), (GPUS[1], [1], [2], 30)]
    taken, places = acted([0, 1], 4, output_device=None)
    assert [place[3] for place in places] == [None, None]
    assert taken == {GPUS[0]: 200, GPUS[1]: 200, torch.device("cpu"): 40}
    taken, places = acted([0, 1], 4, output_device=None, gather_outputs=False)
    assert taken == {GPUS[0]: 200, GPUS[1]: 200}


def test_alike_replicas_are_acted_out_once(acted):
    taken, places = acted([0, 1, 2, 3], 11)  # 3, 3, 3 and 2 rows
    assert [place[:3] for place in places] == [
        (GPUS[1], [1], [3]),
        (GPUS[3], [3], [2]),
        (GPUS[0], [0], [3]),
    ]
    assert places[-1][3] == 30 + 30 + 20
    assert taken == {GPUS[0]: 300, GPUS[1]: 300, GPUS[2]: 300, GPUS[3]: 200}


def test_replicas_of_one_device_are_acted_out_together(acted):
    taken, places = acted([0, 1, 0, 1], 8)
    assert [place[:3] for place in places] == [
        (GPUS[1], [1, 3], [2, 2]),
        (GPUS[0], [0, 2], [2, 2]),
    ]
    assert taken == {GPUS[0]: 400, GPUS[1]: 400}


def test_replicas_without_work_take_nothing(acted):
    taken, places = acted([0, 1, 2], 2)
    assert taken == {GPUS[0]: 100, GPUS[1]: 100} and len(places) == 2


def test_what_a_recording_keeps_is_each_replicas(acted):
    eager, _ = acted([0, 1, 1], 6)
    recorded, _ = acted([0, 1, 1], 6, engine="graph")
    packed = [recorded[device] - eager[device] for device in GPUS[:2]]
    assert packed[1] == 2 * packed[0] > 2 * (6 + 2) * 8 - 1


LAYER_BYTES = 512 * 512 * 4


@pytest.fixture
def scratch(monkeypatch):
    """scratch(places, transport): of a wrapper of five buckets of a size, whose ranks are taken to
    lie on GPUs of these numbers; by their numbers, in buckets."""

    def found(places, transport):
        layers = [nn.Linear(512, 512, bias=False) for _ in range(5)]
        dp = fastdp.DataParallel(
            nn.Sequential(*layers), ["cpu"] * len(places), bucket_bytes=LAYER_BYTES
        )
        assert fits._scratch(dp) == {}  # nothing is known yet
        dp.fits(torch.ones(len(places), 512))
        assert fits._scratch(dp) == {}  # there are not several
        with monkeypatch.context() as patch:
            devices = tuple(GPUS[place] for place in places)
            patch.setattr(fits, "parse_devices", lambda ids, name: devices)
            patch.setattr(fits, "find_transport", lambda devices, wanted: (transport, ""))
            held = fits._scratch(dp)
        return {gpu.index: size_bytes / LAYER_BYTES for gpu, size_bytes in held.items()}

    return found


def test_scratch_between_several_gpus(scratch, monkeypatch):
    # Five buckets of a size have three buffers between them.
    assert scratch([0, 1], "peer") == {0: 3, 1: 3}
    assert scratch([1, 0, 1], "peer") == {1: 3, 0: 3}
    assert scratch([0, 1], "nccl") == scratch([0, 1], "host") == {0: 1, 1: 1}
    assert scratch([0, 0], "local") == {}
    monkeypatch.setattr(fits, "_POOL_DEEP_BYTES", 1000)
    assert scratch([0, 1], "peer") == {0: 1, 1: 1}


def test_scratch_between_more_gpus_than_two(scratch):
    """As csrc/peer_pack.c, csrc/peer_sum.c and csrc/transport_host.c take it."""
    # Each but home also keeps its shards of what is broadcast.
    assert scratch([2, 0, 3], "peer") == {2: 3, 0: 3 + 3 / 2, 3: 3 + 3 / 2}
    # A GPU packs the gradients of each of its ranks.
    assert scratch([0, 1, 1, 1, 1], "peer") == {0: 3, 1: 4}
    assert scratch([0, 1, 2, 3], "nccl") == {0: 1, 1: 1, 2: 1, 3: 1}
    # All gradients are at home before they are summed.
    assert scratch([0, 1, 2, 3], "host") == {0: 3, 1: 1, 2: 1, 3: 1}
    assert scratch([0, 1, 1, 0], "host") == {0: 2, 1: 2}


@pytest.mark.parametrize(
    "size_bytes, rounded",
    [(1, 512), (512, 512), (513, 640), (640, 640), (1024, 1024), (2**20 + 1, 5 * 2**18)],
    ids=str,
)
def test_sizes_of_scratch_are_the_cores(size_bytes, rounded):
    assert fits._class_bytes(size_bytes) == rounded


# Whoever cuts the arguments for a forward cuts them for the estimate.


def lopsided(tree, target_gpus, dim=0):
    """One row for the first of two, and all others for the second."""
    if isinstance(tree, torch.Tensor):
        pieces = tree.split([1, len(tree) - 1], dim)
        return [piece.to(device) for piece, device in zip(pieces, target_gpus, strict=True)]
    if isinstance(tree, dict):
        rows = zip(*[lopsided(each, target_gpus) for each in tree.values()], strict=True)
        return [dict(zip(tree, row, strict=True)) for row in rows]
    return list(zip(*[lopsided(each, target_gpus) for each in tree], strict=True))


def own_scatter(inputs, kwargs, device_ids):
    return lopsided(inputs, device_ids), lopsided(kwargs, device_ids)


class Lopsided(fastdp.DataParallel):
    def scatter(self, inputs, kwargs, device_ids):
        return own_scatter(inputs, kwargs, device_ids)


@pytest.mark.parametrize("mode", fits.MODES)
@pytest.mark.parametrize("whose", ["torchs", "subclass", "instance"])
def test_a_scatter_of_the_users_cuts_for_the_estimate_too(whose, mode, monkeypatch):
    seen = []

    def forward(self, x, scale):
        seen.append((tuple(x.shape), tuple(scale.shape)))
        return self.lin(x) * scale

    kind = Lopsided if whose == "subclass" else fastdp.DataParallel
    dp = kind(Apply(forward), ["cpu"] * 2, sequential=True)
    if whose == "torchs":
        monkeypatch.setattr(scatter_gather, "scatter", lopsided)
    elif whose == "instance":
        dp.scatter = own_scatter
    x, scale = torch.ones(60, 3).double(), torch.ones(60, 1).double()
    fit = dp.fits(x, scale=scale, mode=mode)
    assert seen == [((1, 3), (1, 1)), ((59, 3), (59, 1))]
    estimated = seen[:]
    seen.clear()
    dp(x, scale=scale)
    assert seen == estimated
    sized = fastdp.DataParallel(dp.module, ["cpu"] * 2, sequential=True, chunk_sizes=[1, 59])
    assert step_bytes(sized.fits(x, scale=scale, mode=mode)) == step_bytes(fit)


@pytest.mark.parametrize("whose", ["torchs", "subclass"])
def test_a_scatter_may_look_at_values_and_devices(whose, monkeypatch):
    seen = []

    def by_count(tree, target_gpus, dim=0):
        seen.append([torch.device(device).type for device in target_gpus])
        if not tree:
            return []
        x, count = tree
        return [(piece, count) for piece in x.split([int(count), len(x) - int(count)])]

    class ByCount(fastdp.DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            return by_count(inputs, device_ids), [{}, {}]

    rows = []
    module = Apply(lambda self, x, count: (rows.append(len(x)), self.lin(x))[1])
    kind = ByCount if whose == "subclass" else fastdp.DataParallel
    dp = kind(module, ["cpu"] * 2, sequential=True)
    if whose == "torchs":
        monkeypatch.setattr(scatter_gather, "scatter", by_count)
    batch = torch.ones(60, 3).double(), torch.tensor(7)
    dp.fits(*batch)
    in_estimate, rows[:], seen_then = list(rows), [], list(seen)
    seen.clear()
    dp(*batch)
    assert rows == in_estimate == [7, 53] and seen == seen_then


def test_options_stand_above_a_scatter_in_torchs_place_in_an_estimate(monkeypatch):
    monkeypatch.setattr(scatter_gather, "scatter", lopsided)
    seen = []
    module = Apply(lambda self, x: (seen.append(len(x)), self.lin(x))[1])
    dp = fastdp.DataParallel(module, ["cpu"] * 2, sequential=True, chunk_sizes=[20, 40])
    dp.fits(torch.ones(60, 3).double())
    assert seen == [20, 40]


# Models whose replicas are not simply copies.


def patched():
    """Its forward is a bound method that somebody put there, as libraries for adapters do."""
    net = Named()
    inner = net.first.forward
    net.first.forward = lambda x: inner(x) * 1.0
    net.forward = types.MethodType(lambda self, x: self.second(self.first(x).tanh()), net)
    return net


def closed_over():
    net = Named()
    apart = nn.Linear(100, 200)
    net.forward = types.MethodType(lambda self, x: self.second(self.first(x)) + apart(x), net)
    net.hidden = [apart]  # not registered: no replica has one
    return net


def normed():
    net = Named()
    nn.utils.parametrizations.weight_norm(net.first)
    return net


def stateful():
    class Last(nn.LSTM):
        def forward(self, x):
            return super().forward(x.unsqueeze(1))[0]

    return Last(100, 20, 2)


def compiled():
    net = Named()
    net.compile(backend="eager")
    return net


def nested():
    return nn.Sequential(fastdp.DataParallel(nn.Linear(100, 30), ["cpu", "cpu"]), nn.ReLU())


def scripted():
    return torch.jit.script(nn.Sequential(nn.Linear(100, 30), nn.Tanh()))


ODD = [patched, closed_over, normed, stateful, compiled, nested, scripted]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("ids", REPLICAS[:3])
@pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)
def test_odd_models_are_estimated_and_left_alone(make, ids):
    net = make()
    dp, x = fastdp.DataParallel(net, ids, sequential=True), torch.randn(32, 100)
    tensors = list(dp.parameters())
    for apart in getattr(net, "hidden", ()):
        tensors += apart.parameters()
    values = [tensor.detach().clone() for tensor in tensors]
    fit = dp.fits(x)
    assert fit and step_bytes(fit) > x.nbytes // 2
    assert all(tensor.grad is None for tensor in tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, values, strict=True))
    assert all(type(tensor) is nn.Parameter for tensor in tensors)
    Ones.apply(*leaves(dp(x))).backward()
    assert all(torch.is_tensor(p.grad) and p.grad.isfinite().all() for p in dp.parameters())
