"""Cross-entropy through the output projection, without ever holding all logits.

Legend: N tokens, C channels, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.model import compiled
from runner.model.compiled_layers import product_dtype
from runner.model.layers import Kernels

CHUNKS = {"cuda": 4096}
"""Tokens whose logits are made at a time: a GPU's products want many rows."""
LOGITS = 1 << 24
"""Logits that are made at a time on a CPU, in as many chunks of equal size as that takes."""


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
) -> Tensor:
    """Return the cross-entropy of `x @ head.T` against `targets`, in fp32.

    `x` [B, T, C], `targets` [B, T], `head` [Vp, C], of which the first `vocab` rows count (all: None); mean
    [] or one value per token [B, T]. The fast kernel makes logits for `chunk` tokens at a time (by the
    device: None) and their gradient at once. `z_loss` times the squared log-normaliser is added
    (Chowdhery et al. 2022, section 5).
    """
    vocab = vocab or len(head)
    chunk = chunk or CHUNKS.get(x.device.type) or _even_chunk(targets.numel(), limit=max(64, LOGITS // vocab))
    wants_gradient = torch.is_grad_enabled() and (x.requires_grad or head.requires_grad)
    if kernels == "plain" or (wants_gradient and reduction == "none"):
        losses = _plain(x, head[:vocab], targets, z_loss=z_loss)
        return losses.mean() if reduction == "mean" else losses
    flat_x, flat_targets = x.flatten(0, -2), targets.flatten()
    if wants_gradient:
        loss: Tensor = _ChunkedLoss.apply(flat_x, head, flat_targets, vocab, chunk, z_loss)  # type: ignore[no-untyped-call]
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


def _even_chunk(count: int, *, limit: int) -> int:
    """Return the size of the fewest chunks of at most `limit` that `count` can be cut into evenly."""
    return -(-count // max(1, -(-count // limit)))


class _ChunkedLoss(torch.autograd.Function):
    """Mean loss whose gradient is made in the forward pass, while a chunk's logits are at hand.

    Padding is cut off in here: a slice outside would cost its backward pass two copies of the head.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, head: Tensor, targets: Tensor, vocab: int, chunk: int, z_loss: float
    ) -> Tensor:
        dtype = product_dtype(x)
        weight, count = head[:vocab].to(dtype), len(targets)
        dx, dhead = torch.empty_like(x), torch.empty_like(head)
        dhead[vocab:] = 0
        real = dhead[:vocab]
        gradient_of = _gradient_compiled if compiled.usable(x.device, dtype) else _gradient
        room = weight.new_empty(min(chunk, count), vocab)
        part = weight.new_empty(vocab, x.shape[1])
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        for start in range(0, count, chunk):
            rows, ids = x[start : start + chunk].to(dtype), targets[start : start + chunk]
            logits = torch.mm(rows, weight.t(), out=room[: len(ids)])
            losses, gradient = gradient_of(logits, ids, count=count, z_loss=z_loss)
            total += losses.sum(dtype=torch.float64)
            dx[start : start + chunk] = gradient @ weight
            torch.mm(gradient.t(), rows, out=part)
            real.copy_(part) if start == 0 else real.add_(part)
        ctx.save_for_backward(dx, dhead)
        return (total / count).float()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        dx, dhead = ctx.saved_tensors
        if dloss.device.type == "cpu" and dloss.item() == 1:  # spares a pass over the head's gradient
            return dx, dhead, None, None, None, None
        return dx * dloss, dhead * dloss, None, None, None, None


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
