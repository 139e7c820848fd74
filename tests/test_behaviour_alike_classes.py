"""BEHAVIOUR A, side by side with torch's own: modules whose classes are made in unusual ways, and
the caches that modules keep."""

import abc
import dataclasses
import functools
import gc
import typing
import weakref

import pytest
import torch
from alike import check, trained
from nets import Apply, ints, linear
from torch import nn

row = pytest.mark.row


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = linear()

    def forward(self, x):
        return self.lin(x)


class OwnNew(Base):
    """Its __new__ sets something; the replicas are made by it too."""

    def __new__(cls):
        made = super().__new__(cls)
        object.__setattr__(made, "factor", 3)
        return made

    def forward(self, x):
        return self.lin(x) * self.factor


class Slotted(Base):
    __slots__ = ("last",)

    def forward(self, x):
        self.last = x
        return self.lin(self.last)


class Meta(type):
    pass


class WithMeta(Base, metaclass=Meta):
    pass


class GenericAndAbstract(Base, typing.Generic[typing.TypeVar("T")], abc.ABC):
    pass


@dataclasses.dataclass(eq=False)
class Fielded(nn.Module):
    factor: int = 3

    def __post_init__(self):
        super().__init__()
        self.lin = linear()

    def forward(self, x):
        return self.lin(x) * self.factor


class WithProperty(Base):
    hidden = 2

    @property
    def factor(self):
        return self.hidden

    @factor.setter
    def factor(self, value):
        self.hidden = value

    def forward(self, x):
        out = self.lin(x) * self.factor
        self.factor = 5
        return out * self.factor


class Registered(Base):
    """Notes every construction: replicas are not constructed."""

    made: typing.ClassVar[list] = []

    def __init__(self):
        super().__init__()
        self.made.append(1)

    def forward(self, x):
        return self.lin(x) * len(self.made)


class CachedProperty(Base):
    @functools.cached_property
    def twice(self):
        return self.lin.weight * 2

    def forward(self, x):
        return nn.functional.linear(x, self.twice, self.twice.sum(1))


class CachedMethod(Base):
    @functools.lru_cache(maxsize=4)  # noqa: B019
    def twice(self):
        return self.lin.weight * 2

    def forward(self, x):
        return nn.functional.linear(x, self.twice())


class LazyAttribute(Base):
    positions = None

    def forward(self, x):
        if self.positions is None:
            self.positions = torch.arange(2.0, device=x.device).double()
        return self.lin(x) + self.positions


class LazyBuffer(Base):
    def forward(self, x):
        if not hasattr(self, "positions"):
            self.register_buffer("positions", torch.arange(2.0, device=x.device).double())
        return self.lin(x) + self.positions


class Callable(Base):
    """Calls a method that was bound when the module was made."""

    def __init__(self):
        super().__init__()
        self.callback = self.helper

    def helper(self, x):
        return self.lin(x) * 2

    def forward(self, x):
        return self.callback(x)


class WithKeywords(nn.Sequential):
    def __init__(self):
        super().__init__(linear(), nn.ReLU())

    def forward(self, x, **kwargs):
        for child in self:
            x = child(x)
        return x


CLASSES = [
    OwnNew, Slotted, WithMeta, GenericAndAbstract, Fielded, WithProperty, Registered,
    CachedProperty, CachedMethod, LazyAttribute, LazyBuffer, Callable, WithKeywords,
]  # fmt: skip


@row("A8", "A10", "A11", "A13")
@pytest.mark.parametrize("kind", CLASSES)
def test_classes_of_modules(kind, fast):
    """Two steps with an update between them: a cache that outlives its weights would show."""

    def case(wrap):
        Registered.made.clear()
        module = kind()
        dp = wrap(module)
        names = sorted(module.__dict__)
        results = []
        for _ in range(2):
            results.append(trained(module, dp, ints(4, 3)))
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(3)
        assert sorted(module.__dict__) == names
        return results, sorted(module.state_dict())

    check(case, fast)


@row("A11")
def test_a_cache_that_is_keyed_weakly_by_the_replica(fast):
    """It dies with torch's replicas; with fastdp's, which stay, it is as small as they are few."""
    cache = weakref.WeakKeyDictionary()

    def forward(self, x):
        cache[self] = cache.get(self, 0) + 1
        return self.lin(x)

    dp = fast.wrap(Apply(forward), 2)
    for _ in range(5):
        dp(ints(4, 3)).sum().backward()
    gc.collect()
    assert len(cache) == 2 and set(cache.values()) == {5}
