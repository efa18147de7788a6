"""Every benchmark runs, on sizes that measure nothing: what is never run breaks unseen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks.__main__
from benchmarks.results import Row
from benchmarks.workloads import FOLDER
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
    assert done.stdout.count("| figure |") == 1, "one table"
    assert not list(FOLDER.glob("run-*")), "a contender left its run"
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


def test_a_benchmark_that_breaks_is_named_and_the_others_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> list[Row]:
        raise RuntimeError("no disk")

    ways = {"loader": broken, "loggers": lambda: [Row("a line", 1.5)]}
    monkeypatch.setattr(benchmarks.__main__, "_benchmarks", lambda asked: ways)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match="not measured: loader"):
        benchmarks.__main__.main()
    printed = capsys.readouterr()
    assert "| a line | 1.5 |" in printed.out
    assert "RuntimeError: no disk" in printed.err
    assert [path.name for path in tmp_path.iterdir()] == ["loggers-2t.json"]
