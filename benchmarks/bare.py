"""Models and loops as a person writes them without a framework, in plain torch modules.

Legend: B sequences, T tokens, C channels, H heads, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads import Workload, token_file
from runner.data.shard import HEADER_BYTES, layout_for


class CausalAttention(nn.Module):
    """Multi-head attention through torch's fused kernel."""

    def __init__(self, w: Workload, *, bias: bool, rotary: bool) -> None:
        super().__init__()
        self.heads, self.rotary = w.heads, rotary
        self.qkv = nn.Linear(w.width, 3 * w.width, bias=bias)
        self.out = nn.Linear(w.width, w.width, bias=bias)
        half = w.width // w.heads // 2
        angles = torch.outer(torch.arange(w.seq_len), 1e4 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (p.view(B, T, self.heads, -1).transpose(1, 2) for p in self.qkv(x).split(C, dim=2))
        if self.rotary:
            q, k = self._rotate(q), self._rotate(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, C))

    def _rotate(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Gelu(nn.Module):
    """A two-layer feed-forward network; nanoGPT's GELU is the exact one, GPT-2's the tanh form."""

    def __init__(self, w: Workload, *, bias: bool, tanh: bool) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(w.width, 4 * w.width, bias=bias),
            nn.Linear(4 * w.width, w.width, bias=bias),
        )
        self.gelu = nn.GELU(approximate="tanh" if tanh else "none")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gelu(self.up(x)))


class Gated(nn.Module):
    """A SwiGLU feed-forward network."""

    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(w.width, w.feed_forward, bias=False) for _ in range(2))
        self.down = nn.Linear(w.feed_forward, w.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One pre-norm layer."""

    def __init__(self, w: Workload, *, bias: bool, tanh: bool) -> None:
        super().__init__()
        llama = w.kind == "llama"
        self.norm1, self.norm2 = (
            nn.RMSNorm(w.width) if llama else nn.LayerNorm(w.width, bias=bias) for _ in range(2)
        )
        self.attention = CausalAttention(w, bias=bias, rotary=llama)
        self.feed_forward = Gated(w) if llama else Gelu(w, bias=bias, tanh=tanh)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class PlainModel(nn.Module):
    """GPT-2 (as nanoGPT has it, or with biases and tanh as the original) or Llama, head tied."""

    def __init__(self, w: Workload, *, bias: bool = False, tanh: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(w.vocab, w.width)
        self.positions = nn.Embedding(w.seq_len, w.width) if w.kind == "gpt2" else None
        self.blocks = nn.ModuleList(Block(w, bias=bias, tanh=tanh) for _ in range(w.layers))
        self.norm = nn.RMSNorm(w.width) if w.kind == "llama" else nn.LayerNorm(w.width, bias=bias)
        self.head = nn.Linear(w.width, w.vocab, bias=False)
        self.head.weight = self.tokens.weight
        for name, p in self.named_parameters():
            if p.dim() == 2:
                scale = 1 / math.sqrt(2 * w.layers) if name.endswith(("out.weight", "down.weight")) else 1
                nn.init.normal_(p, std=0.02 * scale)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tokens(x)
        if self.positions is not None:
            h = h + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1))


def random_windows(w: Workload) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return nanoGPT's way to a batch: B random starts in a memory map, stacked."""
    path, dtype = token_file(w.vocab), layout_for(w.vocab).dtype

    def batch() -> tuple[Tensor, Tensor]:
        data = np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES)  # anew, as nanoGPT does
        starts = torch.randint(len(data) - w.seq_len, (w.batch,)).tolist()
        x, y = (
            torch.stack([torch.from_numpy(data[i + d : i + d + w.seq_len].astype(np.int64)) for i in starts])
            for d in (0, 1)
        )
        return x, y

    return batch


def decayed(model: nn.Module) -> list[dict[str, Any]]:
    """Return nanoGPT's two parameter groups: matrices decay, vectors do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def plain_loop(
    w: Workload,
    after_step: Callable[[], None],
    *,
    bf16: bool = False,
    fused: bool = False,
    original: bool = False,
    compiled: bool = False,
) -> None:
    """Train for ever in the style of nanoGPT's train.py: clip, step, read the loss, print a line.

    nanoGPT asks for the fused optimizer on a GPU only; `fused` is what a careful person would do.
    `original`: GPT-2's biases and tanh GELU instead of nanoGPT's defaults.
    """
    torch.manual_seed(1337)
    model: Any = PlainModel(w, bias=original, tanh=original)
    optimizer = torch.optim.AdamW(decayed(model), lr=6e-4, betas=(0.9, 0.95), fused=fused)
    model = torch.compile(model) if compiled else model
    batch = random_windows(w)
    context = torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else contextlib.nullcontext()
    x, y = batch()
    step = 0
    while True:
        with context:
            loss = model(x, y)
        x, y = batch()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"iter {step}: loss {loss.item():.4f}")
        step += 1
        after_step()
