"""What an earlier start left behind, or has still under way, does not end up in the record of the next."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from runner import manifest
from runner.api import Event, Logger, Note, TrainStep
from runner.data.shard import write_shard
from runner.train import Plan
from tests.commands import run
from tests.rank_runs import TWO, command, done_steps, events, notes
from tests.sessions import TINY, opened, ran

AUTO = [*TINY, "train.micro_batch=auto"]


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_a_slow_save_is_in_no_step_s_time(mode: str, tmp_path: Path) -> None:
    slow = ("debug.slow_save_s=0.5", f"checkpoint.async={mode}", "checkpoint.every=4")
    run(*command(tmp_path, *slow, "train.steps=9", "run.name=x"), cwd=tmp_path)
    rows = events(tmp_path / "x", "TrainStep")
    assert max(row["perf/step_ms"] for row in rows) < 400
    if mode != "on":
        assert all(row["checkpoint/blocked_ms"] > 400 for row in events(tmp_path / "x", "Saved"))


def test_a_start_without_a_checkpoint_does_not_bind_the_size_of_a_pass(tmp_path: Path) -> None:
    opened(*AUTO, "train.tokens_per_step=1024", dir=tmp_path)  # dies before it trains
    begun = opened(*AUTO, "train.tokens_per_step=1536", dir=tmp_path)
    assert (begun.plan.micro_batch, begun.plan.accumulate) == (96, 1)


@pytest.mark.parametrize("afresh", ["run.overwrite=true", "checkpoint.resume=never"])
def test_a_fresh_start_does_not_bind_the_size_of_a_pass(afresh: str, tmp_path: Path) -> None:
    ran(*AUTO, "train.tokens_per_step=1024", "train.steps=1", dir=tmp_path)
    if "never" in afresh:
        (tmp_path / "DONE_00000001").unlink()
    begun = opened(*AUTO, "train.tokens_per_step=1536", afresh, dir=tmp_path)
    assert begun.plan.accumulate * begun.plan.rows * 16 == 1536


def test_a_pass_that_no_longer_fits_the_step_is_refused(tmp_path: Path) -> None:
    ran(*AUTO, "train.tokens_per_step=1024", "train.steps=1", dir=tmp_path)
    with pytest.raises(ValueError, match=r"begun with 64 sequences in a pass.*the 96 that each of 1"):
        opened(*AUTO, "train.tokens_per_step=1536", dir=tmp_path)


def test_no_plan_trains_on_fewer_tokens_than_it_says() -> None:
    assert Plan(steps=1, micro_batch=4, seq_len=8, tokens_per_step=64).accumulate == 2
    with pytest.raises(AssertionError, match="cannot train on 96 tokens"):
        _ = Plan(steps=1, micro_batch=8, seq_len=8, tokens_per_step=96).accumulate


def test_refused_steps_are_kept_of_this_history_alone(tmp_path: Path) -> None:
    same = command(tmp_path, "train.steps=9", "checkpoint.every=5", "run.name=x")
    run(*same, "debug.nan_loss_at=[2,6]", "debug.kill_at=8", cwd=tmp_path, code=-9)
    assert kept(tmp_path) == [2, 6]
    run(*same, cwd=tmp_path)  # goes on from step 5, and step 6 is fine this time
    assert kept(tmp_path) == [2]
    run(*same, "run.overwrite=true", cwd=tmp_path)
    assert kept(tmp_path) == []


def kept(folder: Path) -> list[int]:
    return sorted(json.loads(path.read_text())["step"] for path in (folder / "x" / "skips").iterdir())


def test_a_start_with_nothing_to_do_changes_no_record(tmp_path: Path) -> None:
    ran(*TINY, "train.steps=3", dir=tmp_path)
    before = manifest.read(tmp_path)
    opened(*TINY, "train.steps=2", "clip.max_norm=9", dir=tmp_path)
    assert manifest.read(tmp_path) == before


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("nothing", "there is no run nothing"),
        ("x@2", "has no checkpoint of step 2"),
        ("x@3", "that is this run itself"),
        ("y", "step 3 is not before train.steps=3"),
    ],
)
def test_a_mistake_in_where_to_start_from_costs_no_checkpoint(
    source: str, reason: str, tmp_path: Path
) -> None:
    there = [*TINY, f"run.root={tmp_path}"]
    for name in ("x", "y"):
        ran(*there, "train.steps=3", dir=tmp_path / name)
    steps = 3 if source == "y" else 5
    with pytest.raises(ValueError, match=reason):
        opened(*there, f"run.from={source}", "run.overwrite=true", f"train.steps={steps}", dir=tmp_path / "x")
    assert done_steps(tmp_path / "x") == [3]


@pytest.mark.dist
def test_tokens_are_those_that_were_read_whatever_the_ranks(tmp_path: Path) -> None:
    same = command(tmp_path, "run.name=x", "run.ranks_every=0")
    run(*same, "train.steps=4", cwd=tmp_path)
    run(*same, *TWO, "checkpoint.allow_reshard=true", "train.steps=6", cwd=tmp_path)
    read = [row["train/tokens"] for row in events(tmp_path / "x", "TrainStep")]
    assert read == [32, 64, 96, 128, 192, 256]
    told = "a step has 64 tokens on 2 ranks, it had 32 on 1; train.tokens_per_step=32 would have kept it"
    assert told in notes(tmp_path / "x")


def row(step: int, norm: float) -> TrainStep:
    return TrainStep(step, 3.0, 1e-3, norm, math.nan, math.nan, True, "", 1.0, 32, 1.0, 1.0, -1.0)


@pytest.mark.parametrize(
    ("guard", "told"),
    [("max_norm_z=6", [3]), ("max_norm_z=0", []), ("robust=true", [])],
)
def test_residue_of_a_huge_value_in_llmc_s_sums_is_told(guard: str, told: list[int], tmp_path: Path) -> None:
    session = opened(*TINY, "outlier.max_norm_z=6", f"outlier.{guard}", dir=tmp_path)
    seen: list[Event] = []
    session.emitter.loggers["mine"] = cast(Logger, SimpleNamespace(log=seen.append))
    norms = [1.0, math.nan, 1e5, 1e12, 1.0, math.inf]
    session.emit([row(step, norm) for step, norm in enumerate(norms)])
    notes_of = [event for event in seen if isinstance(event, Note)]
    assert [note.step for note in notes_of] == told
    assert all("rounding residue" in note.text for note in notes_of)


def test_data_may_move_but_not_change(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 250, 4000).astype(np.uint16)

    def data(folder: str) -> list[str]:
        found = {split: tmp_path / folder / f"{split}.bin" for split in ("train", "val")}
        return [*TINY, "data=shards", "data.vocab_size=257", *(f"data.{n}={p}" for n, p in found.items())]

    for name in ("train", "val"):
        (tmp_path / "old").mkdir(exist_ok=True)
        write_shard(tmp_path / "old" / f"{name}.bin", tokens)
    ran(*data("old"), "train.steps=4", dir=tmp_path / "straight")
    ran(*data("old"), "train.steps=2", dir=tmp_path / "x")
    (tmp_path / "old").rename(tmp_path / "new")
    ran(*data("new"), "train.steps=4", dir=tmp_path / "x")
    weights = [folder / "model_00000004.bin" for folder in (tmp_path / "straight", tmp_path / "x")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    write_shard(tmp_path / "new" / "train.bin", tokens[::-1].copy())
    with pytest.raises(ValueError, match="data: not what the run was trained with"):
        opened(*data("new"), "train.steps=6", dir=tmp_path / "x")


@pytest.mark.parametrize("afresh", ["run.overwrite=true", "debug.raise_at=null"])
def test_no_record_of_an_earlier_start_passes_for_one_of_this(afresh: str, tmp_path: Path) -> None:
    every = ["logger=[llmc,jsonl,tensorboard]", "train.steps=9", "checkpoint.every=0", "run.plot=true"]
    run(*TINY, *every, "debug.raise_at=7", "run.name=x", cwd=tmp_path, code=1)
    folder = tmp_path / "outputs" / "x"
    (folder / "loss.png").touch()
    run(*TINY, *every, "logger=[llmc]", "train.steps=3", "run.plot=false", afresh, "run.name=x", cwd=tmp_path)
    assert (folder / "main.log").read_text().count(" trl:") == 3
    assert not (folder / "metrics.jsonl").exists()
    assert not (folder / "loss.png").exists()
    assert list((folder / "tensorboard").iterdir()) == []


def test_a_record_that_a_continued_run_does_not_add_to_is_told(tmp_path: Path) -> None:
    short = [*TINY, "run.name=x", "checkpoint.every=2", "scheduler=constant"]
    run(*short, "logger=[llmc,jsonl]", "train.steps=4", cwd=tmp_path)
    log = tmp_path / "outputs" / "x" / "metrics.jsonl"
    before = log.read_bytes()
    printed = run(*short, "logger=[llmc]", "train.steps=6", cwd=tmp_path)
    said = "metrics.jsonl stays as it is and will lack the steps from 4 on, since logger=jsonl is not chosen"
    assert printed.count(said) == 1
    assert log.read_bytes() == before
    assert said not in run(*short, "logger=[llmc]", "train.steps=6", cwd=tmp_path)  # nothing to do


def test_a_start_that_a_continued_run_would_ignore_is_refused(tmp_path: Path) -> None:
    ran(*TINY, "train.steps=4", "checkpoint.every=2", dir=tmp_path / "trunk")
    began = f"run.from={tmp_path}/trunk@2"
    ran(*TINY, began, "train.steps=5", dir=tmp_path / "branch")
    assert ran(*TINY, began, "train.steps=6", dir=tmp_path / "branch").progress.step == 6
    assert ran(*TINY, "train.steps=7", dir=tmp_path / "branch").progress.step == 7
    refused = r"run\.from: .* -> .*/trunk@4 may not change in a resumed run, which goes on from its own"
    for name in ("branch", "trunk"):
        with pytest.raises(ValueError, match=refused):
            opened(*TINY, f"run.from={tmp_path}/trunk@4", "train.steps=9", dir=tmp_path / name)
