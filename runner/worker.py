"""One rank as a process of its own, started by `runner.supervise`, to which it reports how it ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

from runner.cli import ConfigError
from runner.fault import fault_line, lacks_rank, stack
from runner.launch import Outcome
from runner.ranks import Place
from runner.stop import Interrupted, StartUp, let_through, undisturbed
from runner.streams import settle_streams


class Order(NamedTuple):
    """What a rank is to do; `listening` is the bound socket of rank 0, `report` where its end is written."""

    config: dict[str, Any]
    dir: Path
    place: Place
    parent: int
    listening: int | None
    report: int


class Report(NamedTuple):
    """How a rank ended, at `time.monotonic()` of this machine."""

    kind: Literal["outcome", "config", "error", "interrupted"]
    at: float
    outcome: Outcome | None = None
    lines: tuple[str, ...] = ()
    trace: str = ""
    signal: int = 0
    follows: bool = False  # whether it failed only because another rank was gone

    @property
    def code(self) -> int:
        """Return the exit code of the rank's process."""
        if self.outcome is not None:
            return self.outcome.code
        return {"config": 2, "error": 1}.get(self.kind, 128 + self.signal)


def main() -> None:
    """Run the order that standard input brings, report, and leave with the run's exit code."""
    settle_streams()
    order: Order = pickle.load(sys.stdin.buffer)
    end_with_parent(order.parent)
    report = _run(order)
    with os.fdopen(order.report, "wb") as file:
        pickle.dump(report, file)
    sys.stdout.flush()
    sys.stderr.flush()
    # What torch would tear down here may wait for ranks that are gone.
    os._exit(report.code)


def _run(order: Order) -> Report:
    start_up = StartUp()
    try:
        with start_up:
            let_through()
            with undisturbed():
                from runner.job import run_rank
            outcome = run_rank(order.config, dir=order.dir, place=order.place, listening=order.listening)
    except Interrupted as error:
        return Report("interrupted", time.monotonic(), signal=error.number)
    except ConfigError as error:
        return Report("config", time.monotonic(), lines=tuple(error.problems))
    except BaseException as error:
        if (came := start_up.interruption) is not None:
            return Report("interrupted", time.monotonic(), signal=came.number)
        at, lines = time.monotonic(), (fault_line(error),)
        return Report("error", at, lines=lines, trace=stack(error), follows=lacks_rank(error))
    return Report("outcome", time.monotonic(), outcome)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends, so that no rank outlives its run."""
    pr_set_pdeathsig = 1  # linux/prctl.h; elsewhere a rank notices by its peers' silence
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
