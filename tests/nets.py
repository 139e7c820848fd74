"""Small models and exact numbers for the tests of the wrapper.

Weights and inputs are small integers in fp64, so every sum is exact in any order and tests can ask
for equality. `by_hand` is data parallelism in ten lines, for models whose arithmetic rounds: one
copy of the module per chunk, gradients summed in rank order.
"""

import collections
import copy
import threading

import pytest
import torch
from torch import nn

# For models that round (norms, RNNs): a few hundred operations of relative error 2**-53.
CLOSE = {"rtol": 1e-11, "atol": 1e-11}

# Without a list all GPUs are taken, where there are some; else the module is called itself.
NO_LIST = pytest.param(
    None,
    id="direct",
    marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs no GPU: all would be taken"),
)


def exact(module, seed=0):
    """Integers in -3..3 as weights, in place; fp64."""
    generator = torch.Generator().manual_seed(seed)
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            values = torch.randint(-3, 4, parameter.shape, generator=generator)
            parameter.copy_(values.to(parameter.dtype))
    return module


def ints(*shape, seed=1, grad=False):
    """Integers in -4..4; fp64."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-4, 5, shape, generator=generator).double()
    return values.requires_grad_(grad)


def ranked(n, width=3):
    """A batch of n samples whose first element is the replica's number."""
    x = torch.ones(n, width).double()
    x[:, 0] = torch.arange(n)
    return x


def linear(seed=0):
    return exact(nn.Linear(3, 2), seed)


class Net(nn.Module):
    """Two layers with a square between them: a nonlinearity that keeps integers."""

    def __init__(self, seed=0):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)
        exact(self, seed)

    def forward(self, x):
        return self.second(self.first(x) ** 2)


Pair = collections.namedtuple("Pair", "a b")


class Recorder(nn.Module):
    """Keeps what each replica was called with, in the order in which the replicas ran."""

    def __init__(self):
        super().__init__()
        self.lin = linear()
        self.calls = []

    def forward(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return self.lin.bias.expand(1, 2)


class Apply(nn.Module):
    """A module with one Linear(3, 2) whose forward is the function given."""

    def __init__(self, function, seed=0):
        super().__init__()
        self.lin = nn.Linear(3, 2)
        self.function = function
        exact(self, seed)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def calls_of(fast, n, args=(), kwargs=None, **options):
    """(args, kwargs) of each replica, by rank."""
    module = Recorder()
    fast.wrap(module, n, sequential=True, **options)(*args, **(kwargs or {}))
    return module.calls


def gathered(impl, forward, n=2, x=None, **options):
    """The wrapper's result for a forward written as a function of (self, x)."""
    return impl.wrap(Apply(forward), n, **options)(ints(4, 3) if x is None else x)


def same(got, want):
    """Equality of two trees of tensors: structure, types, shapes, dtypes, values."""
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor), f"got a {type(got).__name__}: {got!r}"
        torch.testing.assert_close(got.detach().cpu(), want.detach().cpu(), rtol=0, atol=0)
    elif isinstance(want, dict):
        assert type(got) is type(want)
        assert list(got) == list(want)
        for key in want:
            same(got[key], want[key])
    elif isinstance(want, (list, tuple)):
        assert type(got) is type(want)
        assert len(got) == len(want)
        for left, right in zip(got, want, strict=True):
            same(left, right)
    else:
        assert type(got) is type(want)
        assert got == want


def close(got, want, **bound):
    torch.testing.assert_close(got.detach().cpu(), want.detach().cpu(), **(bound or CLOSE))


def grads(module):
    """Copies of the gradients by name; None stays None."""
    return {
        name: None if p.grad is None else p.grad.detach().cpu().clone()
        for name, p in module.named_parameters()
    }


def by_hand(module, x, n, clone=copy.deepcopy):
    """(output, gradients by name, copy 0 of the module) of n clones of `module` on chunks of x,
    where x is. A clone is moved even if it is there already: that lays out an RNN's weights."""
    copies = [clone(module).to(x.device) for _ in x.chunk(n)]
    outputs = [replica(chunk) for replica, chunk in zip(copies, x.chunk(n), strict=True)]
    output = torch.cat(outputs)
    output.sum().backward()
    total = {}
    for name, parameter in copies[0].named_parameters():
        terms = [dict(c.named_parameters())[name].grad for c in copies]
        terms = [t for t in terms if t is not None]
        total[name] = sum(terms) if terms else torch.zeros_like(parameter)
    return output.detach(), total, copies[0]


def check_against_hand(impl, module, x, n, bound=None, clone=copy.deepcopy):
    """Forward and backward of the wrapped `module` are those of `by_hand` on its home device: the
    host's rounding is not a GPU's (CUDA's weight_norm has a square root of single precision).
    Returns (wrapper, copy 0 of the reference). `bound` None asks for equality."""
    want, want_grads, reference = by_hand(module, x.to(impl.home), n, clone)
    wrapped = impl.wrap(module, n)
    got = wrapped(x)
    got.sum().backward()
    check = close if bound else same
    check(got, want, **(bound or {}))
    for name, gradient in grads(module).items():
        assert gradient is not None, f"{name} has no gradient"
        check(gradient, want_grads[name], **(bound or {}))
    return wrapped, reference


def as_a_loader_that_pins_memory():
    """One of torch's threads asks for one thread of the operators; torch takes that for all threads
    that begin from now on."""
    thread = threading.Thread(target=torch.set_num_threads, args=(1,))
    thread.start()
    thread.join()
