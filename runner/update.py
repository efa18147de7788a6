"""One optimizer update, scaled by the clip factor and gated by the verdict on the device."""

from __future__ import annotations

from torch import Tensor

from runner.api import Optimizer


def update(optimizer: Optimizer, *, step: int, lr: float, scale: Tensor, apply: Tensor) -> None:
    """Apply `scale * gradient` at rate `lr` where `apply` holds; else leave every bit as it is.

    The gate is the optimizer's own (a select or an early return), never a product: 0 * nan is nan.
    """
    optimizer.update(step=step, lr=lr, scale=scale, apply=apply)
