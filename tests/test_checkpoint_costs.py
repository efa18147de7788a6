"""What the benchmark says a checkpoint costs is what the rows of a run say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoint import EVERY, STEPS, _costs


def rows(*, extra_s: dict[int, float], saved_after_s: float) -> list[dict[str, Any]]:
    """Make the rows of a run whose steps take 1 s and what `extra_s` adds to them."""
    found: list[dict[str, Any]] = []
    now = 0.0
    for step in range(STEPS):
        now += 1 + extra_s.get(step, 0)
        found.append({"event": "TrainStep", "step": step, "time": now})
        done = step + 1
        if done % EVERY == 0 or done == STEPS:
            row = {"event": "Saved", "step": done, "time": now + saved_after_s, "checkpoint/blocked_ms": 50.0}
            found.append(row)
    return found


def test_every_step_that_a_checkpoint_slows_down_counts() -> None:
    slower = {EVERY: 0.2, EVERY + 1: 0.1, 2 * EVERY: 0.4, 3 * EVERY + 3: 0.3}
    run = _costs(Path("x"), rows(extra_s=slower, saved_after_s=1.5))
    assert run.step_s == pytest.approx(1)
    assert [save.extra_s for save in run.saves] == pytest.approx([0.3, 0.4, 0.3])
    assert {save.blocked_s for save in run.saves} == {0.05}


def test_a_disk_that_is_always_behind_is_no_baseline() -> None:
    with pytest.raises(RuntimeError, match="takes longer than"):
        _costs(Path("x"), rows(extra_s={}, saved_after_s=EVERY + 1.5))
