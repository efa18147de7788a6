"""Sophia-G: momentum divided by an estimate of the curvature, and clipped (Liu et al. 2023, algorithm 3).

Its own code, because the estimate is a second gradient that the loop makes (`runner.curvature`), and no
library's interface has a place for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from runner.api import Segment, State


class Sophia:
    """Move each weight by at most lr: its momentum over `rho` times its curvature. `segments` are supplied.

    Every `curvature_every` steps the loop draws labels from the model itself for one more micro-batch of
    each rank and passes the gradient of their loss to `observe_curvature` (Gauss-Newton-Bartlett).
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        lr: Annotated[float, Ge(0)],
        betas: tuple[float, float] = (0.965, 0.99),
        rho: Annotated[float, Gt(0)] = 0.04,
        eps: Annotated[float, Gt(0)] = 1e-12,
        weight_decay: Annotated[float, Ge(0)] = 0.2,
        curvature_every: Annotated[int, Ge(1)] = 10,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"optimizer.betas: {list(betas)} must lie in [0, 1); Sophia uses 0.965 and 0.99")
        self.lr, self._betas, self._decay = lr, betas, weight_decay
        self._rho, self._eps = rho, eps
        self.curvature_every = curvature_every
        self._segments = tuple(segments)
        numel, device = sum(s.param.numel() for s in segments), segments[0].param.device
        self._m, self._h = (torch.zeros(numel, device=device) for _ in range(2))

    def observe_curvature(self, *, samples: int, apply: Tensor) -> None:
        """Take the gradient of the mean loss of `samples` drawn labels, unless `apply` [] is false."""
        beta2 = self._betas[1]
        for segment in self._segments:
            h = self._view(self._h, segment)
            new = beta2 * h + (1 - beta2) * samples * segment.grad.square()
            h.copy_(torch.where(apply, new, h))

    def update(self, *, step: int, lr: float, scale: Tensor, apply: Tensor) -> None:
        """Apply one update; with `apply` [] false no bit of weights or state changes."""
        beta1 = self._betas[0]
        for segment in self._segments:
            p, m, h = segment.param, self._view(self._m, segment), self._view(self._h, segment)
            new_m = beta1 * m + (1 - beta1) * (segment.grad * scale)
            move = (new_m / (self._rho * h).clamp(min=self._eps)).clamp(-1, 1)
            decay = self._decay if segment.role != "vector" else 0.0
            new = p * (1 - lr * decay) - lr * move
            p.copy_(torch.where(apply, new, p))
            m.copy_(torch.where(apply, new_m, m))

    def state_dict(self) -> State:
        return {"m": self._m, "h": self._h}

    def load_state_dict(self, state: State) -> None:
        self._m.copy_(torch.as_tensor(state["m"]).view(-1))
        self._h.copy_(torch.as_tensor(state["h"]).view(-1))

    def _view(self, state: Tensor, segment: Segment) -> Tensor:
        return state[segment.offset : segment.offset + segment.param.numel()].view(segment.param.shape)
