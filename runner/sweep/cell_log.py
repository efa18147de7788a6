"""Tell the sweep how far a cell is: `progress.log`, one line `step val_loss` each now and then."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Literal

from runner.events import Event, TrainStep, ValLoss

if TYPE_CHECKING:
    from runner.api import RunInfo  # which needs torch: half of the time that --cfg job takes

_EVERY_S = 1.0


class CellLog:
    """Append the step every second (val_loss nan), and every validation loss at once."""

    def __init__(self) -> None:
        self._fd = -1
        self._next_s = 0.0

    def open(self, run: RunInfo) -> None:
        """Continue the file of a resumed run, start a new one otherwise."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | (0 if run.resumed else os.O_TRUNC)
        self._fd = os.open(run.dir / "progress.log", flags, 0o666)

    def log(self, event: Event) -> None:
        """Write the line that an event is worth, if it is."""
        if isinstance(event, ValLoss):
            self._write(event.step, event.loss)
        elif isinstance(event, TrainStep) and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _EVERY_S
            self._write(event.step + 1, float("nan"))

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """Write the status as the last line, and close the file."""
        if self._fd >= 0:
            os.write(self._fd, f"end:{status}\n".encode("ascii"))
            os.close(self._fd)
            self._fd = -1

    def _write(self, step: int, val_loss: float) -> None:
        os.write(self._fd, f"{step} {val_loss!r}\n".encode("ascii"))


def entry() -> dict[str, str]:
    """Return the logger entry that a sweep adds to each cell's configuration."""
    return {"_target_": f"{CellLog.__module__}.{CellLog.__name__}"}
