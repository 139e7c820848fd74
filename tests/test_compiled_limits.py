"""Compiled replicas whose calls are new at each step: nothing compiles for ever or piles up."""

import fastdp
import pytest
import torch
from compiled_cases import Net, Twins, count_for
from fastdp import compiled
from torch import nn

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]


def test_a_new_length_each_step_does_not_compile_for_ever(fast):
    twins = Twins(fast, Net())
    counts = []
    for length in (6, 8, 10, 12, 14, 16, 18, 20):
        twins.step(twins.rows(length))
        counts.append(twins.count)
    assert counts[-1] == counts[3]
    assert [form["kind"] for form in twins.forms].count("one size") == 2
    assert "any size" in [form["kind"] for form in twins.forms]
    assert twins.reasons == []


def test_an_attribute_that_changes_at_each_step_does_not_compile_for_ever(fast):
    twins = Twins(fast, Net())
    for step in range(12):
        twins.each(lambda module, step=step: setattr(module, "rate", 1.0 + step))
        twins.step(twins.rows())
    assert twins.count <= 10 * count_for(fast, 2)
    assert "limit" in twins.reasons[0].lower()


def test_a_number_that_changes_at_each_step_does_not_compile_for_ever(fast):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, factor):
            return self.layer(x) * factor

    twins, counts = Twins(fast, Scaled()), []
    for step in range(6):
        twins.step(twins.rows(), 1.5 + step)
        counts.append(twins.count)
    assert counts[-1] == counts[3] and twins.reasons == []


def test_a_kind_that_is_new_at_each_step_leaves_nothing(monkeypatch):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, name):
            return self.layer(x)

    monkeypatch.setattr(compiled, "_MAX_FAMILIES", 3)
    dp = fastdp.DataParallel(Named(), ["cpu", "cpu"], compile={"backend": "eager"})
    x = torch.ones(4, 4)
    for step in range(6):
        torch.testing.assert_close(dp(x, f"step {step}"), dp.module(x, ""))
    found = dp._fastdp_compiled
    assert found.count == len(found._families) == 3
    assert found.reasons == ["more than 3 kinds of arguments"]
    dp(x, "step 0")  # what is compiled stays so
    assert found.count == 3
