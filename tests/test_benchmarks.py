"""Every benchmark runs, on sizes that measure nothing: what is never run breaks unseen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT, environment


@pytest.mark.parametrize(
    "arguments", [["--threads", "0"], ["--rounds", "x"], ["--workloads", "Z"], ["nosuch"], ["--nosuch"]]
)
def test_a_mistake_is_one_line_before_anything_is_measured(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", *arguments, "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("benchmarks: error: ")
    assert list(tmp_path.iterdir()) == []


def test_the_races_run_and_keep_their_rows(tmp_path: Path) -> None:
    names = ["step", "peers", "ranks", "checkpoint"]
    options = ["--workloads", "tiny", "--rounds", "1", "--threads", "1", "--results", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks", *names, *options]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {path.name: json.loads(path.read_text())["rows"] for path in tmp_path.glob("*.json")}
    assert sorted(found) == [
        "checkpoint-1t.json",
        "peers-tiny-1t.json",
        "ranks-tiny-1t.json",
        "step-tiny-1t.json",
    ]
    for rows in found.values():
        assert rows
        assert all(row["value"] >= 0 for row in rows)
    assert {row["what"] for row in found["peers-tiny-1t.json"]} >= {
        "tiny: bf16 / nanoGPT-style",
        "tiny: bf16 / the fastest peer",
        "tiny: peak memory of runner-bf16",
    }
