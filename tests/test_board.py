"""Ranks of one machine that agree in shared memory: all numbers arrive, and nobody waits for the dead."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runner.fault import LostRankError
from runner.parallel import board, collective, memory
from runner.parallel.board import Board
from runner.parallel.collective import Messages
from runner.parallel.memory import Memory
from runner.parallel.shared import Common, Shared

ROOM = 40
InThreads = Callable[[int, Callable[[int], None]], None]
pytestmark = pytest.mark.skipif(board.functions() is None, reason="no compiler here")


def opened(path: Path, *, rank: int, world: int) -> Memory:
    return Memory(os.open(path, os.O_RDWR), path.stat().st_size, rank=rank, world=world)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Room for the board of two ranks."""
    compiled = board.functions()
    assert compiled is not None
    path = tmp_path / "board"
    path.write_bytes(bytes(board.size(compiled, words=ROOM, world=2)))
    return path


def board_of(path: Path, *, rank: int, world: int = 2) -> Board:
    compiled = board.functions()
    assert compiled is not None
    return Board(opened(path, rank=rank, world=world), compiled, rank=rank, at=0, room=ROOM)


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> InThreads:
    """Play the ranks in threads; locks are a process's, so that none of them would seem to live."""
    monkeypatch.setattr(Memory, "lives", lambda *_: True)
    return _in_threads


def _in_threads(world: int, play: Callable[[int], None]) -> None:
    problems: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            play(rank)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"
    assert problems == []


def word(turn: int, rank: int, count: int) -> Tensor:
    return torch.arange(count, dtype=torch.float64) + 1000.0 * turn + 0.5 * rank


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("first", [0, 0xFFFFFFFF - 100])  # the counter wraps
def test_every_rank_reads_every_word_of_the_round_it_is_in(
    in_threads: InThreads, tmp_path: Path, world: int, first: int
) -> None:
    compiled = board.functions()
    assert compiled is not None
    path = tmp_path / "board"
    path.write_bytes(bytes(board.size(compiled, words=ROOM, world=world)))
    ready = threading.Barrier(world)
    counts = [random.Random(7).randint(0, ROOM) for _ in range(400)]

    def play(rank: int) -> None:
        mine, naps = board_of(path, rank=rank, world=world), random.Random(rank)
        mine._turn = first
        compiled.runner_board_show(mine._address, rank, ROOM, first, 0, 0)
        ready.wait()
        for turn, count in enumerate(counts):
            if naps.random() < 0.05:
                time.sleep(0.001)
            rows = mine.all_gather(word(turn, rank, count))
            assert torch.equal(rows, torch.stack([word(turn, other, count) for other in range(world)]))
            assert mine.any_flag(turn % world == rank and turn % 3 == 0) == (turn % 3 == 0)
            mine.barrier()

    in_threads(world, play)


def test_what_is_not_a_number_arrives_bit_for_bit(in_threads: InThreads, path: Path) -> None:
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 5e-324], dtype=torch.float64)

    def play(rank: int) -> None:
        rows = board_of(path, rank=rank).all_gather(odd if rank == 0 else -odd)
        assert torch.equal(rows[0].view(torch.int64), odd.view(torch.int64))

    in_threads(2, play)


def test_a_vector_that_is_not_contiguous_is_told_as_it_reads(in_threads: InThreads, path: Path) -> None:
    def play(rank: int) -> None:
        rows = board_of(path, rank=rank).all_gather(word(0, rank, 12).view(3, 4).t()[1])
        assert rows.tolist() == [[1.0, 5.0, 9.0], [1.5, 5.5, 9.5]]

    in_threads(2, play)


OTHER = """
import os, signal, sys, time
import torch
from pathlib import Path
from tests.test_board import board_of
mine = board_of(Path(sys.argv[1]), rank=1)
print("ready", flush=True)
sys.stdin.readline()
for turn in range(3):
    mine.all_gather(torch.tensor([float(turn)], dtype=torch.float64))
print("told", flush=True)
exec(sys.argv[2])
"""


@contextmanager
def other_rank(path: Path, then: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OTHER, str(path), then]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def tell(process: subprocess.Popen[str], mine: Board) -> list[float]:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return [float(mine.all_gather(torch.zeros(1, dtype=torch.float64))[1, 0]) for _ in range(3)]


@pytest.mark.parametrize("then", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(3)", "os._exit(0)"])
def test_a_rank_that_is_gone_is_named_at_once(path: Path, then: str) -> None:
    mine = board_of(path, rank=0)
    with other_rank(path, then) as process:
        assert tell(process, mine) == [0.0, 1.0, 2.0]
        began = time.monotonic()
        with pytest.raises(LostRankError, match="rank 1 ended"):
            mine.barrier()
        assert time.monotonic() - began < 10


def test_a_rank_that_lives_is_waited_for(path: Path) -> None:
    mine = board_of(path, rank=0)
    late = "time.sleep(0.7); print(float(mine.all_gather(torch.zeros(1).double()).sum()))"
    with other_rank(path, late) as process:
        tell(process, mine)
        assert mine.all_gather(torch.ones(1, dtype=torch.float64)).tolist() == [[1.0], [0.0]]
        assert process.communicate()[0].split() == ["told", "1.0"]


def test_the_last_word_of_a_rank_that_left_counts(path: Path) -> None:
    mine = board_of(path, rank=0)
    show = "mine._compiled.runner_board_show(mine._address, 1, 40, 4, last.data_ptr(), 1)"
    with other_rank(path, f"last = torch.full((1,), 7.0).double(); {show}") as process:
        tell(process, mine)
        process.wait()
        assert float(mine.all_gather(torch.zeros(1, dtype=torch.float64))[1, 0]) == 7.0
        with pytest.raises(LostRankError, match="rank 1 ended"):
            mine.barrier()


def test_an_interrupt_ends_a_wait(path: Path) -> None:
    mine = board_of(path, rank=0)
    with other_rank(path, "time.sleep(60)") as process:
        tell(process, mine)
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            mine.barrier()
        assert time.monotonic() - began < 10


@given(
    world=st.integers(1, 5),
    numel=st.integers(1, 5000),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_compiled_and_torch_means_have_the_same_bits(
    world: int, numel: int, cut: tuple[float, float], seed: int
) -> None:
    compiled = board.functions()
    assert compiled is not None
    rows = torch.randn(world, numel + 3, generator=torch.Generator().manual_seed(seed))[:, :numel]
    rows[seed % world, seed % numel] = (float("nan"), float("inf"), 3e38)[seed % 3]
    start, end = sorted(int(part * numel) for part in cut)
    expected = rows.clone()
    by_torch = Shared(Common(expected, Messages(world=1, device=torch.device("cpu"))), rank=0)
    by_torch._from, by_torch._to = start, end
    by_torch._mean_rows()
    compiled.runner_mean_rows(rows.data_ptr(), world, rows.stride(0), start, end)
    assert torch.equal(rows.contiguous().view(torch.int32), expected.contiguous().view(torch.int32))


@pytest.mark.parametrize("lacking", ["memfd_create", "posix_fallocate", "lockf"])
def test_memory_that_cannot_be_had_is_none_and_leaves_nothing_open(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    nothing = SimpleNamespace(memfd_create=lambda *_: -1)
    module, name, instead = {
        "memfd_create": (ctypes, "CDLL", lambda *_, **__: nothing),
        "posix_fallocate": (os, "posix_fallocate", full),
        "lockf": (memory.fcntl, "lockf", full),
    }[lacking]
    open_before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(module, name, instead)
    assert memory.shared(10, rank=0, world=1) is None
    assert os.listdir("/proc/self/fd") == open_before


def test_a_start_that_is_cut_short_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(collective, "gather_objects", interrupted)
    before = os.listdir("/dev/shm")
    with pytest.raises(KeyboardInterrupt):
        memory.shared(10, rank=0, world=2)
    assert os.listdir("/dev/shm") == before


def test_another_process_s_memory_is_opened_by_its_name_alone(tmp_path: Path) -> None:
    fd = memory._new("runner-7", 10)
    assert fd is not None
    path = f"/proc/{os.getpid()}/fd/{fd}"
    other = memory._opened(path, "runner-7")
    assert other is not None
    assert os.read(other, 20) == bytes(10)
    os.close(other)
    os.close(fd)
    with open(tmp_path / "somebody's", "wb") as file:  # what lies there on another machine
        assert memory._opened(f"/proc/{os.getpid()}/fd/{file.fileno()}", "runner-7") is None
    assert memory._opened(path, "runner-7") is None


def test_a_lock_ends_with_its_process_and_is_not_inherited(path: Path) -> None:
    mine = opened(path, rank=0, world=2)
    assert not mine.lives(1)
    with other_rank(path, "if os.fork() == 0: os.close(1); time.sleep(20)\nos._exit(0)") as process:
        assert mine.lives(1)
        assert mine.lives(1), "looking does not take the lock away"
        tell(process, board_of(path, rank=0))
        process.wait()
        assert not mine.lives(1), "its child is still there"


def test_rows_of_shared_memory_begin_at_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.parallel import shared

    messages = Messages(world=1, device=torch.device("cpu"))
    common = shared.common(1025, words=3, rank=0, world=1, otherwise=messages)
    assert common is not None
    assert common.rows.shape == (1, 1025)
    assert common.rows.data_ptr() % 4096 == 0
    assert isinstance(common.agreement, Board)
    monkeypatch.setattr(board, "functions", lambda: None)
    without = shared.common(1025, words=3, rank=0, world=1, otherwise=messages)
    assert without is not None
    assert without.agreement is messages
