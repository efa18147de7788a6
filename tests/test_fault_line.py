"""What data or a machine do to a run is one line; what must be a bug comes with its stack."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runner.api import Event, Note, RunInfo
from runner.data.shard import HEADER_BYTES, require_range, write_shard
from runner.emit import Emitter
from runner.fault import fault_line, naming, stack
from tests.commands import SMALL, environment, run, start
from tests.rank_runs import TWO, children, done_steps, lines, wait_for

STEPS = ["train.steps=2000", "scheduler=constant", "data.order=sequential", "debug.slow_step_s=0.004"]


def caught(action: Callable[[], object]) -> Exception:
    try:
        action()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def bad_token() -> None:
    require_range(np.array([1, 9], np.uint16), 5, path=Path("t.bin"), start=100)


def test_a_value_error_of_this_package_is_its_text_and_one_of_a_library_has_its_stack() -> None:
    ours, library = caught(bad_token), caught(lambda: torch.zeros(2).as_strided("x", 1))  # type: ignore[arg-type]
    assert fault_line(ours).startswith("t.bin: token 9 at position 101 is not below the vocabulary size 5")
    assert stack(ours) == ""
    assert fault_line(library).startswith("TypeError: ")
    assert "Traceback" in stack(library)


def test_a_number_that_is_none_is_a_bug_wherever_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"__name__": "runner.somewhere"}
    exec("def read(text): return float(text)\ndef say(): raise ValueError('what: mend it')", source)
    read, say = source["read"], source["say"]
    assert callable(read)
    assert callable(say)
    assert "Traceback" in stack(caught(lambda: read("x")))
    assert stack(caught(say)) == ""
    monkeypatch.setenv("RUNNER_TRACEBACK", "1")
    assert "Traceback" in stack(caught(say))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity "
                                "of 79.1 GiB of which 1 GiB is free. Of the allocated memory 70 GiB is x."),
         "out of memory for 20 GiB more (CUDA out of memory."),
        (MemoryError(), "out of memory: lower train.micro_batch"),
        (RuntimeError("std::bad_alloc"), "out of memory (std::bad_alloc): lower"),
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), "a/b: No space left on device"),
        (TimeoutError("no answer"), "no answer"),
        (TimeoutError(), "TimeoutError:"),
        (RuntimeError("[/x/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:925. This is typically x"),
         "another rank ended (Connection closed by peer [127"),
        (RuntimeError("of another\nkind"), "RuntimeError: of another kind"),
    ],
)  # fmt: skip
def test_each_error_is_one_line(error: Exception, text: str) -> None:
    assert fault_line(error).startswith(text)
    assert "\n" not in fault_line(error)
    assert bool(stack(error)) == ("another" in str(error))


def corpus(folder: Path) -> list[str]:
    draw = np.random.default_rng(0)
    for name, size in (("t1", 20_000), ("t2", 20_000), ("t3", 20_000), ("val", 2000)):
        write_shard(folder / f"{name}.bin", draw.integers(0, 250, size).astype(np.uint16))
    shards = [f"data.train={folder}/t?.bin", f"data.val={folder / 'val.bin'}", "data.vocab_size=257"]
    return ["data=shards", *shards, *SMALL, *STEPS, f"run.root={folder / 'out'}", "run.name=x"]


def spoil_token(folder: Path) -> None:
    with (folder / "t1.bin").open("r+b") as file:
        file.seek(HEADER_BYTES + 2 * 10_000)
        file.write(b"\xff\xff")


def cut(folder: Path) -> None:
    os.truncate(folder / "t1.bin", HEADER_BYTES + 2 * 10_000)


def remove(folder: Path) -> None:
    (folder / "t2.bin").unlink()


@pytest.mark.parametrize(
    ("spoil", "more", "text"),
    [
        (spoil_token, [], "t1.bin: token 65535 at position 10000 is not below the vocabulary size 257"),
        (spoil_token, ["data.prefetch=2"], "t1.bin: token 65535 at position 10000"),
        (spoil_token, TWO, "of 2 failed: {folder}/t1.bin: token 65535 at position 10000"),
        (cut, [], "t1.bin: ended at byte 21024 while it was read"),
        (remove, [], "t2.bin: No such file or directory"),
    ],
)
def test_data_that_go_bad_in_mid_run_are_one_line(
    spoil: Callable[[Path], None], more: list[str], text: str, tmp_path: Path
) -> None:
    process = start(*more, *corpus(tmp_path), cwd=tmp_path)
    log = tmp_path / "out" / "x" / "main.log"
    wait_for(lambda: lines(log) > 10)
    spoil(tmp_path)
    printed, _ = process.communicate(timeout=90)
    assert process.returncode == 1, printed
    (line,) = printed.splitlines()
    assert line.startswith("runner: error: ")
    assert text.format(folder=tmp_path) in line
    newest = done_steps(tmp_path / "out" / "x")[-1]
    assert line.endswith(f"goes on from the checkpoint of step {newest} (with run.name=x)")
    trained = [text.split()[0] for text in log.read_text().splitlines() if " trl:" in text]
    assert trained == [f"s:{step}" for step in range(len(trained))]
    assert len(trained) >= newest
    assert not children(process)


def limited(*arguments: str, cwd: Path, gib: int, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "runner", *arguments],
        cwd=cwd,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (gib << 30, gib << 30)),
    )


@pytest.mark.parametrize(
    "size", [["model.width=400000"], ["train.micro_batch=50000", "train.seq_len=64", "data.order=windows"]]
)
def test_what_does_not_fit_into_memory_is_one_line(size: list[str], tmp_path: Path) -> None:
    done = limited(*SMALL, *size, "run.name=x", cwd=tmp_path, gib=5)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("runner: error: out of memory for ")
    assert "lower train.micro_batch" in line
    shown = limited(*SMALL, *size, "run.name=x", cwd=tmp_path, gib=5, RUNNER_TRACEBACK="1")
    assert "Traceback (most recent call last)" in shown.stderr


def test_a_cell_s_fault_is_one_line_in_its_log_and_in_the_list(tmp_path: Path) -> None:
    printed = run("-m", *SMALL, "model.width=32,400000", cwd=tmp_path, code=1)
    assert "Traceback" not in printed
    assert printed.count("out of memory for") >= 1
    (log,) = (p for p in tmp_path.rglob("console.log") if "out of memory" in p.read_text())
    assert "Traceback" not in log.read_text()


class Full:
    """A logger whose disk is full until `room`."""

    def __init__(self) -> None:
        self.room = False
        self.written: list[int] = []

    def open(self, run: RunInfo) -> None: ...

    def log(self, event: Event) -> None:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.written.append(event.step)

    def close(self, status: str) -> None: ...


def test_the_record_is_written_at_the_end_or_the_run_says_that_it_is_not() -> None:
    late, never = Full(), Full()
    emitter = Emitter({"llmc": late, "jsonl": never})
    emitter([Note(step, "x") for step in range(3)])
    late.room = True
    assert emitter.close("finished") == ["jsonl"]
    assert late.written == [0, 1, 2]


def test_lines_that_memory_had_no_room_for_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("runner.emit._KEPT", 4)
    late = Full()
    emitter = Emitter({"jsonl": late})
    emitter([Note(step, "x") for step in range(6)])
    late.room = True
    emitter([Note(6, "x")])
    assert late.written == [3, 4, 5, 6]
    assert emitter.close("finished") == ["jsonl"]
    assert "3 lines are lost" in caplog.text


class Forgetful(Full):
    """A logger that logs, and fails at everything else."""

    room = True

    def __init__(self) -> None:
        self.written = []

    def state_dict(self) -> dict[str, Any]:
        raise OSError("no state")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("id")

    def hint(self) -> str:
        raise RuntimeError("no hint")


def test_whatever_a_logger_fails_at_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    fails, works = Forgetful(), Full()
    works.room = True
    emitter = Emitter({"mine": fails, "yours": works})
    emitter.load_state_dict({"mine": {}})
    emitter([Note(5, "x")])
    assert emitter.hints() == []
    assert emitter.state_dict() == {}
    emitter([Note(6, "y")])
    assert (fails.written, works.written) == ([5], [5, 5, 6])  # the second 5 says that `mine` is off
    assert [text.split(":")[0] for text in caplog.messages] == [
        "logger.mine starts without what it kept",
        "logger.mine does not tell where to look",
        "logger.mine is off",
    ]


def test_a_write_that_fails_names_its_file(tmp_path: Path) -> None:
    def write() -> None:
        with naming(tmp_path / "x"), Path("/dev/full").open("w") as file:
            file.write("x")

    assert fault_line(caught(write)) == f"{tmp_path / 'x'}: No space left on device (OSError)"
