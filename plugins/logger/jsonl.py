"""Write `metrics.jsonl`: every event of a run in full precision, one JSON object per line."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import numbers
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from json.encoder import encode_basestring_ascii as _quoted
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from runner.api import Event, Ranks, RunInfo, TrainStep, metrics

_LOG = logging.getLogger(__name__)
_ROW = re.compile(rb'\{"event": "(\w+)", "step": (-?\d+), .*\}\n')
_EXECUTED = frozenset(kind.__name__.encode() for kind in (TrainStep, Ranks))  # `step` was executed
_NONFINITE = {math.inf: '"Infinity"', -math.inf: '"-Infinity"'}


class JsonlLogger:
    """Append one row per event to `<run folder>/metrics.jsonl`, which `runner.report` reads.

    A row holds `event` (the class in `runner.api`), `step`, `time` (Unix seconds), the numbers of
    `metrics(event)` and the event's text fields. Floats are written with `repr`, so they read back to
    the same bits. JSON has no nan or inf: they are the strings "NaN", "Infinity" and "-Infinity",
    which `float()` and JavaScript's `Number()` both read. A number that does not exist yet (a z-score
    while its window fills) is left out. On a resume the file is rewound to the checkpoint, so each
    step stands there once, and a line that a crash tore is dropped.
    """

    def __init__(self, *, fsync: bool = False) -> None:
        self._fsync = fsync
        self._fd = -1
        self._path = Path()

    def open(self, run: RunInfo) -> None:
        """Start an empty file, or rewind the one there to the checkpoint that the run resumes from."""
        self._path = run.dir / "metrics.jsonl"
        if run.resumed and self._path.exists():
            _rewind(self._path, start_step=run.start_step)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(self._path, flags | (0 if run.resumed else os.O_TRUNC), 0o666)

    def log(self, event: Event) -> None:
        """Append the event's row with a single write."""
        data = line(event, time_s=time.time()).encode("ascii")
        written = os.write(self._fd, data)
        try:
            if written != len(data):
                raise OSError(
                    f"{self._path}: wrote {written} of {len(data)} bytes of a row; is the disk full?"
                )
            if self._fsync:
                os.fsync(self._fd)
        except OSError:  # a row is there whole and once, as it will be tried again, or not at all
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def line(event: Event, *, time_s: float) -> str:
    """Return an event's row, newline included; `event` and `step` come first.

    Written by hand, as `json.dumps` takes twice as long when its code has left the caches.
    """
    values: dict[str, Any] = {"event": type(event).__name__, "step": event.step, "time": round(time_s, 3)}
    values |= metrics(event)
    for name in _FIELDS[type(event).__name__]:
        values[name] = getattr(event, name)
    form = _FORMS.get
    items = [f"{_quoted(name)}: {form(type(value), _other)(value)}" for name, value in values.items()]
    return "{" + ", ".join(items) + "}\n"


_NAMED = ("step", "tokens", "skipped")  # numbers that a row has already, as it has all floats
_FIELDS = {
    kind.__name__: [f.name for f in dataclasses.fields(kind) if f.name not in _NAMED and f.type != "float"]
    for kind in get_args(Event)
}


def _float(value: float) -> str:
    return repr(value) if math.isfinite(value) else _NONFINITE.get(value, '"NaN"')


def _list(value: Sequence[Any]) -> str:
    return "[" + ", ".join([_FORMS.get(type(item), _other)(item) for item in value]) + "]"


def _other(value: Any) -> str:
    """Return what a plugin may have put where a plain value belongs: numpy's numbers, 0-d tensors, lists.

    Raises:
        TypeError: it is nothing of that kind.
    """
    if isinstance(value, (list, tuple)):
        return _list(value)
    if value is None or isinstance(value, (str, dict)):
        return json.dumps(value, allow_nan=False)
    return repr(int(value)) if isinstance(value, numbers.Integral) else _float(float(value))


_FORMS: dict[type, Callable[[Any], str]] = {
    float: _float,
    int: repr,
    str: _quoted,
    bool: {True: "true", False: "false"}.__getitem__,
    tuple: _list,
}


def _rewind(path: Path, *, start_step: int) -> None:
    """Keep what precedes the checkpoint: rows of executed steps below its step, others up to it.

    A checkpoint of step k is written after the evaluations of step k and before training step k; a
    resumed run begins with training step k, so nothing that is kept is written again.
    """
    new = path.with_name(path.name + ".tmp")
    with path.open("rb") as old, new.open("wb") as file:
        file.writelines(_rows_before(old, start_step=start_step, name=str(path)))
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def _rows_before(file: BinaryIO, *, start_step: int, name: str) -> Iterator[bytes]:
    damaged = 0
    for text in file:
        match = _ROW.fullmatch(text)
        if match is None:
            damaged += 1
            continue
        step = int(match[2])
        if step < start_step or (step == start_step and match[1] not in _EXECUTED):
            yield text
    if damaged:
        _LOG.warning("%s: dropped %d torn line(s)", name, damaged)
