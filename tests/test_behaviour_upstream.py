"""BEHAVIOUR K: what PyTorch's own tests of nn.DataParallel ask, in the parts that need no second
GPU: written anew from their descriptions."""

import collections

import pytest
import torch
from nets import CLOSE, Apply, Net, close, exact, grads, ints, linear, same
from torch import nn

row = pytest.mark.row


@row("K2")
def test_one_training_step_of_an_lstm(impl):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(3, 4, 2, batch_first=True).double()

        def forward(self, x):
            self.rnn.flatten_parameters()
            return self.rnn(x)[0]

    module, plain = Model(), Model()
    plain.load_state_dict(module.state_dict())
    dp = impl.wrap(module, 2)
    x = ints(4, 2, 3)
    for m, run in ((module, dp), (plain, plain)):
        opt = torch.optim.SGD(m.parameters(), 0.1)
        run(x).sum().backward()
        opt.step()
    for got, want in zip(module.parameters(), plain.parameters(), strict=True):
        close(got, want)
    with torch.no_grad():
        close(dp(x), plain(x))


@row("K4")
@pytest.mark.parametrize("bare", [True, False])
def test_parallel_apply(impl, bare):
    modules = [linear(k).to(impl.device(k)) for k in range(2)]
    tensors = [ints(2, 3, seed=k).to(impl.device(k)) for k in range(2)]
    inputs = tensors if bare else [(t,) for t in tensors]
    outputs = impl.api.parallel_apply(modules, inputs, None, impl.ids(2))
    assert isinstance(outputs, list)
    for k, out in enumerate(outputs):
        same(out, linear(k)(ints(2, 3, seed=k)))
        assert out.device == impl.device(k)


@row("K4", why="keywords, one module, wrong lengths")
def test_parallel_apply_arguments(impl):
    run = impl.api.parallel_apply
    forward = lambda s, x, k=1: s.lin(x) * k  # noqa: E731
    (module, other), (x, y) = (
        [made.to(impl.device(rank)) for rank, made in enumerate(pair)]
        for pair in ((Apply(forward), Apply(forward)), (ints(2, 3), ints(2, 3)))
    )
    outputs = run([module, other], [x, y], [{"k": 2}, {}], impl.ids(2))
    same(outputs, [2 * linear()(ints(2, 3)), linear()(ints(2, 3))])
    same(run([module], [x], None, impl.ids(1)), [linear()(ints(2, 3))])
    text = "" if impl.is_oracle else "number of"  # an older torch says nothing
    for wrong in (([x], None, None), ([x, x], [{}], None), ([x, x], None, impl.ids(1))):
        with pytest.raises(AssertionError, match=text):
            run([module, module], *wrong)


@row("K5")
def test_parallel_apply_under_autocast(impl):
    modules = [linear(k).float().to(impl.device(k)) for k in range(2)]
    inputs = [ints(2, 3).float().to(impl.device(k)) for k in range(2)]
    low = torch.get_autocast_dtype(impl.home.type)  # of others torch's own does not know in threads
    with torch.autocast(impl.home.type, dtype=low):
        outputs = impl.api.parallel_apply(modules, inputs, None, impl.ids(2))
    for k, out in enumerate(outputs):
        same(out, linear(k)(ints(2, 3)).to(low))


@row("K6")
def test_parallel_apply_passes_the_exception(impl):
    class Raises(nn.Module):
        def forward(self, x):
            raise KeyError("stone")

    x = ints(2, 3).to(impl.home)
    modules = [linear().to(impl.home), Raises()]
    with pytest.raises(KeyError, match=r"(?s)Caught KeyError in replica 1 .*Original Traceback"):
        impl.api.parallel_apply(modules, [x, x], None, impl.ids(2))


@row("K7")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_tensors_float_and_optional_keyword(impl, n):
    def forward(self, a, b, scale, c=None):
        return self.lin(a) * self.lin(b) * scale + (0 if c is None else c)

    module, plain = Apply(forward), Apply(forward)
    dp = impl.wrap(module, n)
    for keyword in (None, ints(6, 2, seed=9)):
        made = [[ints(6, 3, seed=k, grad=True) for k in (1, 2)] for _ in range(2)]
        extra = {} if keyword is None else {"c": keyword}
        same(out := dp(*made[0], 2.5, **extra), want := plain(*made[1], 2.5, **extra))
        out.sum().backward()
        want.sum().backward()
        for got, expected in zip(*made, strict=True):
            same(got.grad, expected.grad)
    same(grads(module), grads(plain))
    a, b = ints(6, 3), ints(6, 3, seed=2)
    same(impl.api.data_parallel(module, (a, b, 2.5), impl.ids(n)), plain(a, b, 2.5))


@row("K13")
@pytest.mark.parametrize("n", [2, 3])
def test_sparse_embedding_functional(impl, n):
    module, plain = exact(nn.Embedding(10, 5, sparse=True)), exact(nn.Embedding(10, 5, sparse=True))
    x = torch.randint(10, (6, 2), generator=torch.Generator().manual_seed(1))
    same(out := impl.api.data_parallel(module.to(impl.home), x, impl.ids(n)), want := plain(x))
    out.sum().backward()
    want.sum().backward()
    same(module.weight.grad.coalesce().to_dense(), plain.weight.grad.to_dense())


@row("K14")
def test_nested_output(impl):
    kinds = (
        lambda x: (x, [x, x]),
        lambda x: [x, (x, (x,))],
        lambda x: {"a": x, "b": [x]},
        lambda x: collections.OrderedDict([("b", x), ("a", (x, {"c": x}))]),
    )
    x = ints(4, 3)
    for make in kinds:
        same(impl.wrap(Apply(lambda s, x, make=make: make(x)), 2)(x), make(x))


@row("K15")
def test_nested_input(impl):
    module = Apply(lambda s, pair: s.lin(pair[0]) + pair[1][0])
    x = ints(4, 3)
    same(impl.wrap(module, 2)((x, (x[:, :2],))), linear()(x) + x[:, :2])


@row("K16")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_forward_without_arguments_trains(impl, n):
    module = Apply(lambda s: s.w * 2)
    module.w = nn.Parameter(ints(2, 2))
    out = impl.wrap(module, n)()
    same(out, ints(2, 2) * 2)
    out.sum().backward()
    same(module.w.grad, torch.full((2, 2), 2.0).double())


@row("K18")
def test_penalty_with_graph_nodes_dropped(impl):
    """The gradient penalty keeps only what autograd holds: every wrapper-side name is gone."""

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

        def forward(self, x):
            return self.net(x)

    module, plain = Critic(), Critic()
    plain.load_state_dict(module.state_dict())

    def penalty(run):
        x = ints(6, 3, grad=True)
        out = run(x)
        (g,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
        del out
        return ((g.norm(2, dim=1) - 1) ** 2).mean()

    for _ in range(3):
        got, want = penalty(impl.wrap(module, 2)), penalty(plain)
        close(got, want)
        got.backward()
        want.backward()
    for name, gradient in grads(plain).items():
        if gradient is not None:
            close(grads(module)[name], gradient)


@row("K19")
@pytest.mark.parametrize("shape, n", [((4, 4), 2), ((5, 4), 2), ((7, 2), 3), ((2, 2), 4)])
def test_scatter_and_its_derivatives(impl, shape, n):
    x = ints(*shape, grad=True)
    chunks = impl.api.scatter(x, impl.ids(n))
    assert [c.shape for c in chunks] == [c.shape for c in x.chunk(n)]
    for got, want in zip(chunks, x.chunk(n), strict=True):
        same(got, want)
        assert got.requires_grad
    assert [c.device for c in chunks] == [impl.device(rank) for rank in range(len(chunks))]
    sum((c**2).sum().to(impl.home) * (k + 1) for k, c in enumerate(chunks)).backward()
    weights = torch.cat([torch.full_like(c, 2.0 * (k + 1)) for k, c in enumerate(x.chunk(n))])
    same(x.grad, weights * x)
    double = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda t: impl.api.scatter(t, impl.ids(n)), (double,))


@row("K21")
@pytest.mark.parametrize("sizes", [(2, 2), (1, 3, 2), (0, 2)])
@pytest.mark.parametrize("dim", [0, 1])
def test_gather_and_its_derivatives(impl, sizes, dim):
    make = lambda place: [  # noqa: E731
        (ints(k, 3) if dim == 0 else ints(3, k)).to(place(rank)).requires_grad_()
        for rank, k in enumerate(sizes)
    ]
    parts, twins = make(impl.device), make(lambda rank: impl.home)
    out = impl.api.gather(parts, impl.home_id, dim)
    same(out, torch.cat(twins, dim))
    weights = ints(*out.shape, seed=5).to(out)
    (out**2 * weights).sum().backward()
    (torch.cat(twins, dim) ** 2 * weights).sum().backward()
    for part, twin in zip(parts, twins, strict=True):
        same(part.grad, twin.grad)
    doubles = [torch.randn(2, 2, dtype=torch.float64, requires_grad=True) for _ in sizes]
    doubles = [d.detach().to(impl.device(k)).requires_grad_() for k, d in enumerate(doubles)]
    assert torch.autograd.gradgradcheck(lambda *t: impl.api.gather(t, impl.home_id, dim), doubles)


@row("K21", why="scalars become a vector")
def test_gather_of_scalars(impl):
    parts = [torch.tensor(float(k), device=impl.device(k), requires_grad=True) for k in range(3)]
    with pytest.warns(UserWarning, match="scalars"):
        out = impl.api.gather(parts, impl.home_id)
    same(out, torch.tensor([0.0, 1.0, 2.0]))
    (out * torch.tensor([1.0, 2.0, 3.0], device=impl.home)).sum().backward()
    assert [p.grad.item() for p in parts] == [1.0, 2.0, 3.0]
    assert all(p.grad.shape == () for p in parts)


@row("K22")
def test_gather_of_dicts_of_unequal_length(impl):
    one = torch.ones(1, device=impl.home)
    with pytest.raises(ValueError, match="same number of keys"):
        impl.api.gather([{"a": one}, {"a": one, "b": one}], impl.home_id)


@row("K23")
@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("detach", [True, False])
def test_replicate(impl, kind, detach):
    module = Net().to(impl.home)
    replicas = impl.api.replicate(module, kind(impl.ids(3)), detach)
    assert isinstance(replicas, list) and len(replicas) == 3
    x = ints(2, 3)
    for rank, replica in enumerate(replicas):
        same(out := replica(x.to(impl.device(rank))), Net()(x))
        assert replica.first.weight.device == impl.device(rank)
    if not detach:
        out.sum().backward()
        plain = Net()
        plain(x).sum().backward()
        same(grads(module), grads(plain))


@row("K23", why="no devices")
def test_replicate_to_nothing(fast):
    assert fast.api.replicate(linear(), []) == []


@row("K24")
@pytest.mark.distinct
def test_replicate_buffers(impl):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(impl.home)
    replicas = impl.api.replicate(module, impl.ids(2))
    for rank, replica in enumerate(replicas):
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            buffer, base = getattr(replica[1], name), getattr(module[1], name)
            same(buffer, base)
            assert buffer.device == impl.device(rank)
            assert (buffer.data_ptr() == base.data_ptr()) == (rank == 0)


@row("K28")
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_convolutions_over_two_steps(impl, memory):
    def make():
        layers = [nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 1), nn.Conv2d(2, 1, 1)]
        module = exact(nn.Sequential(*layers))
        module[0].to(memory_format=memory)
        module[2].to(memory_format=memory)
        return module

    module, plain = make(), make()
    dp = impl.wrap(module, 3)
    for step in range(2):
        x = ints(4, 2, 6, 6, seed=step).to(memory_format=memory)
        for m, run in ((module, dp), (plain, plain)):
            m.zero_grad(set_to_none=bool(step))
            run(x).sum().backward()
        for got, want in zip(module.parameters(), plain.parameters(), strict=True):
            close(got.grad, want.grad, **CLOSE)
            assert got.grad.is_contiguous(memory_format=memory) or got.dim() != 4 or (
                not got.is_contiguous(memory_format=memory)
            )


@row("K32")
@pytest.mark.parametrize("empty", [[], {}, ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_kwargs_only_with_an_empty_container(impl, empty, dtype):
    module = Apply(lambda s, x, empty=None: s.lin(x)).to(dtype)
    out = impl.wrap(module, 2)(x=ints(4, 3).to(dtype), empty=empty)
    same(out, linear().to(dtype)(ints(4, 3).to(dtype)))
