"""What a refused step leaves behind, on whatever device its verdict came late."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from runner import forensics
from runner.api import TrainStep
from runner.forensics import Forensics
from tests.commands import run
from tests.rank_runs import command, events, notes


class Place(NamedTuple):
    path: Path
    start: int
    epoch: int


class Stream:
    position = Place(Path("data/train_000003.bin"), 96, 2)


class Engine:
    """Two ranks, of which this is the first; the other saw the next sample."""

    rank, world = 0, 2

    def __init__(self) -> None:
        self.sums = torch.tensor([1.0, 4.0])

    def gather(self, value: list[dict[str, Any]]) -> list[Any]:
        return [value, [{**place, "sample": place["sample"] + 1} for place in value]]

    def slot_norms(self, sums: torch.Tensor) -> dict[str, float]:
        norms = {f"t{i}": float(x.sqrt()) for i, x in enumerate(sums)}
        return {**norms, **{f"small{i}": 1e-6 for i in range(30)}}


def event(step: int, *, loss: float = math.nan) -> TrainStep:
    reason = "non-finite loss"
    return TrainStep(step, loss, 1e-3, 2.0, math.nan, math.nan, False, reason, 1.0, 32, 1.0, 1.0, -1.0)


def make(folder: Path) -> tuple[Forensics, Any]:
    engine: Any = Engine()
    return Forensics(folder, engine=engine, rank_tokens=16), engine


def test_a_verdict_that_comes_a_step_late_still_finds_its_step(tmp_path: Path) -> None:
    kept, engine = make(tmp_path)
    kept.saw(Stream())
    kept.stepped(7)
    engine.sums = torch.tensor([math.nan, 0.0])
    kept.saw(Stream())
    kept.saw(Stream())
    kept.stepped(8)
    (note,) = kept.keep(event(7))
    assert note.level == "warning"
    record = json.loads((tmp_path / "skips" / "step_00000007.json").read_text())
    assert record["loss"] == "nan"
    assert list(record["tensors"].items())[:2] == [("t1", 2.0), ("t0", 1.0)]
    assert len(record["tensors"]) == forensics.MOST_TENSORS
    assert record["batches"] == [
        {"rank": 0, "micro_step": 0, "shard": "train_000003.bin", "sample": 3, "start": 96, "epoch": 2},
        {"rank": 1, "micro_step": 0, "shard": "train_000003.bin", "sample": 4, "start": 96, "epoch": 2},
    ]
    (note,) = kept.keep(event(8))
    assert "first non-finite gradient: t0" in note.text
    assert json.loads((tmp_path / "skips" / "step_00000008.json").read_text())["tensors"]["t0"] == "nan"


def test_a_step_that_is_long_gone_is_not_guessed(tmp_path: Path) -> None:
    kept, _ = make(tmp_path)
    for step in range(5):
        kept.stepped(step)
    assert list(kept.keep(event(1))) == []
    assert not (tmp_path / "skips").exists()


def test_files_and_positions_are_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forensics, "MOST_FILES", 2)
    monkeypatch.setattr(forensics, "MOST_BATCHES", 3)
    kept, _ = make(tmp_path)
    for step in (1, 2, 3, 2):
        for _ in range(5):
            kept.saw(Stream())
        kept.stepped(step)
        (note,) = kept.keep(event(step))
        assert ("is full" in note.text) == (step == 3)
    assert len(list((tmp_path / "skips").iterdir())) == 2
    assert len(json.loads((tmp_path / "skips" / "step_00000002.json").read_text())["batches"]) == 3


def test_a_run_s_refused_steps_are_kept_with_their_data(tmp_path: Path) -> None:
    few = command(tmp_path, "debug.nan_grad_at=[3]", "debug.nan_loss_at=[5]", "data.order=sequential")
    run(*few, "train.tokens_per_step=64", "run.name=x", cwd=tmp_path)
    assert sorted(p.name for p in (tmp_path / "x" / "skips").iterdir()) == [
        "step_00000003.json",
        "step_00000005.json",
    ]
    record = json.loads((tmp_path / "x" / "skips" / "step_00000003.json").read_text())
    assert record["reason"] == "non-finite gradient norm"
    assert [batch["sample"] for batch in record["batches"]] == [
        6,
        7,
    ]  # two micro-batches a step, in file order
    assert [row["train/skipped"] for row in events(tmp_path / "x", "TrainStep")][-1] == 2
    assert sum("refused" in text for text in notes(tmp_path / "x")) == 2


def test_a_run_that_is_refused_too_often_ends_with_advice(tmp_path: Path) -> None:
    few = command(tmp_path, "debug.nan_loss_at=[3,4,5]", "outlier.max_consecutive_skips=3", "run.name=x")
    printed = run(*few, cwd=tmp_path, code=1)
    assert "diverged: 3 steps in a row were skipped up to step 5" in printed
    assert "lower optimizer.lr" in printed
    assert "Traceback" not in printed
