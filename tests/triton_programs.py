"""Run Triton's interpreter or compiler in a program of its own: Triton decides at import which one it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(script: str, *, interpret: bool, tmp_path: Path) -> str:
    """Return what a program prints; its failure is the test's."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    env |= {"TRITON_INTERPRET": "1" if interpret else "0", "TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=200, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
