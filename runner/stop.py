"""Signals: finish the step, save, close, leave. A second signal leaves at once."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
PREEMPTION = (signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers send ahead of the end (`sbatch --signal=USR1@300`, submitit): the run wants to go on."""

_ECHO_S = 1.0  # a launcher and its scheduler may both pass on one signal


def handled() -> tuple[signal.Signals, ...]:
    """Return the signals to take over: all, but SIGHUP where nohup has it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return SIGNALS[:-1] if ignored else SIGNALS


class Stop:
    """A request to stop, raised by a signal and read once per step."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._at = 0.0
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self.signal is not None

    @property
    def code(self) -> int:
        """Return the exit code of a run that a signal stopped: 128 + its number, as a shell has it."""
        return 128 + (self.signal or signal.SIGTERM)

    def agree(self, gather: Callable[[Any], list[Any]]) -> None:
        """Take over the signal of the first rank that got one; all ranks together, once they stop."""
        self.signal = next((number for number in gather(self.signal) if number is not None), self.signal)

    def install(self) -> None:
        """Take over the signals; only the main thread may."""
        for number in handled():
            self._previous[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def pass_on(self) -> None:
        """Call the handler that was there before, now that all is saved: submitit's requeues the job."""
        previous = self._previous.get(self.signal or 0)
        if self.signal in PREEMPTION and callable(previous):
            previous(self.signal, None)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        if not self.requested:
            self.signal, self._at = number, now
            _say(f"{name}: finishing this step and saving; once more to leave at once")
        elif now - self._at > _ECHO_S:
            _say(f"{name} again: left at once; the newest complete checkpoint counts")
            os._exit(128 + number)


def _say(text: str) -> None:
    # Not through a stream or a logger: the signal may have interrupted one of them.
    with contextlib.suppress(OSError):
        os.write(2, f"runner: {text}\n".encode())
