"""FSDP2 under the same loop: the losses of one process, exact resume, and a gate that holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import run
from tests.rank_runs import assert_same_files, command, events

FSDP = ["parallel=fsdp", "parallel.processes=2"]


@pytest.mark.dist
def test_fsdp_trains_as_one_process_does_and_resumes_exactly(tmp_path: Path) -> None:
    same = command(tmp_path, "data.order=windows", "train.tokens_per_step=64", "scheduler.total_steps=20")
    same += ["checkpoint.every=10", "debug.nan_grad_at=[9]"]
    run(*same, "run.name=one", cwd=tmp_path)
    run(*same, *FSDP, "run.name=straight", cwd=tmp_path)
    one, two = (events(tmp_path / name, "TrainStep") for name in ("one", "straight"))
    assert len(one) == len(two) == 20
    key = "train/loss"
    assert max(abs(a[key] - b[key]) for a, b in zip(one, two, strict=True)) < 1e-5
    assert [row["applied"] for row in two] == [step != 9 for step in range(20)]
    vals = [events(tmp_path / name, "ValLoss")[-1]["val/loss"] for name in ("one", "straight")]
    assert abs(vals[0] - vals[1]) < 1e-5

    run(*same, *FSDP, "run.name=pieces", "train.steps=10", cwd=tmp_path)
    run(*same, *FSDP, "run.name=pieces", cwd=tmp_path)
    assert_same_files(tmp_path / "straight", tmp_path / "pieces", step=10)
    assert_same_files(tmp_path / "straight", tmp_path / "pieces", step=20)


@pytest.mark.dist
def test_fsdp_leaves_the_parameters_of_a_refused_step_alone(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    same = command(tmp_path, *FSDP, "train.steps=6", "checkpoint.every=1", "model.dropout=0.1")
    run(*same, "precision=bf16_master", "debug.nan_grad_at=[3]", "run.name=x", cwd=tmp_path)
    before, after, later = (load_file(tmp_path / "x" / f"model_{n:08d}.safetensors") for n in (3, 4, 5))
    assert all(before[name].equal(after[name]) for name in before)
    assert not all(after[name].equal(later[name]) for name in after)
    states = [load_file(tmp_path / "x" / f"state_{n:08d}_00001.safetensors") for n in (3, 4)]
    assert all(states[0][name].equal(states[1][name]) for name in states[0] if "optimizer" in name)


def test_fsdp_alone_says_how_to_start_it(tmp_path: Path) -> None:
    printed = run(*command(tmp_path, "parallel=fsdp"), cwd=tmp_path, code=2)
    assert printed == (
        "runner: error: parallel: fsdp needs ranks; set parallel.processes=2 or more, or use torchrun\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_master"])
def test_fsdp_resumes_on_three_ranks_that_share_unequally(precision: str, tmp_path: Path) -> None:
    same = command(tmp_path, "parallel=fsdp", "parallel.processes=3", f"precision={precision}")
    same += ["model.dropout=0.1", "checkpoint.every=4", "scheduler.total_steps=12", "debug.nan_grad_at=[6]"]
    run(*same, "train.steps=12", "run.name=straight", cwd=tmp_path)
    for steps in (4, 8, 12):
        run(*same, f"train.steps={steps}", "run.name=pieces", cwd=tmp_path)
    assert_same_files(tmp_path / "straight", tmp_path / "pieces", step=12)
