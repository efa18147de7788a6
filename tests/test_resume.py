"""The promise of the project: a run that was killed and continued is the run that was not, bit for bit."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.commands import SMALL, kill_when, run, start

# Twelve samples an epoch, so 40 steps of one or two micro-batches cross epochs and stop in their middle.
TEXT = "".join(f"{n} green bottles hanging on the wall, " for n in range(12, 2, -1))


def corpus(folder: Path) -> list[str]:
    path = folder / "song.txt"
    path.write_text(TEXT)
    return ["data=text", f"data.path={path}", "data.tokenizer=byte", f"data.cache={folder / 'cache'}"]


def last_lines(log: Path) -> dict[str, str]:
    """Return main.log as its readers see it: the last line of each step and stream."""
    return {line.split(":")[1] + line.split()[1].split(":")[0]: line for line in log.read_text().splitlines()}


def record(path: Path) -> list[dict[str, object]]:
    """Return what a run measured, without what the clock made of it."""
    volatile = ("time", "perf/step_ms", "perf/tokens_per_s")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k not in volatile}
        for row in rows
        if row["event"] in ("TrainStep", "ValLoss")
    ]


def assert_same_run(a: Path, b: Path) -> None:
    """Compare everything that two runs of one command leave, but for the clock."""
    assert last_lines(a / "main.log") == last_lines(b / "main.log")
    assert record(a / "metrics.jsonl") == record(b / "metrics.jsonl")
    newest = max(p.name for p in a.glob("DONE_*"))
    assert newest == max(p.name for p in b.glob("DONE_*"))
    step = newest.removeprefix("DONE_")
    for name in (f"model_{step}.bin", f"state_{step}_00000.bin"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


VARIANTS = {
    "plain": ["precision=fp32"],
    "dropout, gate acting": [
        "precision=fp32",
        "model.dropout=0.1",
        "outlier.window=8",
        "outlier.max_loss_z=1.5",
        "outlier.max_norm_z=1.5",
        "optimizer.lr=1e-3",
        "train.tokens_per_step=64",
    ],
    "bf16, windows": ["precision=bf16", "data.order=windows", "model.dropout=0.1", "outlier=median"],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_killed_and_continued_equals_uninterrupted(name: str, tmp_path: Path) -> None:
    command = [*corpus(tmp_path), *SMALL, *VARIANTS[name], f"run.root={tmp_path}"]
    run(*command, "run.name=straight", cwd=tmp_path)
    if "gate" in name:
        rows = record(tmp_path / "straight" / "metrics.jsonl")
        assert any(row.get("applied") is False for row in rows), "the gate never acted: nothing is proved"
    instants = random.Random(name)
    killed = 0
    for attempt in range(4):
        folder = tmp_path / f"killed{attempt}"
        process = start(*command, f"run.name={folder.name}", cwd=tmp_path)
        lines, delay_s = instants.randint(1, 40), instants.uniform(0, 0.02)
        killed += kill_when(process, folder / "main.log", lines=lines, delay_s=delay_s)
        run(*command, f"run.name={folder.name}", cwd=tmp_path)
        assert_same_run(tmp_path / "straight", folder)
    assert killed >= 2, "the runs ended before they could be killed"


def test_same_seed_same_log_and_watching_changes_nothing(tmp_path: Path) -> None:
    command = [*corpus(tmp_path), *SMALL, "model.dropout=0.1", f"run.root={tmp_path}"]
    run(*command, "run.name=a", cwd=tmp_path)
    run(*command, "run.name=b", cwd=tmp_path)
    assert (tmp_path / "a" / "main.log").read_bytes() == (tmp_path / "b" / "main.log").read_bytes()
    watched = [
        "evaluate=[val,sample]",
        "evaluate.val.every=3",
        "evaluate.sample.every=4",
        "logger=[llmc,console]",
    ]
    run(*command, *watched, "run.name=c", cwd=tmp_path)

    def train_lines(name: str) -> list[str]:
        return [line for line in (tmp_path / name / "main.log").read_text().splitlines() if " trl:" in line]

    assert train_lines("a") == train_lines("c")


def test_a_finished_run_can_be_extended_and_is_not_trained_again(tmp_path: Path) -> None:
    command = [*corpus(tmp_path), *SMALL, "scheduler=constant", f"run.root={tmp_path}"]
    run(*command, "run.name=long", cwd=tmp_path)
    run(*command, "run.name=short", "train.steps=21", cwd=tmp_path)
    run(*command, "run.name=short", "train.steps=21", cwd=tmp_path)
    run(*command, "run.name=short", cwd=tmp_path)
    long, short = (last_lines(tmp_path / name / "main.log") for name in ("long", "short"))
    assert {k: v for k, v in short.items() if "trl" in k} == {k: v for k, v in long.items() if "trl" in k}
    assert (tmp_path / "short" / "main.log").read_text().count("s:20 trl") == 1


def test_what_may_not_change_on_resume_is_named(tmp_path: Path) -> None:
    command = [*corpus(tmp_path), *SMALL, f"run.root={tmp_path}", "run.name=x", "train.steps=8"]
    run(*command, cwd=tmp_path)
    printed = run(*command, "run.seed=7", "train.micro_batch=4", "optimizer.lr=1", cwd=tmp_path, code=2)
    lines = printed.splitlines()
    assert all(line.startswith("runner: error: ") for line in lines)
    assert {line.split()[2].rstrip(":") for line in lines} == {"run.seed", "model.seed", "train.micro_batch"}
    printed = run(*command, "checkpoint.resume=never", cwd=tmp_path, code=2)
    assert "run.overwrite=true" in printed
    assert len(printed.splitlines()) == 1
    run(*command, "run.overwrite=true", "train.steps=3", cwd=tmp_path)
    assert sorted(p.name for p in (tmp_path / "x").glob("DONE_*")) == ["DONE_00000003"]
