"""BEHAVIOUR L: kinds seen in public code that still calls nn.DataParallel. Subclasses, patched
steps and forwards written by hand (3) are in test_behaviour_subclasses."""

import queue
import threading

import pytest
import torch
from nets import Apply, Net, close, exact, grads, ints, linear, same
from torch import nn

row = pytest.mark.row


def both(impl, make, x, n=2, steps=1):
    """Forward and backward of the wrapped and of the plain module agree, gradients of x too."""
    module, plain = make(), make()
    dp = impl.wrap(module, n)
    for _ in range(steps):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        same(out := dp(a), want := plain(b))
        out.sum().backward()
        want.sum().backward()
        same(a.grad, b.grad)
    same(grads(module), grads(plain))
    return dp


# 1. Buffers with a graph.


@row("L1")
def test_buffer_with_a_graph(impl):
    maker = torch.ones(2, dtype=torch.float64, device=impl.home, requires_grad=True)
    module = Apply(lambda s, x: s.lin(x) * s.scale)
    module.register_buffer("scale", None)
    dp = impl.wrap(module, 2)
    x = ints(4, 3)
    for factor in (2, 5):
        maker.grad = None
        module.scale = maker * factor
        same(out := dp(x), linear()(x) * factor)
        out.sum().backward()
        same(maker.grad, linear()(x).sum(0) * factor)


# 2. Gradients that enter anywhere.


@row("L2")
def test_loss_on_a_tensor_caught_by_a_hook(impl):
    """The caught tensors get the loss; the gathered output takes no part."""
    module, plain = Net(), Net()
    caught = []
    module.first.register_forward_hook(lambda m, a, out: caught.append(out))
    impl.wrap(module, 2)(x := ints(4, 3))
    assert len(caught) == 2
    sum((t**2).sum().to(impl.home) for t in caught).backward()
    (plain.first(x) ** 2).sum().backward()
    same(module.first.weight.grad, plain.first.weight.grad)
    same(module.first.bias.grad, plain.first.bias.grad)
    second = module.second.weight.grad
    assert second is None or not second.any()


@row("L2")
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_loss_on_one_replicas_output(impl, rank):
    module, plain = Net(), Net()
    caught = {}
    module.register_forward_hook(lambda m, a, out: caught.update({int(a[0][0, 0]): out}))
    x = ints(3, 3)
    x[:, 0] = torch.arange(3)
    out = impl.wrap(module, 3)(x)
    caught[rank].sum().backward(retain_graph=True)
    plain(x[rank : rank + 1]).sum().backward()
    same(grads(module), grads(plain))
    out[rank].sum().backward()
    plain(x[rank : rank + 1]).sum().backward()
    same(grads(module), grads(plain))


# 4. Replicas that wait for each other.


class Exchange(nn.Module):
    """Synchronised batch norm by queues: replica 0 collects sums and sends back the mean."""

    def __init__(self):
        super().__init__()
        self.inbox, self.outboxes = queue.Queue(), [queue.Queue() for _ in range(3)]

    def forward(self, x):
        rank = int(x[0, 0])
        if rank:
            self.inbox.put((x.sum(), x.numel()))
            mean = self.outboxes[rank].get(timeout=20)
        else:
            parts = [(x.sum(), x.numel())] + [self.inbox.get(timeout=20) for _ in range(2)]
            mean = sum(p[0].to(x.device) for p in parts) / sum(p[1] for p in parts)
            for box in self.outboxes[1:]:
                box.put(mean)
        return x - mean.to(x.device)


@row("L4")
def test_synchronised_mean_by_queues(impl):
    x = torch.arange(3.0).double()[:, None].repeat(1, 4).requires_grad_()
    dp = impl.wrap(Exchange(), 3)
    for _ in range(3):
        same(out := dp(x), x - x.mean())
    out[0].sum().backward()
    want = torch.full((3, 4), -4 / 12, dtype=torch.float64)
    want[0] += 1
    torch.testing.assert_close(x.grad, want, rtol=1e-15, atol=1e-15)


# 7, 9. Shared things.


@row("L7")
def test_list_elements_written_in_forward_persist(impl):
    def forward(self, x):
        self.memory[int(x[0, 0])] = x.detach().clone()
        self.memory = None
        return x

    module = Apply(forward)
    module.memory = [None, None]
    impl.wrap(module, 2)(x := torch.arange(2.0)[:, None].expand(2, 3))
    same([t.cpu() for t in module.memory], [x[:1], x[1:]])


@row("L9")
def test_wrapper_as_a_child(impl):
    module = Net()
    parent = nn.Sequential(nn.Identity(), impl.wrap(module, 2))
    assert list(parent.state_dict())[0] == "1.module.first.weight"
    parent.apply(lambda m: m.weight.data.zero_() if isinstance(m, nn.Linear) else None)
    same(parent(ints(4, 3)), module.second.bias.expand(4, 2))
    parent.to(torch.float32).to(torch.float64)
    parent.load_state_dict({f"1.module.{k}": v for k, v in Net().state_dict().items()})
    same(out := parent(ints(4, 3)), Net()(ints(4, 3)))
    out.sum().backward()
    assert all(p.grad is not None for p in parent.parameters())


@row("L9")
def test_two_wrappers_share_a_submodule(impl):
    shared = nn.Linear(3, 3)
    a, b = nn.Sequential(shared, nn.Linear(3, 2)), nn.Sequential(nn.Linear(3, 3), shared)
    exact(a), exact(b, seed=4)
    first, second = impl.wrap(a, 2), impl.wrap(b, 3)
    x = ints(6, 3)
    got = first(x).sum() + second(x).sum()
    got.backward()
    found = grads(nn.ModuleList([a, b]))
    for m in (a, b):
        m.zero_grad()
    (a(x.to(impl.home)).sum() + b(x.to(impl.home)).sum()).backward()
    same(found, grads(nn.ModuleList([a, b])))


@row("L10")
def test_round_trips_under_an_optimizer(impl):
    module, plain = Net(), Net()
    dp = impl.wrap(module, 2)
    opts = [torch.optim.SGD(m.parameters(), 2**-10, momentum=0.5) for m in (module, plain)]
    for step in range(4):
        if step % 2:
            dp.float().double()
            dp.cpu().to(impl.home)
            plain.float().double()
        for m, run, opt in zip((module, plain), (dp, plain), opts, strict=True):
            opt.zero_grad()
            run(ints(4, 3, seed=step)).sum().backward()
            opt.step()
    same(list(module.parameters()), list(plain.parameters()))


# 11. The functional form.


@row("L11")
def test_functional_form(impl):
    module = Apply(lambda s, x=None, k=1, y=None: s.lin(y if x is None else x) * k)
    module.to(impl.home)
    x, want = ints(5, 3), linear()(ints(5, 3))
    run, ids = impl.api.data_parallel, impl.ids(2)
    same(run(module, x, ids), want)
    same(run(module, (x, 2), tuple(ids)), want * 2)
    same(run(module, None, ids, module_kwargs={"y": x}), want)
    same(run(module, (x,), ids, module_kwargs={"k": 3}), want * 3)
    same(run(module, x, impl.ids(1)), want)
    same(run(module, ints(3, 5).t(), ids, impl.home_id, 0), linear()(ints(3, 5).t()))
    run(module, x, ids).sum().backward()
    same(module.lin.weight.grad, x.sum(0).expand(2, 3))


@row("L11")
def test_functional_form_along_another_dim(impl):
    module = Apply(lambda s, x: x * 2).to(impl.home)
    same(impl.api.data_parallel(module, ints(2, 5), impl.ids(2), dim=1), ints(2, 5) * 2)


# 12, 13. Gradients partly off; ties to the world outside.


@row("L12")
def test_no_grad_parts(impl):
    def forward(self, x):
        with torch.no_grad():
            y = self.lin(x)
        return self.net(torch.cat([y, y[:, :1]], 1) + x * 0)

    def make():
        module = Apply(forward)
        module.net = Net()
        return module

    module, plain = make(), make()
    impl.wrap(module, 2)(ints(4, 3)).sum().backward()
    plain(ints(4, 3)).sum().backward()
    same(grads(module.net), grads(plain.net))
    assert module.lin.weight.grad is None or not module.lin.weight.grad.any()


@row("L12")
def test_parameter_that_also_reaches_the_loss_outside(impl):
    module, plain = Net(), Net()
    dp = impl.wrap(module, 2)
    for m, run in ((module, dp), (plain, plain)):
        loss = run(ints(4, 3)).sum() + sum((p**2).sum() for p in m.parameters())
        loss.backward()
    same(grads(module), grads(plain))


@row("L12")
def test_two_nets_in_turn(impl):
    def run(wrap):
        g, d = exact(nn.Linear(3, 3)), linear(seed=2)
        opts = [torch.optim.SGD(m.parameters(), 2**-8) for m in (g, d)]
        gen, dis = wrap(g), wrap(d)
        for step in range(4):
            z = ints(4, 3, seed=step)
            d.requires_grad_(True)
            opts[1].zero_grad()
            (dis(gen(z).detach()).sum() - dis(z).sum()).backward()
            opts[1].step()
            d.requires_grad_(False)
            opts[0].zero_grad()
            (-(dis(gen(z)) ** 2).sum()).backward()
            opts[0].step()
        return [*g.parameters(), *d.parameters()]

    got, want = run(lambda m: impl.wrap(m, 2)), run(lambda m: m)
    for a, b in zip(got, want, strict=True):
        close(a, b)


@row("L13")
@pytest.mark.parametrize("n", [2, 3])
def test_inputs_returned_as_they_are(impl, n):
    both(impl, nn.Identity, ints(5, 3), n)


@row("L13")
def test_outputs_that_are_views(impl):
    both(impl, lambda: Apply(lambda s, x: s.lin(x)[:, 1:]), ints(5, 3), steps=2)
    both(impl, lambda: Apply(lambda s, x: s.lin(x).t().unsqueeze(0).squeeze(0).t()), ints(5, 3))


@row("K19", "K21", "K23")
def test_functions_of_the_module_level(impl):
    """scatter, replicate, parallel_apply and gather as torch.nn.parallel's tutorial joins them."""
    api, ids = impl.api, impl.ids(3)
    module, plain = Net().to(impl.home), Net()
    x = ints(7, 3)
    inputs = api.scatter(x, ids)
    assert isinstance(inputs, tuple) and [len(chunk) for chunk in inputs] == [3, 3, 1]
    replicas = api.replicate(module, ids[: len(inputs)])
    outputs = api.parallel_apply(replicas, [(t,) for t in inputs])
    result = api.gather(outputs, impl.home_id)
    same(result, plain(x))
    result.sum().backward()
    plain(x).sum().backward()
    same(grads(module), grads(plain))
    assert api.scatter([x, 1], ids)[0][1] == 1
    rows, named = api.scatter_kwargs((x,), {"k": x}, ids)
    assert isinstance(rows, tuple) and isinstance(named, tuple) and len(rows) == len(named) == 3


@row("B12", why="a lock and a thread-local object as attributes")
def test_attributes_that_cannot_be_copied(impl):
    module = Apply(lambda s, x: s.lin(x) if s.lock.acquire() and not s.lock.release() else None)
    module.lock, module.local = threading.Lock(), threading.local()
    same(impl.wrap(module, 2)(ints(4, 3)), linear()(ints(4, 3)))
