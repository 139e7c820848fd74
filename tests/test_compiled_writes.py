"""Compiled replicas whose forwards write parameters, or buffers that lie in each other."""

import pytest
import torch
from compiled_cases import Twins
from torch import nn

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]


class Follows(nn.Module):
    """A parameter that the forward writes, as a key encoder's momentum; and a forward that fails
    behind that."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.steps = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.fails = False

    def forward(self, x):
        with torch.no_grad():
            self.steps.add_(1)
        if self.fails:
            raise LookupError("the forward fails")
        return self.layer(x) + self.steps


@pytest.mark.parametrize("first", [True, False], ids=["at first", "later"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_forward_that_fails_writes_its_parameters_once(fast, n, first):
    twins = Twins(fast, Follows(), n=n)
    if not first:
        twins.step(twins.rows())
    for k in range(2):
        for dp in twins.both:
            dp.module.fails = True
            with pytest.raises(LookupError, match="the forward fails"):
                dp(twins.rows())
            dp.module.fails = False
            assert dp.module.steps.tolist() == [k + 1.0 + (not first)] * 4
    twins.step(twins.rows())
    assert twins.compiled.module.steps.tolist() == [3.0 + (not first)] * 4


class Meeting(nn.Module):
    """Replicas have copies of these buffers that lie apart."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        whole = torch.ones(2, 4, dtype=torch.float64)
        self.register_buffer("whole", whole)
        self.register_buffer("part", whole[1])

    def forward(self, x):
        with torch.no_grad():
            self.part.mul_(-0.5)
        return self.layer(x) + self.whole.sum(0)


@pytest.mark.parametrize("n", [1, 2])
def test_buffers_that_lie_in_each_other(fast, n):
    """What was compiled for the module's own is wrong for a replica's."""
    made = [Meeting().double().to(fast.home) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    for module in made:
        module.part = module.whole[1]
    compiled = fast.wrap(made[0], n, compile={"backend": "aot_eager"})
    plain = fast.wrap(made[1], n)
    x = torch.ones(6, 4, dtype=torch.float64, device=fast.home)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), plain(x), rtol=0, atol=1e-12)
        torch.testing.assert_close(made[0].whole, made[1].whole, rtol=0, atol=0)
    reasons = compiled.report()["compiled"]["reasons"]
    assert reasons == (["buffers that share memory"] if n > 1 else [])
