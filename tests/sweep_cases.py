"""What the tests of sweeps share: a small sweep, and what it leaves behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.commands import SMALL, environment, heard, run

# `rewind`: an interrupted cell's main.log can then be compared byte by byte.
TINY = [*SMALL, "train.steps=60", "logger.llmc.on_resume=rewind", "checkpoint.every=10"]
TRUST = "run.trust=[tests]"


def sweep(*arguments: str, cwd: Path, code: int = 0) -> str:
    """Run a sweep of small cells to its end; return what it printed."""
    return run("-m", *TINY, *arguments, cwd=cwd, code=code)


def start(*arguments: str, cwd: Path, mark: str) -> subprocess.Popen[str]:
    """Start a sweep whose processes, down to the last, carry `mark` in their environment."""
    return subprocess.Popen(
        [sys.executable, "-m", "runner", *arguments],
        cwd=cwd,
        env={**environment(), "SWEEP_MARK": mark},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=heard,
    )


def marked(mark: str) -> list[int]:
    """Return the processes that carry a mark and are alive."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if alive and f"SWEEP_MARK={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL the sweep's own process and nothing else."""
    process.send_signal(signal.SIGKILL)
    process.communicate()


def gone(mark: str, *, within_s: float = 5.0) -> bool:
    """Whether every process with a mark ends soon."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not marked(mark):
            return True
        time.sleep(0.02)
    return False


def folder(root: Path) -> Path:
    """Return the only sweep below `root`."""
    (found,) = (p for p in (root / "outputs" / "sweeps").iterdir() if p.name[0] != ".")
    return found


def traces(cell: Path) -> dict[str, bytes]:
    """Return what a cell's bits show in: its log, and its last weights and state."""
    kept = ["main.log", *(p.name for p in cell.glob("*.bin"))]
    return {name: (cell / name).read_bytes() for name in sorted(kept)}


def all_traces(where: Path) -> dict[str, dict[str, bytes]]:
    """Return the traces of every cell of a sweep."""
    return {path.parent.name: traces(path.parent) for path in sorted(where.glob("*/cell.json"))}


def stamps(where: Path) -> dict[str, tuple[int, int]]:
    """Return what changes when a finished cell is run again."""
    files = list(where.glob("*/result.json"))
    return {path.parent.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}
