"""Rarer kinds within BEHAVIOUR A, C and I: trees with cycles, forwards that rebuild themselves, odd
tensors, errors whose text is not their argument."""

import collections
import dataclasses
import subprocess
import threading

import numpy as np
import pytest
import torch
from nets import Apply, Net, grads, ints, linear, same
from torch import nn

row = pytest.mark.row


# Trees.


@row("A10", why="a child that registers its parent as a child")
def test_a_tree_with_a_cycle(impl):
    def forward(self, x):
        assert self.lin.parent is self
        return self.lin(x)

    module = Apply(forward)
    dp = impl.wrap(module, 2)
    module.lin.parent = module  # from here on torch's own `to` would recurse for ever
    for _ in range(2):
        same(out := dp(ints(4, 3)), linear()(ints(4, 3)))
    out.sum().backward()
    same(module.lin.weight.grad, ints(4, 3).sum(0).expand(2, 3))


@row("A10", why="parameters, buffers, children, modes")
def test_what_forward_registers_on_a_replica_is_dropped(impl):
    def forward(self, x):
        assert not hasattr(self, "extra") and not hasattr(self, "stash")
        assert not hasattr(self, "child") and self.training and self.lin.bias is not None
        y = self.lin(x)
        self.extra = nn.Parameter(torch.zeros(1))
        self.register_buffer("stash", torch.zeros(1))
        self.child = nn.Linear(1, 1)
        self.lin.bias = None
        self.eval()
        del self.lin
        return y

    module = Apply(forward)
    names = list(module.state_dict())
    dp = impl.wrap(module, 3)
    for _ in range(3):
        same(dp(ints(6, 3)), linear()(ints(6, 3)))
    assert list(module.state_dict()) == names and module.training
    assert list(dict(module.named_modules())) == ["", "lin"]


@row("A10", why="parameters() of a child replaced in forward")
def test_child_replaced_in_forward_is_used_and_dropped(impl):
    def forward(self, x):
        old = self.lin
        self.lin = nn.Sequential(old, nn.Flatten())
        return self.lin(x)

    module = Apply(forward)
    dp = impl.wrap(module, 2)
    for _ in range(2):
        same(out := dp(ints(4, 3)), linear()(ints(4, 3)))
    out.sum().backward()
    same(module.lin.weight.grad, ints(4, 3).sum(0).expand(2, 3))


class Sealed(nn.Module):
    """Its own __setattr__, __getattr__ and a property."""

    def __init__(self):
        super().__init__()
        self.lin = linear()
        super().__setattr__("sealed", True)

    def __setattr__(self, name, value):
        if self.__dict__.get("sealed"):
            raise AttributeError(f"sealed: {name}")
        super().__setattr__(name, value)

    def __getattr__(self, name):
        if name == "twice":
            return 2
        return super().__getattr__(name)

    @property
    def weight(self):
        return self.lin.weight

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.lin.bias) * self.twice


@row("A10", why="a module with its own __setattr__")
def test_module_with_its_own_attribute_access(fast):
    module = Sealed()
    out = fast.wrap(module, 2)(ints(4, 3))
    same(out, 2 * linear()(ints(4, 3)))
    out.sum().backward()
    same(module.lin.weight.grad, 2 * ints(4, 3).sum(0).expand(2, 3))


@row("A10", why="a module with its own _replicate_for_data_parallel")
def test_module_that_replicates_itself(impl):
    class Own(nn.Linear):
        def _replicate_for_data_parallel(self):
            replica = super()._replicate_for_data_parallel()
            replica.mark = "replicated"
            return replica

    seen = []
    own = Own(3, 2).double()
    module = Apply(lambda s, x: seen.append(s.own.mark) or s.own(x))
    module.own = own
    want = nn.functional.linear(ints(4, 3), own.weight.detach().clone(), own.bias.detach().clone())
    same(out := impl.wrap(module, 2)(ints(4, 3)), want)
    out.sum().backward()
    same(own.weight.grad, ints(4, 3).sum(0).expand(2, 3))
    assert seen == ["replicated"] * 2 and not hasattr(own, "mark")


# Odd tensors in the module.


ODD = {
    "expanded": lambda: torch.ones(1).double().expand(2),
    "strided": lambda: torch.arange(4.0).double()[::2],
    "overlapping": lambda: torch.arange(3.0).double().as_strided((2, 2), (1, 1)),
    "sparse": lambda: torch.tensor([0.0, 3.0]).double().to_sparse(),
    "zero-size": lambda: torch.zeros(0, 2).double(),
    "0-dim": lambda: torch.tensor(3.0).double(),
}


@row("A12", "D14", why="buffers of odd layouts; match or copy")
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("grad", [True, False])
def test_buffers_of_odd_layouts(impl, kind, grad):
    seen = []
    module = Apply(lambda s, x: seen.append(s.odd) or s.lin(x))
    module.register_buffer("odd", ODD[kind]())
    with torch.set_grad_enabled(grad):
        same(impl.wrap(module, 3)(ints(6, 3)), linear()(ints(6, 3)))
    assert len(seen) == 3
    for buffer in seen:
        assert buffer.layout == ODD[kind]().layout
        same(buffer.to_dense(), ODD[kind]().to_dense())


@row("A12", why="two buffers that are views of one storage")
def test_buffers_that_share_storage(impl):
    seen = []
    both = torch.arange(6.0).double()
    module = Apply(lambda s, x: seen.append((s.a.clone(), s.b.clone())) or s.lin(x))
    module.register_buffer("a", both[:4])
    module.register_buffer("b", both[2:])
    impl.wrap(module, 2)(ints(4, 3))
    for a, b in seen:
        same((a, b), (both[:4], both[2:]))


@row("F13", why="weights made under inference mode")
def test_weights_made_under_inference_mode(fast):
    with torch.inference_mode():
        # Moved later, outside, they would lack a version counter: torch's own modules fail so too.
        module = linear().to(fast.home)
    assert module.weight.is_inference()
    dp = fast.wrap(module, 2)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            same(dp(ints(4, 3)), module(ints(4, 3).to(fast.home)))


@row("A1", "H5", why="many replicas")
@pytest.mark.parametrize("n", [8, 16])
def test_many_replicas(impl, n):
    module, plain = Net(), Net()
    impl.wrap(module, n)(ints(3 * n, 3)).sum().backward()
    plain(ints(3 * n, 3)).sum().backward()
    same(grads(module), grads(plain))


# Results.


@row("C4", why="keys that are not strings")
def test_dict_keys_of_any_kind(impl):
    x = ints(4, 3)
    out = impl.wrap(Apply(lambda s, x: {0: x, (1, "a"): [x], None: x}), 2)(x)
    same(out, {0: x, (1, "a"): [x], None: x})


@row("C8", why="other leaves: NumPy arrays")
@pytest.mark.parametrize("length", [0, 1, 3])
def test_numpy_arrays_are_not_turned_into_garbage(fast, length):
    dp = fast.wrap(Apply(lambda s, x: np.zeros(length)), 2)
    with pytest.raises(TypeError, match="ndarray"):
        dp(ints(4, 3))


class Plain(collections.OrderedDict):
    pass


@row("C4")
@pytest.mark.parametrize("kind", [Plain, collections.defaultdict])
def test_dict_subclasses_are_rebuilt_or_refused(impl, kind):
    x = ints(4, 3)
    if kind is Plain:
        same(impl.wrap(Apply(lambda s, x: kind(x=x)), 2)(x), Plain(x=x))
        return
    with pytest.raises(TypeError):
        impl.wrap(Apply(lambda s, x: kind(list, {"x": x})), 2)(x)


# Errors whose text is not their first argument.


class Silent(Exception):
    def __str__(self):
        return "always this"


def decode_error():
    return UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


@row("I2")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "make",
    [
        Silent,
        decode_error,
        lambda: subprocess.CalledProcessError(3, "cmd"),
        lambda: FileNotFoundError(2, "No such file", "a.txt"),
        lambda: ImportError("no", name="mod"),
        lambda: StopIteration(5),
        ValueError,
    ],
    ids=lambda make: getattr(make, "__name__", None),
)
def test_the_place_is_in_the_text_of_every_error(fast, make, rank):
    """Either the type can carry the text, or a RuntimeError does; the original is the cause."""

    def forward(self, x):
        if int(x[0, 0]) == rank:
            raise make()
        return self.lin(x)

    x = torch.tensor([[0.0, 1, 1], [1.0, 1, 1]]).double()
    kind = type(make())
    with pytest.raises((kind, RuntimeError)) as caught:
        fast.wrap(Apply(forward), 2)(x)
    assert f"Caught {kind.__name__} in replica {rank}" in str(caught.value)
    assert "in forward" in str(caught.value)
    assert type(caught.value.__cause__) is kind


@row("I1", why="an error raised while another is handled keeps its chain")
def test_chained_errors_show_both(impl):
    def forward(self, x):
        try:
            raise KeyError("the first")
        except KeyError as error:
            raise ValueError("the second") from error

    with pytest.raises(ValueError, match=r"(?s)the first.*the second"):
        impl.wrap(Apply(forward), 2)(ints(4, 3))


@row("I1", why="the same error object raised by every replica, call after call")
def test_one_error_object_raised_again_and_again(fast):
    """A module-level singleton error must not gather a longer text or chain each time."""
    single = ValueError("one")

    def forward(self, x):
        raise single

    dp = fast.wrap(Apply(forward), 2)
    lengths = []
    for _ in range(4):
        with pytest.raises(ValueError) as caught:
            dp(ints(4, 3))
        lengths.append(len(str(caught.value)))
    assert len(set(lengths[1:])) == 1 and str(single) == "one"


@row("I3", why="thread names, daemons")
def test_worker_threads_are_daemons(fast):
    seen = []
    module = Apply(lambda s, x: seen.append(threading.current_thread()) or s.lin(x))
    fast.wrap(module, 3)(ints(6, 3))
    workers = [t for t in seen if t is not threading.current_thread()]
    assert len(workers) == 2 and all(t.daemon for t in workers)


class Keyed(dict):
    """A dictionary whose constructor takes a value, not items."""

    def __init__(self, x=None):
        super().__init__(x=x)


@dataclasses.dataclass
class Fielded(dict):
    x: object = None


@row("C4", "B11", why="a type that takes its items for a value")
@pytest.mark.parametrize("kind", [Keyed, Fielded])
def test_a_dict_that_takes_its_items_for_a_value_is_refused(fast, kind):
    def made(value):
        result = kind()
        result["x"] = value
        return result

    dp = fast.wrap(Apply(lambda s, x: made(s.lin(x))), 2)
    with pytest.raises(TypeError, match=f"output: {kind.__name__} takes"):
        dp(ints(4, 3))
    dp = fast.wrap(Apply(lambda s, batch: s.lin(batch["x"])), 2)
    with pytest.raises(TypeError, match=f"inputs\\[0\\]: {kind.__name__} takes"):
        dp(made(ints(4, 3)))
