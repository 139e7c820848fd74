"""What a review found in what a forward leaves behind: classes, aliases, methods, open leases."""

import weakref

import pytest
import torch
from nets import Apply, exact, grads, ints, linear, same
from torch import nn

row = pytest.mark.row


class Hundredfold(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 100


class Turncoat(nn.Linear):
    def forward(self, x):
        self.__class__ = Hundredfold
        return nn.Linear.forward(self, x)


@row("A10")
def test_a_class_changed_in_forward_does_not_stick(impl):
    module = exact(Turncoat(3, 2))
    dp = impl.wrap(module, 2)
    x = ints(4, 3)
    want = nn.functional.linear(x, module.weight.cpu(), module.bias.cpu()).detach()
    for _ in range(3):
        same(dp(x).detach(), want)
        assert type(module) is Turncoat


def counted(forward):
    """A module with the forward, and a set of its replicas that are alive."""
    alive = weakref.WeakSet()

    def watched(self, x):
        alive.add(self)
        return forward(self, x)

    return Apply(watched), alive


def keeps_alias(self, x):
    self.alias = self.lin
    return self.alias(x)


def keeps_itself(self, x):
    self.me = self
    return self.me.lin(x)


def keeps_method(self, x):
    self.call = self.lin.forward
    return self.call(x)


def keeps_own_method(self, x):
    self.again = self.forward
    return self.lin(x)


def keeps_in_child(self, x):
    self.lin.__dict__["parent"] = self
    return self.lin(x)


def keeps_several(self, x):
    self.one = self.two = self.lin
    self.three = self.lin.forward
    return self.two(x)


LEFT = [keeps_alias, keeps_itself, keeps_method, keeps_own_method, keeps_in_child, keeps_several]


@row("A10", "J1")
@pytest.mark.parametrize("forward", LEFT)
@pytest.mark.parametrize("n", [2, 3])
def test_aliases_left_by_a_forward_do_not_use_up_replicas(fast, forward, n):
    module, alive = counted(forward)
    dp = fast.wrap(module, n)
    x, want = ints(6, 3), linear()
    for _ in range(6):
        dp.zero_grad()
        dp(x).sum().backward()
        assert len(alive) == n
    want(x).sum().backward()
    same(grads(module.lin), grads(want))
    for replica in alive:
        assert not {"alias", "me", "call", "again", "one"} & set(replica.__dict__)
        assert "parent" not in replica.lin.__dict__


@row("A10", "J1")
@pytest.mark.parametrize("forward", LEFT)
def test_a_replica_held_outside_as_well_is_left_alone(fast, forward):
    """The counterpart: counting its own names for a module must not hide somebody else's."""
    kept = []

    def keeping(self, x):
        out = forward(self, x)
        kept.append(self.lin)
        return out

    module = Apply(keeping)
    dp = fast.wrap(module, 2)
    dp(ints(4, 3))
    first = list(kept)
    with torch.no_grad():
        module.lin.weight.add_(1)
    dp(ints(4, 3))
    assert len(kept) == 4 and not set(map(id, kept[2:])) & set(map(id, first))
    assert all(each.weight is not None for each in kept)


@row("J1")
def test_an_alias_that_cannot_be_counted_stays_bounded(fast):
    """In a list it looks like somebody else's: new replicas, but never more than a few."""

    def forward(self, x):
        self.many = [self.lin]
        return self.many[0](x)

    module, alive = counted(forward)
    dp = fast.wrap(module, 2)
    for _ in range(12):
        same(dp(ints(4, 3)).detach(), linear()(ints(4, 3)).detach())
    assert len(alive) <= 2 * 3


@row("A8", "J1")
@pytest.mark.parametrize("forward", LEFT)
def test_methods_of_the_base_beside_aliases(fast, forward):
    module, alive = counted(forward)
    module.first = module.lin.forward
    dp = fast.wrap(module, 2)
    for _ in range(4):
        same(dp(ints(4, 3)).detach(), linear()(ints(4, 3)).detach())
        assert len(alive) == 2


@row("A8", "J1")
def test_methods_of_the_base_are_bound_anew_and_counted(fast):
    module, alive = counted(lambda self, x: self.first(x))
    module.first = module.lin.forward
    module.second = module.lin.extra_repr
    dp = fast.wrap(module, 2)
    for _ in range(4):
        same(dp(ints(4, 3)).detach(), linear()(ints(4, 3)).detach())
        assert len(alive) == 2


@row("G3", why="hand-written forward")
def test_a_hand_written_forward_without_gather_keeps_memory_flat(fast):
    class Hand(fast.api.DataParallel):
        def forward(self, *inputs):
            rows, named = self.scatter(inputs, {}, self.device_ids)
            made = self.replicate(self.module, self.device_ids[: len(rows)])
            return self.parallel_apply(made, rows, named)

    copies = []

    def forward(self, x):
        alive.add(self)
        copies.append(weakref.ref(self.lin.weight))
        return self.lin(x)

    alive = weakref.WeakSet()
    module = Apply(forward)
    dp = fast.wrap_as(Hand, module, 3)
    counts = []
    for _ in range(12):
        dp.zero_grad()
        sum(out.sum().to("cpu") for out in dp(ints(6, 3))).backward()
        living = {id(ref()) for ref in copies if ref() is not None}
        counts.append((len(alive), len(living)))
    assert counts == [(3, 3)] * 12
    want = linear()
    want(ints(6, 3)).sum().backward()
    same(grads(module.lin), grads(want))
