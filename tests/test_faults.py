"""Every fault ends in one message that a person can act on, and costs no checkpoint that was complete."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import SMALL, run, start
from tests.rank_runs import (
    TWO,
    alive,
    assert_same_files,
    children,
    command,
    done_steps,
    events,
    lines,
    notes,
    wait_for,
)


def errors(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("runner: error:")]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("debug.raise_at=9", "rank 1 of 2 failed: RuntimeError: debug.raise_at: an error in step 9"),
        ("debug.kill_at=9", "rank 1 of 2 was killed by SIGKILL"),
    ],
)
def test_a_rank_that_dies_takes_the_others_with_it(fault: str, message: str, tmp_path: Path) -> None:
    few = command(tmp_path, *TWO, fault, "debug.rank=1", "run.name=x")
    process = start(*few, cwd=tmp_path)
    wait_for(lambda: lines(tmp_path / "x" / "main.log") > 9)
    ranks, began = children(process), time.monotonic()
    printed, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 8
    assert process.returncode == 1
    assert not any(alive(pid) for pid in ranks)
    assert len(errors(printed)) == 1
    assert message in errors(printed)[0]
    assert printed.count("Traceback (most recent call last)") == ("raise" in fault)
    assert done_steps(tmp_path / "x") == [7]


@pytest.mark.dist
def test_a_hung_rank_is_ended_and_every_rank_leaves_its_stacks(tmp_path: Path) -> None:
    few = command(tmp_path, *TWO, "debug.hang_at=9", "debug.rank=1", "run.watchdog_s=4", "run.name=x")
    printed = run(*few, cwd=tmp_path, code=124)
    assert errors(printed)[-1].endswith("made no progress and was ended; the stacks are above")
    stacks = [(tmp_path / "x" / f"stacks_{rank:05d}.txt").read_text() for rank in (0, 1)]
    assert all("since step 9" in text.splitlines()[0] for text in stacks)
    assert "inject.py" in stacks[1]
    assert "inject.py" not in stacks[0]


def test_a_failing_write_costs_that_checkpoint_alone(tmp_path: Path) -> None:
    few = command(tmp_path, "debug.fail_saves=[2]", "debug.fail_with=EIO", "run.name=x")
    run(*few, cwd=tmp_path)
    assert done_steps(tmp_path / "x") == [7, 20]
    (note,) = (text for text in notes(tmp_path / "x") if "not written" in text)
    assert note.startswith("checkpoint 14 not written, older ones stay:")
    assert "Input/output error" in note
    assert not list((tmp_path / "x").glob("*.tmp"))


def test_loggers_may_fail_but_the_record_is_whole(tmp_path: Path) -> None:
    few = command(tmp_path, "logger=[llmc,jsonl,console]")
    full = ["debug.break_logger=llmc", "debug.break_logger_at=[3,4,5]"]
    printed = run(*few, *full, "run.name=full", cwd=tmp_path)
    assert "logger.llmc: OSError" in printed
    dead = ["debug.break_logger=console", "debug.break_logger_at=[3]"]
    printed = run(*few, *dead, "run.name=dead", cwd=tmp_path)
    assert "logger.console is off: OSError" in printed
    logs = [(tmp_path / name / "main.log").read_text() for name in ("full", "dead")]
    assert logs[0] == logs[1]
    assert [line.split()[0] for line in logs[0].splitlines() if " trl:" in line] == [
        f"s:{n}" for n in range(20)
    ]


def test_damaged_checkpoints_are_named_and_the_older_one_is_used(tmp_path: Path) -> None:
    few = command(tmp_path, "checkpoint.every=5")
    run(*few, "run.name=straight", cwd=tmp_path)
    run(*few, "run.name=x", cwd=tmp_path)
    folder = tmp_path / "x"
    state = folder / "state_00000020_00000.bin"
    spoiled = bytearray(state.read_bytes())
    spoiled[len(spoiled) // 2] ^= 1
    state.write_bytes(spoiled)
    (folder / "model_00000015.bin").unlink()
    printed = run(*few, "run.name=x", "logger=[llmc,jsonl,console]", cwd=tmp_path)
    assert "checkpoint 20" in printed
    assert "state_00000020_00000.bin" in printed
    assert "model_00000015.bin" in printed
    assert_same_files(folder, tmp_path / "straight", step=20)
    damaged = [text for text in notes(folder) if "is damaged, trying the next older one" in text]
    assert len(damaged) == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(path: Path) -> None:
    """Write zeros until not a byte fits any more."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for size in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.write(file, b"\0" * size)
    finally:
        os.close(file)


def test_a_full_disk_costs_no_step_and_no_line(small_disk: Path, tmp_path: Path) -> None:
    few = command(tmp_path, "checkpoint.every=5", "train.steps=100000", "scheduler=constant", "run.name=x")
    few += ["evaluate.val.every=100000", "checkpoint.keep=2", "logger=[llmc,jsonl,console]"]
    few += ["debug.slow_save_s=0.3"]  # the disk fills up between the look at its free space and the write
    process = start(*few, f"run.root={small_disk}", cwd=tmp_path)
    folder, ballast = small_disk / "x", small_disk / "ballast"
    try:
        wait_for(lambda: len(done_steps(folder)) >= 2)
        kept = done_steps(folder)
        until = time.monotonic() + 2
        while time.monotonic() < until:
            fill(ballast)  # again: a save that fails gives its space back
        assert process.poll() is None, "the run ended"
        stuck = done_steps(folder)
        assert stuck[-1] >= kept[-1], "a complete checkpoint was lost"
        ballast.unlink()
        wait_for(lambda: done_steps(folder)[-1] > stuck[-1] + 5)
        process.terminate()
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 143
    assert re.search(r"checkpoint \d+ not written.*(No space left|bytes free)", printed)
    assert "its lines wait in memory" in printed
    steps = [row["step"] for row in events(folder, "TrainStep")]
    assert steps == list(range(len(steps))), "lines were lost"
    trained = [line.split()[0] for line in (folder / "main.log").read_text().splitlines() if " trl:" in line]
    assert trained == [f"s:{step}" for step in steps]


def test_a_run_whose_end_is_not_on_the_disk_has_failed(tmp_path: Path) -> None:
    command = [*SMALL, "train.steps=10", "run.name=a"]
    printed = run(*command, "debug.fail_saves=[2]", cwd=tmp_path, code=1)
    assert "the checkpoint of step 10 could not be written" in printed
    assert (tmp_path / "outputs/a/DONE_00000007").is_file()
    run(*command, cwd=tmp_path)
    assert (tmp_path / "outputs/a/DONE_00000010").is_file()


def test_weights_that_are_not_finite_are_not_called_a_full_disk(tmp_path: Path) -> None:
    few = command(tmp_path, "outlier=off", "debug.nan_loss_at=[16]", "run.name=x")
    printed = run(*few, cwd=tmp_path, code=1)
    assert "checkpoint 20 not written, older ones stay: refused: embed.wte holds non-finite" in printed
    assert "once that is mended, the same command goes on from the last one that was" in printed
    assert "make room" not in printed
    assert done_steps(tmp_path / "x") == [7, 14]
