"""Cross-entropy through the output projection, without ever holding all logits.

Legend: N tokens, C channels, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.model import compiled, pool
from runner.model.compiled_layers import Grads, product_dtype
from runner.model.layers import Kernels
from runner.model.tie import Head, Tie

CHUNKS = {"cuda": 4096}
"""Tokens whose logits are made at a time: a GPU's products want many rows."""
LOGITS = 1 << 24
"""Logits that a CPU makes at a time, in as few and as even chunks as that takes."""
BLOCK = 64
"""Tokens of which a chunk is a multiple: a CPU's products cut their operands in blocks, odd ends are slow."""
PART = 1 << 20
"""Elements of the head's gradient that a CPU makes at a time before it adds them: they stay in its cache."""


def head_loss(
    x: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    reduction: Literal["mean", "none"],
    chunk: int | None,
    kernels: Kernels,
    z_loss: float = 0.0,
    vocab: int | None = None,
    tie: Tie | None = None,
) -> Tensor:
    """Return the cross-entropy of `x @ head.T` against `targets`, in fp32.

    `x` [B, T, C], `targets` [B, T], `head` [Vp, C], of which the first `vocab` rows count (all: None); mean
    [] or one value per token [B, T]. The fast kernel makes logits for `chunk` tokens at a time (by the
    device: None) and their gradient at once. `z_loss` times the squared log-normaliser is added
    (Chowdhery et al. 2022, section 5). With a `tie` the fast kernel leaves the head's gradient there.
    """
    vocab = vocab or len(head)
    chunk = chunk or CHUNKS.get(x.device.type) or _even_chunk(x, vocab=vocab)
    wants_gradient = torch.is_grad_enabled() and (x.requires_grad or head.requires_grad)
    if kernels == "plain" or (wants_gradient and reduction == "none"):
        losses = _plain(x, head[:vocab], targets, z_loss=z_loss)
        return losses.mean() if reduction == "mean" else losses
    flat_x, flat_targets = x.flatten(0, -2), targets.flatten()
    if wants_gradient:
        loss: Tensor = _ChunkedLoss.apply(flat_x, head, flat_targets, vocab, chunk, z_loss, tie)  # type: ignore[no-untyped-call]
        return loss
    head = head[:vocab]
    parts = [
        _losses(F.linear(rows, head).float(), ids, z_loss=z_loss)[0]
        for rows, ids in zip(torch.split(flat_x, chunk), torch.split(flat_targets, chunk), strict=True)
    ]
    losses = torch.cat(parts)
    return losses.mean() if reduction == "mean" else losses.view_as(targets)


def _plain(x: Tensor, head: Tensor, targets: Tensor, *, z_loss: float) -> Tensor:
    logits = F.linear(x, head).float().flatten(0, -2)
    losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
    if z_loss:
        losses = losses + z_loss * logits.logsumexp(-1).square()
    return losses.view_as(targets)


def _losses(logits: Tensor, targets: Tensor, *, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses [n], probabilities [n, V] and log-normalisers [n] of fp32 logits [n, V].

    The likeliest token has a probability of at least 1/V, so its logarithm gives the normaliser
    without the underflow that the target's own probability may suffer.
    """
    probabilities = torch.softmax(logits, -1)
    log_normaliser = logits.amax(-1) - probabilities.amax(-1).log()
    losses = log_normaliser - logits.gather(-1, targets[:, None])[:, 0]
    if z_loss:
        losses = losses + z_loss * log_normaliser.square()
    return losses, probabilities, log_normaliser


def _even_chunk(x: Tensor, *, vocab: int) -> int:
    """Return the size of the fewest chunks with few enough logits, even but for whole blocks."""
    blocks = -(-(x.numel() // x.shape[-1]) // BLOCK)
    limit = max(1, LOGITS // (vocab * BLOCK))
    return BLOCK * max(1, -(-blocks // max(1, -(-blocks // limit))))


class _ChunkedLoss(torch.autograd.Function):
    """Mean loss whose gradient is made in the forward pass, while a chunk's logits are at hand.

    Padding is cut off in here: a slice outside would cost its backward pass two copies of the head.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        head: Tensor,
        targets: Tensor,
        vocab: int,
        chunk: int,
        z_loss: float,
        tie: Tie | None,
    ) -> Tensor:
        dtype = product_dtype(x)
        count = len(targets)
        new = partial(pool.take, dtype=dtype, device=x.device)
        weight, is_copy = head[:vocab], head.dtype != dtype
        weight = new(*weight.shape).copy_(weight) if is_copy else weight
        dx = torch.empty_like(x)
        # A single chunk is done with the copy of the head in time: its gradient takes that place.
        shared = is_copy and count <= chunk
        dhead = weight if shared else pool.take(*head.shape, dtype=head.dtype, device=x.device)
        gradient_of = _gradient_compiled if compiled.usable(x.device, dtype) else _gradient
        room = new(min(chunk, count), vocab)
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        for start in range(0, count, chunk):
            rows, ids = x[start : start + chunk].to(dtype), targets[start : start + chunk]
            logits = torch.mm(rows, weight.t(), out=room[: len(ids)])
            losses, gradient = gradient_of(logits, ids, count=count, z_loss=z_loss)
            total += losses.sum(dtype=torch.float64)
            dx[start : start + chunk] = gradient @ weight
            _add_product(dhead, gradient, rows, first=start == 0)
        for spent in (room, *([weight] if is_copy and not shared else [])):
            pool.give_back(spent)
        ctx.save_for_backward(dx)
        ctx.head = Head(dhead, rows=len(head), dtype=head.dtype)
        ctx.tie = tie
        return (total / count).float()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Grads:
        (dx,) = ctx.saved_tensors
        # A loss that is not scaled spares passes over memory; asking a GPU would make it wait.
        scale = None if dloss.device.type == "cpu" and dloss.item() == 1 else dloss
        dx = dx if scale is None else dx * scale
        if ctx.tie is None:
            return dx, ctx.head.gradient(scale), *[None] * 5
        ctx.tie.hand_over(ctx.head.taken(), scale)
        return dx, *[None] * 6


def _add_product(dhead: Tensor, gradient: Tensor, rows: Tensor, *, first: bool) -> None:
    """Add gradient.T @ rows to the head's gradient [Vp, C], or begin it; padding gets 0.

    A CPU makes some rows of it at a time, which stay in its cache until they are added.
    """
    vocab = gradient.shape[1]
    if first:
        dhead[vocab:] = 0
    size = min(vocab, PART // rows.shape[1] + 1) if dhead.device.type == "cpu" else vocab
    in_place = first and rows.dtype == dhead.dtype
    room = rows.new_empty(0 if in_place else size, rows.shape[1])
    for piece, part in zip(torch.split(dhead[:vocab], size), torch.split(gradient, size, 1), strict=True):
        product = torch.mm(part.t(), rows, out=piece if in_place else room[: len(piece)])
        if not in_place:
            piece.copy_(product) if first else piece.add_(product)


def _gradient(logits: Tensor, targets: Tensor, *, count: int, z_loss: float) -> tuple[Tensor, Tensor]:
    """Return losses [n] and the mean loss's gradient with respect to `logits` [n, V], in their type."""
    losses, gradient, log_normaliser = _losses(logits.float(), targets, z_loss=z_loss)
    if z_loss:
        gradient *= (1 + 2 * z_loss * log_normaliser)[:, None]
    gradient[torch.arange(len(targets), device=logits.device), targets] -= 1
    return losses, gradient.div_(count).to(logits.dtype)


def _gradient_compiled(
    logits: Tensor, targets: Tensor, *, count: int, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Do the same in place of the logits."""
    return compiled.loss_(logits, targets, weight=1 / count, z_loss=z_loss), logits
