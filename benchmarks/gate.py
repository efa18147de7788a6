"""Let a parent process decide when a training loop runs, and tell it how long the steps took."""

from __future__ import annotations

import json
import os
import resource
import time
from typing import Any, Literal

from runner.events import Event, TrainStep

PIPES = "BENCHMARK_GATE"  # environment: file descriptors to read orders from and write results to


class Gate:
    """Called once after each step; waits for an order whenever the steps of the last one are done."""

    def __init__(self) -> None:
        orders, self._results = (int(fd) for fd in os.environ[PIPES].split(","))
        self._orders = os.fdopen(orders, "r")
        self._left = 0
        self._stamps: list[float] = []
        self._cpu = 0.0

    def __call__(self) -> None:
        """Count a step; at the end of an order report, and wait for the next."""
        self._stamps.append(time.perf_counter())
        self._left -= 1
        if self._left > 0:
            return
        steps = [1e3 * (b - a) for a, b in zip(self._stamps, self._stamps[1:], strict=False)]
        self._report(steps)
        self._left = int(self._orders.readline() or 0)
        if self._left <= 0:
            os._exit(0)
        self._stamps = [time.perf_counter()]
        self._cpu = time.process_time()

    def _report(self, steps: list[float]) -> None:
        cpu_ms = 1e3 * (time.process_time() - self._cpu)
        result = {
            "time": time.time(),
            "wall_ms": steps,
            "cpu_ms": cpu_ms / max(1, len(steps)),  # of the first report: since the process began
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        os.write(self._results, (json.dumps(result) + "\n").encode())


class GateLogger:
    """The gate as a logger of the runner: a step is over when its event has been logged."""

    def __init__(self) -> None:
        self._gate = Gate()

    def open(self, run: Any) -> None:
        """Do nothing."""

    def log(self, event: Event) -> None:
        """Pass the gate after each training step."""
        if isinstance(event, TrainStep):
            self._gate()

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """Do nothing."""
