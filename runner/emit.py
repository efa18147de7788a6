"""Hand events to the loggers, and keep a broken logger from hurting the run."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from runner.api import Event, Logger, Note, RunInfo

log = logging.getLogger(__name__)

RECORDS = ("llmc", "jsonl")
"""The loggers that are the record of a run: their lines are kept and tried again after a failure."""

SHOWS = "console"
"""The logger that a person watches."""

_KEPT = 100_000
_UNWRITABLE = (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError, AttributeError)


class Emitter:
    """Fan out events to named loggers.

    A logger that raises is reported once and dropped: a dead dashboard must not end a week of training.
    The record keeps what it could not write (a full disk) and writes it, in order, once it can; an event
    that has no form there, because a plugin put something else where a number belongs, is left out.
    """

    def __init__(self, loggers: Mapping[str, Logger], *, rank: int = 0) -> None:
        self.loggers = dict(loggers)
        self._rank = rank
        self._waiting: dict[str, deque[Event]] = {}
        self._lost: Counter[str] = Counter()  # lines of a record that it will never hold
        self._at = 0  # the step of the last event

    def open(self, run: RunInfo) -> None:
        """Open every logger; one that cannot open is dropped, unless it is the record.

        Raises:
            ValueError: naming the file of the record that cannot be written.
        """
        for name, logger in list(self.loggers.items()):
            try:
                logger.open(run)
            except Exception as error:
                if name not in RECORDS:
                    self._drop(name, error, run.start_step)
                elif isinstance(error, OSError):
                    where = error.filename or run.dir
                    raise ValueError(f"logger.{name}: cannot write {where} ({error.strerror})") from error
                else:
                    raise

    def __call__(self, events: Iterable[Event]) -> None:
        for event in events:
            self._at = event.step
            if isinstance(event, Note):
                self._warn(event)
            for name in list(self.loggers):
                self._send(name, event)

    def _warn(self, note: Note) -> None:
        """Put on standard error what must be seen, where no console logger shows it."""
        if note.level != "info" and self._rank == 0 and SHOWS not in self.loggers:
            log.warning("%s: %s", note.level, note.text)

    def _send(self, name: str, event: Event) -> None:
        waiting = self._waiting.get(name)
        if waiting:
            self._lost[name] += len(waiting) == waiting.maxlen
            waiting.append(event)
        try:
            if waiting:
                self._catch_up(name, waiting)
            else:
                self.loggers[name].log(event)
        except Exception as error:
            if name not in RECORDS:
                self._drop(name, error, event.step)
            elif isinstance(error, _UNWRITABLE):
                self._leave_out(name, error, event)
            elif not waiting:
                self._waiting[name] = deque([event], maxlen=_KEPT)
                self._tell(
                    Note(event.step, f"logger.{name}: {_text(error)}; its lines wait in memory", "error")
                )

    def _catch_up(self, name: str, waiting: deque[Event]) -> None:
        while waiting:
            try:
                self.loggers[name].log(waiting[0])
            except _UNWRITABLE as error:
                self._leave_out(name, error, waiting[0])
            waiting.popleft()

    def _leave_out(self, name: str, error: Exception, event: Event) -> None:
        """Count an event that will never be written as lost: waiting for it would cost all later ones."""
        if not self._lost[name]:
            what = type(event).__name__
            self._tell(Note(event.step, f"logger.{name}: {_text(error)}; this {what} is left out", "error"))
        self._lost[name] += 1

    def _drop(self, name: str, error: Exception, step: int) -> None:
        del self.loggers[name]
        self._waiting.pop(name, None)
        self._tell(Note(step, f"logger.{name} is off: {_text(error)}; the run goes on without it", "warning"))

    def _tell(self, note: Note) -> None:
        log.warning("%s", note.text)
        for name, logger in self.loggers.items():
            if name not in RECORDS:
                try:
                    logger.log(note)
                except Exception:
                    log.warning("logger.%s could not pass it on", name)

    def close(self, status: Literal["finished", "stopped", "failed"]) -> list[str]:
        """Close every logger, whatever the others do; return the parts of the record that lack lines."""
        lacking = [name for name in self.loggers if name in RECORDS and not self._written(name)]
        for name, logger in self.loggers.items():
            try:
                logger.close(status)
            except Exception as error:
                log.warning("logger.%s did not close: %s", name, _text(error))
        return lacking

    def _written(self, name: str) -> bool:
        """Write what still waits, as there will be no later event to do it; say what could not be."""
        waiting = self._waiting.get(name, deque())
        try:
            self._catch_up(name, waiting)
        except Exception as error:
            lost = len(waiting) + self._lost[name]
            log.error("logger.%s: %s; %d of its lines are lost", name, _text(error), lost)
            return False
        if self._lost[name]:
            log.error("logger.%s: %d lines are lost: left out, or kept for too long", name, self._lost[name])
        return not self._lost[name]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the loggers that keep one (a wandb run id)."""
        states = {}
        for name, logger in list(self.loggers.items()):
            if hasattr(logger, "state_dict"):
                try:
                    states[name] = logger.state_dict()
                except Exception as error:
                    self._drop(name, error, self._at)
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each logger its state back; one that is new, or cannot read it, starts without."""
        for name, logger in self.loggers.items():
            if name in state and hasattr(logger, "load_state_dict"):
                try:
                    logger.load_state_dict(state[name])
                except Exception as error:
                    log.warning("logger.%s starts without what it kept: %s", name, _text(error))

    def hints(self) -> list[tuple[str, str]]:
        """Return the loggers that tell where to look at the run, and what they tell."""
        found = []
        for name, logger in self.loggers.items():
            try:
                hint = getattr(logger, "hint", str)()
            except Exception as error:
                log.warning("logger.%s does not tell where to look: %s", name, _text(error))
            else:
                found += [(name, hint)] if hint else []
        return found


def _text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
