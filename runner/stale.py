"""Records in a run folder that an earlier start wrote and this one does not: none may pass for its own."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path

_FILES = {
    "llmc": "main.log",
    "jsonl": "metrics.jsonl",
    "tensorboard": "tensorboard/events.out.tfevents.*",
}
"""What each logger that has files in the run folder writes there; one that is chosen settles them itself."""


def remove_records(folder: Path, *, written: Collection[str]) -> None:
    """Remove what a run that starts afresh found and will not write, given the loggers that it has."""
    left = [pattern for name, pattern in _FILES.items() if name not in written]
    for path in (path for pattern in (*left, "loss.png") for path in folder.glob(pattern)):
        with contextlib.suppress(OSError):
            path.unlink()


def unwritten_records(folder: Path, *, written: Collection[str], start_step: int) -> Iterator[str]:
    """Yield a line for each record that a run which goes on at `start_step` has and will not add to."""
    for name, pattern in _FILES.items():
        if name not in written and (path := next(folder.glob(pattern), None)) is not None:
            where = path.relative_to(folder).parts[0]
            yield (
                f"{where} stays as it is and will lack the steps from {start_step} on, "
                f"since logger={name} is not chosen any more"
            )
