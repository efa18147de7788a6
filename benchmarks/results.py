"""What every benchmark hands back: rows of a table, kept as JSON beside the machine's state."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parent / "results"
QUIET = 0.6  # load average from which on wall-clock ratios mean nothing


class Row(NamedTuple):
    """One measured figure, better if lower: at most `must` is asked for, `want` is hoped for."""

    what: str
    value: float
    unit: str = "x"
    must: float | None = None
    want: float | None = None
    how: str = ""


def save(name: str, rows: Sequence[Row], *, load: float, folder: Path = RESULTS) -> None:
    """Write the rows of a benchmark to `<folder>/<name>.json`; `load` was measured before it began."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "benchmark": name,
        "time": time.strftime("%Y-%m-%d %H:%M"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
        "quiet": load < QUIET,
        "rows": [row._asdict() for row in rows],
    }
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def stored() -> list[str]:
    """Return a heading and a table for each file of results."""
    parts = []
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text())
        rows = [Row(**row) for row in document["rows"]]
        state = f"load average {document['load_before']:g} before it" + (
            ", quiet" if document["quiet"] else ""
        )
        parts.append(f"**{document['benchmark']}** ({document['cpu']}, {state})\n\n{table(rows)}")
    return parts


def load_average() -> float:
    """Return how many processes wanted a core during the last minute."""
    return os.getloadavg()[0]


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| figure | measured | must | want | how |", "|---|---|---|---|---|"]
    for row in rows:
        met = "" if row.must is None else " (met)" if row.value <= row.must else " (**missed**)"
        goals = ["" if goal is None else f"{goal:g}" for goal in (row.must, row.want)]
        value = f"{row.value:.3g}" + ("" if row.unit == "x" else f" {row.unit}")
        lines.append(f"| {row.what} | {value}{met} | {goals[0]} | {goals[1]} | {row.how} |")
    return "\n".join(lines)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
