"""BEHAVIOUR I: errors of replicas, what the threads carry, calls inside and beside calls."""

import contextvars
import threading

import pytest
import torch
from nets import Apply, Net, grads, ints, linear, ranked, same
from torch import nn

row = pytest.mark.row


def failing(make, *ranks):
    """A module that raises make() on the given replicas."""

    def forward(self, x):
        if int(x[0, 0]) in ranks:
            raise make()
        return self.lin(x)

    return Apply(forward)


class TwoArguments(Exception):
    def __init__(self, first, second):
        super().__init__(first, second)
        self.first, self.second = first, second


class KeywordOnly(Exception):
    def __init__(self, *, code):
        super().__init__(code)
        self.code = code


class Picky(ValueError):
    """Refuses to be rebuilt from a text."""

    def __init__(self, number):
        if not isinstance(number, int):
            raise AssertionError("a number, please")
        super().__init__(number)


# Errors.


@row("I1")
@pytest.mark.parametrize("kind", [KeyError, ValueError, RuntimeError, StopIteration, OSError])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_error_says_where(impl, kind, rank):
    dp = impl.wrap(failing(lambda: kind("the key"), rank), 3)
    with pytest.raises(kind) as caught:
        dp(ranked(3))
    text = str(caught.value)
    device = impl.ids(3)[rank] if impl.is_oracle else impl.device(rank)
    assert f"Caught {kind.__name__} in replica {rank} on device {device}." in text
    assert "Original Traceback (most recent call last)" in text
    assert "in forward" in text and "test_behaviour_threads.py" in text and "the key" in text
    same(dp(ranked(3) * 0 - 1), linear()(ranked(3) * 0 - 1))


@row("I1")
def test_error_keeps_the_original_as_cause(fast):
    original = ValueError("first", 2)
    with pytest.raises(ValueError) as caught:
        fast.wrap(failing(lambda: original, 1), 2)(ranked(2))
    assert caught.value.__cause__ is original and original.args == ("first", 2)


@row("I1")
def test_first_by_rank_is_raised_and_all_finish(impl):
    finished = []

    def forward(self, x):
        rank = int(x[0, 0])
        if rank == 2:
            raise ValueError("from two")
        if rank == 1:
            gate.wait(10)
            raise KeyError("from one")
        if rank == 3:
            gate.wait(10)
        finished.append(rank)
        return self.lin(x)

    gate = threading.Event()
    threading.Timer(0.05, gate.set).start()
    with pytest.raises(KeyError, match="from one"):
        impl.wrap(Apply(forward), 4)(ranked(4))
    assert sorted(finished) == [0, 3]


@row("I2")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "make", [lambda: TwoArguments(1, 2), lambda: KeywordOnly(code=3), lambda: Picky(4)]
)
def test_odd_constructors(fast, make, rank):
    kind = type(make())
    with pytest.raises((kind, RuntimeError)) as caught:
        fast.wrap(failing(make, rank), 2)(ranked(2))
    assert f"Caught {kind.__name__} in replica {rank}" in str(caught.value)
    assert type(caught.value.__cause__) is kind


@row("I1", why="keep the exception's type")
def test_type_is_kept_for_code_that_catches_its_own(fast):
    with pytest.raises(TwoArguments) as caught:
        fast.wrap(failing(lambda: TwoArguments(1, 2), 1), 2)(ranked(2))
    assert (caught.value.first, caught.value.second) == (1, 2)


@row("I1", why="mutant: SystemExit in a worker")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_base_exceptions_reach_the_caller(fast, kind, rank):
    dp = fast.wrap(failing(lambda: kind("out"), rank), 2)
    for _ in range(2):
        with pytest.raises(kind):
            dp(ranked(2))
    same(dp(ranked(2) - 5), linear()(ranked(2) - 5))


@row("I1")
def test_error_in_backward_of_a_replica(impl):
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("in backward")

    module = Apply(lambda s, x: Bad.apply(s.lin(x)) if x[0, 0] == 1 else s.lin(x))
    dp = impl.wrap(module, 2)
    with pytest.raises(KeyError, match="in backward"):
        dp(ranked(2)).sum().backward()
    module.zero_grad()
    dp(ranked(2) + 5).sum().backward()
    same(module.lin.bias.grad, torch.full((2,), 2.0).double())


@row("I1")
def test_errors_of_scatter_and_gather_leave_the_wrapper_usable(impl):
    dp = impl.wrap(Apply(lambda s, x, k=None: s.lin(x) if x.size(0) < 3 else x[0]), 2)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            dp(ints(4, 3), k=torch.tensor(1))
        with pytest.raises(RuntimeError):
            dp(ints(5, 3))
    same(dp(ints(4, 3)), linear()(ints(4, 3)))


# What the threads carry.


@row("I6")
def test_grad_mode_set_in_forward_does_not_leak(impl):
    seen = []

    def forward(self, x):
        seen.append(torch.is_grad_enabled())
        torch.set_grad_enabled(False)
        return self.lin(x)

    dp = impl.wrap(Apply(forward), 2)
    for _ in range(3):
        dp(ints(4, 3))
        assert torch.is_grad_enabled()
    assert seen == [True] * 6


@row("I6")
def test_inference_mode_reaches_replicas(fast):
    seen = []
    dp = fast.wrap(Apply(lambda s, x: seen.append(torch.is_inference_mode_enabled()) or x), 3)
    with torch.inference_mode():
        dp(ints(3, 3))
    dp(ints(3, 3))
    assert seen == [True] * 3 + [False] * 3


@row("I6")
def test_default_dtype_reaches_replicas(impl):
    seen = []
    dp = impl.wrap(Apply(lambda s, x: seen.append(torch.ones(1).dtype) or x), 2)
    dp(ints(2, 3))
    torch.set_default_dtype(torch.float64)
    try:
        dp(ints(2, 3))
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen == [torch.float32] * 2 + [torch.float64] * 2


@row("I6", why="saved-tensor hooks")
def test_saved_tensor_hooks_keep_the_numbers_right(impl):
    packed = []

    def pack(tensor):
        packed.append(1)
        return tensor.detach().clone()

    module, plain = Net(), Net()
    dp = impl.wrap(module, 2)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = dp(ints(4, 3))
    with torch.autograd.graph.save_on_cpu():
        second = dp(ints(4, 3))
    (out.sum() + second.sum()).backward()
    plain(ints(4, 3)).sum().backward()
    same(grads(module), {name: 2 * g for name, g in grads(plain).items()})


@row("I6", why="saved-tensor hooks")
def test_saved_tensor_hooks_reach_replica_0(fast):
    """And it alone: unpacking order makes carrying them further unsafe."""
    seen = set()
    dp = fast.wrap(Apply(lambda s, x: s.lin(x) ** 2), 3)

    def pack(tensor):
        seen.add(threading.get_ident())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        dp(ints(6, 3)).sum().backward()
    assert seen == {threading.get_ident()}


@row("I6", why="anomaly mode")
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.filterwarnings("ignore:Error detected in")
def test_anomaly_mode(impl):
    module = Apply(lambda s, x: torch.sqrt(s.lin(x) * 0))
    with torch.autograd.detect_anomaly():
        with pytest.raises(RuntimeError, match="returned nan values"):
            (impl.wrap(module, 2)(ints(4, 3)) * 0).sum().backward()


# Random numbers.


@row("I4", "I5")
def test_dropout_runs_and_masks(impl):
    dp = impl.wrap(nn.Dropout(0.5), 4)
    for _ in range(5):
        out = dp(torch.ones(64, 9).double())
        assert set(out.flatten().tolist()) == {0.0, 2.0}
    same(dp.eval()(torch.ones(8, 9)), torch.ones(8, 9))


@row("I4", "I5")
def test_dropout_on_devices_of_their_own(impl):
    """Each has its generator, seeded alike: the same again from one seed, and masks that coincide,
    as in torch's. (Replicas that share a generator: see sequential=True.)"""
    if impl.gpus < 2:
        pytest.skip("needs 2 GPUs, each with its generator")
    dp = impl.wrap(nn.Dropout(0.5), 2)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append(dp(torch.ones(8, 9).double()))
    same(runs[1], runs[0])
    same(runs[0][:4], runs[0][4:])
    torch.cuda.manual_seed_all(3)
    same(runs[0][:4], nn.functional.dropout(torch.ones(4, 9, device=impl.home).double(), 0.5))


@row("I4")
def test_dropout_backward_uses_the_masks_of_forward(impl):
    x = torch.ones(64, 4).double().requires_grad_()
    out = impl.wrap(nn.Dropout(0.5), 3)(x)
    out.sum().backward()
    same(x.grad, out)


@row("I6", why="context variables")
@pytest.mark.parametrize("n", [2, 3])
def test_context_variables(fast, n):
    """Replicas see the caller's; what they set, those on kept threads do not see again."""
    seen = []

    def forward(self, x):
        rank = int(x[0, 0])
        seen.append((rank, value.get()))
        if rank:
            value.set(100 + rank)
            assert value.get() == 100 + rank
        return self.lin(x)

    value = contextvars.ContextVar("value", default=0)
    dp = fast.wrap(Apply(forward), n)
    for given in (None, 5, 6):
        seen.clear()
        if given is not None:
            value.set(given)
        dp(ranked(n))
        assert sorted(seen) == [(rank, given or 0) for rank in range(n)]
        assert value.get() == (given or 0)
