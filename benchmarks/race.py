"""Let contenders take turns: each is a process that runs a few steps when told to, then waits."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gate import PIPES
from benchmarks.workloads import FOLDER

ROOT = Path(__file__).resolve().parent.parent


class First(NamedTuple):
    """What the first step cost, from the start of the process on."""

    wall_s: float
    cpu_s: float
    peak_mb: float


class Racer:
    """One contender's process, stopped at its gate."""

    def __init__(self, name: str, workload: str, *, threads: int) -> None:
        self.name = name
        orders_in, orders_out = os.pipe()
        results_in, results_out = os.pipe()
        environment = os.environ | {
            PIPES: f"{orders_in},{results_out}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": str(threads),
            "WANDB_MODE": "offline",
        }
        FOLDER.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(prefix="race-", dir=FOLDER)
        environment["BENCHMARK_RUNS"] = self._folder.name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        started = time.time()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.contenders", name, workload, str(threads)],
            env=environment,
            cwd=ROOT,
            pass_fds=(orders_in, results_out),
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )
        os.close(orders_in)
        os.close(results_out)
        self._orders = os.fdopen(orders_out, "w")
        self._results = os.fdopen(results_in, "r")
        first = self._result()
        self.first = First(first["time"] - started, first["cpu_ms"] / 1e3, first["peak_mb"])
        self.peak_mb = self.first.peak_mb

    def run(self, steps: int) -> dict[str, Any]:
        """Run some steps; return their times."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, for want of memory perhaps
            self._orders.write(f"{steps}\n")
            self._orders.flush()
        result = self._result()
        self.peak_mb = result["peak_mb"]
        return result

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        self._process.wait(60)
        self._results.close()
        self._errors.close()
        self._folder.cleanup()

    def _result(self) -> dict[str, Any]:
        line = self._results.readline()
        if not line:
            self._errors.seek(0)
            text = self._errors.read().decode(errors="replace")[-2000:]
            code = self._process.wait(60)
            raise RuntimeError(f"{self.name} ended with {code}: {text or 'no word (was there memory?)'}")
        result: dict[str, Any] = json.loads(line)
        return result


class Lap(NamedTuple):
    """What one contender's step took in one round, milliseconds."""

    wall_ms: float  # the 10th percentile
    cpu_ms: float  # the mean, all threads


def race(
    names: Sequence[str], workload: str, *, threads: int, rounds: int, steps: int
) -> tuple[dict[str, list[Lap]], dict[str, Racer]]:
    """Return each contender's laps, and the (ended) racers with their first steps and peaks."""
    racers = {name: Racer(name, workload, threads=threads) for name in names}
    laps: dict[str, list[Lap]] = {name: [] for name in names}
    try:
        for racer in racers.values():
            racer.run(2 if steps > 1 else 1)
            time.sleep(2)  # what starts in the background (wandb) is done then
            racer.run(min(steps, 20))
        for round_ in range(rounds):
            order = list(racers.values())
            for racer in order[round_ % len(order) :] + order[: round_ % len(order)]:
                if steps > 3:
                    racer.run(1)  # its data is in the caches again
                result = racer.run(steps)
                laps[racer.name].append(Lap(percentile(result["wall_ms"], 10), result["cpu_ms"]))
    finally:
        for racer in racers.values():
            racer.close()
    return laps, racers


def races(
    names: Sequence[str], workload: str, *, threads: int, rounds: int, steps: int, processes: int
) -> dict[str, list[Lap]]:
    """Race several processes of each contender, one after the other; return the laps of all."""
    laps: dict[str, list[Lap]] = {name: [] for name in names}
    for _ in range(processes):
        some, _ = race(names, workload, threads=threads, rounds=rounds, steps=steps)
        for name in names:
            laps[name] += some[name]
    return laps


def percentile(values: Sequence[float], p: float) -> float:
    """Return a percentile by linear interpolation."""
    ranked = sorted(values)
    at = (len(ranked) - 1) * p / 100
    low = int(at)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (at - low) * (ranked[high] - ranked[low])


def ratio(laps: dict[str, list[Lap]], name: str, base: str, *, metric: str) -> float:
    """Return the median over rounds of a contender's time over another's."""
    pairs = zip(laps[name], laps[base], strict=True)
    return statistics.median(getattr(a, metric) / getattr(b, metric) for a, b in pairs)
