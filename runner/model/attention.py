"""Causal self-attention and the key/value cache of generation.

Legend: B sequences, T tokens, H heads, D channels per head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class LayerCache:
    """Keys and values of one layer's past tokens, [B, H, capacity, D], filled up to `length`."""

    capacity: int
    length: int = 0
    keys: Tensor | None = None
    values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the new tokens' keys and values [B, H, T, D]; return those of all tokens so far."""
        if self.keys is None or self.values is None:
            shape = (*k.shape[:2], self.capacity, k.shape[-1])
            self.keys, self.values = k.new_empty(shape), v.new_empty(shape)
        end = self.length + k.shape[2]
        assert end <= self.capacity
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


@dataclass
class Cache:
    """What a model remembers of the tokens it has read, so that generation reads each only once."""

    batch: int
    layers: list[LayerCache] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens read so far."""
        return self.layers[0].length


def plain_attention(q: Tensor, k: Tensor, v: Tensor, *, dropout: float = 0.0) -> Tensor:
    """Attend from the last tokens of a sequence to it: q [B, H, T, D], k and v [B, H, S, D], S >= T."""
    queries, keys = q.shape[2], k.shape[2]
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    future = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(keys - queries + 1)
    weights = scores.float().masked_fill(future, -math.inf).softmax(-1).to(v.dtype)
    return torch.dropout(weights, dropout, dropout > 0) @ v
