"""BEHAVIOUR K and F: what PyTorch's own tests of nn.DataParallel ask about devices, modes, dtypes,
written anew from their descriptions. With one GPU or none the devices are one, and what wants
several is looked at with the meta device in the other's place."""

import pytest
import torch
from nets import CLOSE, Apply, Net, check_against_hand, grads, ints, linear, same
from torch import nn

row = pytest.mark.row

MISPLACED = (
    r"module must have its parameters and buffers on device \S+ \(device_ids\[0\]\) "
    r"but found one of them on device: "
)


def other_ids(impl, n):
    """The implementation's ids, the last first, and the device of each."""
    ids = impl.ids(n)[::-1]
    return ids, [impl.device(rank) for rank in reversed(range(n))]


def other_order(impl, make, n, **options):
    """A wrapper of make() whose devices come in the other order, and the first of them."""
    ids, places = other_ids(impl, n)
    return impl.api.DataParallel(make().to(places[0]), ids, **options), places


# The functional form, and other orders of devices.


@row("K12", "F7", "X19")
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("turned", [False, True])
def test_functional_form_in_both_orders(impl, n, turned):
    ids, places = other_ids(impl, n)
    if not turned:
        ids, places = ids[::-1], places[::-1]
    module, plain = Net().to(places[0]), Net()
    x, z = ints(2 * n + 1, 3, grad=True), ints(2 * n + 1, 3, grad=True)
    for source in {impl.home, places[0], places[-1]}:
        same(out := impl.api.data_parallel(module, x.to(source), ids), want := plain(z))
        assert out.device == places[0]
        out.sum().backward()
        want.sum().backward()
        same(x.grad, z.grad)
        same(grads(module), grads(plain))


@row("K12")
def test_functional_form_without_ids_means_all_devices(impl, monkeypatch):
    """All GPUs; the stand-in's one. Without a GPU there is none, and the error says so."""
    if impl.home.type == "cpu" and not impl.is_oracle:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(RuntimeError, match="no available devices were found"):
            impl.api.data_parallel(Net(), ints(5, 3))
        return
    same(impl.api.data_parallel(Net().to(impl.home), ints(5, 3)), Net()(ints(5, 3)))


@row("F7", "X19")
@pytest.mark.parametrize("n", [2, 3])
def test_the_first_id_is_the_home_device(impl, n):
    seen = []

    def make():
        return Apply(lambda s, x: seen.append((int(x[0, 0]), x.device)) or s.lin(x))

    dp, places = other_order(impl, make, n)
    assert dp.src_device_obj == places[0]
    x = ints(2 * n, 3)
    x[:, 0] = torch.arange(n).repeat_interleave(2)
    same(out := dp(x), linear()(x))
    assert out.device == places[0] and sorted(seen, key=lambda s: s[0]) == list(enumerate(places))
    out.sum().backward()
    assert dp.module.lin.weight.grad.device == places[0]
    same(dp.module.lin.weight.grad, x.sum(0).expand(2, 3))


@row("K17", "X20", "F8")
def test_torch_device_objects(impl):
    if impl.is_oracle and impl.home.type == "cpu":
        ids, output = [torch.device("cuda", k) for k in range(3)], torch.device("cpu")
    else:
        ids, output = [impl.device(k) for k in range(3)], impl.device(2)
    dp = impl.api.DataParallel(Net().to(impl.home), device_ids=ids, output_device=output)
    out = dp(ints(7, 3))
    same(out, Net()(ints(7, 3)))
    assert out.device == (impl.device(2) if impl.home.type == "cuda" else torch.device("cpu"))


@row("F8", "X22")
@pytest.mark.parametrize("bad", [9, 128, "cuda:9", torch.device("cuda", 9)])
def test_ids_out_of_range_name_the_entry_and_what_is_visible(fast, monkeypatch, bad):
    if fast.home.type == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    visible = list(range(torch.cuda.device_count()))
    named = f"cuda:{bad}" if isinstance(bad, int) else str(bad)
    with pytest.raises(ValueError) as caught:
        fast.api.DataParallel(linear(), device_ids=[0, bad])
    assert str(caught.value) == (
        f"device_ids[1] is {named}, but the visible CUDA devices are {visible}"
    )


# Weights and the devices of the ids.


@row("K9", "F6")
@pytest.mark.parametrize("call", ["wrapper", "function"])
def test_weights_elsewhere_are_refused(impl, call):
    """In a parameter, in a buffer, in all: torch's text, both ways of calling."""

    def run(module):
        if call == "wrapper":
            return impl.api.DataParallel(module, impl.ids(2))(ints(4, 3))
        return impl.api.data_parallel(module, ints(4, 3), impl.ids(2))

    same(run(Net().to(impl.home)), Net()(ints(4, 3)))
    with pytest.raises(RuntimeError, match=f"{MISPLACED}meta"):
        run(Net().to("meta"))
    either = f"{MISPLACED}meta|spans the devices .*meta"
    module = Net().to(impl.home)
    module.second.to("meta")
    with pytest.raises((RuntimeError, ValueError), match=either):
        run(module)
    module = nn.BatchNorm1d(3).to(impl.home)
    module.running_mean = module.running_mean.to("meta")
    with pytest.raises((RuntimeError, ValueError), match=either):
        run(module)


@row("K9", "F6")
def test_weights_on_another_gpu_or_the_host(impl):
    """The matrix of torch's test; with one GPU the part that one can show."""
    if impl.home.type == "cpu":
        dp = impl.wrap(Net(), 2)
        dp.to("meta")
        with pytest.raises(RuntimeError, match=f"{MISPLACED}meta"):
            dp(ints(4, 3))
        return
    dp = impl.wrap(Net(), 2)
    dp.cpu()
    with pytest.raises(RuntimeError, match=f"{MISPLACED}cpu"):
        dp(ints(4, 3))
    dp.to(impl.home)
    same(dp(ints(4, 3)), Net()(ints(4, 3)))
    if impl.gpus > 1:
        dp.to(impl.device(1))
        with pytest.raises(RuntimeError, match=f"{MISPLACED}{impl.device(1)}"):
            dp(ints(4, 3))
        turned, places = other_order(impl, Net, 2)
        same(turned(ints(4, 3)), Net()(ints(4, 3)))
        turned.to(places[1])
        with pytest.raises(RuntimeError, match=f"{MISPLACED}{places[1]}"):
            turned(ints(4, 3))


@row("K9", "F9", "X23")
def test_one_device_moves_the_module_there(impl):
    """As torch does; its stand-in on the host has nowhere to move to."""
    dp = impl.api.DataParallel(Net(), impl.ids(1))
    same(out := dp(ints(4, 3).to(impl.home)), Net()(ints(4, 3)))
    assert out.device == impl.home
    assert {p.device for p in dp.parameters()} == {impl.home}


# Plain nets, modes and dtypes.


@row("K8")
def test_output_of_a_small_net(impl):
    module = nn.Linear(10, 5).double()
    x = ints(20, 10)
    want = module(x)
    torch.testing.assert_close(impl.wrap(module, 2)(x).cpu(), want, **CLOSE)


class SeesGrad(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.seen = linear(), []

    def forward(self, x):
        self.seen.append((torch.is_grad_enabled(), self.lin.weight.requires_grad))
        return self.lin(x)


@row("K11", "X50")
@pytest.mark.parametrize("call", ["wrapper", "function"])
def test_no_grad_is_seen_inside(impl, call):
    module = SeesGrad().to(impl.home)
    dp = impl.wrap(module, 3)
    run = dp if call == "wrapper" else lambda x: impl.api.data_parallel(module, x, impl.ids(3))
    with torch.no_grad():
        assert not run(ints(6, 3)).requires_grad
    assert [grad for grad, _ in module.seen] == [False] * 3
    module.seen.clear()
    assert run(ints(6, 3)).requires_grad
    assert module.seen == [(True, True)] * 3


@row("K30", "K31", "E7")
@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_module_in_each_precision(impl, dtype, keyword):
    """Whole numbers: exact in each of them."""
    module, plain = linear().to(dtype), linear().to(dtype)
    x = ints(4, 3).to(dtype)
    dp = impl.wrap(module, 2)
    same(dp(input=x) if keyword else dp(x), want := plain(x))
    assert want.dtype == dtype


@row("K28", "X49")
@pytest.mark.parametrize("clear", [True, False])
def test_strides_and_low_precision_mixed(impl, clear):
    """Four convolutions: channels_last or not, double or low; two steps, the second with gradients
    cleared or kept as zeros."""
    low = torch.float16 if impl.home.type == "cuda" else torch.bfloat16

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)]).double()
            self.convs[1].to(memory_format=torch.channels_last)
            self.convs[2].to(low)
            self.convs[3].to(low).to(memory_format=torch.channels_last)

        def forward(self, x):
            for conv in self.convs:
                x = conv(x.to(conv.weight.dtype))
            return x.double()

    module = Mixed()
    # The same kernels on the same chunks; a GPU's may differ with where a chunk lies in memory.
    bound = None if impl.home.type == "cpu" else {"rtol": 0.02, "atol": 0.5}
    for _ in range(2):
        module.zero_grad(set_to_none=clear)
        dp, _ = check_against_hand(impl, module, ints(4, 8, 4, 4), 2, bound)
        for conv in dp.module.convs:
            assert conv.weight.grad.stride() == conv.weight.stride()
            assert conv.weight.grad.dtype == conv.weight.dtype
