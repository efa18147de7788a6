"""Write llm.c's `main.log`, byte for byte, so that every tool that reads llm.c's logs reads ours."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import re
from pathlib import Path
from typing import Literal

from runner.api import Event, RunInfo, Score, TrainStep, ValLoss

_LOG = logging.getLogger(__name__)
_NUMBER = rb"-?(?:\d+\.\d{%d}|inf|nan)"
_WHOLE_LINE = re.compile(
    rb"s:\d+ (?:(?:tel|eval):%b|trl:%b lr:%b norm:%b)" % (_NUMBER % 4, _NUMBER % 4, _NUMBER % 6, _NUMBER % 2)
)
_HEAD = re.compile(rb"s:(-?\d+) (\w+):")


class LlmcLogger:
    """Append one line per training step, validation loss and score to `<run folder>/main.log`.

    Each line is one open, one write and one close (llmc/logger.h), so a crash loses nothing that was
    logged. A fresh start empties the file. On a resume it is left alone and new lines append, as in
    llm.c: readers let the last line of a step win. `rewind` drops what the resumed run will write
    again, so that each step stands there once. Either way a last line that a crash tore is mended:
    given its newline if only that is missing, else cut off, as half a number reads as a wrong one.
    """

    def __init__(
        self,
        *,
        on_resume: Literal["append", "rewind"] = "append",
        score: str = "hellaswag",
        fsync: bool = False,
    ) -> None:
        self._on_resume = on_resume
        self._score = score
        self._fsync = fsync
        self._path = ""

    def open(self, run: RunInfo) -> None:
        """Empty the file on a fresh start; mend it, and rewind it if asked to, on a resume."""
        path = run.dir / "main.log"
        self._path = str(path)
        if not run.resumed:
            with path.open("wb"):
                return
        if path.exists():
            _mend_last_line(path)
            if self._on_resume == "rewind":
                _rewind(path, start_step=run.start_step)

    def log(self, event: Event) -> None:
        """Append the event's line; events that llm.c has no line for are left out."""
        text = line(event, score=self._score)
        if text is not None:
            assert self._path, "open() comes before log()"
            _append(self._path, text.encode("ascii"), fsync=self._fsync)

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """Do nothing: no file stays open between lines."""


def line(event: Event, *, score: str = "hellaswag") -> str | None:
    """Return llm.c's log line for an event, newline included; None where llm.c has none."""
    if isinstance(event, TrainStep):
        loss, lr, norm = _c_float(event.loss, 4), _c_float(event.lr, 6), _c_float(event.norm, 2)
        return f"s:{event.step} trl:{loss} lr:{lr} norm:{norm}\n"
    if isinstance(event, ValLoss):
        return f"s:{event.step} tel:{_c_float(event.loss, 4)}\n"
    if isinstance(event, Score) and event.name == score:
        return f"s:{event.step} eval:{_c_float(event.value, 4)}\n"
    return None


def _c_float(value: float, decimals: int) -> str:
    """Format as C's printf does a float: rounded to float32 first, and NaN keeps its sign."""
    single = ctypes.c_float(value).value
    if math.isnan(single):
        return "-nan" if math.copysign(1.0, single) < 0 else "nan"
    return f"{single:.{decimals}f}"


def _append(path: str, data: bytes, *, fsync: bool) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        written = os.write(fd, data)
        try:
            if written != len(data):
                raise OSError(f"{path}: wrote {written} of {len(data)} bytes of a line; is the disk full?")
            if fsync:
                os.fsync(fd)
        except OSError:
            os.ftruncate(fd, os.fstat(fd).st_size - written)  # a line is there whole and once or not at all
            raise
    finally:
        os.close(fd)


def _mend_last_line(path: Path) -> None:
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - 4096)  # far longer than any line
        file.seek(start)
        tail = file.read()
        torn = tail[tail.rfind(b"\n") + 1 :]
        if not torn:
            return
        if _WHOLE_LINE.fullmatch(torn):
            file.write(b"\n")
            return
        _LOG.warning("%s: cut off a torn last line of %d bytes", path, len(torn))
        file.truncate(size - len(torn))


def _rewind(path: Path, *, start_step: int) -> None:
    """Keep what precedes the checkpoint: training lines below its step, others up to it.

    A checkpoint of step k is written after the evaluations of step k and before training step k, and
    a resumed run evaluates next after training, so the `tel` and `eval` of step k must stay.
    """
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [text for text in lines if _precedes(text, start_step=start_step)]
    if len(kept) == len(lines):
        return
    new = path.with_name(path.name + ".tmp")
    with new.open("wb") as file:
        file.write(b"".join(kept))
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def _precedes(text: bytes, *, start_step: int) -> bool:
    head = _HEAD.match(text)
    if head is None:
        return True  # not ours; whoever wrote it wants it kept
    step = int(head[1])
    return step < start_step or (step == start_step and head[2] != b"trl")
