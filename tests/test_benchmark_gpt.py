"""benchmarks/gpt.py: a GPT indeed."""

import math
import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))

import gpt  # noqa: E402
import models  # noqa: E402

WORDS = 100


@pytest.fixture
def small():
    return gpt.Gpt(64, 4, 2, WORDS)


def loss_at(module, ids, place):
    """Of the one word at `place`, predicted from those before it."""
    return module(ids[:, : place + 1]) * place - (module(ids[:, :place]) * (place - 1))


def test_an_untrained_one_guesses(small):
    ids = torch.randint(0, WORDS, (8, 33))
    assert small(ids).item() == pytest.approx(math.log(WORDS), rel=0.1)


def test_nothing_is_seen_before_its_time(small):
    """The loss of the first words does not know of later ones: it is that of the shorter rows."""
    small.double()
    ids = torch.randint(0, WORDS, (2, 12))
    other = ids.clone()
    other[:, 9] = (ids[:, 9] + 1) % WORDS
    for place in range(2, 9):
        assert loss_at(small, ids, place).item() == loss_at(small, other, place).item()
    assert small(ids).item() != small(other).item()


def test_it_has_the_size_of_gpt2():
    module = models.MODELS["gpt-causal"].make(torch.device("meta"))
    assert sum(p.numel() for p in module.parameters()) == 124_439_808
    assert module.last.weight is module.words.weight
