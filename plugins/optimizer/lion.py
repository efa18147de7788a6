"""Lion: the sign of a momentum as the update (Chen et al. 2023, algorithm 2).

Its own code, because the gate is a select on the device: the libraries' versions branch on the host, which
on a GPU would wait for the verdict of every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from runner.api import Segment, State


class Lion:
    """Move each weight by lr against the sign of its momentum. `segments` (fp32) are supplied.

    Wants a tenth to a third of AdamW's learning rate, and as much more weight decay (section 5).
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        lr: Annotated[float, Ge(0)],
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: Annotated[float, Ge(0)] = 1.0,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"optimizer.betas: {list(betas)} must lie in [0, 1); Lion uses 0.9 and 0.99")
        self.lr, self._betas, self._decay = lr, betas, weight_decay
        self._segments = tuple(segments)
        self._m = torch.zeros(sum(s.param.numel() for s in segments), device=segments[0].param.device)

    def update(self, *, step: int, lr: float, scale: Tensor, apply: Tensor) -> None:
        """Apply one update; with `apply` [] false no bit of weights or state changes."""
        beta1, beta2 = self._betas
        for segment in self._segments:
            p, m = segment.param, self._view(segment)
            g = segment.grad * scale
            decay = self._decay if segment.role != "vector" else 0.0
            new = p * (1 - lr * decay) - lr * torch.sign(beta1 * m + (1 - beta1) * g)
            p.copy_(torch.where(apply, new, p))
            m.copy_(torch.where(apply, beta2 * m + (1 - beta2) * g, m))

    def state_dict(self) -> State:
        return {"m": self._m}

    def load_state_dict(self, state: State) -> None:
        self._m.copy_(torch.as_tensor(state["m"]).view(-1))

    def _view(self, segment: Segment) -> Tensor:
        return self._m[segment.offset : segment.offset + segment.param.numel()].view(segment.param.shape)
