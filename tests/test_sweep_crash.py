"""A sweep whose process is killed at a random instant ends as if it had not been."""

from __future__ import annotations

import random
import time
import uuid
from pathlib import Path

import pytest

from tests.sweep_cases import TINY, all_traces, folder, gone, kill, marked, stamps, start, sweep


def interrupted(cwd: Path, *arguments: str, kills: int, seed: int, whole_s: float) -> str:
    """Run a sweep, killed `kills` times at random instants, to its end; return the last output."""
    instants = random.Random(seed)
    printed = ""
    for n in range(kills + 1):
        mark = uuid.uuid4().hex
        before = stamps(folder(cwd)) if (cwd / "outputs").exists() else {}
        process = start("-m", *TINY, *arguments, cwd=cwd, mark=mark)
        if n == kills:
            printed, _ = process.communicate(timeout=240)
            assert process.returncode == 0, printed
        else:
            time.sleep(instants.uniform(0.2, 0.8) * whole_s)
            kill(process)
            assert gone(mark), f"orphans: {marked(mark)}"
        if before:
            after = stamps(folder(cwd))
            assert {k: after[k] for k in before} == before, "a finished cell was run again"
    return printed


def compare(tmp_path: Path, *arguments: str, kills: int, seed: int) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    began = time.monotonic()
    sweep(*arguments, cwd=whole)
    interrupted(cut, *arguments, kills=kills, seed=seed, whole_s=time.monotonic() - began)
    expected, found = (all_traces(folder(where)) for where in (whole, cut))
    assert expected.keys() == found.keys()
    for cell in expected:
        assert expected[cell].keys() == found[cell].keys(), cell
        assert all(expected[cell][name] == found[cell][name] for name in expected[cell]), cell
    assert folder(whole).name == folder(cut).name


def test_a_killed_sweep_ends_with_the_same_bits(tmp_path: Path) -> None:
    compare(tmp_path, "run.seed=1,2,3", "sweep.parallel=2", kills=1, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [11, 12, 13])
def test_a_sweep_killed_five_times_ends_with_the_same_bits(tmp_path: Path, seed: int) -> None:
    swept = ("scheduler.warmup_steps=4,8,16", "optimizer.lr=1e-3,3e-3", "sweep.parallel=2", "train.steps=300")
    compare(tmp_path, *swept, kills=5, seed=seed)
