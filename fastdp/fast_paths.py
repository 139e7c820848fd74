"""What torch's layers of attention do as one operator where no gradient is wanted, step by step:
the shapes of its result tell nothing of the tensors that it makes for itself."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

import torch
import torch.nn.functional as F


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: Optional[torch.Tensor] = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: Optional[int] = None,
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """As `_native_multi_head_attention`, for one tensor that is query, key and value."""
    batch, length, _ = query.shape
    width = embed_dim // num_heads
    packed = F.linear(query, qkv_weight)
    if mask is None and not need_weights and width % 8 == 0 and _has_fused(query.device):
        return F.linear(torch.empty_like(query), proj_weight, proj_bias), None
    rows = torch.empty_like(packed).view(3, batch * num_heads, length, width)
    del packed
    scores = torch.bmm(rows[0], rows[1].transpose(1, 2))
    if mask is not None:
        scores = torch.empty_like(scores)  # else its softmax is taken in place
    weights = scores.view(batch, num_heads, length, length) if need_weights else None
    del scores
    # What they weigh is written where the queries were, and copied head beside head.
    output = F.linear(torch.empty_like(query), proj_weight, proj_bias)
    if weights is not None and average_attn_weights:
        weights = weights.sum(1)
    return output, weights


def encoder_layer(
    source: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    epsilon: float,
    first_norm_weight: torch.Tensor,
    first_norm_bias: torch.Tensor,
    second_norm_weight: torch.Tensor,
    second_norm_bias: torch.Tensor,
    first_weight: torch.Tensor,
    first_bias: torch.Tensor,
    second_weight: torch.Tensor,
    second_bias: torch.Tensor,
    mask: Optional[torch.Tensor] = None,
    mask_type: Optional[int] = None,
) -> torch.Tensor:
    """As `_transformer_encoder_layer_fwd`. What it does in place takes no memory."""

    def first_norm(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (embed_dim,), first_norm_weight, first_norm_bias, epsilon)

    def second_norm(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (embed_dim,), second_norm_weight, second_norm_bias, epsilon)

    x = first_norm(source) if norm_first else source
    projections = qkv_weight, qkv_bias, proj_weight, proj_bias
    x = attention(x, x, x, embed_dim, num_heads, *projections, mask, False)[0]
    if not norm_first:
        x = first_norm(x)
    before = x
    if norm_first:
        x = second_norm(x)
    x = F.linear(F.linear(x, first_weight, first_bias), second_weight, second_bias)
    del before
    return x if norm_first else second_norm(x)


def _has_fused(device: torch.device) -> bool:
    """Whether attention without a mask is a fused one, which reads the projections as they lie."""
    if device.type != "cuda":
        return False
    kinds = torch.backends.cuda
    return kinds.flash_sdp_enabled() or kinds.mem_efficient_sdp_enabled()


# By overload packet, which a torch may lack.
IN_STEPS: Dict[Any, Callable[..., Any]] = {
    getattr(torch.ops.aten, name): steps
    for name, steps in {
        "_native_multi_head_attention": attention,
        "_transformer_encoder_layer_fwd": encoder_layer,
    }.items()
    if hasattr(torch.ops.aten, name)
}
