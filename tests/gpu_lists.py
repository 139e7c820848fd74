"""Lists of GPUs that tests run on: one listed several times, two, and, where there are more, all of
them, in other orders, and parts without the first. A test skips the lists that a machine is too
small for.

`pytest --gpus 7,6,5,4` gives the tests that take "several GPUs" (conftest.py, engine_cases.py)
these in this order: each once, or one GPU again and again. Else they are all that there are.
"""

import pytest
import torch

ON_ONE = (0,) * 8
# Home is not the first GPU, nor are ranks the numbers of GPUs.
PAIRS = [(2, 3), (3, 1)]
FOUR = [(0, 1, 2, 3), (3, 2, 1, 0), (1, 2, 3, 0)]
EIGHT = [tuple(range(8)), tuple(reversed(range(8))), (5, 6, 7, 0, 1, 2, 3, 4), (7, 2, 5)]
MANY = [*PAIRS, *FOUR, *EIGHT]

_chosen = []


def choose(text):
    """What --gpus says. ValueError if it says nothing that can be had."""
    numbers = [int(word) for word in text.split(",") if word.strip().isdigit()]
    if len(numbers) < len(text.split(",")):
        raise ValueError(f"--gpus is {text!r}: it must be numbers of GPUs, such as 3,2,1,0")
    count = torch.cuda.device_count()
    if max(numbers) >= count:
        raise ValueError(f"--gpus is {text!r}: torch sees {count} GPUs")
    _chosen[:] = numbers


def several():
    """The GPUs of tests that take several, in the order of ranks."""
    return list(_chosen) or list(range(torch.cuda.device_count()))


def are_several():
    return bool(_chosen) or torch.cuda.device_count() > 1


def lacking(ids):
    """Why a list cannot be had here, or None."""
    is_there = max(ids) < torch.cuda.device_count()
    return None if is_there else f"needs {max(ids) + 1} GPUs"


def need(ids):
    reason = lacking(ids)
    if reason is not None:
        pytest.skip(reason)
    return list(ids)


def on_way(way, monkeypatch):
    """The list of a way, a setting of FASTDP_OVERLAP and the list, with that set."""
    overlap, *found = way
    need(found)
    monkeypatch.setenv("FASTDP_OVERLAP", overlap)
    return found


def here(lists):
    """Those that this machine has GPUs for."""
    return [list(ids) for ids in lists if lacking(ids) is None]
