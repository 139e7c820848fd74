"""Ctrl-C while fastdp.patch() is put on or undone: nn.DataParallel is torch's own afterwards, and
can be patched again."""

import pytest
from interrupting import interrupt_at
from torch import nn

import fastdp

# Points of a whole undo are many: it looks at all objects.
POINTS = {"put on": range(3, 1500, 31), "undone": range(2, 120, 7)}


def as_it_is():
    function = nn.parallel.data_parallel.__code__
    return dict(vars(nn.DataParallel)), function, fastdp.DataParallel


@pytest.mark.parametrize("step", POINTS)
def test_an_interrupt_while_it_is(step):
    before, struck = as_it_is(), 0
    for point in POINTS[step]:
        handle = fastdp.patch() if step == "undone" else None
        try:
            with interrupt_at(point) as where:
                if step == "undone":
                    handle.undo()
                else:
                    handle = fastdp.patch()
        except KeyboardInterrupt:
            struck += 1
        if handle is not None:
            handle.undo()
        if not where:
            break
        assert as_it_is() == before, where
    assert struck > 10
    with fastdp.patch():
        assert as_it_is() != before
    assert as_it_is() == before
