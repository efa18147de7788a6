"""What a sweep's folder knows: which cell has which number, and how it ended.

`cells.json` maps a cell's identity (a hash of its overrides) to its number, which it keeps for good.
`NNN/cell.json` holds the settings that the cell was started with, `NNN/result.json` how it ended.
All of them are written beside and renamed, so a crash leaves the old file or the new one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from runner.fault import naming

Config = dict[str, Any]
Status = Literal["finished", "diverged", "stopped", "pruned", "failed"]

DONE: frozenset[Status] = frozenset({"finished", "diverged", "pruned"})
"""A cell that ended like this is never run again: it would end the same way."""

_PROGRESS = re.compile(r"^(\d+) (nan|-?inf|[-+.\de]+)\n", re.M)

_HOW = ("sweep", "hydra", "logger", "checkpoint", "meter")
_HOW_RUN = ("root", "name", "label", "group", "tags", "plot", "overwrite", "threads", "trust")
_HOW_KEYS = {*(f"run.{name}" for name in _HOW_RUN), "data.prefetch", "data.cache"}


class CellError(RuntimeError):
    """A cell that crashed, for Hydra sweepers that ask for its value."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: its number, what sets it apart, and its checked configuration."""

    number: int
    key: str  # its identity
    label: str  # "lr=0.003 warmup_steps=50"
    overrides: dict[str, Any]  # every override of the command by key, as values
    config: Config
    folder: Path

    @property
    def name(self) -> str:
        """Return the folder's name: always short, whatever the overrides hold."""
        return folder_name(self.number)


@dataclass(frozen=True)
class Result:
    """How a cell ended. `val_loss` is nats per token: inf if it diverged, nan if never measured."""

    status: Status
    code: int
    step: int = 0
    val_loss: float = math.nan
    seconds: float = 0.0
    message: str = ""

    @property
    def failed(self) -> bool:
        """Whether a person has to look at it."""
        return self.status in ("failed", "diverged")


def folder_name(number: int) -> str:
    """Return the name of a cell's folder."""
    return f"{number:03d}"


# ---------------------------------------------------------------- identity


def is_how(key: str) -> bool:
    """Whether an override says how a run is carried out, not what it computes."""
    return key.split(".")[0].split("/")[0] in _HOW or key in _HOW_KEYS


def identity(overrides: Mapping[str, Any], *, swept: frozenset[str] = frozenset()) -> str:
    """Return what tells a cell from all others, whatever the order and spelling of its overrides.

    Settings that only say how to run count if they are `swept`: someone compares them.
    """
    what = {key: value for key, value in overrides.items() if key in swept or not is_how(key)}
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return what differs between two configurations of one cell that its result depends on."""
    before, after = _flat(old), _flat(new)
    keys = sorted(key for key in before.keys() & after.keys() if not is_how(key))
    return [f"{key} {before[key]} -> {after[key]}" for key in keys if before[key] != after[key]]


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    if not isinstance(value, Mapping):
        return {prefix: json.dumps(value, default=str)}
    flat: dict[str, str] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


# ---------------------------------------------------------------- files


def read_numbers(folder: Path) -> dict[str, int]:
    """Return the cells of a sweep by identity; empty where there is no sweep yet."""
    try:
        return {key: entry["number"] for key, entry in _read(folder / "cells.json")["cells"].items()}
    except FileNotFoundError:
        return {}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder / 'cells.json'}: not a list of cells; choose another sweep.name"
        ) from error


def add_numbers(folder: Path, cells: Iterable[Cell]) -> None:
    """Write down the numbers of new cells, by identity."""
    try:
        entries = _read(folder / "cells.json")["cells"]
    except FileNotFoundError:
        entries = {}
    new = {cell.key: {"number": cell.number, "overrides": cell.overrides} for cell in cells}
    if new.keys() - entries.keys():
        write_json(folder / "cells.json", {"version": 1, "cells": {**entries, **new}})


def read_cell(folder: Path) -> dict[str, Any] | None:
    """Return what a cell was started with (label, overrides, config); None if it never was."""
    return _read_fields(folder / "cell.json", ("number", "label", "overrides", "config"))


def write_cell(cell: Cell) -> None:
    """Write down what a cell is started with."""
    content = {"number": cell.number, "label": cell.label, "overrides": cell.overrides, "config": cell.config}
    write_json(cell.folder / "cell.json", content)


def read_result(folder: Path) -> Result | None:
    """Return how a cell ended; None if it has not."""
    content = _read_fields(folder / "result.json", ("status", "code", "val_loss"))
    if content is None:
        return None
    try:
        return Result(**{**content, "val_loss": float(content["val_loss"])})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / 'result.json'}: {error}; remove it to run the cell again") from None


def write_result(folder: Path, result: Result) -> None:
    """Write down how a cell ended."""
    write_json(folder / "result.json", {**asdict(result), "val_loss": repr(result.val_loss)})


def last_progress(folder: Path) -> tuple[int, float]:
    """Return the step and the newest validation loss (nan: none) of a cell that may still run."""
    step, val_loss = 0, math.nan
    for at, loss in read_progress(folder):
        step = max(step, at)
        val_loss = val_loss if math.isnan(loss) else loss
    return step, val_loss


def read_progress(folder: Path) -> list[tuple[int, float]]:
    """Return (step, validation loss or nan) as a cell reported them, in order."""
    try:
        text = (folder / "progress.log").read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return []
    return [(int(line[1]), float(line[2])) for line in _PROGRESS.finditer(text)]


def ending(folder: Path) -> str | None:
    """Return the status with which a cell's logger was closed; None if it was not, or runs again."""
    try:
        text = (folder / "progress.log").read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return None
    last = text.splitlines()[-1] if text else ""
    return last.removeprefix("end:") if last.startswith("end:") else None


def with_seconds(result: Result, seconds: float) -> Result:
    """Return the result with the time that the cell took in this session."""
    return replace(result, seconds=round(seconds, 3))


def write_json(path: Path, content: Any) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f"{path.name}.tmp")
    with naming(tmp), open(tmp, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, default=str, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(tmp, path)


def _read_fields(path: Path, names: Iterable[str]) -> dict[str, Any] | None:
    """Return an object that has these fields; None if there is no such file."""
    try:
        content = _read(path)
    except FileNotFoundError:
        return None
    if not isinstance(content, dict) or not set(names) <= content.keys():
        raise ValueError(f"{path}: not what a sweep writes; remove it, or choose another sweep.name")
    return content


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: cannot be read ({error}); remove it, or choose another sweep.name"
        ) from None
