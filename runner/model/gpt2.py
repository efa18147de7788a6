"""GPT-2 with llm.c's architecture, parameter order and initial weights.

Legend: B sequences, T tokens, C channels, H heads, V vocabulary (Vp with padding), L layers.

The last part of a parameter's name is llm.c's name of the tensor, and `named_parameters()` meets the
tensors in the order of llm.c's model file, once the blocks of a name are stacked over the layers:

    embed.wte embed.wpe  blocks.<i>.{ln1w ln1b qkvw qkvb attprojw attprojb ln2w ln2b
                                     fcw fcb fcprojw fcprojb}  final.lnfw final.lnfb
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor, nn

from runner.model.attention import Cache, LayerCache, attention, split_heads
from runner.model.init import STD, normal_, residual_std
from runner.model.layers import Kernels, Linear, add_layer_norm, gelu, layer_norm
from runner.model.linear import linear
from runner.model.loss import head_loss
from runner.model.tie import Tie, embedding, tie_of

PADDING = 128  # llm.c pads the vocabulary to a multiple of 128


def check_length(tokens: int, *, limit: int) -> None:
    """Raise ValueError if a sequence is longer than the model can read."""
    if tokens > limit:
        raise ValueError(f"sequence of {tokens} tokens is longer than model.max_seq_len={limit}")


class Embedding(nn.Module):
    """Add a token's embedding and its position's."""

    def __init__(self, *, padded_vocab: int, max_seq_len: int, width: int) -> None:
        super().__init__()
        self.wte = nn.Parameter(torch.zeros(padded_vocab, width))
        self.wpe = nn.Parameter(torch.zeros(max_seq_len, width))

    def forward(self, tokens: Tensor, *, start: int, tie: Tie | None = None) -> Tensor:
        return embedding(tokens, self.wte, tie) + self.wpe[start : start + tokens.shape[1]]


class Block(nn.Module):
    """One pre-norm transformer layer: attention, then the feed-forward network, each added to its input."""

    def __init__(self, *, width: int, heads: int, dropout: float, kernels: Kernels) -> None:
        super().__init__()
        C = width
        self.heads, self.dropout, self.kernels = heads, dropout, kernels
        # The run's precision may put another in its place.
        self.linear: Linear = linear if kernels == "fast" else F.linear
        self.ln1w = nn.Parameter(torch.ones(C))
        self.ln1b = nn.Parameter(torch.zeros(C))
        self.qkvw = nn.Parameter(torch.zeros(3 * C, C))
        self.qkvb = nn.Parameter(torch.zeros(3 * C))
        self.attprojw = nn.Parameter(torch.zeros(C, C))
        self.attprojb = nn.Parameter(torch.zeros(C))
        self.ln2w = nn.Parameter(torch.ones(C))
        self.ln2b = nn.Parameter(torch.zeros(C))
        self.fcw = nn.Parameter(torch.zeros(4 * C, C))
        self.fcb = nn.Parameter(torch.zeros(4 * C))
        self.fcprojw = nn.Parameter(torch.zeros(C, 4 * C))
        self.fcprojb = nn.Parameter(torch.zeros(C))

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        kernels = self.kernels
        attended = self._drop(self._attend(layer_norm(x, self.ln1w, self.ln1b, kernels=kernels), cache))
        x, normed = add_layer_norm(x, attended, self.ln2w, self.ln2b, kernels=kernels)
        hidden = gelu(self.linear(normed, self.fcw, self.fcb), kernels=kernels)
        return x + self._drop(self.linear(hidden, self.fcprojw, self.fcprojb))

    def _attend(self, x: Tensor, cache: LayerCache | None) -> Tensor:
        B, T, C = x.shape
        qkv = self.linear(x, self.qkvw, self.qkvb)
        q, k, v = split_heads(qkv, heads=self.heads, groups=self.heads, kernels=self.kernels)
        if cache is not None:
            k, v = cache.append(k, v)
        y = attention(q, k, v, kernels=self.kernels, dropout=self.dropout if self.training else 0.0)
        return self.linear(y.transpose(1, 2).reshape(B, T, C), self.attprojw, self.attprojb)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class FinalNorm(nn.Module):
    """Normalise what the last block returns."""

    def __init__(self, *, width: int, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.lnfw = nn.Parameter(torch.ones(width))
        self.lnfb = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.lnfw, self.lnfb, kernels=self.kernels)


class GPT2(nn.Module):
    """GPT-2 (Radford et al. 2019): learned positions, pre-norm blocks, a head tied to the embedding.

    `max_seq_len`, `vocab_size` are supplied from `train.seq_len` and the data when they are null.
    Rows of the embedding beyond `vocab_size` are padding: zero, and they take no part in anything.
    """

    def __init__(
        self,
        *,
        layers: Annotated[int, Ge(1)],
        heads: Annotated[int, Ge(1)],
        width: Annotated[int, Ge(1)],
        max_seq_len: Annotated[int, Ge(1)] | None = None,
        vocab_size: Annotated[int, Ge(1)] | None = None,
        padded_vocab: Annotated[int, Ge(1)] | None = None,
        dropout: Annotated[float, Ge(0), Le(0.99)] = 0.0,
        init_from: str | None = None,
        seed: Annotated[int, Ge(0), Le(2147483647)] = 42,
        loss_chunk: Annotated[int, Ge(1)] | None = None,
        kernels: Literal["fast", "plain"] = "fast",
    ) -> None:
        super().__init__()
        assert max_seq_len is not None, "supplied from train.seq_len"
        assert vocab_size is not None, "supplied from the data"
        if width % heads:
            raise ValueError(f"model.width={width} is not a multiple of model.heads={heads}")
        self.layers, self.heads, self.width = layers, heads, width
        self.max_seq_len, self.vocab_size = max_seq_len, vocab_size
        self.padded_vocab = padded_vocab or -(-vocab_size // PADDING) * PADDING
        if self.padded_vocab < vocab_size:
            raise ValueError(f"model.padded_vocab={padded_vocab} is less than the vocabulary of {vocab_size}")
        self.dropout, self.init_from = dropout, init_from
        self.loss_chunk, self.kernels = loss_chunk, kernels
        self.embed = Embedding(padded_vocab=self.padded_vocab, max_seq_len=max_seq_len, width=width)
        self.blocks = nn.ModuleList(
            Block(width=width, heads=heads, dropout=dropout, kernels=kernels) for _ in range(layers)
        )
        self.final = FinalNorm(width=width, kernels=kernels)
        if init_from is None:
            self.reset_parameters(seed=seed)

    @torch.no_grad()
    def reset_parameters(self, *, seed: int) -> None:
        """Draw the initial weights; seed 42 gives those of llm.c to the bit."""
        generator = torch.Generator().manual_seed(seed)
        normal_(self.embed.wte[: self.vocab_size], std=STD, generator=generator)
        normal_(self.embed.wpe, std=STD, generator=generator)
        for block in self.blocks:
            assert isinstance(block, Block)
            normal_(block.qkvw, std=STD, generator=generator)
            normal_(block.attprojw, std=residual_std(self.layers), generator=generator)
            normal_(block.fcw, std=STD, generator=generator)
            normal_(block.fcprojw, std=residual_std(self.layers), generator=generator)

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
        check_length(start + tokens.shape[1], limit=self.max_seq_len)
        tie = tie_of(
            self.embed.wte, kernels=self.kernels, training=targets is not None and reduction == "mean"
        )
        x = F.dropout(self.embed(tokens, start=start, tie=tie), self.dropout, self.training)
        for i, block in enumerate(self.blocks):
            x = block(x, cache.layers[i] if cache is not None else None)
        x, head, vocab = self.final(x), self.embed.wte, self.vocab_size
        if targets is None:
            return F.linear(x, head[:vocab])
        chunk, kernels = self.loss_chunk, self.kernels
        return head_loss(
            x, head, targets, reduction=reduction, chunk=chunk, kernels=kernels, vocab=vocab, tie=tie
        )

    def new_cache(self, batch: int) -> Cache:
        """Return an empty cache for generating `batch` sequences."""
        return Cache([LayerCache(batch, self.max_seq_len) for _ in range(self.layers)])

    def header(self) -> dict[str, int]:
        """Return the shape as llm.c's model file names it."""
        return {
            "max_seq_len": self.max_seq_len,
            "vocab_size": self.vocab_size,
            "layers": self.layers,
            "heads": self.heads,
            "channels": self.width,
            "padded_vocab": self.padded_vocab,
        }

    def flops_per_token(self, seq_len: int) -> int:
        """Return llm.c's count for a token's forward and backward: 6N + 6LCT, padding included in N."""
        parameters = sum(p.numel() for p in self.parameters())
        return 6 * parameters + 6 * self.layers * self.width * seq_len
