"""Read a sweep's folder back: one row per cell, sorted by validation loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from runner.history import History, is_run, read_history, summarize
from runner.sweep import cells, naming

TRUNK = "trunk"
"""The budget of the run that branches leave."""

SEEDS = ("run.seed", "data.seed", "model.seed")


@dataclass(frozen=True)
class Row:
    """One cell: what sets it apart, how it ended or stands, and its curves if it has any."""

    number: int
    label: str
    values: dict[str, Any]  # the overrides in which the cells differ
    state: str  # finished diverged pruned failed stopped unfinished
    step: int
    val_loss: float
    best_val_loss: float
    train_loss: float
    skipped: int
    seconds: float
    folder: Path
    history: History | None
    message: str = ""


class Spread(NamedTuple):
    """Cells that differ only in their seed, in one line."""

    label: str
    cells: int
    mean: float
    deviation: float  # sample standard deviation, nan for one cell
    low: float
    high: float


def read_rows(folder: Path) -> list[Row]:
    """Return the cells of a sweep, best first; those without a validation loss by training loss, last.

    Branches stand in the order of their budgets, after their trunk.

    Raises:
        ValueError: the folder holds no sweep, or a file in it cannot be read.
    """
    found = sorted(path.parent for path in folder.glob("*/cell.json"))
    if not found:
        raise ValueError(f"{folder}: no sweep there (no NNN/cell.json); name a folder below outputs/sweeps")
    about = [cells.read_cell(path) for path in found]
    known = [(path, content) for path, content in zip(found, about, strict=True) if content]
    rows = [content["overrides"] for _, content in known]
    keys = ["budget"] if any("budget" in row for row in rows) else naming.varying(rows)
    made = [_row(path, content, keys) for path, content in known]
    return sorted(made, key=_by_budget if keys == ["budget"] else _order)


def _row(folder: Path, content: dict[str, Any], keys: Sequence[str]) -> Row:
    result = cells.read_result(folder)
    step, val_loss = cells.last_progress(folder)
    history = read_history(folder) if is_run(folder) else None
    facts = summarize(history) if history else None
    if result is None:
        result = cells.Result("stopped", 0, step, val_loss)
        state = "unfinished"
    else:
        state = str(result.status)
    return Row(
        number=int(content["number"]),
        label=naming.label(content["overrides"], keys) or str(content["label"]),
        values={key: content["overrides"].get(key) for key in keys},
        state=state,
        step=result.step,
        val_loss=result.val_loss,
        best_val_loss=facts.best_val_loss if facts else math.nan,
        train_loss=facts.train_loss if facts else math.nan,
        skipped=facts.skipped if facts else 0,
        seconds=result.seconds,
        folder=folder,
        history=history,
        message=result.message,
    )


_RANK = {"finished": 0, "pruned": 1, "unfinished": 2, "stopped": 2, "diverged": 3, "failed": 4}


def _order(row: Row) -> tuple[int, float, float, int]:
    losses = [math.inf if math.isnan(loss) else loss for loss in (row.val_loss, row.train_loss)]
    return (_RANK[row.state], *losses, row.number)  # type: ignore[return-value]


def _by_budget(row: Row) -> tuple[float, int]:
    budget = row.values["budget"]
    return (float(budget) if is_number(budget) else 0.0, row.number)


def keys_of(rows: Sequence[Row]) -> list[str]:
    """Return the overrides in which the cells differ."""
    return list(rows[0].values) if rows else []


def numeric_keys(rows: Sequence[Row]) -> list[str]:
    """Return the keys, seeds apart, whose values are numbers or absent."""
    return [key for key in keys_of(rows) if key not in SEEDS and _is_numeric(rows, key)]


def _is_numeric(rows: Sequence[Row], key: str) -> bool:
    values = [row.values[key] for row in rows if row.values[key] not in (None, TRUNK)]
    return bool(values) and all(is_number(value) for value in values)


def is_number(value: Any) -> bool:
    """Whether a swept value has a place on an axis."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def spreads(rows: Sequence[Row]) -> list[Spread]:
    """Return mean and spread over the seeds for each setting; empty where no seed was swept."""
    keys = keys_of(rows)
    if not any(key in SEEDS for key in keys):
        return []
    others = [key for key in keys if key not in SEEDS]
    groups: dict[str, list[float]] = {}
    for row in rows:
        if math.isfinite(row.val_loss):
            groups.setdefault(naming.label(row.values, others) or "all", []).append(row.val_loss)
    made = [_spread(label, losses) for label, losses in groups.items()]
    return sorted(made, key=lambda spread: spread.mean)


def _spread(label: str, losses: list[float]) -> Spread:
    deviation = statistics.stdev(losses) if len(losses) > 1 else math.nan
    return Spread(label, len(losses), statistics.fmean(losses), deviation, min(losses), max(losses))
