"""Gradients that lie side by side are few tensors, in whatever storages they lie."""


import torch
from fastdp.flat_gradients import joined
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn


@st.composite
def layouts(draw):
    """Gradients cut out of a few storages, with gaps, in any order."""
    gradients, memories = [], []
    for _ in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
        memory, start = torch.zeros(400, dtype=dtype), 0
        memories.append(memory)
        for rows, columns, gap, kind in draw(
            st.lists(
                st.tuples(
                    st.integers(0, 3), st.integers(1, 3), st.sampled_from([0, 0, 1, 4]),
                    st.sampled_from(["plain", "plain", "turned", "every other"]),
                ),
                max_size=8,
            )
        ):  # fmt: skip
            count = rows * columns
            if kind == "every other":
                piece = memory[start : start + 2 * count : 2]
                start += 2 * count + gap
            else:
                piece = memory[start : start + count].view(rows, columns)
                start += count + gap
            gradients.append(piece.t() if kind == "turned" else piece)
    return draw(st.permutations(gradients)), memories


@settings(deadline=None, max_examples=150)
@given(layouts(), st.integers(0, 5))
def test_joined_tensors_are_the_gradients_and_nothing_else(found, fill):
    """Each element of each once: also from the second time on, when it is remembered."""
    gradients, memories = found
    owner = nn.Module()
    for value in (1, 2):
        for memory in memories:
            memory.fill_(-9)
        for gradient in gradients:
            gradient.fill_(value)
        parts = joined(owner, gradients)
        assert sum(part.numel() for part in parts) == sum(g.numel() for g in gradients)
        for part in parts:
            assert part.eq(value).all()
            part.add_(10)
        assert all(gradient.eq(value + 10).all() for gradient in gradients)
        touched = sum(memory.ne(-9).sum().item() for memory in memories)
        assert touched == sum(g.numel() for g in gradients)
    assert len(parts) <= len(gradients)
