"""From the command to the first finished step, and the commands that train nothing."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time

from benchmarks.contenders import missing
from benchmarks.race import ROOT, Racer
from benchmarks.results import Row

COMMANDS = {
    "--help": ["--help"],
    "--cfg job": ["--cfg", "job"],
    "a mistake": ["train.stps=3"],
}


def measure(*, rounds: int, quiet: bool) -> list[Row]:
    """Start each contender `rounds` times on workload S, taking turns, one thread."""
    names = ["runner-bf16", "nanogpt", *(p for p in ("hf-fp32", "lightning-fp32") if missing(p) is None)]
    firsts: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            racer = Racer(name, "S", threads=1)
            racer.close()
            firsts[name].append(racer.first.wall_s if quiet else racer.first.cpu_s)
    how = f"S, {rounds} starts each, {'wall' if quiet else 'cpu'}, default loggers"
    ours = firsts["runner-bf16"]
    goals = {"nanogpt": (1.0, 0.7), "hf-fp32": (0.60, 0.42)}
    rows = [Row("time to first step", min(ours), "s", how=how)]
    for name in names[1:]:
        value = statistics.median(a / b for a, b in zip(ours, firsts[name], strict=True))
        rows.append(Row(f"time to first step / {name}", value, "x", *goals.get(name, (None, None)), how))
    return rows + [_command(name, rounds=rounds, quiet=quiet) for name in COMMANDS]


def _command(name: str, *, rounds: int, quiet: bool) -> Row:
    command = [sys.executable, "-m", "runner", *COMMANDS[name]]
    times = []
    for _ in range(rounds):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        times.append(wall if quiet else cpu)
    how = f"median of {rounds}, {'wall' if quiet else 'cpu'}"
    return Row(f"runner {name}", statistics.median(times), "s", 0.6, 0.35, how)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main("startup")
