"""What a person reads while a sweep runs: one line for each thing that happens."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from runner.sweep.cells import Cell, Result


class Teller:
    """Writes the sweep's lines; estimates what is left from how long cells took."""

    def __init__(self, *, total: int, parallel: int) -> None:
        self._total = total
        self._parallel = parallel
        self._done = 0
        self._seconds: list[float] = []

    def line(self, text: str) -> None:
        """Write one line at once."""
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def skipped(self) -> None:
        """Count a cell that an earlier command finished; the headline told of it."""
        self._done += 1

    def started(self, cell: Cell, *, attempt: int) -> None:
        """Tell of a cell that starts or goes on."""
        if attempt == 1:
            going_on = any(cell.folder.glob("DONE_*"))
            self.line(f"#{cell.number} {'continues' if going_on else 'starts'} {cell.label}".rstrip())

    def retried(self, cell: Cell, result: Result) -> None:
        """Tell of a cell that failed and is tried again."""
        self.line(f"#{cell.number} {clipped(result.message)}; tried again")

    def ended(self, cell: Cell, result: Result, *, seconds: float) -> None:
        """Tell how a cell ended, and how long the rest will take."""
        if result.status == "stopped":
            where = f"at step {result.step}, saved" if result.step else "before its first step"
            self.line(f"#{cell.number} stopped {where} {cell.label}".rstrip())
            return
        self._done += 1
        self._seconds.append(seconds)
        count = f"{self._done}/{self._total}{self._left()}"
        text = f"#{cell.number} {_word(result)} ({count}) {_facts(cell, result)}"
        if result.failed:
            text += f" | {clipped(result.message or result.status, most=90)}"
        self.line(text)

    def interrupted(self, running: int, *, again: bool) -> None:
        """Tell what a Ctrl-C does."""
        what = "killed" if again else "finish their step and save (again: kill them)"
        self.line(f"stopping: {running} running cells {what}; the same command continues the sweep")

    def failures(self, ended: Sequence[tuple[Cell, Result]]) -> None:
        """List what went wrong, with where to look."""
        bad = [(cell, result) for cell, result in ended if result.failed]
        if bad:
            self.line("")
            self.line(f"{len(bad)} of {self._total} cells failed:")
        for cell, result in bad:
            log = short(cell.folder / "console.log")
            self.line(
                f"  #{cell.number} {cell.label}: {clipped(result.message or result.status)}; log: {log}"
            )

    def _left(self) -> str:
        left = self._total - self._done
        if left <= 0 or not self._seconds:
            return ""
        rounds = math.ceil(left / self._parallel)
        return f", about {duration(rounds * sum(self._seconds) / len(self._seconds))} left"


def duration(seconds: float) -> str:
    """Return a time span in the units that a person thinks in."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def short(path: Path) -> str:
    """Return a path as short as it can be written here."""
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)


def _word(result: Result) -> str:
    return "done" if result.status == "finished" else result.status


def _facts(cell: Cell, result: Result) -> str:
    val = "" if math.isnan(result.val_loss) else f"val={result.val_loss:.4g}"
    return f"{cell.label} {val}".strip()


def clipped(text: str, *, most: int = 160) -> str:
    """Return one line of a message that may be long; all of it is in the log."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
