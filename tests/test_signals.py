"""A signal, to whichever process and whenever, ends in a complete checkpoint and a known exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.stop import Interrupted, StartUp, Stop, undisturbed
from tests.commands import SMALL, environment, run, start
from tests.rank_runs import (
    TWO,
    alive,
    children,
    command,
    done_steps,
    lines,
    notes,
    wait_for,
)

LONG = ["train.steps=100000", "scheduler=constant", "evaluate.val.every=100000", "checkpoint.every=100000"]


def test_the_signal_of_any_rank_is_everybodys() -> None:
    mine = Stop()
    mine.agree(lambda value: [value, None, signal.SIGUSR1])
    assert mine.code == 138


def test_an_echo_of_a_signal_is_not_a_second_one(capfd: pytest.CaptureFixture[str]) -> None:
    stop = Stop()
    stop.install()
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop.code == 140
    finally:
        stop.restore()
    assert capfd.readouterr().err.count("SIGUSR2") == 1


def test_the_handler_that_was_there_is_called_at_the_end() -> None:
    called = []
    before = signal.signal(signal.SIGUSR2, lambda number, _frame: called.append(number))
    stop = Stop()
    try:
        stop.install()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert called == []
        stop.restore()
        stop.pass_on()
        assert called == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.dist
def test_a_signal_to_one_rank_alone_stops_all_after_the_same_step(tmp_path: Path) -> None:
    process = start(*command(tmp_path, *LONG, *TWO), "run.name=x", cwd=tmp_path)
    log = tmp_path / "x" / "main.log"
    wait_for(lambda: lines(log) > 5)
    _, second = children(process)
    os.kill(second, signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 143, printed
    (step,) = done_steps(tmp_path / "x")
    assert log.read_text().splitlines()[-1].startswith(f"s:{step - 1} trl:")
    assert f"stopped at step {step}" in printed or "continue" in printed


@pytest.mark.dist
def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    process = start(*command(tmp_path, *LONG, *TWO), "run.name=x", cwd=tmp_path)
    wait_for(lambda: lines(tmp_path / "x" / "main.log") > 5)
    ranks = children(process)
    assert len(ranks) == 2
    process.kill()
    process.communicate()
    wait_for(lambda: not any(alive(pid) for pid in ranks), timeout_s=5)


def test_preemption_during_a_save_waits_for_it_and_requeues(tmp_path: Path) -> None:
    few = command(tmp_path, *LONG, "checkpoint.every=4", "debug.slow_save_s=1")
    process = start(*few, "run.name=x", "run.requeue=touch requeued", cwd=tmp_path)
    folder = tmp_path / "x"
    wait_for(lambda: lines(folder / "main.log") >= 6)
    process.send_signal(signal.SIGUSR1)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 138, printed
    assert (tmp_path / "requeued").exists()
    steps = done_steps(folder)
    assert steps[0] == 4
    assert len(steps) == 2, "the save under way and the one for the signal"
    assert not list(folder.glob("*.tmp"))


def test_a_signal_during_an_evaluation_takes_effect_after_it(tmp_path: Path) -> None:
    few = command(tmp_path, *LONG, "evaluate.val.every=5", "evaluate.val.batches=1500")
    process = start(*few, "run.name=x", cwd=tmp_path)
    folder = tmp_path / "x"
    wait_for(lambda: lines(folder / "main.log") == 6)  # the first validation, then steps 0 to 4
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    assert done_steps(folder) == [5]
    assert (folder / "main.log").read_text().splitlines()[-1].startswith("s:5 tel:")


def test_a_second_signal_leaves_at_once(tmp_path: Path) -> None:
    few = command(tmp_path, *LONG, "checkpoint.every=4", "debug.slow_save_s=60")
    process = start(*few, "run.name=x", cwd=tmp_path)
    folder = tmp_path / "x"
    wait_for(lambda: lines(folder / "main.log") >= 5)
    process.send_signal(signal.SIGTERM)
    time.sleep(1.2)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == 143
    assert time.monotonic() - began < 5
    assert "SIGTERM again: left at once" in printed
    assert done_steps(folder) == []
    run(*few, "debug.slow_save_s=0", "train.steps=8", "run.name=x", cwd=tmp_path)
    assert done_steps(folder) == [4, 8]
    assert not notes(folder) or "damaged" not in "".join(notes(folder))


STARTING = [*SMALL, "train.steps=100000", "scheduler=constant", "evaluate.val.batches=2000"]


@pytest.mark.parametrize(
    ("number", "more"),
    [(signal.SIGTERM, []), (signal.SIGINT, []), (signal.SIGUSR1, []), (signal.SIGHUP, TWO)],
)
def test_a_signal_before_the_first_step_leaves_nothing(
    number: signal.Signals, more: list[str], tmp_path: Path
) -> None:
    for wait_s in (0.2, 0.5, 0.9, 1.4):
        process = start(*more, *STARTING, cwd=tmp_path)
        time.sleep(wait_s)
        process.send_signal(number)
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == 128 + number, printed
        assert printed.splitlines()[-1] == f"runner: {number.name}: left before anything was trained"
        assert "Traceback" not in printed
        assert list(tmp_path.iterdir()) == []


def test_a_signal_during_the_start_of_a_run_that_goes_on_costs_nothing(tmp_path: Path) -> None:
    few = [*SMALL, "train.steps=14", "scheduler=constant", "run.name=x"]
    run(*few, cwd=tmp_path)
    folder = tmp_path / "outputs" / "x"
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    process = start(*few, "train.steps=28", cwd=tmp_path)
    time.sleep(0.6)
    process.terminate()
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 143, printed
    after = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    assert {name for name in before if after[name] != before[name]} <= {".lock", "manifest.json"}
    run(*few, "train.steps=28", cwd=tmp_path)
    assert done_steps(folder) == [7, 14, 21, 28]


MISHAP = """
import os, signal, sys
from hydra._internal.config_loader_impl import ConfigLoaderImpl as Loader
from runner import cli
compose = Loader.load_configuration
def composed(self, **given):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException:
        if sys.argv.pop(1) == "transform":
            raise AttributeError("what a library makes of it") from None
    return compose(self, **given)
Loader.load_configuration = composed
cli.main()
"""


@pytest.mark.parametrize("more", [[], ["-m", "run.seed=1,2"], TWO])
@pytest.mark.parametrize("mishap", ["swallow", "transform"])
def test_a_signal_counts_whatever_a_library_does_with_it(
    mishap: str, more: list[str], tmp_path: Path
) -> None:
    """Only the exception that a signal raises can be lost, in a bare `except` or a destructor."""
    arguments = [mishap, *more, *STARTING]
    process = subprocess.run(
        [sys.executable, "-c", MISHAP, *arguments],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.stderr == "runner: SIGTERM: left before anything was trained\n"
    assert process.returncode == 143
    assert list(tmp_path.iterdir()) == []


def test_a_signal_waits_for_what_cannot_be_left_halfway() -> None:
    reached = []
    with pytest.raises(Interrupted), StartUp():  # noqa: PT012
        with undisturbed():
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append("the end")
        reached.append("too far")
    assert reached == ["the end"]


def test_after_a_run_the_first_signal_lets_the_last_words_be_said_and_the_second_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    with StartUp() as start_up:
        stop = Stop()
        stop.install()
        stop.restore()
        os.kill(os.getpid(), signal.SIGTERM)  # as torchrun sends it, once another rank has failed
        with undisturbed():
            start_up._since = time.monotonic() - 2
        assert left == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert left == [143]


def test_a_signal_while_cells_start_is_not_their_failure(tmp_path: Path) -> None:
    process = start("-m", *STARTING, "run.seed=1,2", "sweep.name=s", cwd=tmp_path)
    cell = tmp_path / "outputs" / "sweeps" / "s" / "000"
    wait_for((cell / "cell.json").exists)
    process.send_signal(signal.SIGHUP)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 129, printed
    assert "failed" not in printed
    assert "#0 stopped before its first step" in printed
    assert not (cell / "result.json").exists()
