"""Cross-entropy through the output projection, without ever holding all logits.

Legend: N tokens, C channels, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.model.layers import Kernels

CHUNKS = {"cpu": 128, "cuda": 4096}
"""Tokens whose logits are made at a time: a CPU's caches are small, a GPU's products want many rows."""


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
    chunk = chunk or CHUNKS.get(x.device.type, 512)
    vocab = vocab or len(head)
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


class _ChunkedLoss(torch.autograd.Function):
    """Mean loss whose gradient is made in the forward pass, while a chunk's logits are at hand.

    Padding is cut off in here: a slice outside would cost its backward pass two copies of the head.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, head: Tensor, targets: Tensor, vocab: int, chunk: int, z_loss: float
    ) -> Tensor:
        dtype = (
            torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        )
        weight, count = head[:vocab].to(dtype), len(targets)
        dx, dhead = torch.empty_like(x), torch.empty_like(head)
        dhead[vocab:] = 0
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        for start in range(0, count, chunk):
            rows, ids = x[start : start + chunk].to(dtype), targets[start : start + chunk]
            losses, gradient, log_normaliser = _losses((rows @ weight.t()).float(), ids, z_loss=z_loss)
            total += losses.sum()
            if z_loss:
                gradient *= (1 + 2 * z_loss * log_normaliser)[:, None]
            gradient[torch.arange(len(ids), device=x.device), ids] -= 1
            gradient = gradient.to(dtype)
            dx[start : start + chunk] = gradient @ weight
            part = gradient.t() @ rows
            real = dhead[:vocab]
            real.copy_(part) if start == 0 else real.add_(part)
        ctx.save_for_backward(dx.div_(count), dhead.div_(count))
        return total / count

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        dx, dhead = ctx.saved_tensors
        if dloss.device.type == "cpu" and dloss.item() == 1:  # spares a pass over the head's gradient
            return dx, dhead, None, None, None, None
        return dx * dloss, dhead * dloss, None, None, None, None
