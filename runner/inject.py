"""Faults on request (`debug.*`): to test the guard, and to see what a run does when one happens."""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Ge
from torch import Tensor

Step = Annotated[int, Ge(0)]


class Inject:
    """Spoil the loss or the gradient of the listed 0-based steps."""

    def __init__(
        self,
        *,
        nan_loss_at: list[Step] | None = None,
        nan_grad_at: list[Step] | None = None,
        spike_loss_at: list[Step] | None = None,
    ) -> None:
        self._nan_loss = frozenset(nan_loss_at or ())
        self._nan_grad = frozenset(nan_grad_at or ())
        self._spike = frozenset(spike_loss_at or ())

    def loss(self, step: int, loss: Tensor) -> Tensor:
        """Return the loss of a micro-batch, spoiled if `step` is listed."""
        if step in self._nan_loss:
            return loss * float("nan")
        return loss * 100.0 if step in self._spike else loss

    def gradients(self, step: int, engine: Any) -> None:
        """Put a nan into the first gradient element if `step` is listed."""
        if step in self._nan_grad:
            engine.gradient[0] = float("nan")
