"""Faults on request (`debug.*`): to test the guard, and to see what a run does when one happens.

Steps are 0-based and counted from the start of the run, saves from 1 in this process.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from typing import Annotated, Any, Literal

from annotated_types import Ge
from torch import Tensor

from runner.api import Event, Logger, RunInfo

Step = Annotated[int, Ge(0)]


class Inject:
    """Spoil numbers, writes, loggers or a rank at the listed moments; `this_rank` is supplied."""

    def __init__(
        self,
        *,
        nan_loss_at: list[Step] | None = None,
        nan_grad_at: list[Step] | None = None,
        spike_loss_at: list[Step] | None = None,
        rank: Annotated[int, Ge(0)] = 0,
        raise_at: Step | None = None,
        hang_at: Step | None = None,
        kill_at: Step | None = None,
        slow_step_s: Annotated[float, Ge(0)] = 0.0,
        slow_save_s: Annotated[float, Ge(0)] = 0.0,
        fail_saves: list[Annotated[int, Ge(1)]] | None = None,
        fail_with: Literal["ENOSPC", "EIO", "EDQUOT"] = "ENOSPC",
        break_logger: str | None = None,
        break_logger_at: list[Step] | None = None,
        this_rank: int = 0,
    ) -> None:
        self._nan_loss = frozenset(nan_loss_at or ())
        self._nan_grad = frozenset(nan_grad_at or ())
        self._spike = frozenset(spike_loss_at or ())
        self._here = rank == this_rank
        at = {"raise": raise_at, "hang": hang_at, "kill": kill_at}
        self._at = {what: step for what, step in at.items() if step is not None}
        self._slow_step_s, self._slow_save_s = slow_step_s, slow_save_s
        self._fail_saves, self._errno = frozenset(fail_saves or ()), getattr(errno, fail_with)
        self._logger, self._logger_at = break_logger, frozenset(break_logger_at or ())
        self._saves = 0

    def step(self, step: int) -> None:
        """Do to the chosen rank what is due before `step`."""
        if not self._here:
            return
        due = [what for what, at in self._at.items() if at == step] if self._at else []
        if "kill" in due:
            os.kill(os.getpid(), signal.SIGKILL)
        if "raise" in due:
            raise RuntimeError(f"debug.raise_at: an error in step {step}, as asked for")
        while "hang" in due:
            time.sleep(1)
        if self._slow_step_s:
            time.sleep(self._slow_step_s)

    def loss(self, step: int, loss: Tensor) -> Tensor:
        """Return the loss of a micro-batch, spoiled if `step` is listed."""
        if step in self._nan_loss:
            return loss * float("nan")
        return loss * 100.0 if step in self._spike else loss

    def gradients(self, step: int, engine: Any) -> None:
        """Put a nan into the first gradient element if `step` is listed."""
        if step in self._nan_grad:
            engine.gradient[0] = float("nan")

    def write(self) -> None:
        """Delay or refuse the write of a checkpoint; called where its files are written.

        Raises:
            OSError: this save is listed.
        """
        if not self._here:
            return
        self._saves += 1
        time.sleep(self._slow_save_s)
        if self._saves in self._fail_saves:
            raise OSError(self._errno, f"{os.strerror(self._errno)} (debug.fail_saves)")

    def loggers(self, loggers: dict[str, Logger]) -> dict[str, Logger]:
        """Return the loggers, the chosen one broken.

        Raises:
            ValueError: there is no such logger.
        """
        if self._logger is None:
            return loggers
        if self._logger not in loggers:
            known = ", ".join(loggers) or "none"
            raise ValueError(f"debug.break_logger: no logger {self._logger!r} in this run; it has {known}")
        return {**loggers, self._logger: Broken(loggers[self._logger], at=self._logger_at)}


class Broken:
    """A logger whose disk is full during the listed steps."""

    def __init__(self, inner: Logger, *, at: frozenset[int]) -> None:
        self._inner, self._at = inner, at

    def open(self, run: RunInfo) -> None:
        self._inner.open(run)

    def log(self, event: Event) -> None:
        if event.step in self._at:
            self._at -= {event.step}  # it is tried again, once the next event comes
            raise OSError(errno.ENOSPC, "No space left on device (debug.break_logger)")
        self._inner.log(event)

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:
        self._inner.close(status)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
