"""The gradient of an embedding that is also the head, without a second tensor of its size.

autograd would add the head's gradient [V, C] and the embedding's, which is zero but for the rows of the
batch's tokens. With a large vocabulary these two and their sum are most of what a step holds. Here the
embedding's backward pass, which comes last, adds its rows to the tensor that the loss has made, at once in
the parameter's `main_grad` where the engine offers one (`runner.parallel.gradient`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.model import compiled, pool
from runner.model.layers import Kernels, is_fast
from runner.model.linear import take_main_grad


class Head:
    """The gradient of a head [rows, C] `dtype`, as far as it is made: fewer rows, or a shorter type."""

    def __init__(self, made: Tensor | None, *, rows: int, dtype: torch.dtype) -> None:
        self._made = made
        self._rows, self._dtype = rows, dtype

    def gradient(self, scale: Tensor | None, *, out: Tensor | None = None) -> Tensor:
        """Return it whole, times `scale`, in `out` if that is given; padding is 0."""
        made = self._made
        if made is None:
            raise RuntimeError("this loss has gone backward already, which used its gradient up")
        if made.dtype == self._dtype and out is None:
            return made if scale is None else made * scale
        whole = made.new_empty(self._rows, made.shape[1], dtype=self._dtype) if out is None else out
        whole[: len(made)] = made
        whole[len(made) :] = 0
        return whole if scale is None else whole.mul_(scale)

    def spent(self, scale: Tensor | None, *, out: Tensor | None) -> Tensor:
        """Do the same, and give back what it was made in."""
        made, whole = self._made, self.gradient(scale, out=out)
        if made is not None and made is not whole:
            pool.give_back(made)
        return whole

    def taken(self) -> Head:
        """Return it for somebody who may change it, and keep nothing."""
        made, self._made = self._made, None
        return Head(made, rows=self._rows, dtype=self._dtype)


class Tie:
    """Carries the head's gradient from the loss to the embedding within one backward pass."""

    def __init__(self) -> None:
        self._head: Head | None = None
        self._scale: Tensor | None = None

    def hand_over(self, head: Head, scale: Tensor | None) -> None:
        """Leave the head's gradient and what to multiply it by; the embedding will change it in place."""
        self._head, self._scale = head, scale

    def take(self, *, wte: Tensor) -> Tensor | None:
        """Return the gradient of `wte`, or None where the loss took no part in this backward pass."""
        head, self._head = self._head, None
        return None if head is None else head.spent(self._scale, out=take_main_grad(wte))


def tie_of(wte: Tensor, *, kernels: Kernels, training: bool) -> Tie | None:
    """Return a tie where it helps: on a CPU, for a pass that will have a backward pass."""
    return (
        Tie()
        if training and torch.is_grad_enabled() and wte.requires_grad and is_fast(wte, kernels)
        else None
    )


def embedding(tokens: Tensor, wte: Tensor, tie: Tie | None) -> Tensor:
    """Return the rows of `wte` [V, C] of `tokens` [B, T]."""
    if tie is None:
        return F.embedding(tokens, wte)
    rows: Tensor = _TiedEmbedding.apply(tokens, wte, tie)  # type: ignore[no-untyped-call]
    return rows


class _TiedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, wte: Tensor, tie: Tie) -> Tensor:
        ctx.tie, ctx.wte = tie, wte
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, wte)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[None, Tensor, None]:
        (tokens,) = ctx.saved_tensors
        gradient = ctx.tie.take(wte=ctx.wte)
        if gradient is None:
            gradient = dx.new_zeros(ctx.wte.shape)
        ids, rows = tokens.flatten(), dx.flatten(0, -2)
        if compiled.usable(gradient.device, gradient.dtype) and gradient.dtype == rows.dtype:
            compiled.add_rows_(gradient, ids=ids, rows=rows)
        else:
            gradient.index_add_(0, ids, rows.to(gradient.dtype))
        return None, gradient.detach(), None
