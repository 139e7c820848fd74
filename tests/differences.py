"""What the tests of README.md's tables "What differs from nn.DataParallel" share: both sides, each
with two replicas on the host, and the rows that have a test.
"""

from pathlib import Path

import fastdp
import oracle
import torch
from nets import Apply, ints

THEIRS, OURS = "nn.DataParallel", "fastdp"


class Rows(dict):
    """First cells of the page's rows, and their tests."""

    def __call__(self, cell):
        def register(test):
            self[cell] = test
            return test

        return register


def cells(*titles):
    """The first cells of the tables below these titles."""
    page = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    section = page.split("\n## What differs from nn.DataParallel\n")[1].split("\n## ")[0]
    found = []
    for title in titles:
        table = section.split(f"\n{title}:\n\n")[1].split("\n\n")[0]
        found += [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    return found


def wrap(side, module, base=None, **options):
    if side == THEIRS:
        return (base or oracle.DataParallel)(module, device_ids=[0, 1])
    return (base or fastdp.DataParallel)(module, device_ids=["cpu", "cpu"], **options)


def call(side, forward, *args, **kwargs):
    """What a wrapped module with this forward returns for two replicas of two rows each."""
    return wrap(side, Apply(forward))(*(args or (ints(4, 3),)), **kwargs)


def per_replica(side, look):
    """look(replica) of each replica, in no order."""
    seen = []
    call(side, lambda self, x: (seen.append(look(self)), x)[1])
    return seen


def rank_of(x):
    """Which replica a chunk of rows 0, 1 belongs to."""
    return int(x[0, 0])


def ranked():
    return torch.tensor([[0.0] * 3, [1.0] * 3], dtype=torch.float64)
