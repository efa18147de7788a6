"""List the cells of a sweep: `python -m runner.sweep.status outputs/sweeps/NAME`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from runner.arguments import home_paths
from runner.command import leave, told
from runner.lock import try_lock
from runner.report import text_table
from runner.sweep.naming import show
from runner.sweep.rows import Row, read_rows
from runner.sweep.tell import short
from runner.usage import Parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = Parser(prog="python -m runner.sweep.status", description="List a sweep's cells.")
    parser.add_argument("sweep", nargs="+", help="sweep folders, as in outputs/sweeps/warmup_lr-3fa9c1")
    given = parser.parse_args(home_paths(sys.argv[1:] if arguments is None else list(arguments)))
    try:
        tables = [text_table(status_table(read_rows(folder))) for folder in map(Path, given.sweep)]
    except (ValueError, OSError) as error:
        return told("runner.sweep.status", error)
    print("\n".join(tables))
    return 0


def status_table(rows: Sequence[Row]) -> list[list[str]]:
    """Return the cells in the order of their numbers, headings first."""
    lines = [["cell", "state", "step", "val loss", "settings", "log"]]
    for row in sorted(rows, key=lambda row: row.number):
        state = "running" if row.state == "unfinished" and is_running(row.folder) else row.state
        loss = "-" if math.isnan(row.val_loss) else show(row.val_loss)
        log = short(row.folder / "console.log")
        lines.append([f"#{row.number}", state, str(row.step), loss, row.label, log])
    return lines


def is_running(folder: Path) -> bool:
    """Whether a process holds the lock of a run folder."""
    try:
        with open(folder / ".lock", "rb") as handle:
            try_lock(handle.fileno(), shared=True)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


if __name__ == "__main__":
    leave("runner.sweep.status", main)
