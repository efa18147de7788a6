"""Things that go wrong in the middle of a run, as evaluators that a test's configuration names."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path

from runner.api import Event, View


class Crash:
    """Die of a segmentation fault at a step, if the learning rate in the name says so."""

    def __init__(self, *, every: int = 1, at: int = 10, once: str | None = None) -> None:
        self.every, self._at, self._once = every, at, once

    def __call__(self, view: View, step: int) -> Iterable[Event]:
        """Crash, or do nothing."""
        if step != self._at or (self._once and Path(self._once).exists()):
            return []
        if self._once:
            Path(self._once).touch()
        os.kill(os.getpid(), signal.SIGSEGV)
        return []


class Child:
    """Start a process that would outlive the run."""

    def __init__(self, *, every: int = 1, seconds: int = 60) -> None:
        self.every, self._seconds = every, seconds
        self._children: list[subprocess.Popen[bytes]] = []

    def __call__(self, view: View, step: int) -> Iterable[Event]:
        """Start it once."""
        if not self._children:
            self._children.append(subprocess.Popen(["sleep", str(self._seconds)]))
        return []
