"""Bring one checkpoint to the disk while training goes on.

A thread writes this rank's files under temporary names. Once every rank's are on the disk, all take their
names, which is quick; then another thread of rank 0 syncs the folder, writes DONE and removes what
retention gives up. On a CPU the first thread reads live memory, which only changes in the update: what is
unread when an update is about to begin is copied. On a GPU everything was copied beforehand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from runner.api import Event, Note, Saved
from runner.checkpoint import folder as files
from runner.checkpoint.background import Background
from runner.checkpoint.job import Job
from runner.checkpoint.writer import Outcome, discard, publish


class Together(NamedTuple):
    """What the ranks of a run do together: every rank calls the same, in the same order."""

    any_rank: Callable[[bool], bool]  # whether any rank raised a flag
    barrier: Callable[[], None]
    gather: Callable[[str | None], list[str | None]]  # everyone's, in rank order

    def agree(self, problem: str | None) -> str | None:
        """Return the problem of the first rank that has one, or None on all."""
        if not self.any_rank(problem is not None):
            return None
        return next((text for text in self.gather(problem) if text), "a rank failed")


class Flight:
    """A checkpoint on its way. `release` returns once the next update may change what is being written.

    `retain`, run after DONE, returns what became of older checkpoints.
    """

    def __init__(
        self,
        job: Job,
        *,
        step: int,
        rank: int,
        folder: Path,
        together: Together,
        writing: Background[Outcome],
        release: Callable[[], None],
        retain: Callable[[int], list[Event]],
    ) -> None:
        self.step = step
        self.saved = False
        self.blocked_s = 0.0
        self._job, self._rank, self._folder, self._together = job, rank, folder, together
        self._writing, self._release, self._retain = writing, release, retain
        self._finishing: Background[tuple[str | None, list[Event]]] | None = None
        self._size = 0
        self._failure: str | None = None
        self._retained: list[Event] = []

    def poll(self) -> bool:
        """Make the next update safe, and go on if every rank can; return whether all is over."""
        with self._timed():
            self._release()
            under_way = self._writing if self._finishing is None else self._finishing
            return not self._together.any_rank(under_way.running) and self._advance()

    def finish(self) -> None:
        """Wait until all is over."""
        with self._timed():
            while not self._advance():
                pass

    def events(self) -> list[Event]:
        """Return what happened, once all is over."""
        if self._failure is not None:
            text = f"checkpoint {self.step} not written, older ones stay: {self._failure}"
            return [Note(self.step, text, "error")]
        if self._rank != 0:
            return []
        path = str(files.done_path(self._folder, self.step))
        return [Saved(self.step, path, self._size, 1000 * self.blocked_s), *self._retained]

    def _advance(self) -> bool:
        """Wait for what is under way and take the next step; return whether that was the last."""
        if self._finishing is not None:
            failure, self._retained = self._finishing.result()
            self._failure = self._together.agree(failure)
            self.saved = self._failure is None
            return True
        self._size, failure = self._writing.result()
        self._failure = self._together.agree(failure)
        if self._failure is not None:
            discard(self._job)
            return True
        self._failure = self._publish()
        if self._failure is None:
            self._finishing = Background(self._declare_done)
        return self._failure is not None

    def _publish(self) -> str | None:
        failure = None
        if self._rank == 0:
            failure = attempt(lambda: files.remove(self._folder, self.step), folder=self._folder)
        self._together.barrier()  # an older attempt at this step is gone: nothing vouches for a mixture
        failure = failure or attempt(lambda: publish(self._job), folder=self._folder)
        return self._together.agree(failure)

    def _declare_done(self) -> tuple[str | None, list[Event]]:
        if self._rank != 0:
            return None, []
        failure = attempt(lambda: files.mark_done(self._folder, self.step), folder=self._folder)
        return failure, [] if failure else self._retain(self.step)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.blocked_s += time.perf_counter() - start


def attempt(action: Callable[[], None], *, folder: Path) -> str | None:
    """Do something with files in `folder`; return one line if the disk refuses."""
    try:
        action()
    except OSError as error:
        return f"{error.filename or folder}: {error.strerror or error}"
    return None
