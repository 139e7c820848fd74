"""What a review found alive too long: modules, replicas and threads that nobody refers to."""

import gc
import threading
import time
import weakref

import pytest
import torch
from nets import Apply, ints, linear, same

row = pytest.mark.row


def workers():
    return sum(thread.name.startswith("fastdp-replica") for thread in threading.enumerate())


def ends(done, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.001)
    return done()


class Node(list):
    """A list that can be referenced weakly."""


def plain(module):
    pass


def callbacks(module):
    module.callbacks = [module.extra_repr]


def method(module):
    module.describe = module.extra_repr


def hook(module):
    module.register_forward_hook(lambda *_, keeps=module: None)


def backward_hook(module):
    module.register_full_backward_hook(lambda *_, keeps=module: None)


def parent(module):
    module.lin.__dict__["parent"] = module


def itself(module):
    module.__dict__["me"] = module


def shared_list(module):
    module.notes = Node([module])


def closure(module):
    module.later = lambda: module


WAYS = [plain, callbacks, method, hook, backward_hook, parent, itself, shared_list, closure]


def model(way):
    module = Apply(lambda self, x: self.lin(x))
    way(module)
    return module


@row("G3", why="leaks: data_parallel keeps no module alive")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("train", [True, False])
def test_data_parallel_lets_modules_and_threads_go(fast, way, train):
    """The package's table knows a module weakly, but a replica has the module's own attributes, and
    these may lead back to it."""
    gc.collect()
    before, refs, x = workers(), [], ints(4, 3).to(fast.home)
    for _ in range(3):
        module = model(way).to(fast.home)
        refs.append(weakref.ref(module))
        with torch.set_grad_enabled(train):
            for _ in range(2):
                out = fast.api.data_parallel(module, x, fast.ids(2))
        same(out.detach(), linear()(ints(4, 3)).detach())
        if train:
            out.sum().backward()
        del module, out
    assert ends(lambda: all(ref() is None for ref in refs)), "modules live on"
    assert ends(lambda: workers() <= before), "threads live on"


@row("G3")
@pytest.mark.parametrize("way", WAYS)
def test_a_wrapper_lets_its_module_and_threads_go(fast, way):
    gc.collect()
    before, module = workers(), model(way)
    dp = fast.wrap(module, 3)
    dp(ints(6, 3)).sum().backward()
    refs = [weakref.ref(module), weakref.ref(dp), weakref.ref(dp._fastdp_runtime)]
    assert workers() > before
    del module, dp
    assert ends(lambda: all(ref() is None for ref in refs)), "objects live on"
    assert ends(lambda: workers() <= before), "threads live on"


@row("J1", why="replicas are kept: data_parallel")
def test_data_parallel_keeps_replicas_and_fills_them_again(fast):
    """Stripped of all that came from the module, they get it back, and see its edits."""
    alive, seen = weakref.WeakSet(), []

    def forward(self, x):
        alive.add(self)
        seen.append((self.note, self.training, len(self._forward_hooks), self.twice(2)))
        return self.lin(x)

    def twice(self, number):
        return 2 * number

    module = Apply(forward).to(fast.home)
    module.twice = twice.__get__(module)
    x = ints(4, 3).to(fast.home)
    for step in range(4):
        module.note = step
        module.train(step % 2 == 0)
        handle = module.register_forward_hook(lambda *_: None) if step == 2 else None
        seen.clear()
        out = fast.api.data_parallel(module, x, fast.ids(2))
        assert seen == [(step, step % 2 == 0, int(step == 2), 4)] * 2
        assert len(alive) == 2
        same(out.detach(), linear()(ints(4, 3)).detach())
        if handle is not None:
            handle.remove()
    for replica in alive:
        assert set(replica.__dict__) == {"_parameters", "_buffers", "_modules"}


@row("G3", why="leaks: replicas that are held, in data_parallel")
def test_data_parallel_drops_replicas_that_are_held(fast):
    kept, copies = [], []

    def forward(self, x):
        kept.append(self)
        copies.append(weakref.ref(self.lin.weight))
        return self.lin(x)

    module = Apply(forward).to(fast.home)
    ref = weakref.ref(module)
    for _ in range(3):
        fast.api.data_parallel(module, ints(4, 3).to(fast.home), fast.ids(2)).sum().backward()
    assert len(set(map(id, kept))) == 6
    del module
    kept.clear()
    assert ends(lambda: ref() is None and all(copy() is None for copy in copies))


@row("G3", why="leaks: an interrupted or checkpointed forward")
def test_replicas_that_are_let_go_late_lose_their_copies(fast):
    """Held when their forward ended, they go into another pool; let go, they are emptied at the
    next forward even though it runs on other replicas."""
    hold, kept, copies = [], [], []

    def forward(self, x):
        if hold:
            kept.append(self)
            copies.append(weakref.ref(self.lin.weight))
        return self.lin(x)

    dp = fast.wrap(Apply(forward), 2)
    x = ints(4, 3)
    hold.append(True)
    dp(x).sum().backward()
    hold.clear()
    dp(x).sum().backward()
    dp(x).sum().backward()
    gc.collect()
    assert any(copy() is not None for copy in copies), "a held replica was emptied"
    kept.clear()
    dp(x).sum().backward()
    dp(x).sum().backward()
    assert ends(lambda: all(copy() is None for copy in copies))
