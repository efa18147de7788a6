"""Signals: finish the step, save, close, leave. A second signal leaves at once.

Before the first step there is nothing to save: then a signal undoes what has been begun, and leaves.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
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


class Interrupted(KeyboardInterrupt):
    """A signal came before anything was trained; `code` is the exit code that says so."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name}: left before anything was trained")
        self.number, self.code = number, 128 + number


class StartUp:
    """While a run starts, let a signal end what is under way as Ctrl-C does, so that it is undone.

    Whoever takes the signals over, and gives them back by `give_back`, ends the start: what has been
    trained by then is saved, and the process is about to leave. Its last words, an error perhaps, which
    made a launcher send the signal, come first; only a second signal cuts them short.
    """

    def __init__(self) -> None:
        self.over = self.busy = False
        self.noted: int | None = None
        self._since: float | None = None
        self._previous: dict[int, Any] = {}

    @property
    def interruption(self) -> Interrupted | None:
        """Return the signal that came during this start, None if there was none or the start is over.

        What it interrupted may have failed in a way of its own, or may have swallowed it: a library's
        bare `except`, a destructor, a callback.
        """
        return None if self.over or self.noted is None else Interrupted(self.noted)

    def __enter__(self) -> StartUp:
        self._previous = {number: signal.signal(number, self) for number in handled()}
        return self

    def __exit__(self, *_: object) -> None:
        give_back(self._previous)

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Raise Interrupted, or leave at once if that takes too long."""
        now = time.monotonic()
        if self._since is not None and now - self._since > _ECHO_S:
            os._exit(128 + number)
        if self._since is None:
            self._since, self.noted = now, number
            if not self.busy and not self.over:
                raise Interrupted(number)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Put off what a signal does to a start while something is under way that an exception would break.

    Compiled code that is being imported ends the process if one passes through it.
    """
    start_up = signal.getsignal(signal.SIGTERM)
    if not isinstance(start_up, StartUp):
        yield
        return
    start_up.busy = True
    try:
        yield
    finally:
        start_up.busy = False
    heed()


def interruption() -> Interrupted | None:
    """Return the signal that came during the start that is under way; None if none is or none came."""
    start_up = signal.getsignal(signal.SIGTERM)
    return start_up.interruption if isinstance(start_up, StartUp) else None


def heed() -> None:
    """Go no further if a signal came during this start, whatever has become of the exception it raised.

    Raises:
        Interrupted: one came.
    """
    if (came := interruption()) is not None:
        raise came


def give_back(previous: Mapping[int, Any]) -> None:
    """Put back the signal handlers that somebody had taken over."""
    for number, handler in previous.items():
        if isinstance(handler, StartUp):
            handler.over = True
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Let signals wait, also in the processes started meanwhile, until those call `let_through`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, handled())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_through() -> None:
    """Take the signals that were held back when this process was started."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handled())


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
        give_back(self._previous)

    def pass_on(self) -> None:
        """Call the handler that was there before, now that all is saved: submitit's requeues the job."""
        previous = self._previous.get(self.signal or 0)
        if self.signal in PREEMPTION and callable(previous) and not isinstance(previous, StartUp):
            previous(self.signal, None)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        if not self.requested:
            self.signal, self._at = number, now
            _say(f"{name}: finishing what is under way and saving; once more to leave at once")
        elif now - self._at > _ECHO_S:
            _say(f"{name} again: left at once; the newest complete checkpoint counts")
            os._exit(128 + number)


def _say(text: str) -> None:
    # Not through a stream or a logger: the signal may have interrupted one of them.
    with contextlib.suppress(OSError):
        os.write(2, f"runner: {text}\n".encode())
