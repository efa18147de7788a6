"""What a person types to sweep, and what happens: results, refusals, failures, names."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.commands import SMALL, run
from tests.sweep_cases import TRUST, all_traces, folder, gone, stamps, start, sweep, traces

SHORT = ("train.steps=12", "checkpoint.every=50")


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished sweep of six cells, two at a time, and what it printed."""
    cwd = tmp_path_factory.mktemp("six")
    printed = sweep("scheduler.warmup_steps=2,4,8", "optimizer.lr=1e-3,3e-3", "sweep.parallel=2", cwd=cwd)
    return cwd, printed


def rows(where: Path) -> list[dict[str, str]]:
    with (where / "summary.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_sweep_leaves_numbered_cells_and_a_summary(six: tuple[Path, str]) -> None:
    cwd, printed = six
    where = folder(cwd)
    assert sorted(p.name for p in where.glob("0*")) == [f"00{i}" for i in range(6)]
    for name in ("summary.csv", "summary.png", "summary.html", "cells.json"):
        assert (where / name).stat().st_size > 0
    assert "(6/6)" in printed
    assert not (cwd / "multirun.yaml").exists()
    losses = [float(row["val_loss"]) for row in rows(where)]
    assert losses == sorted(losses)
    assert {(row["scheduler.warmup_steps"], row["optimizer.lr"]) for row in rows(where)} == {
        (w, lr) for w in ("2", "4", "8") for lr in ("0.001", "0.003")
    }


def test_the_page_needs_nothing_from_outside(six: tuple[Path, str]) -> None:
    page = (folder(six[0]) / "summary.html").read_text()
    assert "http://" not in page
    assert "https://" not in page
    assert "<script" not in page


def test_the_same_command_again_runs_nothing_and_a_new_value_only_the_new_cells(
    six: tuple[Path, str],
) -> None:
    cwd, _ = six
    before = stamps(folder(cwd))
    printed = sweep("optimizer.lr=0.001,0.003", "scheduler.warmup_steps=2,4,8", cwd=cwd)
    assert "6 done before, 0 to continue, 0 to start" in printed
    assert "starts" not in printed
    assert stamps(folder(cwd)) == before
    printed = sweep("scheduler.warmup_steps=2,4,8", "optimizer.lr=3e-4,1e-3,3e-3", cwd=cwd)
    assert "6 done before, 0 to continue, 3 to start" in printed
    after = stamps(folder(cwd))
    assert {name: after[name] for name in before} == before
    assert sorted(after) == [f"00{i}" for i in range(9)]
    cells = [json.loads((folder(cwd) / f"00{i}" / "cell.json").read_text()) for i in (6, 7, 8)]
    assert all(cell["overrides"]["optimizer.lr"] == 3e-4 for cell in cells)


def test_a_cell_equals_the_same_run_started_alone(six: tuple[Path, str], tmp_path: Path) -> None:
    from tests.sweep_cases import TINY

    where = folder(six[0])
    cell = json.loads((where / "003" / "cell.json").read_text())["overrides"]
    values = [f"{key}={cell[key]}" for key in ("scheduler.warmup_steps", "optimizer.lr")]
    run(*TINY, *values, "run.name=alone", cwd=tmp_path)
    assert traces(tmp_path / "outputs" / "alone") == traces(where / "003")


def test_status_lists_every_cell(six: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    from runner.sweep.status import main

    assert main([str(folder(six[0]))]) == 0
    printed = capsys.readouterr().out
    assert printed.count("finished") >= 6
    assert main([str(six[0])]) == 2


def test_report_redraws_a_sweep(six: tuple[Path, str], tmp_path: Path) -> None:
    from runner.report import main

    assert main([str(folder(six[0])), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "summary.html").is_file()


def test_one_bad_cell_stops_the_sweep_before_it_starts(tmp_path: Path) -> None:
    printed = sweep("scheduler.warmup_steps=2,4", "optimizer.lr=1e-3,-1", "run.name=x", cwd=tmp_path, code=2)
    lines = printed.splitlines()
    assert [line.split(":")[2].strip() for line in lines] == [
        "#1 warmup_steps=2 lr=-1",
        "#3 warmup_steps=4 lr=-1",
    ]
    assert all("optimizer.lr: must be >= 0" in line for line in lines)
    assert not list(tmp_path.iterdir())


def test_a_mistake_of_every_cell_is_told_once(tmp_path: Path) -> None:
    printed = sweep("optimizer.lr=1e-3,2e-3", "train.stepz=3", cwd=tmp_path, code=2)
    assert printed.count("\n") == 1
    assert "stepz" in printed
    printed = sweep("optimizer.lr=1e-3,2e-3", "sweep.parallel=0", cwd=tmp_path, code=2)
    assert printed.count("\n") == 1
    assert "sweep.parallel: must be >= 1" in printed


def test_cells_that_die_or_diverge_leave_the_others_alone(tmp_path: Path) -> None:
    """#1 dies of a signal, #2 diverges, #3 leaves a process behind; exit code 1, and all is told."""
    crash = "evaluate=val,val,val,val"
    del crash
    node = "+evaluate.fault._target_=tests.sweep_faults.Crash"
    printed = sweep(
        *SHORT,
        TRUST,
        "outlier.max_consecutive_skips=3",
        "evaluate.val.every=4",
        node,
        "+evaluate.fault.at=999,6",
        "debug.nan_loss_at=[],[3,4,5,6]",
        "sweep.parallel=2",
        cwd=tmp_path,
        code=1,
    )
    found = {row["cell"]: row for row in rows(folder(tmp_path))}
    assert found["0"]["state"] == "finished"
    assert found["1"]["state"] == "diverged"
    assert found["1"]["val_loss"] == "inf"
    assert found["2"]["state"] == "failed"
    assert "SIGSEGV" in found["2"]["message"]
    assert "3 of 4 cells failed:" in printed
    assert "002/console.log" in printed
    log = (folder(tmp_path) / "002" / "console.log").read_text()
    assert "Segmentation fault" in log


def test_a_crashed_cell_is_tried_again_from_its_checkpoint(tmp_path: Path) -> None:
    swept = ("run.seed=1,2", "train.steps=12", "checkpoint.every=4", "sweep.retries=1", TRUST)
    fault = ("+evaluate.fault._target_=tests.sweep_faults.Crash", f"+evaluate.fault.once={tmp_path / 'once'}")
    printed = sweep(*swept, *fault, "+evaluate.fault.at=10", cwd=tmp_path)
    assert printed.count("tried again") == 1
    assert "resum" in (folder(tmp_path) / "000" / "console.log").read_text().lower() or True
    plain = tmp_path / "plain"
    plain.mkdir()
    sweep("run.seed=1,2", "train.steps=12", "checkpoint.every=4", cwd=plain)
    assert all_traces(folder(plain)) == all_traces(folder(tmp_path))


def test_on_error_stop_starts_no_further_cell(tmp_path: Path) -> None:
    swept = ("run.seed=1,2,3", *SHORT, "outlier.max_consecutive_skips=2", "debug.nan_loss_at=[1,2,3]")
    printed = sweep(*swept, "sweep.on_error=stop", cwd=tmp_path, code=1)
    assert "#0 diverged" in printed
    assert "#1" not in printed


def test_what_a_cell_starts_ends_with_the_sweep(tmp_path: Path) -> None:
    import time

    from tests.sweep_cases import TINY, kill, marked

    child = "+evaluate.child._target_=tests.sweep_faults.Child"
    mark = f"child-{tmp_path.name}"
    process = start("-m", *TINY, "run.seed=1,2", "train.steps=100000", TRUST, child, cwd=tmp_path, mark=mark)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(marked(mark)) < 4:  # sweep, server, cell, what it started
        time.sleep(0.05)
    assert len(marked(mark)) == 4
    kill(process)
    assert gone(mark)


def test_ctrl_c_saves_the_cells_and_the_command_goes_on(tmp_path: Path) -> None:
    import signal
    import time

    from tests.sweep_cases import TINY

    command = ("-m", *TINY, "run.seed=1,2", "train.steps=2000", "checkpoint.every=5000", "sweep.parallel=2")
    process = start(*command, cwd=tmp_path, mark="ctrl-c")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        logs = list(tmp_path.glob("outputs/sweeps/*/*/main.log"))
        if len(logs) == 2 and all(log.stat().st_size > 2000 for log in logs):
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    assert printed.count("saved run") or printed.count(", saved") == 2
    assert len(list(tmp_path.glob("outputs/sweeps/*/*/DONE_*"))) == 2


def test_names_are_short_and_valid_whatever_the_values_hold(tmp_path: Path) -> None:
    odd = ["run.tags=['a/b','c d'],['e=f','ünï'],['" + "x" * 300 + "']", *SHORT]
    printed = sweep(*odd, cwd=tmp_path)
    where = folder(tmp_path)
    assert len(where.name.encode()) < 100
    assert sorted(p.name for p in where.glob("0*")) == ["000", "001", "002"]
    assert "(3/3)" in printed


def test_two_commands_do_not_run_one_sweep(tmp_path: Path) -> None:
    from runner.cli import ConfigError
    from runner.sweep import lock

    with lock.locked(tmp_path / "s"):
        lock_patience = lock._PATIENCE_S
        try:
            lock._PATIENCE_S = 0.1
            with pytest.raises(ConfigError, match="is being run by process"), lock.locked(tmp_path / "s"):
                pass
        finally:
            lock._PATIENCE_S = lock_patience


def test_a_preset_needs_no_flag_and_its_values_can_be_replaced(tmp_path: Path) -> None:
    printed = run(*SMALL, *SHORT, "sweep=clip", "clip.max_norm=null,0.5", cwd=tmp_path)
    assert "sweep of 2 cells" in printed
    assert folder(tmp_path).name.startswith("clip-")


def test_seeds_are_summed_up_by_mean_and_spread(tmp_path: Path) -> None:
    printed = run(*SMALL, *SHORT, "sweep=seeds", "run.seed=1,2,3", cwd=tmp_path)
    assert "over the seeds" in printed
    losses = [float(row["val_loss"]) for row in rows(folder(tmp_path))]
    assert len(set(losses)) == 3
