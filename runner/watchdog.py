"""End a run that makes no progress, and leave the stacks that tell why."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from pathlib import Path
from typing import IO

HANG_CODE = 124  # of a run that was ended, as of a command that timeout(1) ended
_CHECKS = 4  # per limit


class Watchdog:
    """Watches that `beat` is called at least every `limit_s`; if not, dumps all stacks and ends the process.

    A thread looks now and then, so a beat costs next to nothing. Should compiled code hold the
    interpreter, that thread cannot run either: then faulthandler's own does it after twice the limit.
    All ranks of a hung run dump before the first one leaves.
    """

    def __init__(self, limit_s: float | None, *, folder: Path, rank: int = 0) -> None:
        self._limit_s, self._rank = limit_s, rank
        self._path = folder / f"stacks_{rank:05d}.txt"
        self._beats, self._what = 0, "the start"
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch; without a limit nothing happens."""
        if self._limit_s is not None:
            self._thread = threading.Thread(
                target=self._watch, args=(self._limit_s,), daemon=True, name="watchdog"
            )
            self._thread.start()

    def beat(self, what: str) -> None:
        """Note progress: `what` begins now."""
        self._beats += 1
        self._what = what

    def stop(self) -> None:
        """Watch no more."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()
            self._thread = None

    def _watch(self, limit_s: float) -> None:
        seen, since = -1, time.monotonic()
        while not self._stopping.wait(limit_s / _CHECKS):
            if self._beats != seen:
                seen, since = self._beats, time.monotonic()
                faulthandler.dump_traceback_later(2 * limit_s, exit=True, file=sys.stderr)
            elif time.monotonic() - since > limit_s:
                self._end(time.monotonic() - since, pause_s=2 * limit_s / _CHECKS)

    def _end(self, waited_s: float, *, pause_s: float) -> None:
        text = (
            f"runner: error: rank {self._rank}: no progress for {waited_s:.0f} s since {self._what}: "
            f"ended (run.watchdog_s); the stacks are in {self._path}\n"
        )
        with contextlib.suppress(OSError), open(self._path, "w", encoding="utf-8") as file:
            _dump(text, file)
        _dump(text, sys.stderr)
        time.sleep(pause_s)  # a peer that loses this rank must have written its own stacks by then
        os._exit(HANG_CODE)


def _dump(text: str, file: IO[str]) -> None:
    file.write(text)
    file.flush()
    faulthandler.dump_traceback(file)
