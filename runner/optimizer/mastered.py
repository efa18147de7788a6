"""Let an optimizer that knows only fp32 train bfloat16 weights too: it updates a master copy of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from runner.api import Optimizer, Segment, State
from runner.optimizer.master import initial_master, view_of
from runner.rng import ModelRng, stochastic_round, weight_noise


class Mastered:
    """An optimizer of fp32 weights behind the run's weights, of whatever type.

    bfloat16 weights are the master copy, rounded stochastically with llm.c's noise, as `AdamW` does.
    fp32 weights are their own master. On a CPU a refused update ends here; on other devices `inner`
    gates it itself.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        build: Callable[[Sequence[Segment]], Optimizer],
        rng: ModelRng,
    ) -> None:
        self._segments, self._rng = tuple(segments), rng
        half = segments[0].param.dtype == torch.bfloat16
        self._master: Tensor | None = initial_master(segments) if half else None
        exact = segments
        if self._master is not None:
            exact = [replace(segment, param=view_of(self._master, segment)) for segment in segments]
        self.inner = build(exact)

    def update(self, *, step: int, lr: float, scale: Tensor, apply: Tensor) -> None:
        """Apply one update; with `apply` [] false no bit of weights, state or generator changes."""
        if apply.device.type == "cpu":
            if not bool(apply):
                return
            seeds: Sequence[int | Tensor] = self._rng.update(len(self._segments))
        else:
            seeds = self._rng.update_on_device(len(self._segments), apply=apply).unbind()
        self.inner.update(step=step, lr=lr, scale=scale, apply=apply)
        if self._master is not None:
            for segment, seed in zip(self._segments, seeds, strict=True):
                _round(segment, view_of(self._master, segment), seed=seed, apply=apply)

    def state_dict(self) -> State:
        state = self.inner.state_dict()
        return state if self._master is None else {**state, "master": self._master}

    def load_state_dict(self, state: State) -> None:
        """Restore the inner state and the master copy; raises ValueError where one is missing."""
        if self._master is not None:
            if "master" not in state:
                raise ValueError("optimizer state: 'master' is missing; resume with the run's precision")
            self._master.copy_(torch.as_tensor(state["master"]).view(-1))
        self.inner.load_state_dict({name: value for name, value in state.items() if name != "master"})


def _round(segment: Segment, exact: Tensor, *, seed: int | Tensor, apply: Tensor) -> None:
    for layer, (weights, row) in enumerate(zip(segment.param, exact, strict=True)):
        noise = weight_noise(row.numel(), start=segment.start, layer=layer, seed=seed, device=row.device)
        weights.copy_(torch.where(apply, stochastic_round(row, noise), weights))
