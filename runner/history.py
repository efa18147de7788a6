"""Read back what a run logged: the curves, the skipped steps and the settings of one run folder."""

from __future__ import annotations

import json
import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_STREAMS = {"trl": "train/loss", "tel": "val/loss", "eval": "eval/score"}
_FIELDS = {"lr": "train/lr", "norm": "train/grad_norm"}
_Points = dict[str, tuple["array[int]", "array[float]"]]  # steps and values as they were written
_LABELS_OF_A_RUN = ("run.name", "run.dir", "run.root")


class Curve(NamedTuple):
    """One metric over the steps, sorted by step, one value a step."""

    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]


@dataclass(frozen=True)
class History:
    """What a run folder tells about a run; `curves` by metric name, `skipped` step -> reason."""

    name: str
    dir: Path
    curves: dict[str, Curve]
    skipped: dict[int, str] = field(default_factory=dict)
    sample: str = ""  # the newest text that the model wrote
    settings: dict[str, str] = field(default_factory=dict)  # flat: "optimizer.lr" -> "0.001"

    def last(self, metric: str) -> float:
        """Return a metric's last value; nan if it was never logged."""
        curve = self.curves.get(metric)
        return float(curve.values[-1]) if curve else math.nan


class Summary(NamedTuple):
    """One run in one row; losses in nats per token, nan where there is none."""

    name: str
    steps: int
    val_loss: float  # the last one
    best_val_loss: float
    best_step: int
    train_loss: float  # mean over the last 2 % of the steps
    skipped: int
    tokens_per_s: float  # median


def is_run(folder: Path) -> bool:
    """Whether a folder holds a log that `read_history` can read."""
    return any((folder / name).is_file() for name in ("metrics.jsonl", "main.log"))


def read_history(run_dir: str | Path) -> History:
    """Read `metrics.jsonl`, or `main.log` where there is none; the last value of a step wins.

    Raises `ValueError` if the folder holds neither.
    """
    folder = Path(run_dir)
    points: _Points = defaultdict(lambda: (array("q"), array("d")))
    skipped: dict[int, str] = {}
    sample = ""
    if not is_run(folder):
        raise ValueError(f"{folder}: no metrics.jsonl and no main.log there; name a run folder")
    if (folder / "metrics.jsonl").is_file():
        for row in _json_rows(folder / "metrics.jsonl"):
            _add_row(row, points, skipped)
            if row["event"] == "Sample":
                sample = row["prompt"] + row["text"]
    else:
        for step, name, value in _log_values(folder / "main.log"):
            _add(points, name, step=step, value=value)
    curves = {name: _curve(*pairs) for name, pairs in points.items()}
    name = folder.resolve().name
    return History(name, folder, curves, dict(sorted(skipped.items())), sample, _settings(folder))


def summarize(history: History) -> Summary:
    """Return a run's row for a table."""
    train, val = history.curves.get("train/loss"), history.curves.get("val/loss")
    speed = history.curves.get("perf/tokens_per_s")
    best = int(np.nanargmin(val.values)) if val and np.isfinite(val.values).any() else -1
    return Summary(
        name=history.name,
        steps=int(train.steps[-1]) + 1 if train else 0,
        val_loss=history.last("val/loss"),
        best_val_loss=float(val.values[best]) if val and best >= 0 else math.nan,
        best_step=int(val.steps[best]) if val and best >= 0 else 0,
        train_loss=float(np.mean(train.values[-max(1, len(train.values) // 50) :])) if train else math.nan,
        skipped=len(history.skipped),
        tokens_per_s=float(np.median(speed.values)) if speed else math.nan,
    )


def by_loss(histories: Iterable[History]) -> list[History]:
    """Sort by the last validation loss, by training loss where there is none; diverged runs last."""

    def key(history: History) -> tuple[float, float]:
        row = summarize(history)
        losses = [math.inf if math.isnan(loss) else loss for loss in (row.val_loss, row.train_loss)]
        return losses[0], losses[1]

    return sorted(histories, key=key)


def differing(histories: Sequence[History]) -> list[str]:
    """Return the settings in which the runs differ, but for those that only name a run.

    A run that does not tell its settings (no manifest.json) differs in none.
    """
    told = [history.settings for history in histories if history.settings]
    keys = {key: None for settings in told for key in settings}
    seen = {key: {settings.get(key) for settings in told} for key in keys}
    return [key for key in keys if len(seen[key]) > 1 and key not in _LABELS_OF_A_RUN]


def flatten(config: Any, *, prefix: str = "") -> dict[str, str]:
    """Return nested settings as one level: {"optimizer": {"lr": 1}} -> {"optimizer.lr": "1"}."""
    if not isinstance(config, dict):
        return {prefix: config if isinstance(config, str) else json.dumps(config)}
    flat: dict[str, str] = {}
    for key, value in config.items():
        flat |= flatten(value, prefix=f"{prefix}.{key}" if prefix else str(key))
    return flat


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith(b"\n"):
                return  # torn by a crash, or being written at this moment
            try:
                row = json.loads(text)
            except ValueError:  # of json, or of the encoding that it takes random bytes for
                row = None
            if not isinstance(row, dict) or not {"event", "step"} <= row.keys():
                raise ValueError(f"{path}:{number}: not a row of a run's metrics: {text[:60]!r}")
            yield row


def _add(points: _Points, name: str, *, step: int, value: float) -> None:
    steps, values = points[name]
    steps.append(step)
    values.append(value)


def _add_row(row: dict[str, Any], points: _Points, skipped: dict[int, str]) -> None:
    step = row["step"]
    for name, value in row.items():
        if "/" in name:
            _add(points, name, step=step, value=float(value))
    if row["event"] == "TrainStep":
        skipped.pop(step, None)
        if not row["applied"]:
            skipped[step] = row["reason"]


def _log_values(path: Path) -> Iterator[tuple[int, str, float]]:
    """Yield (step, metric, value) of llm.c's log; lines of another form are passed over."""
    for text in path.read_text(errors="replace").splitlines():
        head, *pairs = [part.partition(":") for part in text.split()] or [("", "", "")]
        if head[0] != "s" or not pairs:
            continue
        names = [((_STREAMS | _FIELDS).get(key), value) for key, _, value in pairs]
        try:
            values = [(int(head[2]), name, float(value)) for name, value in names if name and value]
        except ValueError:
            continue  # torn by a crash, or somebody else's
        yield from values


def _curve(steps: array[int], values: array[float]) -> Curve:
    """Sort by step; of several values of a step keep the last that was written."""
    at, value = np.frombuffer(steps, np.int64), np.frombuffer(values, np.float64)
    order = np.argsort(at, kind="stable")
    at, value = at[order], value[order]
    last = np.append(at[1:] != at[:-1], True)
    return Curve(at[last], value[last])


def _settings(folder: Path) -> dict[str, str]:
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); remove it to go on without settings") from None
    return flatten(manifest.get("config", {}) if isinstance(manifest, dict) else {})
