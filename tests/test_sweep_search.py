"""A search asks optuna for values, survives being killed, and ends with as many trials as were asked for."""

from __future__ import annotations

import csv
import json
import shutil
import time
import uuid
from pathlib import Path

import pytest

from runner.sweep.search import measures_loss, mend
from tests.commands import SMALL, run
from tests.sweep_cases import folder, gone, kill, start

optuna = pytest.importorskip("optuna")
JournalStorage = optuna.storages.JournalStorage
JournalFileBackend = optuna.storages.journal.JournalFileBackend
CREATE_TRIAL = 4  # optuna's number for this kind of line in its journal

RANGES = ("optimizer.lr=tag(log,interval(1e-4,1e-1))", "scheduler.warmup_steps=range(2,12,2)")
SEARCH = (*SMALL, "sweep=search", *RANGES, "sweep.parallel=2", "sweep.search.startup_trials=2")


def trials(cwd: Path) -> list[str]:
    """Return the states of a study's trials, by number."""
    storage = JournalStorage(JournalFileBackend(str(folder(cwd) / "study.journal")))
    study = optuna.load_study(study_name=None, storage=storage)
    return [trial.state.name for trial in study.trials]


def killed_and_repeated(cwd: Path, *, count: int, at: int) -> None:
    command = (*SEARCH, f"sweep.search.trials={count}")
    mark = uuid.uuid4().hex
    process = start(*command, cwd=cwd, mark=mark)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len(list(cwd.glob("outputs/sweeps/*/*/result.json"))) < at:
        time.sleep(0.02)
    kill(process)
    assert gone(mark)
    printed = run(*command, cwd=cwd)
    assert f"({count}/{count})" in printed
    assert len(trials(cwd)) == count
    assert set(trials(cwd)) <= {"COMPLETE", "PRUNED"}
    with (folder(cwd) / "summary.csv").open() as file:
        assert len(list(csv.DictReader(file))) == count


def test_a_killed_search_ends_with_its_number_of_trials(tmp_path: Path) -> None:
    killed_and_repeated(tmp_path, count=3, at=1)


def params(cwd: Path) -> list[dict[str, object]]:
    """Return the values of a study's trials, by number."""
    storage = JournalStorage(JournalFileBackend(str(folder(cwd) / "study.journal")))
    return [trial.params for trial in optuna.load_study(study_name=None, storage=storage).trials]


def test_a_trial_gets_the_values_that_a_kill_came_before(tmp_path: Path) -> None:
    command = (*SEARCH, "sweep.parallel=1", "sweep.search.trials=2")
    run(*command, cwd=tmp_path)
    wanted = params(tmp_path)
    journal = folder(tmp_path) / "study.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    created = max(at for at, line in enumerate(lines) if json.loads(line)["op_code"] == CREATE_TRIAL)
    for written in (0, 1):  # of its two values
        journal.write_bytes(b"".join(lines[: created + 1 + written]))
        shutil.rmtree(max(folder(tmp_path).glob("*/result.json")).parent)
        assert "(2/2)" in run(*command, cwd=tmp_path)
        assert params(tmp_path) == wanted


@pytest.mark.slow
def test_twelve_trials_killed_in_the_middle_are_twelve(tmp_path: Path) -> None:
    killed_and_repeated(tmp_path, count=12, at=5)


@pytest.mark.slow
def test_a_diverged_trial_is_a_bad_one_and_no_crash(tmp_path: Path) -> None:
    nan = ("debug.nan_loss_at=[],[3,4,5]", "outlier.max_consecutive_skips=3", "optimizer.lr=1e-3")
    run(*SEARCH, *nan, "sweep.search.trials=5", cwd=tmp_path)
    assert "PRUNED" in trials(tmp_path)


def test_the_ends_of_every_range_are_checked_first(tmp_path: Path) -> None:
    printed = run(*SMALL, "sweep=search", "optimizer.lr=interval(-1,1)", cwd=tmp_path, code=2)
    assert "optimizer.lr: must be >= 0, got -1" in printed
    assert printed.count("\n") == 1
    for mistake, line in {
        "optimizer.lr=interval(0.5,0.1)": "optimizer.lr: interval(0.5,0.1): the lower end",
        "optimizer.lr=tag(log,interval(0,0.1))": "optimizer.lr: tag(log,interval(0,0.1)): by magnitude",
    }.items():
        printed = run(*SMALL, "sweep=search", mistake, cwd=tmp_path, code=2)
        assert printed.startswith(f"runner: error: {line}")
        assert printed.count("\n") == 1
    blind = ("logger=none", "train.steps=2", "evaluate=none", "optimizer.lr=interval(0.1,1)")
    printed = run("sweep=search", *blind, cwd=tmp_path, code=2)
    assert printed.startswith("runner: error: sweep=search: without a validation loss")
    assert printed.count("\n") == 1
    printed = run(*SMALL, "sweep=search", cwd=tmp_path, code=2)
    assert "nothing to search" in printed
    assert not list(tmp_path.iterdir())


def test_a_search_needs_somebody_who_measures_a_loss() -> None:
    sample = {"_target_": "runner.sampling.Sample"}
    for lacking in (None, {}, {"val": None}, {"sample": sample}):
        assert not measures_loss(lacking)
    assert measures_loss({"sample": sample, "val": {"_target_": "runner.evaluate.Validation"}})
    assert measures_loss({"own": {"_target_": "mine.Loss"}})


def test_a_torn_journal_is_mended(tmp_path: Path) -> None:
    journal = tmp_path / "study.journal"
    journal.write_bytes(b'{"a": 1}\n{"b": ')
    (tmp_path / "study.journal.lock").touch()
    mend(journal)
    assert journal.read_bytes() == b'{"a": 1}\n'
    assert not (tmp_path / "study.journal.lock").exists()
