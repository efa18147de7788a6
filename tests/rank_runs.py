"""Runs of several ranks for tests: a tiny corpus, commands, and the processes behind a command."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.commands import SMALL, environment

TWO = ["parallel=ddp", "parallel.processes=2"]
# 80 windows of 16 tokens: what 20 steps read wraps around, so that they cross epochs.
TEXT = "".join(f"{n} green bottles hanging on the wall, " for n in range(60, 2, -1))


def command(folder: Path, *more: str) -> list[str]:
    """Return the arguments of a run of 20 steps below `folder`; later ones win."""
    path = folder / "song.txt"
    path.write_text(TEXT)
    corpus = ["data=text", f"data.path={path}", "data.tokenizer=byte", f"data.cache={folder / 'cache'}"]
    # The parallel group is chosen before its keys are, wherever `more` names it.
    return [*corpus, *SMALL, "precision=fp32", f"run.root={folder}", "train.steps=20", *more]


def torchrun(*arguments: str, cwd: Path, ranks: int = 2) -> tuple[int, str]:
    """Start ranks as torchrun does; return the exit code and what all of them printed."""
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*program, "-m", "runner", *arguments],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout + done.stderr


def children(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes that a command has started, in that order: its ranks."""
    try:
        text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    except OSError:
        return []
    return [int(pid) for pid in text.split()]


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], Any], *, timeout_s: float = 90.0) -> Any:
    """Return the first true value of `condition`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.005)
    raise AssertionError("it did not happen in time")


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of one kind that a run recorded."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == kind]


def notes(folder: Path) -> list[str]:
    return [str(row["text"]) for row in events(folder, "Note")]


def done_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("DONE_")) for path in folder.glob("DONE_*") if not path.suffix)


def assert_same_files(a: Path, b: Path, *, step: int) -> None:
    """Compare every data file of a checkpoint, byte for byte."""
    names = sorted(p.name for p in a.glob(f"*_{step:08d}*") if p.name.startswith(("model", "state")))
    assert names
    assert names == sorted(p.name for p in b.glob(f"*_{step:08d}*") if p.name.startswith(("model", "state")))
    for name in names:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


def with_variables(**variables: str) -> dict[str, str]:
    return {**environment(), **variables}
