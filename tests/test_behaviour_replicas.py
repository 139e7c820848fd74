"""BEHAVIOUR A: what a replica holds, and what of it lasts: parameters, attributes, buffers."""

import copy
import io
import types

import pytest
import torch
from nets import Apply, Net, ints, linear, same
from torch import nn

row = pytest.mark.row


# Parameters.


@row("A1")
@pytest.mark.parametrize("n", [2, 3])
def test_replica_lists_its_parameters(fast, n):
    seen = []

    def forward(self, x):
        seen.append({name: (p, p.grad_fn) for name, p in self.named_parameters()})
        assert next(self.parameters()).dtype == torch.float64
        return self.lin(x)

    module = Apply(forward)
    dp = fast.wrap(module, n)
    dp(ints(6, 3))
    assert len(seen) == n
    for named in seen:
        assert list(named) == ["lin.weight", "lin.bias"]
        for name, (parameter, grad_fn) in named.items():
            assert isinstance(parameter, nn.Parameter)
            assert grad_fn is not None and parameter.requires_grad and not parameter.is_leaf
            assert parameter is not module.get_parameter(name)
            same(parameter, module.get_parameter(name))


@row("A1")
def test_parameters_of_a_replica_link_to_the_base(fast):
    """A penalty over self.parameters() inside forward has its gradient: 2w from each replica."""
    module = Apply(lambda s, x: 0 * s.lin(x).sum() + sum((p**2).sum() for p in s.parameters()))
    dp = fast.wrap(module, 2)
    dp(ints(4, 3)).sum().backward()
    same(module.lin.weight.grad, 4 * module.lin.weight)
    same(module.lin.bias.grad, 4 * module.lin.bias)


@row("A1")
def test_parameters_of_a_replica_without_grad(fast):
    seen = []
    dp = fast.wrap(Apply(lambda s, x: seen.append(list(s.parameters())) or s.lin(x)), 2)
    with torch.no_grad():
        dp(ints(4, 3))
    assert [len(parameters) for parameters in seen] == [2, 2]


@row("A1")
def test_replicas_say_so(impl):
    seen = []
    module = Apply(lambda s, x: seen.append((s._is_replica, s.lin._is_replica)) or s.lin(x))
    impl.wrap(module, 2)(ints(4, 3))
    assert seen == [(True, True)] * 2
    assert not getattr(module, "_is_replica", False)


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.ps = nn.ParameterList([nn.Parameter(torch.ones(2) * k) for k in (1, 2)])
        self.pd = nn.ParameterDict({"a": nn.Parameter(torch.ones(2) * 3)})
        self.double()

    def forward(self, x):
        assert len(self.ps) == 2 and list(self.pd.keys()) == ["a"] and "a" in self.pd
        for p in (self.ps[0], self.ps[1], self.pd["a"]):
            assert p.requires_grad and p.grad_fn is not None
        return x * sum(p for p in self.ps) + sum(v for _, v in self.pd.items())


@row("A2", "K29")
def test_parameter_list_and_dict(impl):
    module = Lists()
    dp = impl.wrap(module, 2)
    x = ints(4, 2)
    same(out := dp(x), x * 3 + 3)
    out.sum().backward()
    same(module.ps[0].grad, x.sum(0))
    same(module.ps[1].grad, x.sum(0))
    same(module.pd["a"].grad, torch.full((2,), 4.0, dtype=torch.float64))


@row("A2")
def test_parameter_list_parameters_iterate(fast):
    module = Lists()
    module.forward = types.MethodType(lambda s, x: x * sum(p for p in s.ps.parameters()), module)
    same(fast.wrap(module, 2)(ints(4, 2)), ints(4, 2) * 3)


@row("A4")
def test_order_of_wrap_move_and_optimizer(impl):
    """Wrap, move, optimizer in three orders: the same weights after 10 steps."""

    def steps(order):
        module = Net()
        made = {}
        for step in order:
            if step == "wrap":
                made["dp"] = impl.wrap(module, 2)
            elif step == "move":
                module.float().double().to(impl.home)
            else:
                made["opt"] = torch.optim.SGD(module.parameters(), 2**-12, momentum=0.5)
        for step in range(10):
            made["opt"].zero_grad()
            made["dp"](ints(4, 3, seed=step)).sum().backward()
            made["opt"].step()
        return [p.detach().clone() for p in module.parameters()]

    first, second, third = map(
        steps, (("wrap", "move", "opt"), ("move", "wrap", "opt"), ("opt", "move", "wrap"))
    )
    for a, b, c, start in zip(first, second, third, Net().parameters(), strict=True):
        same(a, b)
        same(a, c)
        assert not torch.equal(a.cpu(), start)


@row("A5")
def test_module_spanning_devices_is_refused(impl):
    module = nn.Sequential(linear().to(impl.home), nn.Linear(2, 2, device="meta"))
    with pytest.raises((RuntimeError, ValueError), match="meta"):
        impl.api.DataParallel(module, device_ids=impl.ids(2))(ints(4, 3))


# Attributes.


@row("A6")
def test_tensor_attribute_is_shared_not_moved(impl):
    seen = []
    module = Apply(lambda s, x: seen.append((s.c, s.ls[0], s.ls)) or s.lin(x))
    module.c = torch.ones(3)
    module.ls = [linear()]
    impl.wrap(module, 3)(ints(6, 3))
    assert len(seen) == 3
    for c, hidden, ls in seen:
        assert c is module.c and hidden is module.ls[0] and ls is module.ls


@row("A8")
def test_bound_method_kept_as_attribute_is_rebound(fast):
    seen = []

    def forward(self, x):
        seen.append((self.f.__self__ is self.lin, self.own.__self__ is self))
        return self.f(x)

    module = Apply(forward)
    module.f = module.lin.forward
    module.own = module.extra_repr
    x = ints(4, 3)
    same(out := fast.wrap(module, 2)(x), linear()(x))
    assert seen == [(True, True)] * 2
    out.sum().backward()
    same(module.lin.bias.grad, torch.full((2,), 4.0, dtype=torch.float64))
    assert module.f.__self__ is module.lin


@row("A9")
def test_patched_forward_runs_on_the_replica(fast):
    seen = []

    def forward(self, x):
        seen.append(self)
        return -torch.nn.functional.linear(x, self.weight, self.bias)

    module = linear()
    module.forward = types.MethodType(forward, module)
    x = ints(4, 3)
    same(fast.wrap(module, 2)(x), -linear()(x))
    assert len({id(s) for s in seen}) == 2 and all(s is not module for s in seen)
    assert module.forward.__self__ is module


@row("A9")
def test_patched_forward_numbers(impl):
    module = linear()
    forward = module.forward
    module.forward = lambda x: 2 * forward(x)
    x = ints(4, 3)
    dp = impl.wrap(module, 2)
    if impl.gpus > 1:
        # The lambda holds the base's forward: no replica elsewhere can run it, and torch says why.
        place = rf"(cuda:)?{impl.device(1).index}\b"
        with pytest.raises(RuntimeError, match=rf"(?s)in replica 1 on device {place}.*{impl.home}"):
            dp(x)
        return
    same(out := dp(x), 2 * linear()(x))
    out.sum().backward()
    same(module.weight.grad, 2 * x.sum(0).expand(2, 3))


@row("A10")
@pytest.mark.parametrize("n", [2, 3])
def test_rebinding_is_lost_mutation_is_seen(impl, n):
    seen = []

    def forward(self, x):
        seen.append(self.count)
        assert not hasattr(self, "new") and not hasattr(self.lin, "new")
        self.count += 1
        self.new = self.lin.new = x
        self.log.append(1)
        self.table["k"] = 1
        del self.gone
        return self.lin(x)

    module = Apply(forward)
    module.count, module.log, module.table, module.gone = 0, [], {}, 1
    dp = impl.wrap(module, n)
    for _ in range(3):
        dp(ints(6, 3))
    assert seen == [0] * (3 * n)
    assert module.count == 0 and module.gone == 1 and not hasattr(module, "new")
    assert module.log == [1] * (3 * n) and module.table == {"k": 1}


@row("A10")
def test_attribute_edits_of_the_base_are_seen(impl):
    module = Apply(lambda s, x: s.lin(x) * s.scale + getattr(s, "shift", 0))
    module.scale = 1
    dp = impl.wrap(module, 2)
    x = ints(4, 3)
    y = linear()(x)
    same(dp(x), y)
    module.scale = 3
    same(dp(x), 3 * y)
    module.shift = 5
    same(dp(x), 3 * y + 5)
    del module.shift
    same(dp(x), 3 * y)


@row("A11")
def test_replicas_keep_their_identity(fast):
    seen = []
    dp = fast.wrap(Apply(lambda s, x: seen.append((id(s), id(s.lin))) or s.lin(x)), 3)
    for _ in range(4):
        dp(ints(6, 3)).sum().backward()
    assert len(set(seen)) == 3 and len(seen) == 12


# Buffers.


def counting(forward):
    module = Apply(forward)
    module.register_buffer("k", torch.zeros((), dtype=torch.long))
    return module


@row("A12")
@pytest.mark.distinct
def test_only_replica_0_writes_the_buffer(impl):
    module = counting(lambda s, x: (s.k.add_(x.size(0)), s.lin(x))[1])
    dp = impl.wrap(module, 2)
    buffer, address = module.k, module.k.data_ptr()
    dp(ints(7, 3))
    assert module.k is buffer and buffer.data_ptr() == address and buffer.item() == 4
    dp(ints(7, 3))
    assert buffer.item() == 8


@row("A12")
@pytest.mark.distinct
def test_every_replica_starts_from_the_base_buffer(impl):
    seen = []

    def forward(self, x):
        seen.append(self.k.item())
        self.k.add_(10)
        return self.lin(x)

    module = counting(forward)
    dp = impl.wrap(module, 2)
    for _ in range(3):
        dp(ints(4, 3))
    # Replica 0 writes the base itself; the other replica was copied before it could.
    assert sorted(seen) == [0, 0, 10, 10, 20, 20] and module.k.item() == 30


@row("A13")
def test_buffer_rebinding_is_lost(impl):
    def forward(self, x):
        self.k = self.k + 1
        assert self.k.item() == 1
        return self.lin(x)

    module = counting(forward)
    dp = impl.wrap(module, 2)
    for _ in range(2):
        dp(ints(4, 3))
    assert module.k.item() == 0


@row("A13")
def test_buffer_replaced_on_the_base_is_seen(impl):
    module = Apply(lambda s, x: s.lin(x) + s.b)
    module.register_buffer("b", torch.zeros(2).double())
    dp = impl.wrap(module, 2)
    x = ints(4, 3)
    y = linear()(x)
    same(dp(x), y)
    module.b = torch.ones(2, device=impl.home).double()
    same(dp(x), y + 1)
    module.b.data.fill_(2)
    same(dp(x), y + 2)


@row("A12")
def test_kinds_of_buffers(impl):
    """None, not persistent, shared by two modules, zero-size."""
    seen = []

    def forward(self, x):
        seen.append((self.none, self.loose is self.lin.loose, tuple(self.empty.shape)))
        return self.lin(x) + self.loose

    module = Apply(forward)
    module.register_buffer("none", None)
    # Made at home: `to` moves a shared buffer once for each name, and they are two.
    loose = torch.ones(2, device=impl.home).double()
    module.register_buffer("loose", loose, persistent=False)
    module.lin.register_buffer("loose", module.loose)
    module.register_buffer("empty", torch.zeros(0, 3))
    same(impl.wrap(module, 2)(ints(4, 3)), linear()(ints(4, 3)) + 1)
    assert seen == [(None, True, (0, 3))] * 2


@row("A12", why="a buffer that may be resized, which travels alone")
@pytest.mark.parametrize("shape", [(1,), (0,)], ids=["one", "none"])
@pytest.mark.distinct
def test_a_buffer_of_one_element_is_replica_0s_alone(impl, shape):
    seen = []

    def forward(self, x):
        seen.append((int(x[0, 0]), self.b.device, self.b.data_ptr()))
        self.b.add_(x[0, 0])
        return self.lin(x) + (self.b if self.b.numel() else 0)

    def make():
        module = Apply(forward)
        module.register_buffer("b", torch.full(shape, 5.0).double())
        return module

    module, x = make(), ints(3, 3)
    x[:, 0] = torch.tensor([1.0, 2.0, 4.0])
    got = impl.wrap(module, 3)(x)
    same(module.b, torch.full(shape, 6.0).double())
    added = x[:, :1] + 5 if shape == (1,) else torch.zeros(3, 1).double()
    same(got, linear()(x) + added)
    if shape == (1,):
        places = {number: place for number, *place in seen}
        assert len(set(map(tuple, places.values()))) == 3
        assert places[1][1] == module.b.data_ptr()


# Copies of replicas.


@row("A25")
def test_deepcopy_in_forward(fast):
    module = Apply(lambda s, x: copy.deepcopy(s.lin)(x))
    same(fast.wrap(module, 2)(ints(4, 3)), linear()(ints(4, 3)))


@row("A25", "K27")
@pytest.mark.parametrize("detach", [False, True])
def test_save_replicas(impl, detach):
    for replica in impl.api.replicate(Net().to(impl.home), impl.ids(2), detach):
        torch.save(replica, file := io.BytesIO())
        assert file.getbuffer().nbytes > 0


@row("A25")
def test_state_dict_in_forward(fast):
    seen = []
    module = Net()
    names = list(module.state_dict())
    module.register_forward_pre_hook(lambda m, _: seen.append(list(m.state_dict())))
    fast.wrap(module, 2)(ints(4, 3))
    assert seen == [names] * 2
