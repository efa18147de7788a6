"""A short crash matrix; the whole one is benchmarks/crash_matrix.py, its table in benchmarks/results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import environment

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "crash_matrix.py"


def crash(cell: str, *, kills: int, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(kills), "3", cell],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.dist
def test_killed_ranks_lose_nothing_and_nothing_lies(tmp_path: Path) -> None:
    table = crash("zero1 2 on", kills=1, cwd=tmp_path)
    assert "| zero1 2 | on |" in table


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["single on", "single off", "ddp 2 on", "ddp 2 off", "zero1 2 off"])
def test_killed_runs_of_every_kind(cell: str, tmp_path: Path) -> None:
    crash(cell, kills=6, cwd=tmp_path)
