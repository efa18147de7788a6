"""Signals: finish the step, save, close, leave. A second signal leaves at once."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Stop:
    """A request to stop, raised by a signal and read once per step."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self.signal is not None

    @property
    def code(self) -> int:
        """Return the exit code of a run that a signal stopped: 128 + its number, as a shell has it."""
        return 128 + (self.signal or signal.SIGTERM)

    def install(self) -> None:
        """Take over the signals; only the main thread may."""
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.requested:
            os._exit(128 + number)
        self.signal = number
