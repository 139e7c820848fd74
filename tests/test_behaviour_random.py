"""BEHAVIOUR B and C at random: whatever torch's own does with a call without an error, fastdp does
too: the same arguments for each replica, the same result, the same gradients."""

import collections
import random
import warnings

import oracle
import pytest
import torch
from nets import same
from torch import nn

row = pytest.mark.row

Pair = collections.namedtuple("Pair", "a b")


class Mine(dict):
    pass


class Calls:
    """Random calls: trees of tensors, most of them as long as the batch, and constants."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.batch = self.random.randint(1, 7)
        self.replicas = self.random.randint(2, 4)
        self.dim = self.random.choice([0, 0, 0, 1, -1])
        self.count = 0

    def tensor(self):
        rows = self.random.choice([self.batch] * 6 + [1, 9])
        shape = self.random.choice([(rows, 3), (rows, 2, 2), (rows, 1), (rows, 4)])
        self.count += 1
        tensor = torch.arange(float(torch.Size(shape).numel())).reshape(shape).double()
        tensor += 100 * self.count
        kind = self.random.choice(["plain", "whole", "grad", "transposed", "half"])
        if kind == "whole":
            return tensor.long()
        if kind == "half":
            return tensor.half()
        if kind == "transposed":
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)
        return tensor.requires_grad_(kind == "grad")

    def tree(self, depth=0):
        if depth > 2 or self.random.random() < 0.5:
            is_constant = self.random.random() < 0.1
            return self.random.choice([None, 3, "s"]) if is_constant else self.tensor()
        kind = self.random.choice([list, tuple, dict, Pair, collections.OrderedDict, Mine])
        if kind is Pair:
            return Pair(self.tree(depth + 1), self.tree(depth + 1))
        items = [self.tree(depth + 1) for _ in range(self.random.randint(0, 3))]
        return kind(zip("zyx", items)) if issubclass(kind, dict) else kind(items)

    def arguments(self):
        positional = tuple(self.tree() for _ in range(self.random.randint(0, 3)))
        named = {name: self.tree() for name in "kl"[: self.random.randint(0, 2)]}
        return positional, named


class Echo(nn.Module):
    """Notes its arguments; gives its tensors back, those of double precision times a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 2.0, dtype=torch.float64))
        self.seen = []

    def forward(self, *args, **kwargs):
        self.seen.append((args, kwargs))
        return self.scaled([args, kwargs])

    def scaled(self, tree):
        if isinstance(tree, torch.Tensor):
            return tree * self.scale if tree.dtype == torch.float64 else tree
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            return type(tree)(*map(self.scaled, tree))
        if isinstance(tree, dict):
            return type(tree)((key, self.scaled(value)) for key, value in tree.items())
        return type(tree)(map(self.scaled, tree)) if isinstance(tree, (list, tuple)) else None


def tensors_of(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    if not isinstance(tree, (list, tuple, dict)):
        return []
    children = tree.values() if isinstance(tree, dict) else tree
    return [tensor for child in children for tensor in tensors_of(child)]


def first_of(arguments):
    """A number that says which replica's arguments these are."""
    return [float(t.detach().flatten()[0]) for t in tensors_of(arguments)]


def outcome(cls, ids, home, seed):
    """(what each replica got, the result, the gradients), or the error."""
    calls = Calls(seed)
    args, kwargs = calls.arguments()
    module = Echo().to(home)
    dp = cls(module, device_ids=ids(calls.replicas), dim=calls.dim)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = dp(*args, **kwargs)
    except Exception as error:
        return error
    total = sum(t.double().sum() for t in tensors_of(out) if t.requires_grad)
    if isinstance(total, torch.Tensor):
        total.backward()
    leaves = [t.grad for t in tensors_of([args, kwargs]) if t.requires_grad]
    return sorted(module.seen, key=first_of), out, [module.scale.grad, *leaves]


@row("B8", "B11", "C11", "C4", "C5")
@pytest.mark.parametrize("block", range(6))
def test_what_torch_does_without_an_error_is_done_alike(fast, block):
    compared = 0
    for seed in range(100 * block, 100 * block + 100):
        want = outcome(oracle.DataParallel, lambda n: list(range(n)), torch.device("cpu"), seed)
        got = outcome(fast.api.DataParallel, fast.ids, fast.home, seed)
        if isinstance(want, Exception):
            continue  # refused as well, or better
        assert not isinstance(got, Exception), f"seed {seed}: {got}"
        if len(got[0]) < len(want[0]):
            # Constants or empty containers called replicas for which there was a tensor too few.
            counts = [len(tensors_of(arguments)) for arguments in want[0]]
            assert min(counts) < max(counts)
            continue
        try:
            same([list(arguments) for arguments in got[0]], [list(a) for a in want[0]])
            same(list(got[1:]), list(want[1:]))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        compared += 1
    assert compared > 50, f"{compared} calls of 100 could be compared"
