"""A refused update changes no bit of weights, moments or generator; the run goes on and says why."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.commands import SMALL, run

STATE_HEADER = 1024


def rows(folder: Path) -> list[dict[str, object]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if row["event"] == "TrainStep"]


def saved(folder: Path, step: int) -> tuple[bytes, bytes, bytes]:
    """Return the weights, the moments and the generator's fields of a checkpoint."""
    model = (folder / f"model_{step:08d}.bin").read_bytes()
    state = (folder / f"state_{step:08d}_00000.bin").read_bytes()
    moments = state[STATE_HEADER : STATE_HEADER + 2 * (len(model) - 1024)]
    return model, moments, state[88:96]


@pytest.mark.parametrize(
    ("fault", "reason", "step"),
    [
        ("debug.nan_grad_at=[5]", "non-finite gradient norm", 5),
        ("debug.nan_loss_at=[5]", "non-finite loss", 5),
        ("debug.spike_loss_at=[12]", "loss z-score", 12),
    ],
)
def test_a_refused_update_changes_nothing(fault: str, reason: str, step: int, tmp_path: Path) -> None:
    guard = [
        "outlier.window=8",
        "outlier.max_loss_z=2.5",
        "checkpoint.every=1",
        "train.steps=16",
        "precision=fp32",
    ]
    run(*SMALL, fault, *guard, f"run.root={tmp_path}", "run.name=x", "data.order=sequential", cwd=tmp_path)
    folder = tmp_path / "x"
    refused = [row for row in rows(folder) if not row["applied"]]
    assert step in [row["step"] for row in refused]
    row = next(row for row in refused if row["step"] == step)
    assert reason in str(row["reason"])
    assert saved(folder, step) == saved(folder, step + 1)
    assert saved(folder, step + 1)[0] != saved(folder, step + 2)[0]
    weights = np.frombuffer(saved(folder, 16)[0][1024:], dtype="<f4")
    assert np.isfinite(weights).all()
    assert rows(folder)[-1]["step"] == 15
    # Learning rate and data go on over a skip: only the update is left out.
    lines = (folder / "main.log").read_text().splitlines()
    assert sum(" trl:" in line for line in lines) == 16
    if "nan" in fault:
        assert math.isnan(float(str(row["train/grad_norm"])))


def test_a_diverged_run_ends_with_a_message_and_a_code(tmp_path: Path) -> None:
    faults = f"debug.nan_loss_at=[{','.join(map(str, range(4, 30)))}]"
    printed = run(
        *SMALL,
        faults,
        "outlier.max_consecutive_skips=6",
        f"run.root={tmp_path}",
        "run.name=x",
        cwd=tmp_path,
        code=1,
    )
    assert "diverged: 6 steps in a row were skipped up to step 9 (non-finite loss" in printed
    assert "Traceback" not in printed
    assert [row["step"] for row in rows(tmp_path / "x")] == list(range(10))


def test_without_a_guard_a_nan_is_never_saved(tmp_path: Path) -> None:
    printed = run(
        *SMALL,
        *("debug.nan_grad_at=[3]", "outlier=off", f"run.root={tmp_path}", "run.name=x"),
        cwd=tmp_path,
        code=1,  # a run whose end is not on the disk did not succeed
    )
    assert not list((tmp_path / "x").glob("DONE_*"))
    notes = [json.loads(line) for line in (tmp_path / "x" / "metrics.jsonl").read_text().splitlines()]
    texts = " ".join(str(row.get("text")) for row in notes if row["event"] == "Note")
    assert "finite" in texts
    assert "Traceback" not in printed
