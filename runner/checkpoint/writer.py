"""Write one rank's files of a checkpoint on a thread, from live memory or from copies in host memory.

On a CPU the thread reads the live tensors while the next forward and backward run: they change only in
the update, before which the loop joins the thread. On a GPU the tensors are first copied to pinned host
memory on a side stream; only the next update waits for the copies, on the device.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from runner.api import Slot
from runner.checkpoint import disk
from runner.checkpoint.disk import Written
from runner.checkpoint.job import Job


class Writing:
    """A write in flight. `failure` is one line once it is over, or None."""

    def __init__(self, job: Job, *, ready: Callable[[], None]) -> None:
        self.job = job
        self.failure: str | None = None
        self.size = 0
        self._ready = ready
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()

    def publish(self) -> None:
        """Give the finished files their names."""
        for path in self.job.paths:
            os.replace(_tmp(path), path)

    def discard(self) -> None:
        """Remove what was written."""
        for path in self.job.paths:
            with contextlib.suppress(OSError):
                _tmp(path).unlink(missing_ok=True)

    def _run(self) -> None:
        path = self.job.extra_path
        try:
            self._ready()
            if self.job.weights is not None and (bad := non_finite(self.job.weights, self.job.layout)):
                self.failure = f"refused: {bad} holds non-finite weights"
                return
            written: dict[str, Written] = {}
            for path, chunks in self.job.files:
                written[path.name] = disk.write_file(_tmp(path), chunks)
            path = self.job.extra_path
            extra = disk.write_file(_tmp(path), [self.job.extra(written)])
            self.size = sum(w.size for w in written.values()) + extra.size
        except OSError as error:
            self.failure = f"{_tmp(path)}: {error.strerror or error}"
        except Exception as error:  # a thread must not die silently
            self.failure = f"{path}: {type(error).__name__}: {error}"


def _tmp(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def non_finite(weights: Tensor, layout: Sequence[Slot]) -> str | None:
    """Return the name of the first slot that holds nan or inf, or None."""
    if bool(torch.isfinite(weights.sum(dtype=torch.float64))):  # any nan or inf reaches the sum
        return None
    for slot in layout:
        if not bool(torch.isfinite(weights[slot.offset : slot.offset + slot.numel]).all()):
            return slot.name
    return None
