"""One sweep command at a time in one folder; the lock ends with the last process that holds it."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from runner.cli import ConfigError
from runner.lock import UNLOCKED, try_lock

log = logging.getLogger(__name__)

_PATIENCE_S = 10.0


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Yield the descriptor of the sweep's lock; cells that inherit it keep the folder locked.

    Waits a moment: the cells of a sweep that was just killed need one to end.

    Raises:
        ConfigError: the folder cannot be written, or another command runs this sweep.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".sweep.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(
            [f"sweep.root: cannot write to {folder} ({error.strerror}); choose another"]
        ) from error
    try:
        _take(handle, folder)
        with contextlib.suppress(OSError):  # it only says who has the lock; a full disk is told later
            os.truncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield handle
    finally:
        os.close(handle)


def _take(handle: int, folder: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            if not try_lock(handle):
                log.warning(UNLOCKED, folder, "sweep.name")
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                owner = os.pread(handle, 32, 0).decode("ascii", "replace") or "unknown"
                raise ConfigError(
                    [f"sweep.name: {folder} is being run by process {owner}; wait, or choose another name"]
                ) from None
            time.sleep(0.05)
