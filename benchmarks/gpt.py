"""A GPT of GPT-2's size, written out: attention is one call of `scaled_dot_product_attention` with
`is_causal=True`, where transformers' GPT-2 hands it a mask. Weights of the embedding and of the
last layer are tied; the loss is computed inside."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, LAYERS, WORDS, LENGTH = 768, 12, 12, 50257, 1024


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.query_key_value(self.norm_1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.widen(self.norm_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """forward(ids) is the loss of predicting each word from those before it. `ids` are int64, of
    shape (batch, length), with length at most 1,024 as GPT-2's."""

    def __init__(
        self, width: int = WIDTH, heads: int = HEADS, layers: int = LAYERS, words: int = WORDS
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(LENGTH, width)
        nn.init.normal_(self.words.weight, std=0.02)  # it gives the scores, too
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, words, bias=False)
        self.last.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.size(1), device=ids.device)
        x = self.norm(self.blocks(self.words(ids) + self.places(places)))
        scores = self.last(x[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())
