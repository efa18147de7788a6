"""Where a run is, and what its events say of how it goes."""

from __future__ import annotations

import math

from runner.api import Event, State, TrainStep, ValLoss

LEAP = 2.0**20
"""From here on the square of a value, in float64, swallows what a window of ordinary ones varies by."""


class DivergedError(RuntimeError):
    """Too many steps in a row were refused; the message says how many and why."""


class Progress:
    """Where the run is, and the few figures that its end reports."""

    def __init__(self, *, max_consecutive_skips: int | None) -> None:
        self.step = 0
        self.val_loss = math.nan
        self.best_val_loss = math.inf
        self.best_step = 0
        self.lost_since: int | None = None  # the step from which on no training loss was finite, or diverged
        self.stopped = False
        self._limit = max_consecutive_skips
        self._skips_in_a_row = 0
        self._before: tuple[float, float] | None = None  # loss and norm of the last finite step

    def observe(self, event: Event) -> None:
        """Note what an event says of the run.

        Raises:
            DivergedError: `outlier.max_consecutive_skips` steps in a row were skipped.
        """
        if isinstance(event, ValLoss):
            self.val_loss = event.loss
            if event.loss < self.best_val_loss:
                self.best_val_loss, self.best_step = event.loss, event.step
        elif isinstance(event, TrainStep):
            if math.isfinite(event.loss):
                self.lost_since = None
            elif self.lost_since is None:
                self.lost_since = event.step
            self._skips_in_a_row = 0 if event.applied else self._skips_in_a_row + 1
            if self._limit is not None and self._skips_in_a_row >= self._limit:
                self.lost_since = event.step - self._skips_in_a_row + 1
                raise DivergedError(
                    f"diverged: {self._skips_in_a_row} steps in a row were skipped up to step {event.step} "
                    f"({event.reason}); lower optimizer.lr, or raise outlier.max_consecutive_skips"
                )

    def leaps(self, event: TrainStep) -> bool:
        """Whether loss or norm is finite and LEAP times that of the finite step before it in this session."""
        values = (event.loss, event.norm)
        if not all(map(math.isfinite, values)):
            return False
        before, self._before = self._before, values
        return before is not None and any(
            abs(now) > LEAP * abs(was) for now, was in zip(values, before, strict=True)
        )

    def state_dict(self) -> State:
        """Return what a resumed run needs to go on counting."""
        names = ("step", "val_loss", "best_val_loss", "best_step", "lost_since", "_skips_in_a_row")
        return {name.strip("_"): getattr(self, name) for name in names}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state`."""
        self.step = int(state["step"])
        self.val_loss, self.best_val_loss = float(state["val_loss"]), float(state["best_val_loss"])
        self.best_step, self._skips_in_a_row = int(state["best_step"]), int(state["skips_in_a_row"])
        self.lost_since = state.get("lost_since")  # None in a checkpoint of an earlier version
