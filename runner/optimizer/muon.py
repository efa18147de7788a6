"""Muon for matrices, AdamW for everything else: torch's Muon behind the loop's contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt
from torch import Tensor

from runner.api import Segment, State
from runner.optimizer.adamw import AdamW
from runner.optimizer.foreign import Foreign
from runner.optimizer.options import moved_together


class Muon:
    """Orthogonalise the momentum of each matrix (Jordan et al. 2024). `segments` (fp32) are supplied.

    Embeddings, heads and vectors get AdamW at `adamw_lr_scale` times the rate. `match_rms_adamw` makes
    updates as large as AdamW's, so that its rates carry over (Liu et al. 2025).
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        lr: Annotated[float, Ge(0)],
        momentum: Annotated[float, Ge(0), Lt(1)] = 0.95,
        nesterov: bool = True,
        ns_steps: Annotated[int, Ge(1), Lt(100)] = 5,
        adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw",
        weight_decay: Annotated[float, Ge(0)] = 0.1,
        adamw_lr_scale: Annotated[float, Ge(0)] = 1.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: Annotated[float, Ge(0)] = 1e-8,
    ) -> None:
        self.lr, self._adamw_lr_scale = lr, adamw_lr_scale
        matrices = [s for s in segments if _is_matrix(s)]
        others = moved_together([s for s in segments if not _is_matrix(s)])

        def build(params: list[dict[str, Any]]) -> Any:
            from torch.optim import Muon as TorchMuon  # a second of imports, for those who choose it

            return TorchMuon(
                params,
                lr=lr,
                weight_decay=weight_decay,
                momentum=momentum,
                nesterov=nesterov,
                ns_steps=ns_steps,
                adjust_lr_fn=adjust_lr,
            )

        # Either may be empty where `optimizer.lr_scale` splits the roles.
        self._muon = Foreign(matrices, build=build, decays=True) if matrices else None
        self._adamw: AdamW | None = None
        if others:
            self._adamw = AdamW(others, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def update(self, *, step: int, lr: float, scale: Tensor, apply: Tensor) -> None:
        """Apply one update unless `apply` [] is false; reading that waits for a GPU."""
        if self._muon is not None:
            self._muon.update(step=step, lr=lr, scale=scale, apply=apply)
        if self._adamw is not None:
            self._adamw.update(step=step, lr=lr * self._adamw_lr_scale, scale=scale, apply=apply)

    def state_dict(self) -> State:
        parts = {"muon": self._muon, "adamw": self._adamw}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load_state_dict(self, state: State) -> None:
        if self._muon is not None:
            self._muon.load_state_dict(state["muon"])
        if self._adamw is not None:
            self._adamw.load_state_dict(state["adamw"])


def _is_matrix(segment: Segment) -> bool:
    return segment.role == "matrix" and len(segment.shape) == 2
