"""The settings of a sweep (`sweep.*`); they say how cells are run, never what a cell computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt


@dataclass(frozen=True)
class Search:
    """How optuna looks for the best values of the swept ranges."""

    trials: Annotated[int, Ge(1)] = 20
    sampler: Literal["tpe", "random"] = "tpe"
    startup_trials: Annotated[int, Ge(1)] = 8
    prune: bool = True
    prune_after: Annotated[int, Ge(0)] = 0
    penalty: Annotated[float, Gt(0)] = 100.0
    seed: Annotated[int, Ge(0)] = 42


@dataclass(frozen=True)
class Branches:
    """One trunk at the peak learning rate, and a decay off it for each budget of steps."""

    budgets: list[Annotated[int, Ge(2)]]
    decay_frac: Annotated[float, Gt(0), Lt(1)] = 0.2
    max_checkpoints: Annotated[int, Ge(1)] = 64

    def decay_steps(self, budget: int) -> int:
        """Return how many of a budget's steps are its decay; at least one."""
        return max(1, round(budget * self.decay_frac))


@dataclass(frozen=True)
class Sweep:
    """How the cells of a sweep are run."""

    name: str | None = None
    root: str = "outputs/sweeps"
    parallel: Annotated[int, Ge(1), Le(1024)] | None = None
    on_error: Literal["continue", "stop"] = "continue"
    retries: Annotated[int, Ge(0)] = 0
    search: Search | None = None
    branches: Branches | None = None
