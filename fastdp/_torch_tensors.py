"""Private attributes of torch's tensors that fastdp uses, each behind a function, and what happens
where a torch lacks it. tests/test_torch_compat.py checks the table against the source."""

from __future__ import annotations

import functools
from typing import List

import torch

# name -> (where it lives, what fastdp does without it)
PRIVATE = {
    "_make_subclass": ("torch.Tensor", "none: parameters of a subclass raise"),
    "_foreach_norm": ("torch", "norms of gradients are taken one by one"),
}


def as_parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    """The tensor as an `nn.Parameter` that does not require grad itself: a Function that returns it
    makes it a non-leaf parameter with a grad_fn. Shares memory and version counter."""
    if type(tensor) is not torch.nn.Parameter:  # a subclass may have a detach of its own
        return torch.Tensor._make_subclass(torch.nn.Parameter, tensor, False)
    alias = tensor.detach()
    become_parameter(alias)
    return alias


def become_parameter(tensor: torch.Tensor) -> None:
    """`as_parameter` in place, for a tensor that nobody else holds yet: as torch's lazy parameters
    become ordinary ones, and at a tenth of the cost."""
    tensor.__class__ = torch.nn.Parameter


def increment_versions(tensors: List[torch.Tensor]) -> None:
    """Each was written past torch. A torch before 2.5 takes them one by one."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except (RuntimeError, TypeError, ValueError):
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)


def foreach_norm(
    tensors: List[torch.Tensor], order: float, dtype: torch.dtype
) -> List[torch.Tensor]:
    """The norm of each tensor, computed in `dtype`; all of one dtype, none empty."""
    if _norms_take_dtype():
        return list(torch._foreach_norm(tensors, order, dtype=dtype))
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


@functools.cache
def _norms_take_dtype() -> bool:
    try:
        torch._foreach_norm([torch.ones(1)], 2, dtype=torch.float64)
    except (AttributeError, TypeError):
        return False
    return True
