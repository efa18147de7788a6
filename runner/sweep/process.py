"""What happens inside a cell's own process: run it as if it had been started alone, say how it ended."""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path
from typing import Any

from runner.cli import ConfigError
from runner.fault import fault_line, stack
from runner.launch import Outcome, RankError, launch
from runner.stop import heed
from runner.sweep.cells import Result, Status, write_result

Config = dict[str, Any]


def run_cell(config: Config, folder: Path) -> int:
    """Run one cell in `folder`; return its exit code. What it finished is written down here.

    Raises:
        Interrupted: a signal came before anything was trained.
    """
    faulthandler.enable()  # a crash in native code leaves its stack in the log
    try:
        outcome = launch(config)
    except ConfigError as error:
        for line in error.problems:
            sys.stderr.write(f"runner: error: {line}\n")
        return _fail(folder, code=2, message="; ".join(error.problems))
    except RankError as error:
        sys.stderr.write(f"{error.trace}runner: error: {error}\n")
        return _fail(folder, code=error.code, message=str(error))
    except Exception as error:
        heed()
        sys.stderr.write(f"{stack(error)}runner: error: {fault_line(error)}\n")
        return _fail(folder, code=1, message=fault_line(error))
    result = result_of(outcome)
    if result.status != "stopped":
        write_result(folder, result)
    return outcome.code


def result_of(outcome: Outcome) -> Result:
    """Return a run's outcome as a cell's result."""
    status: Status
    if outcome.status == "failed":
        status = "diverged" if outcome.val_loss == float("inf") else "failed"
    else:
        status = outcome.status
    return Result(status, outcome.code, outcome.step, outcome.val_loss, message=outcome.message)


def _fail(folder: Path, *, code: int, message: str) -> int:
    write_result(folder, Result("failed", code, message=" ".join(message.split())))
    return code
