"""Run folders: claimed by one run, never shared, always saying how the run ended."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands import SMALL, environment, run, start


def test_runs_of_the_same_second_never_share_a_folder(tmp_path: Path) -> None:
    short = [*SMALL, "train.steps=2", f"run.root={tmp_path / 'out'}"]
    started = [start(*short, cwd=tmp_path) for _ in range(3)]
    for process in started:
        printed, _ = process.communicate(timeout=240)
        assert process.returncode == 0, printed
    folders = [p for p in (tmp_path / "out").iterdir() if p.is_dir()]
    assert len(folders) == 3
    for folder in folders:
        assert (folder / "main.log").read_text().count(" trl:") == 2


def test_a_folder_in_use_is_refused_and_named(tmp_path: Path) -> None:
    command = [*SMALL, "train.steps=100000", f"run.root={tmp_path}", "run.name=busy"]
    first = start(*command, cwd=tmp_path)
    try:
        while not (tmp_path / "busy" / "main.log").is_file():
            assert first.poll() is None
            time.sleep(0.05)
        printed = run(*command, cwd=tmp_path, code=2)
        assert len(printed.splitlines()) == 1
        assert f"in use by process {first.pid}" in printed
    finally:
        first.kill()
        first.communicate()


def test_what_a_run_leaves_is_enough_to_repeat_it(tmp_path: Path) -> None:
    printed = run(
        *SMALL,
        "logger=[llmc,console,jsonl]",
        f"run.root={tmp_path}",
        "run.name=x",
        "run.plot=true",
        cwd=tmp_path,
    )
    folder = tmp_path / "x"
    for name in ("main.log", "metrics.jsonl", "manifest.json", "loss.png", "DONE_00000040"):
        assert (folder / name).is_file(), name
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["config"]["train"]["steps"] == 40
    assert manifest["parameters"] > 0
    for text in ("val loss", "curves", "train on", "run.name=x", "sample"):
        assert text in printed
    assert (folder / "loss.png").stat().st_size > 10_000


@pytest.mark.parametrize(("logger", "file"), [("llmc", "main.log"), ("jsonl", "metrics.jsonl")])
def test_a_record_that_cannot_be_written_is_one_line(logger: str, file: str, tmp_path: Path) -> None:
    (tmp_path / "outputs/a" / file).mkdir(parents=True)
    printed = run(*SMALL, "run.name=a", cwd=tmp_path, code=2)
    assert (
        printed
        == f"runner: error: logger.{logger}: cannot write {tmp_path}/outputs/a/{file} (Is a directory)\n"
    )


def test_what_must_be_seen_is_seen_without_a_console(tmp_path: Path) -> None:
    run(*SMALL, "train.steps=14", "run.name=a", cwd=tmp_path)
    newest = tmp_path / "outputs/a/model_00000014.bin"
    newest.write_bytes(newest.read_bytes()[:-4])
    printed = run(*SMALL, "train.steps=14", "run.name=a", cwd=tmp_path)
    assert "warning: checkpoint 14 in" in printed
    assert printed.count("is damaged, trying the next older one") == 1


@pytest.mark.parametrize("where", [["run.name=a/b/c"], ["run.root=q/w", "run.name=a/b"], ["run.root=q/w/e"]])
def test_a_refused_run_leaves_none_of_the_folders_that_were_made_for_it(
    where: list[str], tmp_path: Path
) -> None:
    run(*SMALL, *where, "checkpoint.resume=must", cwd=tmp_path, code=2)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_a_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "x").write_text("")
    for name in ("x", "x/y"):
        printed = run(*SMALL, f"run.name={name}", cwd=tmp_path, code=2)
        assert f"run.name: {tmp_path / 'outputs' / 'x'} is a file, not a folder" in printed


def test_a_finished_record_without_a_checkpoint_is_not_emptied_unasked(tmp_path: Path) -> None:
    command = [*SMALL, "train.steps=4", "run.name=a", "checkpoint.every=0"]
    run(*command, cwd=tmp_path)
    folder = tmp_path / "outputs/a"
    record = (folder / "main.log").read_bytes()
    (session,) = json.loads((folder / "manifest.json").read_text())["sessions"]
    assert (session["ended"]["status"], session["ended"]["step"]) == ("finished", 4)
    printed = run(*command, "run.seed=1", cwd=tmp_path, code=2)
    assert printed == (
        f"runner: error: run.name: {folder} holds the record of a run that finished at step 4 without a "
        "checkpoint, a fresh start would empty it; choose another run.name, or pass run.overwrite=true\n"
    )
    assert (folder / "main.log").read_bytes() == record
    run(*command, "run.seed=1", "run.overwrite=true", cwd=tmp_path)
    assert (folder / "main.log").read_bytes() != record


def test_a_run_that_did_not_finish_starts_again_by_the_same_command(tmp_path: Path) -> None:
    command = [*SMALL, "train.steps=4", "run.name=a", "checkpoint.every=0"]
    run(*command, "debug.raise_at=2", cwd=tmp_path, code=1)
    run(*command, cwd=tmp_path)
    assert (tmp_path / "outputs/a/main.log").read_text().count(" trl:") == 4


def test_a_missing_manifest_is_told_since_nothing_can_be_compared(tmp_path: Path) -> None:
    command = [*SMALL, "run.name=a"]
    run(*command, "train.steps=7", "scheduler.total_steps=14", cwd=tmp_path)
    (tmp_path / "outputs/a/manifest.json").unlink()
    printed = run(*command, "train.steps=14", "optimizer.weight_decay=0.5", cwd=tmp_path)
    assert printed.count("warning: manifest.json is not there: what has changed") == 1
    assert (tmp_path / "outputs/a/manifest.json").is_file()


def test_a_sweeps_folder_is_no_run_s(tmp_path: Path) -> None:
    sweep = tmp_path / "outputs" / "sweeps" / "s"
    sweep.mkdir(parents=True)
    (sweep / "cells.json").write_text("{}")
    printed = run(*SMALL, "run.name=sweeps/s", cwd=tmp_path, code=2)
    assert printed == f"runner: error: run.name: {sweep} holds a sweep, not a run; choose another run.name\n"
    assert [path.name for path in sweep.iterdir()] == ["cells.json"]


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"rmdir '{gone}' && exec '{sys.executable}' -m runner train.steps=1"
    done = subprocess.run(
        command, shell=True, cwd=gone, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == (
        "runner: error: the folder that this command was given in is gone; go to one that is there\n"
    )
