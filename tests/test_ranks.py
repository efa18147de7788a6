"""However the ranks are started, they make one run; and its bits need not depend on how many there are."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner import ranks
from runner.ranks import Place, first_node, placed
from tests.commands import run, start
from tests.rank_runs import (
    TWO,
    alive,
    assert_same_files,
    children,
    command,
    events,
    lines,
    torchrun,
    wait_for,
    with_variables,
)

SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


def test_a_place_is_read_from_the_launchers_variables() -> None:
    by_torchrun = placed(
        {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "5"}
    )
    assert by_torchrun is not None
    assert by_torchrun[:5] == (1, 4, 1, "a", 5)
    by_srun = placed({**SRUN, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "n[03-06],m1"})
    assert by_srun is not None
    assert by_srun[:4] == (3, 4, 1, "n03")
    assert by_srun.port == 15_000 + 7 * 16


def test_one_rank_needs_no_place() -> None:
    assert placed({}) is None
    assert placed({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert placed({**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None
    # A batch script counts tasks too, but srun has not started them.
    batch = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    assert placed({**batch, "SLURM_NTASKS": "8"}) is None


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "x", "WORLD_SIZE": "2", "MASTER_PORT": "1"},
        {"RANK": "2", "WORLD_SIZE": "2", "MASTER_PORT": "1"},
        {"RANK": "0", "WORLD_SIZE": "2"},
    ],
)
def test_contradicting_variables_are_named(variables: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"^(RANK|MASTER_PORT): .*torchrun or srun"):
        placed(variables)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a1", "a1"),
        ("a1,b2", "a1"),
        ("gpu[003-006,9]", "gpu003"),
        ("x[1,2]-ib,y", "x1-ib"),
        ("n-1.z", "n-1.z"),
    ],
)
def test_first_node(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_rank_0_s_port_being_taken_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match=r"rank 0: cannot meet .* set MASTER_PORT to a free one"):
            ranks.meet(Place(world=2, port=taken.getsockname()[1]))


@pytest.mark.dist
def test_own_ranks_torchrun_and_srun_make_the_same_single_run(tmp_path: Path) -> None:
    few = command(tmp_path, "train.steps=8", "logger=[llmc,jsonl,console]")
    slow = ["run.ranks_every=4", "debug.slow_step_s=0.05", "debug.rank=1"]
    printed = run(*few, *TWO, *slow, "run.name=own", cwd=tmp_path)
    assert printed.count("run own starts") == 1
    times = [row["step_ms"] for row in events(tmp_path / "own", "Ranks")]
    assert times
    assert all(len(ms) == 2 and ms[1] > 50 for ms in times)
    assert times[-1][0] < 50, "the rank that waited is not the slow one"

    code, printed = torchrun(*few, "parallel=ddp", cwd=tmp_path)
    assert code == 0, printed
    assert printed.count(" starts, 8 steps") == 1
    (by_torchrun,) = (p for p in tmp_path.glob("20*") if p.is_dir())

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "runner", *few, "parallel=ddp", "run.name=srun"],
            cwd=tmp_path,
            env=with_variables(
                SLURM_JOB_ID="1",
                SLURM_STEP_ID="0",
                SLURM_STEP_NUM_TASKS="2",
                SLURM_PROCID=rank,
                SLURM_LOCALID=rank,
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            ),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in "01"
    ]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    assert outputs[1] == ""
    for folder in (by_torchrun, tmp_path / "srun"):
        assert (folder / "main.log").read_bytes() == (tmp_path / "own" / "main.log").read_bytes()
        assert_same_files(folder, tmp_path / "own", step=8)


@pytest.mark.dist
def test_torchrun_s_ranks_report_a_wrong_command_once(tmp_path: Path) -> None:
    code, printed = torchrun(*command(tmp_path), "parallel=single", "optimizer.lr=-1", cwd=tmp_path)
    errors = [line for line in printed.splitlines() if line.startswith("runner: error:")]
    assert code != 0
    assert len(errors) == 2
    assert "single runs 1 process, but 2 were started" in "".join(errors)
    assert not list(tmp_path.glob("20*")), "a refused command left a run folder"


@pytest.mark.dist
def test_a_sweep_under_a_launcher_is_refused(tmp_path: Path) -> None:
    lonely = with_variables(RANK="0", WORLD_SIZE="2", MASTER_PORT="0", TORCHELASTIC_USE_AGENT_STORE="False")
    # The other rank never comes: rank 0 must have said why before it waits for it.
    process = subprocess.Popen(
        [sys.executable, "-m", "runner", "-m", "optimizer.lr=1,2"],
        cwd=tmp_path,
        env=lonely,
        text=True,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    first = process.stderr.readline()
    process.kill()
    process.communicate()
    assert first.startswith("runner: error: -m: a sweep starts its own processes")


@pytest.mark.dist
def test_a_rank_that_was_stopped_is_waited_for_and_named_if_it_stays_so(tmp_path: Path) -> None:
    few = command(tmp_path, *TWO, "train.steps=100000", "run.watchdog_s=2", "run.name=x")
    process = start(*few, cwd=tmp_path)
    wait_for(lambda: lines(tmp_path / "x" / "main.log") > 3)
    first, second = children(process)
    os.kill(first, signal.SIGSTOP)
    time.sleep(0.7)
    seen = lines(tmp_path / "x" / "main.log")
    os.kill(first, signal.SIGCONT)
    wait_for(lambda: lines(tmp_path / "x" / "main.log") > seen + 3)
    os.kill(second, signal.SIGSTOP)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 124
    assert "rank 0 of 2 made no progress and was ended; the stacks are above; no word from rank 1," in printed
    assert not alive(second)


@pytest.mark.dist
@pytest.mark.parametrize("memory", ["auto", "off"])
def test_the_rank_that_was_killed_is_named_however_late_it_is_noticed(memory: str, tmp_path: Path) -> None:
    ways = ["train.steps=100000", "run.name=x", f"parallel.shared_memory={memory}"]
    process = start(*command(tmp_path, *TWO, *ways), cwd=tmp_path)
    wait_for(lambda: lines(tmp_path / "x" / "main.log") > 3)
    first, second = children(process)
    os.kill(process.pid, signal.SIGSTOP)  # a machine that swaps may take as long
    os.kill(second, signal.SIGKILL)
    wait_for(lambda: not alive(first))
    time.sleep(1.5)
    os.kill(process.pid, signal.SIGCONT)
    printed, _ = process.communicate(timeout=60)
    said = [line for line in printed.splitlines() if line.startswith("runner: error: ")]
    assert len(said) == 1
    assert "rank 1 of 2 was killed by SIGKILL" in said[0]


CANONICAL = [
    "parallel.reduce=canonical",
    "data.order=windows",
    "train.tokens_per_step=256",  # 8 micro-batches: 1 x 8, 2 x 4 and 4 x 2
    "evaluate.val.batches=4",
    "checkpoint.allow_reshard=true",
    "checkpoint.every=4",
    "scheduler.total_steps=12",
]


@pytest.mark.dist
def test_canonical_bits_do_not_depend_on_the_ranks_not_even_across_a_resume(tmp_path: Path) -> None:
    same = command(tmp_path, "precision=bf16_master", *CANONICAL)
    run(*same, "run.name=one", "train.steps=12", cwd=tmp_path)
    resharded = [*same, "run.name=many"]
    run(*resharded, "parallel=zero1", "parallel.processes=4", "train.steps=4", cwd=tmp_path)
    run(*resharded, "parallel=ddp", "parallel.processes=2", "train.steps=8", cwd=tmp_path)
    run(*resharded, "train.steps=12", cwd=tmp_path)
    one, many = ((tmp_path / name / "main.log").read_text().splitlines() for name in ("one", "many"))
    assert [line for line in one if " trl:" in line] == [line for line in many if " trl:" in line]
    assert set(one) <= set(many)  # `many` also validated where it ended
    assert_same_files(tmp_path / "one", tmp_path / "many", step=12)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_master"])
def test_canonical_bits_for_every_number_of_ranks(precision: str, tmp_path: Path) -> None:
    same = command(tmp_path, f"precision={precision}", *CANONICAL, "train.steps=12")
    run(*same, "run.name=one", cwd=tmp_path)
    for name, count in [("ddp", 2), ("ddp", 4), ("zero1", 2), ("zero1", 4)]:
        folder = tmp_path / f"{name}{count}"
        run(*same, f"parallel={name}", f"parallel.processes={count}", f"run.name={folder.name}", cwd=tmp_path)
        assert (folder / "main.log").read_bytes() == (tmp_path / "one" / "main.log").read_bytes()
        model = "model_00000012.bin"
        assert (folder / model).read_bytes() == (tmp_path / "one" / model).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("order", ["shuffle", "sequential", "windows"])
@pytest.mark.parametrize("name", ["ddp", "zero1"])
def test_native_runs_resume_exactly_at_the_same_number_of_ranks(
    name: str, order: str, tmp_path: Path
) -> None:
    same = command(
        tmp_path, f"parallel={name}", "parallel.processes=2", f"data.order={order}", "model.dropout=0.1"
    )
    same += ["scheduler.total_steps=20", "evaluate.val.every=4"]
    run(*same, "run.name=straight", cwd=tmp_path)
    for steps in (8, 12, 20):
        run(*same, f"train.steps={steps}", "run.name=pieces", cwd=tmp_path)
    assert (tmp_path / "pieces" / "main.log").read_bytes() == (
        tmp_path / "straight" / "main.log"
    ).read_bytes()
    assert_same_files(tmp_path / "straight", tmp_path / "pieces", step=20)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("fault", "memory", "line"),
    [
        ("raise_at", "auto", "rank 1 of 2 failed: RuntimeError: debug.raise_at: an error in step 9"),
        ("kill_at", "auto", "rank 0 of 2 failed: rank 1 ended; its own lines say why, unless it was killed"),
        ("kill_at", "off", "rank 0 of 2 failed: another rank ended (Connection "),
    ],
)
def test_under_torchrun_one_line_names_the_rank_and_the_cause(
    fault: str, memory: str, line: str, tmp_path: Path
) -> None:
    ways = [f"debug.{fault}=9", "debug.rank=1", "run.name=x", f"parallel.shared_memory={memory}"]
    code, printed = torchrun(*command(tmp_path, "parallel=ddp", *ways), cwd=tmp_path)
    assert code != 0
    said = [text for text in printed.splitlines() if text.startswith("runner: error: ")]
    assert sum(text.startswith(f"runner: error: {line}") for text in said) == 1, printed
    assert all("ended because another rank failed" in text for text in said if line not in text)
    assert printed.count("in _one_voice") == (fault == "raise_at"), "a stack for what needs none"
