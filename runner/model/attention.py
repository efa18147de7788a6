"""Causal self-attention and the key/value cache of generation.

Legend: B sequences, T tokens, S tokens to look at, H heads, D channels per head, C = H * D.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.model import compiled
from runner.model.compiled_layers import SplitHeads
from runner.model.layers import Kernels, is_compiled, is_fast
from runner.model.llama_layers import rotate

BLOCK = 128  # queries that share one matrix product; keys after them are not computed
KEPT_BYTES = 32 << 20  # attention weights of a layer up to this size are kept for the backward pass


@dataclass
class LayerCache:
    """Keys and values of one layer's past tokens, [batch, H, capacity, D], filled up to `length`."""

    batch: int
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
        assert k.shape[0] == self.batch
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


@dataclass
class Cache:
    """What a model remembers of the tokens it has read, so that generation reads each only once."""

    layers: list[LayerCache] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens read so far."""
        return self.layers[0].length


def attention(q: Tensor, k: Tensor, v: Tensor, *, kernels: Kernels, dropout: float = 0.0) -> Tensor:
    """Attend causally from the last T tokens of a sequence to all its S tokens; return [B, H, T, D].

    q [B, H, T, D]; k and v [B, G, S, D] with S >= T, where G divides H: query head h reads
    key/value head h * G // H (grouped-query attention, Ainslie et al. 2023).
    """
    heads, groups = q.shape[1], k.shape[1]
    if groups != heads:
        k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
    whole = q.shape[2] == k.shape[2]
    if whole and dropout == 0.0 and is_fast(q, kernels):
        y: Tensor = _BlockCausal.apply(q, k, v)  # type: ignore[no-untyped-call]
        return y
    if whole and kernels == "fast" and not is_fast(q, kernels):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
    return _plain(q, k, v, dropout=dropout)


def split_heads(
    qkv: Tensor,
    *,
    heads: int,
    groups: int,
    kernels: Kernels,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Part [B, T, (H + 2G)D] into queries [B, H, T, D], keys and values [B, G, T, D].

    `cos`, `sin` [T, D/2] fp32 rotate queries and keys (`llama_layers.rotate`).
    """
    parts = (heads, groups, groups)
    if is_compiled(qkv, kernels):
        q, k, v = SplitHeads.apply(qkv, parts, cos, sin)  # type: ignore[no-untyped-call]
        return q, k, v
    if is_fast(qkv, kernels) and heads == groups:
        q, k, v = _SplitHeads.apply(qkv, heads)  # type: ignore[no-untyped-call]
    else:
        B, T, _ = qkv.shape
        q, k, v = torch.split(qkv.view(B, T, sum(parts), -1).transpose(1, 2), list(parts), 1)
    if cos is not None and sin is not None:
        q, k = (rotate(z, cos, sin, kernels=kernels) for z in (q, k))
    return q, k, v


class _SplitHeads(torch.autograd.Function):
    """One copy in each direction, into the layout that the next matrix product reads."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
        B, T, _ = qkv.shape
        parts = qkv.view(B, T, 3, heads, -1).permute(2, 0, 3, 1, 4).contiguous()
        return parts[0], parts[1], parts[2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        B, H, T, D = gradients[0].shape
        packed = gradients[0].new_empty(B, T, 3, H, D)
        for i, gradient in enumerate(gradients):
            packed[:, :, i] = gradient.transpose(1, 2)
        return packed.view(B, T, 3 * H * D), None


def _plain(q: Tensor, k: Tensor, v: Tensor, *, dropout: float) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    future = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(keys - queries + 1)
    weights = scores.masked_fill(future, -math.inf).softmax(-1).to(v.dtype)
    return torch.dropout(weights, dropout, dropout > 0) @ v


class _BlockCausal(torch.autograd.Function):
    """Attention as matrix products over blocks of queries, each with only the keys it may see.

    torch's own CPU kernel works in tiles too small for the matrix library, most of all in bf16.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, T, D = q.shape
        q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
        y = q.new_empty(B, T, H, D)  # the layout that the next projection reads
        keep = any(ctx.needs_input_grad) and B * H * T * T * q.element_size() <= 2 * KEPT_BYTES
        kept = []
        for start in range(0, T, BLOCK):
            end = min(start + BLOCK, T)
            weights = _weights(q, k, start=start, end=end)
            _place(torch.bmm(weights, v[:, :end]).view(B, H, -1, D), y[:, start:end])
            kept += [weights] if keep else []
        ctx.save_for_backward(q, k, v, *kept)
        return y.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *kept = ctx.saved_tensors
        B, H, T, D = dy.shape
        dy = _taken(dy).view(B * H, T, D)
        total = q.dtype if T <= BLOCK else torch.promote_types(q.dtype, torch.float32)  # of sums over blocks
        dq: list[Tensor] = []
        dk, dv = torch.empty(0), torch.empty(0)
        for start in reversed(range(0, T, BLOCK)):  # the last block sees every key
            end = min(start + BLOCK, T)
            weights = kept[start // BLOCK] if kept else _weights(q, k, start=start, end=end)
            dscores = _dscores(
                torch.bmm(dy[:, start:end], v[:, :end].transpose(1, 2)), weights, start=start, D=D
            )
            dq.insert(0, torch.bmm(dscores, k[:, :end]))
            dk_part = torch.bmm(dscores.transpose(1, 2), q[:, start:end])
            dv_part = torch.bmm(weights.transpose(1, 2), dy[:, start:end])
            if end == T:
                dk, dv = dk_part.to(total), dv_part.to(total)
            else:
                dk[:, :end] += dk_part
                dv[:, :end] += dv_part
        whole = dq[0] if len(dq) == 1 else torch.cat(dq, 1)
        heads = (B, H, T, D)
        return whole.view(heads), dk.to(k.dtype).view(heads), dv.to(v.dtype).view(heads)


def _place(y: Tensor, at: Tensor) -> None:
    """Write `y` [B, H, T, D] to `at` [B, T, H, D], which may be some tokens of more."""
    if compiled.usable(y.device, y.dtype):
        compiled.join((y,), heads=(y.shape[1], 0, 0), out=at)
    else:
        at.copy_(y.transpose(1, 2))


def _taken(dy: Tensor) -> Tensor:
    """Return `dy` [B, H, T, D], usually a view of [B, T, H, D], as contiguous heads."""
    packed = dy.transpose(1, 2)
    if compiled.usable(dy.device, dy.dtype) and packed.is_contiguous():
        return compiled.split(packed.flatten(2), heads=(dy.shape[1], 0, 0))[0]
    return dy.contiguous()


def _weights(q: Tensor, k: Tensor, *, start: int, end: int) -> Tensor:
    """Return the attention weights [B*H, end - start, end] of the queries start..end."""
    keys, scale = k[:, :end].transpose(1, 2), 1 / math.sqrt(q.shape[-1])
    if compiled.usable(q.device, q.dtype):
        return compiled.softmax_(torch.bmm(q[:, start:end], keys), start=start, scale=scale)
    scores = q.new_empty(q.shape[0], end - start, end)
    torch.baddbmm(scores, q[:, start:end], keys, beta=0, alpha=scale, out=scores)
    future = torch.full((end - start, end - start), -math.inf, dtype=q.dtype, device=q.device).triu_(1)
    scores[:, :, start:] += future
    return torch.softmax(scores, -1)


def _dscores(dweights: Tensor, weights: Tensor, *, start: int, D: int) -> Tensor:
    """Return the gradient of the unscaled scores."""
    scale = 1 / math.sqrt(D)
    if compiled.usable(weights.device, weights.dtype):
        return compiled.softmax_back_(dweights, weights=weights, start=start, scale=scale)
    return torch._softmax_backward_data(dweights, weights, -1, weights.dtype).mul_(scale)
