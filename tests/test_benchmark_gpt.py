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


def test_an_untrained_one_guesses(small):
    ids = torch.randint(0, WORDS, (8, 33))
    assert small(ids).item() == pytest.approx(math.log(WORDS), rel=0.1)


def test_no_word_sees_a_later_one(small):
    small.double()
    ids = torch.randint(0, WORDS, (2, 12))
    other = ids.clone()
    other[:, 9] = (ids[:, 9] + 1) % WORDS
    seen = []
    small.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    small(ids), small(other)
    same = torch.isclose(*seen).flatten(2).all(2)
    assert same[:, :9].all() and not same[:, 9:].any()


def test_it_has_the_size_of_gpt2():
    module = models.MODELS["gpt-causal"].make(torch.device("meta"))
    assert sum(p.numel() for p in module.parameters()) == 124_439_808
    assert module.last.weight is module.words.weight
