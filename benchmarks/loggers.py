"""A log line must cost the same at the end of a long run as at its start."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.results import Row
from benchmarks.workloads import FOLDER
from runner.api import RunInfo, TrainStep
from runner.plugins.logger.jsonl import JsonlLogger
from runner.plugins.logger.llmc import LlmcLogger

LINES = 3_000_000
ONCE = 2000


def measure() -> list[Row]:
    """Log to empty files, then to files as long as three million lines."""
    folder = FOLDER / "logs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows = []
    for name, logger, file in (
        ("main.log", LlmcLogger(), "main.log"),
        ("metrics.jsonl", JsonlLogger(), "metrics.jsonl"),
    ):
        logger.open(_run(folder))
        first = _cost_us(logger)
        path = folder / file
        os.truncate(path, path.stat().st_size * LINES // ONCE)  # sparse: appending goes to the end
        last = _cost_us(logger)
        logger.close("finished")
        how = f"{first:.0f} and {last:.0f} us, median of {ONCE} on one thread"
        rows.append(Row(f"{name}: a line at 3,000,000 / at 0", last / first, "x", 1.3, 1.1, how))
    shutil.rmtree(folder)
    return rows


def _cost_us(logger: Any) -> float:
    times = []
    for step in range(ONCE):
        event = TrainStep(step, 3.1 + step / 7, 3e-4, 1.1, 0.2, 0.3, True, "", 0.9, step, 20.5, 4e4, -1.0)
        began = time.thread_time()
        logger.log(event)
        times.append(time.thread_time() - began)
    return 1e6 * statistics.median(times)


def _run(folder: Path) -> RunInfo:
    return RunInfo("bench", folder, config={}, manifest={}, start_step=0, resumed=False, steps=LINES)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main("loggers")
