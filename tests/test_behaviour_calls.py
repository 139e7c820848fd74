"""BEHAVIOUR I: which threads run the replicas, and calls inside, beside and across calls."""

import threading

import pytest
import torch
from nets import CLOSE, Apply, Net, close, grads, ints, linear, ranked, same

row = pytest.mark.row


@row("J1", why="persistent workers, replica 0 on the caller's thread")
def test_replicas_keep_their_threads(fast):
    seen = []
    module = Apply(lambda s, x: seen.append((int(x[0, 0]), threading.get_ident())) or s.lin(x))
    dp = fast.wrap(module, 3)
    for _ in range(4):
        dp(ranked(3))
    threads = dict(seen)
    assert sorted(set(seen)) == sorted(threads.items()) and len(set(threads.values())) == 3
    assert threads[0] == threading.get_ident()


@row("J2", "L4", why="replicas run at once")
@pytest.mark.parametrize("n", [2, 4, 7])
def test_replicas_can_wait_for_each_other(impl, n):
    barrier = threading.Barrier(n, timeout=20)
    dp = impl.wrap(Apply(lambda s, x: (barrier.wait(), s.lin(x))[1]), n)
    for _ in range(3):
        same(dp(ints(2 * n, 3)), linear()(ints(2 * n, 3)))


@row("I7", why="concurrent calls from two threads")
def test_concurrent_calls_on_one_wrapper(impl):
    if impl.is_oracle and impl.gpus > 1:
        pytest.skip("needs 1 GPU: over several, torch's own gave three threads wrong numbers")
    module, plain = Net(), Net()
    dp = impl.wrap(module, 2)
    errors = []
    start = threading.Barrier(3, timeout=20)

    def work(seed):
        try:
            x, z = ints(5, 3, seed=seed, grad=True), ints(5, 3, seed=seed, grad=True)
            (want,) = torch.autograd.grad(plain(z).sum(), z)
            start.wait()
            for _ in range(15):
                with torch.no_grad():
                    same(dp(z), plain(z))
                (got,) = torch.autograd.grad(dp(x).sum(), x)
                same(got, want)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads)
    dp(ints(5, 3)).sum().backward()
    plain(ints(5, 3)).sum().backward()
    same(grads(module), grads(plain))


@row("H4", why="two wrappers at once, one module")
def test_two_wrappers_in_two_threads(impl):
    module, plain = Net(), Net()
    errors = []

    def work(dp, n):
        try:
            for _ in range(15):
                same(dp(ints(n + 1, 3)), plain(ints(n + 1, 3)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(impl.wrap(module, n), n)) for n in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors


@row("I7", why="a call inside a call, and inside a backward")
def test_calls_inside_calls(impl):
    inner_module, plain = Net(seed=3), Net(seed=3)
    inner = impl.wrap(inner_module, 2)
    # In a list it is no child: every replica calls the one wrapper, whose outputs are on its home.
    module = Apply(lambda s, x: s.lin(x) + s.box[0](x).to(x.device))
    module.box = [inner]
    x, z = ints(8, 3, grad=True), ints(8, 3, grad=True)
    seen = []

    def hook(gradient):
        with torch.no_grad():
            seen.append(dp(ints(4, 3)))

    dp = impl.wrap(module, 2)
    out = dp(x)
    out.register_hook(hook)
    out.sum().backward()
    (linear()(z) + plain(z)).sum().backward()
    same(x.grad, z.grad)
    same(grads(inner_module), grads(plain))
    same(seen[0], linear()(ints(4, 3)) + plain(ints(4, 3)))


@row("I7", why="a wrapper that calls itself in forward")
def test_a_wrapper_called_by_its_own_replica(impl):
    def forward(self, x, deep=0):
        if deep:
            return self.lin(x)
        return self.box[0](x, deep=1).to(x.device) + self.lin(x)

    module = Apply(forward)
    dp = impl.wrap(module, 2)
    module.box = [dp]
    out = dp(ints(8, 3))
    same(out, 2 * linear()(ints(8, 3)))
    out.sum().backward()
    same(module.lin.weight.grad, 2 * ints(8, 3).sum(0).expand(2, 3))


@row("I7", why="backward from another thread")
def test_backward_in_another_thread(impl):
    module, plain = Net(), Net()
    loss = impl.wrap(module, 2)(ints(4, 3)).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join(20)
    plain(ints(4, 3)).sum().backward()
    same(grads(module), grads(plain))


@row("I7", why="long-lived use from many short threads")
def test_calls_from_many_short_threads(impl):
    dp = impl.wrap(Net(), 2)
    results = []
    for _ in range(12):
        thread = threading.Thread(target=lambda: results.append(dp(ints(4, 3)).detach()))
        thread.start()
        thread.join(20)
    want = Net()(ints(4, 3))
    assert len(results) == 12
    for got in results:
        close(got, want, **CLOSE)
