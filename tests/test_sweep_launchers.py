"""Sweeps through other launchers and sweepers of Hydra."""

from __future__ import annotations

import os
import signal
import time
import uuid
from pathlib import Path

import pytest

from tests.sweep_cases import TINY, folder, gone, marked, start, sweep, traces

SHORT = ("train.steps=12", "checkpoint.every=50")


@pytest.mark.slow
def test_hydra_s_own_launcher_and_sweeper_work(tmp_path: Path) -> None:
    printed = sweep("run.seed=1,2", *SHORT, "hydra/launcher=basic", "sweep.name=basic", cwd=tmp_path)
    assert "(2/2)" in printed
    assert (folder(tmp_path) / "summary.csv").is_file()
    printed = sweep("run.seed=1,2", *SHORT, "sweep.name=basic", cwd=tmp_path)
    assert "2 done before" in printed
    printed = sweep("run.seed=1,2,3", *SHORT, "hydra/sweeper=basic", "sweep.name=basic", cwd=tmp_path)
    assert "2 done before, 0 to continue, 1 to start" in printed


@pytest.mark.slow
def test_a_preempted_submitit_job_is_queued_again_and_continues(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    alone, cut = tmp_path / "alone", tmp_path / "cut"
    alone.mkdir()
    cut.mkdir()
    long = ("train.steps=2000", "checkpoint.every=50", "run.seed=1")
    mark = uuid.uuid4().hex
    process = start("-m", *TINY, *long, "hydra/launcher=submitit_local", cwd=cut, mark=mark)
    log = next_log(cut)
    while log.read_bytes().count(b"\n") < 200:
        time.sleep(0.05)
    for pid in marked(mark):
        if b"submitit.core._submit" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGUSR2)
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == 0, printed
    assert gone(mark)
    manifest = (folder(cut) / "000" / "manifest.json").read_text()
    assert manifest.count('"start_step"') == 2
    sweep(*long, cwd=alone)
    whole, continued = traces(folder(alone) / "000"), traces(folder(cut) / "000")
    assert {name: continued[name] for name in whole} == whole
    steps = {name.split("_")[1].split(".")[0] for name in continued.keys() - whole.keys()}
    assert len(steps) <= 1, "beyond the usual checkpoints there is at most the one of the signal"


def next_log(where: Path) -> Path:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for log in where.glob("outputs/sweeps/*/000/main.log"):
            return log
        time.sleep(0.05)
    raise AssertionError("no cell started")
