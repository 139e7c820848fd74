"""BEHAVIOUR E: dtypes, autocast, forward-mode. For compiled modules: test_behaviour_compiled."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from nets import CLOSE, Apply, Net, check_against_hand, close, grads, ints, linear, ranked, same
from torch import nn
from torch_features import FLOAT8

row = pytest.mark.row


# Dtypes.


class ComplexNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.complex(ints(3, 2), ints(3, 2, seed=2)))
        self.register_buffer("shift", torch.complex(ints(2), ints(2, seed=2)))

    def forward(self, x):
        assert self.w.dtype == self.shift.dtype == torch.complex128 and self.w.shape == (3, 2)
        return x @ self.w + self.shift


class Conjugated(ComplexNet):
    def forward(self, x):
        return (x @ self.w.conj() + self.shift).conj()


@row("E1", "K20")
@pytest.mark.parametrize("grad", [True, False])
def test_complex_stays_complex(impl, grad):
    module, plain = ComplexNet(), ComplexNet()
    x = torch.complex(ints(5, 3), ints(5, 3, seed=2))
    with torch.set_grad_enabled(grad):
        same(out := impl.wrap(module, 2)(x), want := plain(x))
    if grad:
        out.abs().pow(2).sum().backward()
        want.abs().pow(2).sum().backward()
        close(module.w.grad, plain.w.grad)


@row("E1", why="gradients that are lazily conjugated")
def test_conjugated_weights(fast):
    """torch's own refuses them: it views complex numbers as real."""
    module, plain = Conjugated(), Conjugated()
    x = torch.complex(ints(5, 3), ints(5, 3, seed=2))
    out, want = fast.wrap(module, 2)(x), plain(x)
    same(out, want.resolve_conj())
    out.real.sum().backward()
    want.real.sum().backward()
    same(module.w.grad.resolve_conj(), plain.w.grad.resolve_conj())


@row("E1")
def test_complex_and_real_parameters_together(impl):
    def forward(self, x):
        return torch.view_as_real(self.lin(x) * self.w)

    module, plain = Apply(forward), Apply(forward)
    for m in (module, plain):
        m.w = nn.Parameter(torch.complex(ints(2), ints(2, seed=2)))
    same(out := impl.wrap(module, 2)(ints(4, 3)), want := plain(ints(4, 3)))
    out.sum().backward()
    want.sum().backward()
    same(grads(module), grads(plain))


ODD = ["bool", "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32"]
ODD += ["float64", "complex64", "uint16", "uint32", *(str(each)[6:] for each in FLOAT8)]


@row("E2")
@pytest.mark.distinct
def test_buffers_of_every_dtype_are_exact(impl):
    """Beside fp64 weights; fp8 and the like move as bytes."""
    seen = []
    module = Apply(lambda s, x: seen.append(dict(s.named_buffers())) or s.lin(x))
    for name in ODD:
        values = torch.arange(1, 8).to(getattr(torch, name))
        module.register_buffer(f"as_{name}", values)
    want = {name: b.clone() for name, b in module.named_buffers()}
    impl.wrap(module, 3)(ints(6, 3))
    assert len(seen) == 3
    for buffers in seen:
        assert list(buffers) == list(want)
        for name, buffer in buffers.items():
            assert buffer.dtype == want[name].dtype
            raw = buffer.cpu().contiguous().view(torch.uint8)
            assert torch.equal(raw, want[name].contiguous().view(torch.uint8)), name


def check_against_plain(impl, make):
    """Two replicas of a module of ints(4, 3) beside an equal module that is not wrapped."""
    module, plain = make(), make()
    same(out := impl.wrap(module, 2)(ints(4, 3)), want := plain(ints(4, 3)))
    out.sum().backward()
    want.sum().backward()
    same(grads(module), grads(plain))


@row("E2", "E7")
def test_parameters_of_several_dtypes(impl):
    def make():
        module = Apply(lambda s, x: s.lin(x) + s.low.float().sum() + s.single.sum())
        module.low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        module.single = nn.Parameter(torch.ones(2))
        module.frozen = nn.Parameter(torch.arange(3), requires_grad=False)
        return module

    check_against_plain(impl, make)


@row("E7")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_models(impl, dtype):
    """Small integers are exact in half precision too, the sums of four included."""
    module, plain = linear().to(dtype), linear().to(dtype)
    x = ints(4, 3).to(dtype)
    same(out := impl.wrap(module, 2)(x), want := plain(x))
    out.sum().backward()
    want.sum().backward()
    same(grads(module), grads(plain))


DOUBLE, SINGLE, COMPLEX = torch.float64, torch.float32, torch.complex128


@row("C15", why="replica 0's decides")
@pytest.mark.parametrize(
    "first, second",
    [(SINGLE, DOUBLE), (DOUBLE, torch.float16), (DOUBLE, torch.int32), (torch.int64, DOUBLE)],
)
def test_outputs_of_unlike_dtypes_are_converted(impl, first, second):
    module = Apply(lambda s, x: s.lin(x * 1.5).to(first if x[0, 0] == 0 else second))
    out, want = impl.wrap(module, 2)(ranked(2)), linear()(ranked(2) * 1.5)
    assert out.dtype == first and out.requires_grad == first.is_floating_point
    same(out, torch.cat([want[:1].to(first), want[1:].to(second).to(first)]))
    if out.requires_grad:
        out.sum().backward()
        used = ranked(2) if second.is_floating_point else ranked(2)[:1]
        same(module.lin.weight.grad, 1.5 * used.sum(0).expand(2, 3))


@row("C15", why="real and complex do not fit")
@pytest.mark.parametrize("first, second", [(DOUBLE, COMPLEX), (COMPLEX, DOUBLE)])
def test_real_beside_complex_outputs_are_refused(impl, first, second):
    module = Apply(lambda s, x: s.lin(x).to(first if x[0, 0] == 0 else second))
    # torch's own takes the complex one for a real one with a dimension more.
    refused = "invalid size|same number of dimensions"
    text = refused if impl.is_oracle else f"dtype {first} on replica 0 but {second} on"
    with pytest.raises(RuntimeError, match=text):
        impl.wrap(module, 2)(ranked(2))


# Autocast.


@row("E3", "K26")
@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_enabled_reaches_replicas(impl, enabled):
    device = impl.home.type
    low = torch.get_autocast_dtype(device)  # of others torch's own does not know in threads
    seen = []

    def forward(self, x):
        seen.append((torch.is_autocast_enabled(device), self.lin(x).dtype))
        return x

    dp = impl.wrap(Apply(forward).float(), 2)
    with torch.autocast(device, dtype=low, enabled=enabled):
        dp(torch.ones(4, 3))
        assert torch.is_autocast_enabled(device) == enabled
    assert seen == [(enabled, low if enabled else torch.float32)] * 2
    seen.clear()
    dp(torch.ones(4, 3))
    assert seen == [(False, torch.float32)] * 2


@row("E4")
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_dtype_and_cache_flag_reach_replicas(fast, dtype, cache):
    device = fast.home.type
    seen = []

    def forward(self, x):
        seen.append((torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()))
        return self.lin(x)

    dp = fast.wrap(Apply(forward).float(), 2)
    with torch.autocast(device, dtype=dtype, cache_enabled=cache):
        assert dp(torch.ones(4, 3)).dtype == dtype
    assert seen == [(dtype, cache)] * 2


@row("E3")
def test_autocast_numbers_and_gradients(fast):
    device = fast.home.type
    module, plain = linear().float(), linear().float().to(fast.home)
    dp = fast.wrap(module, 2)
    x = ints(4, 3).float()
    with torch.autocast(device, dtype=torch.bfloat16):
        for _ in range(2):
            same(out := dp(x), want := plain(x.to(fast.home)))
            out.float().sum().backward()
            want.float().sum().backward()
    same(grads(module), grads(plain))
    assert module.weight.grad.dtype == torch.float32


def casts_below(node):
    """The casts in the graph of an output."""
    found, todo = set(), [node]
    while todo:
        node = todo.pop()
        if node is None:
            continue
        if "ToCopy" in node.name():
            found.add(node)
        todo.extend(below for below, _ in node.next_functions)
    return found


@row("E3", why="programs that stay in one autocast")
@pytest.mark.parametrize("inside", [False, True], ids=["one autocast", "also in forward"])
def test_what_the_caller_casts_is_cast_anew_after_a_forward(impl, inside):
    """As in torch, whose threads clear the cast cache. In one autocast around all steps a weight
    that the wrapper does not have would stay as it was cast first."""
    device = impl.home.type

    def forward(self, x):
        with torch.autocast(device, dtype=torch.bfloat16) if inside else nullcontext():
            return self.lin(x)

    dp, head = impl.wrap(Apply(forward).float(), 3), nn.Linear(2, 2, bias=False).to(impl.home)
    x = ints(6, 3).float().to(impl.home)
    with torch.no_grad():
        head.weight.copy_(torch.eye(2))
    with torch.autocast(device, dtype=torch.bfloat16):
        for step in range(4):
            rows = dp(x)
            assert head(rows).tolist() == (rows.float() * 2.0**step).tolist()
            with torch.no_grad():
                head.weight.mul_(2)


@row("E3")
def test_autocast_inside_forward_stays_inside(impl):
    device = impl.home.type

    def forward(self, x):
        with torch.autocast(device, dtype=torch.bfloat16):
            y = self.lin(x)
        assert not torch.is_autocast_enabled(device)
        return y

    out = impl.wrap(Apply(forward).float(), 2)(torch.ones(4, 3))
    assert out.dtype == torch.bfloat16 and not torch.is_autocast_enabled(device)


@row("E5")
def test_a_step_warns_of_nothing(impl):
    module = nn.Sequential(Net(), nn.BatchNorm1d(2).double())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dp = impl.wrap(module, 2)
        opt = torch.optim.SGD(dp.parameters(), 0.1)
        for _ in range(2):
            dp(ints(4, 3)).sum().backward()
            opt.step()
        with torch.autocast(impl.home.type, dtype=torch.bfloat16), torch.no_grad():
            dp.eval()(ints(4, 3))


@row("E6")
def test_grad_scaler_finds_inf_of_the_last_replica(impl):
    module = linear().float()
    dp = impl.wrap(module, 2)
    opt = torch.optim.SGD(dp.parameters(), 1.0)
    scaler = torch.amp.GradScaler(impl.home.type, init_scale=4.0)
    before = [p.detach().clone() for p in module.parameters()]
    x = ints(4, 3).float()
    x[3, 0] = float("inf")
    scaler.scale(dp(x).sum()).backward()
    scaler.step(opt)
    scaler.update()
    same(list(module.parameters()), before)
    assert scaler.get_scale() == 2.0
    opt.zero_grad()
    scaler.scale(dp(ints(4, 3).float()).sum()).backward()
    scaler.step(opt)
    same(module.bias, before[1] - 4)


# Forward mode and functorch.


@row("E11", why="mutant: a tangent dropped")
def test_forward_mode_is_refused_or_right(fast):
    dp = fast.wrap(linear(), 2)
    x, t = ints(4, 3), ints(4, 3, seed=2)
    for grad in (True, False):
        try:
            with torch.autograd.forward_ad.dual_level(), torch.set_grad_enabled(grad):
                dual = torch.autograd.forward_ad.make_dual(x.to(fast.home), t.to(fast.home))
                tangent = torch.autograd.forward_ad.unpack_dual(dp(dual)).tangent
        except (RuntimeError, NotImplementedError):
            continue
        assert tangent is not None, "the tangent was dropped without a word"
        same(tangent, t @ linear().weight.T)


@row("E11")
def test_functorch_transforms_are_refused_or_right(fast):
    dp = fast.wrap(linear(), 2)
    x, t = ints(4, 3).to(fast.home), ints(4, 3, seed=2).to(fast.home)
    weight = linear().weight.detach()
    expected = {
        "jvp": (lambda: torch.func.jvp(dp, (x,), (t,))[1], t.cpu() @ weight.T),
        "vjp": (lambda: torch.func.vjp(dp, x)[1](t[:, :2])[0], t[:, :2].cpu() @ weight),
        "grad": (lambda: torch.func.grad(lambda x: dp(x).sum())(x), weight.sum(0).expand(4, 3)),
        "vmap": (lambda: torch.func.vmap(dp)(x[None]), linear()(x.cpu())[None]),
    }
    for name, (run, want) in expected.items():
        try:
            got = run()
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            assert "Exception raised from" not in str(error), f"{name}: torch's C++ frames"
            continue
        same(got, want)


@row("E2", why="tensor subclasses")
def test_parameter_subclass_trains(impl):
    class Marked(nn.Parameter):
        pass

    module, plain = linear(), linear()
    module.weight = Marked(module.weight.detach())
    impl.wrap(module, 2)(ints(4, 3)).sum().backward()
    plain(ints(4, 3)).sum().backward()
    same(grads(module), grads(plain))
    assert type(module.weight) is Marked


@row("E7")
def test_convolution_net(impl):
    module = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2)
    ).double()
    check_against_hand(impl, module, ints(6, 1, 5, 5), 2, CLOSE)


@row("E7", "X7")
def test_scalar_and_zero_size_parameters(impl):
    def make():
        module = Apply(lambda s, x: s.lin(x) * s.scale + s.none.sum())
        module.scale = nn.Parameter(torch.tensor(3.0).double())
        module.none = nn.Parameter(torch.zeros(0, 4).double())
        return module

    check_against_plain(impl, make)
