"""What a person types to sweep, and what happens: results, refusals, failures, names."""

from __future__ import annotations

import csv
import json
import re
import signal
import time
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.cli import ConfigError
from runner.report import main as report
from runner.sweep import lock, naming, status
from tests.commands import SMALL, run
from tests.sweep_cases import TINY, TRUST, folder, gone, kill, marked, stamps, start, sweep, traces

SHORT = ("train.steps=12", "checkpoint.every=50")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished sweep of four cells, two at a time, and what it printed."""
    cwd = tmp_path_factory.mktemp("four")
    printed = sweep("scheduler.warmup_steps=2,4", "optimizer.lr=1e-3,3e-3", "sweep.parallel=2", cwd=cwd)
    return cwd, printed


def rows(where: Path) -> list[dict[str, str]]:
    with (where / "summary.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_sweep_leaves_numbered_cells_and_a_summary(four: tuple[Path, str]) -> None:
    cwd, printed = four
    where = folder(cwd)
    assert sorted(p.name for p in where.glob("0*")) == ["000", "001", "002", "003"]
    for name in ("summary.csv", "summary.png", "summary.html", "cells.json"):
        assert (where / name).stat().st_size > 0
    assert "(4/4)" in printed
    assert not (cwd / "multirun.yaml").exists()
    losses = [float(row["val_loss"]) for row in rows(where)]
    assert losses == sorted(losses)
    pairs = {(row["scheduler.warmup_steps"], row["optimizer.lr"]) for row in rows(where)}
    assert pairs == {(warmup, lr) for warmup in ("2", "4") for lr in ("0.001", "0.003")}
    page = (where / "summary.html").read_text()
    assert "http://" not in page
    assert "https://" not in page
    assert "<script" not in page


def test_the_same_command_runs_nothing_and_a_new_value_only_its_cells(four: tuple[Path, str]) -> None:
    cwd, _ = four
    before = stamps(folder(cwd))
    printed = sweep("optimizer.lr=0.001,0.003", "scheduler.warmup_steps=2,4", cwd=cwd)
    assert "4 done before, 0 to continue, 0 to start" in printed
    assert "starts" not in printed
    assert stamps(folder(cwd)) == before
    printed = sweep("scheduler.warmup_steps=2,4", "optimizer.lr=3e-4,1e-3,3e-3", cwd=cwd)
    assert "4 done before, 0 to continue, 2 to start" in printed
    after = stamps(folder(cwd))
    assert {name: after[name] for name in before} == before
    cells = [json.loads((folder(cwd) / f"00{i}" / "cell.json").read_text()) for i in (4, 5)]
    assert all(cell["overrides"]["optimizer.lr"] == 3e-4 for cell in cells)


def test_a_cell_equals_the_same_run_started_alone(four: tuple[Path, str], tmp_path: Path) -> None:
    where = folder(four[0])
    cell = json.loads((where / "003" / "cell.json").read_text())["overrides"]
    values = [f"{key}={cell[key]}" for key in ("scheduler.warmup_steps", "optimizer.lr")]
    run(*TINY, *values, "run.name=alone", cwd=tmp_path)
    assert traces(tmp_path / "outputs" / "alone") == traces(where / "003")


def test_status_and_report_read_a_sweep(
    four: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status.main([str(folder(four[0]))]) == 0
    assert capsys.readouterr().out.count("finished") >= 4
    assert status.main([str(four[0])]) == 2
    assert report([str(folder(four[0])), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "summary.html").is_file()


def test_bad_cells_stop_a_sweep_before_it_starts(tmp_path: Path) -> None:
    printed = sweep("scheduler.warmup_steps=2,4", "optimizer.lr=1e-3,-1", cwd=tmp_path, code=2)
    assert printed.splitlines() == [
        f"runner: error: #{number} lr=-1 warmup_steps={warmup}: optimizer.lr: must be >= 0, got -1"
        for number, warmup in ((2, 2), (3, 4))
    ]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", ["train.stepz=3", "sweep.parallel=0"])
def test_a_mistake_of_every_cell_is_told_once(tmp_path: Path, wrong: str) -> None:
    printed = sweep("run.seed=1,2", wrong, cwd=tmp_path, code=2)
    assert printed.count("\n") == 1
    assert wrong.partition("=")[0] in printed
    assert not list(tmp_path.iterdir())


def test_cells_that_die_or_diverge_leave_the_others_alone(tmp_path: Path) -> None:
    """#1 diverges, #2 dies of a signal; exit code 1, and all is told."""
    fault = ("+evaluate.fault._target_=tests.sweep_faults.Crash", "+evaluate.fault.at=999,6", TRUST)
    nan = ("outlier.max_consecutive_skips=3", "debug.nan_loss_at=[],[3,4,5]")
    printed = sweep(*SHORT, *fault, *nan, "sweep.parallel=2", cwd=tmp_path, code=1)
    found = {row["cell"]: row for row in rows(folder(tmp_path))}
    states = {row["state"] for row in found.values()}
    assert states == {"finished", "diverged", "failed"}
    diverged, dead = (next(r for r in found.values() if r["state"] == s) for s in ("diverged", "failed"))
    assert diverged["val_loss"] == "inf"
    assert "SIGSEGV" in dead["message"]
    assert "cells failed:" in printed
    log = folder(tmp_path) / f"{int(dead['cell']):03d}" / "console.log"
    assert f"{log.parent.name}/console.log" in printed
    assert "Segmentation fault" in log.read_text()


def test_a_crashed_cell_is_tried_again_from_its_checkpoint(tmp_path: Path) -> None:
    once = tmp_path / "once"
    fault = ("+evaluate.fault._target_=tests.sweep_faults.Crash", f"+evaluate.fault.once={once}", TRUST)
    steps = ("train.steps=12", "checkpoint.every=4")
    printed = sweep("run.seed=1", *steps, *fault, "+evaluate.fault.at=10", "sweep.retries=1", cwd=tmp_path)
    assert printed.count("tried again") == 1
    assert once.exists()
    run(*TINY, *steps, "run.seed=1", "run.name=alone", cwd=tmp_path)
    assert traces(tmp_path / "outputs" / "alone") == traces(folder(tmp_path) / "000")


@pytest.mark.slow
def test_on_error_stop_starts_no_further_cell(tmp_path: Path) -> None:
    swept = ("run.seed=1,2,3", *SHORT, "outlier.max_consecutive_skips=2", "debug.nan_loss_at=[1,2,3]")
    printed = sweep(*swept, "sweep.on_error=stop", cwd=tmp_path, code=1)
    assert "#0 diverged" in printed
    assert "#1 " not in printed


def test_what_a_cell_starts_ends_with_the_sweep(tmp_path: Path) -> None:
    child = "+evaluate.child._target_=tests.sweep_faults.Child"
    mark = uuid.uuid4().hex
    process = start("-m", *TINY, "run.seed=1,2", "train.steps=100000", TRUST, child, cwd=tmp_path, mark=mark)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and "sleep" not in map(name_of, marked(mark)):
        time.sleep(0.05)
    kill(process)
    assert time.monotonic() < deadline
    assert gone(mark)


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def test_ctrl_c_saves_the_cells(tmp_path: Path) -> None:
    command = ("-m", *TINY, "run.seed=1,2", "train.steps=4000", "checkpoint.every=5000", "sweep.parallel=2")
    process = start(*command, cwd=tmp_path, mark=uuid.uuid4().hex)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        logs = list(tmp_path.glob("outputs/sweeps/*/*/main.log"))
        if len(logs) == 2 and all(log.stat().st_size > 1000 for log in logs):
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    assert printed.count("stopped at step") == 2
    assert len(list(tmp_path.glob("outputs/sweeps/*/*/DONE_*"))) == 2


@pytest.mark.slow
def test_odd_values_make_cells_like_any_other(tmp_path: Path) -> None:
    odd = ["run.tags=['a/b','c d'],['e=f','ünï'],['" + "x" * 300 + "']", *SHORT]
    printed = sweep(*odd, cwd=tmp_path)
    where = folder(tmp_path)
    assert len(where.name.encode()) < 100
    assert sorted(p.name for p in where.glob("0*")) == ["000", "001", "002"]
    assert "(3/3)" in printed


texts = st.text(max_size=60)
values = st.one_of(texts, st.floats(), st.integers(), st.none(), st.lists(texts, max_size=3))
settings = st.dictionaries(texts, values, max_size=6)


@given(fixed=settings, swept=st.sets(texts, max_size=6), preset=st.none() | texts)
def test_names_are_short_and_valid_whatever_the_values_hold(
    fixed: dict[str, object], swept: set[str], preset: str | None
) -> None:
    name = naming.sweep_name(naming.Command(frozenset(swept), fixed), preset=preset)
    assert 0 < len(name.encode()) <= 255
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name)
    shuffled = dict(reversed(fixed.items()))
    assert name == naming.sweep_name(naming.Command(frozenset(swept), shuffled), preset=preset)


@given(keys=st.lists(st.sampled_from(["a.lr", "b.lr", "lr", "x.a.lr", "run.seed", "model"]), unique=True))
def test_short_names_stay_apart(keys: list[str]) -> None:
    names = naming.short_names(keys)
    assert len(set(names.values())) == len(keys)


def test_two_commands_do_not_run_one_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.1)
    with lock.locked(tmp_path), pytest.raises(ConfigError, match="is being run by"), lock.locked(tmp_path):
        pass


def test_a_preset_needs_no_flag_and_seeds_are_summed_up(tmp_path: Path) -> None:
    printed = run(*SMALL, *SHORT, "sweep=seeds", "run.seed=1,2", cwd=tmp_path)
    assert "sweep of 2 cells" in printed
    assert "over the seeds" in printed
    assert folder(tmp_path).name.startswith("seeds-")
    losses = [float(row["val_loss"]) for row in rows(folder(tmp_path))]
    assert len(set(losses)) == 2
