"""The wheel holds everything: it composes and checks from any folder, under one package name."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.commands import ROOT


def test_a_wheel_composes_from_anywhere(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    assert sorted(p.name for p in (tmp_path / "site").iterdir() if "dist-info" not in p.name) == ["runner"]
    code = (
        "import sys, runner\n"
        "assert runner.__file__.startswith(sys.argv[1]), runner.__file__\n"
        "from runner.plugins.scheduler.inv_sqrt import inv_sqrt\n"
        "from runner.cli import run_command\n"
        "sys.argv = ['runner', 'train.stepz=1', 'scheduler=inv_sqrt']\n"
        "sys.exit(run_command(sys.argv[1:]))\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "site")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2, process.stderr
    assert process.stderr == "runner: error: train.stepz: no such option (did you mean train.steps?)\n"
