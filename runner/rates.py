"""A run's learning rates, evaluated a few steps ahead."""

from __future__ import annotations

from runner.api import Scheduler
from runner.scheduler import rate_at

_AHEAD = 32  # steps


class Rates:
    """A schedule of `steps` steps that is asked for several rates in a row.

    A schedule is a pure function of the step, so when it is asked does not matter. Asked between two
    training steps, which sweep the caches, a rate takes 25 us; right after another one it takes 3.
    """

    def __init__(self, schedule: Scheduler, *, steps: int) -> None:
        self._schedule, self._steps = schedule, steps
        self._first, self._rates = 0, list[float]()

    def __call__(self, step: int) -> float:
        """Return the rate of a step, a float32 value; what the schedule raises for it is raised here.

        Raises:
            ValueError: the schedule, which may be anybody's, has no number for the step.
        """
        if not 0 <= step - self._first < len(self._rates):
            self._first, self._rates = step, self._from(step)
        return self._rates[step - self._first]

    def _from(self, step: int) -> list[float]:
        rates = [self._rate(step)]
        for later in range(step + 1, min(step + _AHEAD, self._steps)):
            try:
                rates.append(self._rate(later))
            except (Exception, SystemExit):  # it is asked again if the run gets there
                break
        return rates

    def _rate(self, step: int) -> float:
        return rate_at(self._schedule, step, steps=self._steps)
