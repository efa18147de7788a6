"""The check of a GPU runs here on a CPU: every section reports, and none can take the others with it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check, gpu_sections
from benchmarks.gpu_check import SECTIONS, Found
from tests.commands import environment

MET = [
    *("AdamW, fp32 weights", "AdamW, bf16 weights", "gradient norm", "guard, z-scores", "guard, robust"),
    *("guard, median", "guard, finite", "clip factor", "llm.c's random stream"),
    *("runner: host syncs", "loss: this device / CPU", "runner: two runs", "runner: interrupted and resumed"),
]
MEASURED = [
    *("runner: speed", "runner: peak memory", "torch eager: speed", "nanoGPT-style: speed"),
    *("checkpoint: stall", "runner: step / torch eager", "runner: step / nanoGPT-style", "runner, fp8"),
]


def test_every_row_is_there_and_met(tmp_path: Path) -> None:
    script = Path(__file__).parent.parent / "benchmarks" / "gpu_check.py"
    command = [sys.executable, str(script), "--results", str(tmp_path)]
    env = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads((tmp_path / "gpu_check-cpu.json").read_text())["rows"]
    for start in (*MET, *MEASURED):
        assert [row for row in rows if row["what"].startswith(start)], f"{start} is missing"
        assert start in ended.stdout
    for row in rows:
        if row["must"] is not None:
            assert row["value"] <= row["must"], row
    left_out = {row["what"].removesuffix(": left out") for row in rows if "left out" in row["what"]}
    assert left_out - {"runner, fp8"} == {name for name, section in SECTIONS.items() if section.gpu_only}


def test_a_section_that_hangs_is_stopped_and_is_a_row(tmp_path: Path) -> None:
    began = time.perf_counter()
    problem = gpu_check._outcome("runner", tmp_path / "report", limit_s=0.3)
    assert problem is not None
    assert problem.startswith("stopped after 0 s")
    assert time.perf_counter() - began < 12


def test_a_section_that_fails_says_why_and_keeps_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report"
    problem = gpu_check._outcome("no such section", report, limit_s=60)
    assert problem is not None
    assert problem.startswith("exit 2: ")
    assert "invalid choice" in problem

    def half(name: str, report: Path, *, limit_s: float) -> str:
        written = gpu_sections.Report(report)
        written.figure("ms runner", 2.0)
        written.row(gpu_check.Row("one", 1.0))
        with open(report, "a") as file:
            file.write('{"row": {"what": "cut o')
        return "exit -11: illegal memory access"

    monkeypatch.setattr(gpu_check, "_outcome", half)
    found = Found([], {})
    gpu_check._run_section("kernels", found, left_s=100)
    assert [row.what for row in found.rows] == ["one", "kernels: failed"]
    assert found.rows[1].how == "exit -11: illegal memory access"
    assert math.isnan(found.rows[1].value)
    assert found.figures == {"ms runner": 2.0}


def test_when_the_time_is_up_the_rest_is_left_out_and_the_table_comes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check.signal, "signal", lambda *_: None)
    code = gpu_check._run_all(["kernels", "bits"], budget_s=0, results=tmp_path)
    assert code == 1
    printed = capsys.readouterr().out
    assert "| kernels: left out |" in printed
    assert "| bits: left out |" in printed
    assert (tmp_path / "gpu_check-cpu.json").exists()


def test_one_kernel_that_fails_leaves_the_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: Any) -> int:
        raise RuntimeError("CUDA error: an illegal\n memory access")

    monkeypatch.setattr(gpu_sections.gpu_parity, "checks", lambda device: {"a": broken, "b": lambda d: 0})
    rows = list(gpu_sections.gpu_parity.measure(gpu_sections.scale().device))
    assert [row.what.split(":")[0] for row in rows] == ["a", "b"]
    assert rows[0].how == "RuntimeError: CUDA error: an illegal memory access"
    assert rows[1].value == 0


def test_what_sections_say_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sections, "on_gpu", lambda: True)
    figures = {
        "ms runner": 80.0,
        "ms runner, CUDA graphs": 70.0,
        "ms runner, fp8": 10.0,
        "ms torch eager": 100.0,
        "losses runner": [3.0, 2.0],
        "losses runner, CUDA graphs": [3.0, 2.0000001],
        "losses runner, compiled blocks": [3.0, 2.01],
        "bits runner": "a",
        "bits CUDA graphs": "b",
    }
    rows = {row.what: row for row in gpu_check._compared(figures)}
    assert rows["runner, CUDA graphs: step / torch eager"].value == 0.7
    graphs, compiled = (
        rows[f"runner, {kind}: losses / eager - 1"] for kind in ("CUDA graphs", "compiled blocks")
    )
    assert graphs.must == 0 < graphs.value
    assert compiled.must is not None
    assert compiled.value <= compiled.must
    assert rows["CUDA graphs and eager: bits differ"].value == 1
    assert gpu_check._compared({"losses runner, fp8": [1.0]}) == []
