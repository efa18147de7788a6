"""Llama-style decoder: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

Legend: B sequences, T tokens, C channels, H query heads, G key/value heads, D channels per head,
F feed-forward channels, V vocabulary.

Parameters, named after their counterparts in `gpt2`:

    embed.wte  blocks.<i>.{ln1w qkvw [qnormw knormw] attprojw ln2w gateupw downw}  final.lnfw  [final.headw]
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

from runner.model.attention import Cache, LayerCache, attention, split_heads
from runner.model.gpt2 import check_length
from runner.model.init import STD, normal_, residual_std
from runner.model.layers import Kernels, Linear
from runner.model.linear import linear
from runner.model.llama_layers import add_rms_norm, rms_norm, rotate, swiglu
from runner.model.loss import head_loss


class TokenEmbedding(nn.Module):
    """Look up the tokens' vectors."""

    def __init__(self, *, vocab_size: int, width: int) -> None:
        super().__init__()
        self.wte = nn.Parameter(torch.zeros(vocab_size, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.wte)


class LlamaBlock(nn.Module):
    """One layer: attention, then the gated feed-forward network, each added to its normalised input."""

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        kv_heads: int,
        feed_forward: int,
        norm_eps: float,
        qk_norm: bool,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        C, D = width, width // heads
        self.heads, self.kv_heads, self.norm_eps, self.kernels = heads, kv_heads, norm_eps, kernels
        # The run's precision may put another in its place.
        self.linear: Linear = linear if kernels == "fast" else F.linear
        self.ln1w = nn.Parameter(torch.ones(C))
        self.qkvw = nn.Parameter(torch.zeros((heads + 2 * kv_heads) * D, C))
        self.qnormw = nn.Parameter(torch.ones(D)) if qk_norm else None
        self.knormw = nn.Parameter(torch.ones(D)) if qk_norm else None
        self.attprojw = nn.Parameter(torch.zeros(C, C))
        self.ln2w = nn.Parameter(torch.ones(C))
        self.gateupw = nn.Parameter(torch.zeros(2 * feed_forward, C))
        self.downw = nn.Parameter(torch.zeros(C, feed_forward))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None = None) -> Tensor:
        attended = self._attend(self._norm(x, self.ln1w), cos, sin, cache)
        x, normed = add_rms_norm(x, attended, self.ln2w, eps=self.norm_eps, kernels=self.kernels)
        gate_up = self.linear(normed, self.gateupw)
        return x + self.linear(swiglu(gate_up, kernels=self.kernels), self.downw)

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None) -> Tensor:
        B, T, C = x.shape
        split = partial(split_heads, heads=self.heads, groups=self.kv_heads, kernels=self.kernels)
        qkv = self.linear(x, self.qkvw)
        if self.qnormw is not None and self.knormw is not None:
            q, k, v = split(qkv)
            q, k = self._norm(q, self.qnormw), self._norm(k, self.knormw)
            q, k = (rotate(z, cos, sin, kernels=self.kernels) for z in (q, k))
        else:
            q, k, v = split(qkv, cos=cos, sin=sin)
        if cache is not None:
            k, v = cache.append(k, v)
        y = attention(q, k, v, kernels=self.kernels)
        return self.linear(y.transpose(1, 2).reshape(B, T, C), self.attprojw)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, eps=self.norm_eps, kernels=self.kernels)


class Output(nn.Module):
    """Normalise what the last block returns; hold the output projection unless it is the embedding."""

    def __init__(self, *, vocab_size: int, width: int, tied: bool) -> None:
        super().__init__()
        self.lnfw = nn.Parameter(torch.ones(width))
        self.headw = None if tied else nn.Parameter(torch.zeros(vocab_size, width))


class Llama(nn.Module):
    """Decoder of Touvron et al. 2023, with grouped-query attention (Ainslie et al. 2023).

    `max_seq_len`, `vocab_size` are supplied from `train.seq_len` and the data when they are null.
    """

    def __init__(
        self,
        *,
        layers: Annotated[int, Ge(1)],
        heads: Annotated[int, Ge(1)],
        kv_heads: Annotated[int, Ge(1)],
        width: Annotated[int, Ge(1)],
        feed_forward: Annotated[int, Ge(1)],
        max_seq_len: Annotated[int, Ge(1)] | None = None,
        vocab_size: Annotated[int, Ge(1)] | None = None,
        rope_theta: Annotated[float, Gt(0)] = 10000.0,
        norm_eps: Annotated[float, Gt(0)] = 1e-5,
        tied_head: bool = False,
        qk_norm: bool = False,
        z_loss: Annotated[float, Ge(0)] = 0.0,
        zero_head: bool = False,
        scale_embedding: bool = False,
        init_from: str | None = None,
        seed: Annotated[int, Ge(0), Le(2147483647)] = 42,
        loss_chunk: Annotated[int, Ge(1)] | None = None,
        kernels: Literal["fast", "plain"] = "fast",
    ) -> None:
        super().__init__()
        assert isinstance(max_seq_len, int) and isinstance(vocab_size, int)  # noqa: PT018 (both supplied)
        _check_shape(heads=heads, kv_heads=kv_heads, width=width)
        if tied_head and (zero_head or scale_embedding):
            raise ValueError(
                "model.tied_head=true excludes model.zero_head and model.scale_embedding; untie one"
            )
        self.layers, self.heads, self.kv_heads, self.width = layers, heads, kv_heads, width
        self.max_seq_len, self.vocab_size, self.feed_forward = max_seq_len, vocab_size, feed_forward
        self.rope_theta, self.norm_eps, self.z_loss = rope_theta, norm_eps, z_loss
        self.init_from = init_from
        self.loss_chunk, self.kernels = loss_chunk, kernels
        self.embed = TokenEmbedding(vocab_size=vocab_size, width=width)
        shape = {"width": width, "heads": heads, "kv_heads": kv_heads, "feed_forward": feed_forward}
        block = partial(LlamaBlock, **shape, norm_eps=norm_eps, qk_norm=qk_norm, kernels=kernels)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.final = Output(vocab_size=vocab_size, width=width, tied=tied_head)
        self._keep_angles(theta=rope_theta)
        if init_from is None:
            self.reset_parameters(seed=seed, zero_head=zero_head, scale_embedding=scale_embedding)

    def _keep_angles(self, *, theta: float) -> None:
        cos, sin = _angles(self.max_seq_len, dims=self.width // self.heads, theta=theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @torch.no_grad()
    def reset_parameters(self, *, seed: int, zero_head: bool, scale_embedding: bool) -> None:
        """Draw N(0, 0.02); what writes into the residual stream is scaled by 1/sqrt(2 layers)."""
        generator = torch.Generator().manual_seed(seed)
        _check_head(tied=self.final.headw is None, shaped=zero_head or scale_embedding)
        scale = self.width**0.5 if scale_embedding else 1.0
        normal_(self.embed.wte, std=STD * scale, generator=generator)
        for block in self.blocks:
            assert isinstance(block, LlamaBlock)
            normal_(block.qkvw, std=STD, generator=generator)
            normal_(block.attprojw, std=residual_std(self.layers), generator=generator)
            normal_(block.gateupw, std=STD, generator=generator)
            normal_(block.downw, std=residual_std(self.layers), generator=generator)
        if self.final.headw is not None and not zero_head:
            normal_(self.final.headw, std=STD, generator=generator)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        reduction: Literal["mean", "none"] = "mean",
        cache: Any = None,
    ) -> Tensor:
        """Return logits [B, T, V] without targets; the mean loss [] or losses [B, T] fp32 with them."""
        start = cache.length if cache is not None else 0
        end = start + tokens.shape[1]
        check_length(end, limit=self.max_seq_len)
        assert isinstance(self.cos, Tensor)
        assert isinstance(self.sin, Tensor)
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            layer = cache.layers[i] if cache is not None else None
            x = block(x, self.cos[start:end], self.sin[start:end], layer)
        x = rms_norm(x, self.final.lnfw, eps=self.norm_eps, kernels=self.kernels)
        head = self.embed.wte if self.final.headw is None else self.final.headw
        if targets is None:
            return F.linear(x, head)
        z_loss = self.z_loss if self.training else 0.0
        chunk, kernels = self.loss_chunk, self.kernels
        return head_loss(x, head, targets, reduction=reduction, chunk=chunk, kernels=kernels, z_loss=z_loss)

    def new_cache(self, batch: int) -> Cache:
        """Return an empty cache for generating `batch` sequences."""
        return Cache([LayerCache(batch, self.max_seq_len) for _ in range(self.layers)])

    def header(self) -> dict[str, int]:
        """Return the shape's integers."""
        names = ("max_seq_len", "vocab_size", "layers", "heads", "kv_heads", "width", "feed_forward")
        return {name: getattr(self, name) for name in names}

    def flops_per_token(self, seq_len: int) -> int:
        """Return the count for a token's forward and backward, 6N + 6LCT as for GPT-2 in llm.c."""
        parameters = sum(p.numel() for p in self.parameters())
        return 6 * parameters + 6 * self.layers * self.width * seq_len


def _check_shape(*, heads: int, kv_heads: int, width: int) -> None:
    if width % heads or (width // heads) % 2:
        raise ValueError(f"model.width={width} is not model.heads={heads} times an even number of channels")
    if heads % kv_heads:
        raise ValueError(f"model.heads={heads} is not a multiple of model.kv_heads={kv_heads}")


def _check_head(*, tied: bool, shaped: bool) -> None:
    if tied and shaped:
        raise ValueError(
            "model.tied_head=true excludes model.zero_head and model.scale_embedding; set it or them to false"
        )


def _angles(positions: int, *, dims: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [positions, dims/2] of position * theta^(-2i/dims), in fp32."""
    frequency = 1.0 / theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)
    angle = torch.outer(torch.arange(positions, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()
