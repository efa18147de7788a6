"""Training goes on while a checkpoint is written: it holds its own step's bits, whatever came after."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner import arena
from runner.api import Event, Note, Saved, Snapshot
from runner.checkpoint import disk, folder, memory, spare
from runner.checkpoint.disk import Bytes
from runner.checkpoint.pieces import Pieces
from runner.checkpoint.spare import Spare
from runner.checkpoint.store import Store
from tests.checkpoint_cases import assert_same_snapshot, gpt2_snapshot
from tests.commands import run
from tests.rank_runs import assert_same_files, command, done_steps
from tests.sessions import TINY, ran
from tests.test_checkpoint_store import make_store, names

ROOT = Path(__file__).parent.parent


class Gate:
    """Stands between a checkpoint's thread and its first byte until it is opened."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self.failure: OSError | None = None

    def __call__(self) -> None:
        assert self._opened.wait(20)
        if self.failure is not None:
            raise self.failure

    def open(self) -> None:
        self._opened.set()

    def close(self) -> None:
        self._opened.clear()


def slow_down(monkeypatch: pytest.MonkeyPatch, *, piece_bytes: int, write_s: float) -> None:
    """Make a checkpoint's writer slower than several updates."""
    real = os.write

    def write(fd: int, data: Any) -> int:
        if threading.current_thread().name == "checkpoint":
            time.sleep(write_s)
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(disk, "_PIECE_BYTES", piece_bytes)


def train_on(snapshot: Snapshot) -> None:
    """Change all that an update changes."""
    for tensor in (snapshot.weights, *snapshot.optimizer.values()):
        tensor.mul_(-3).add_(1)


def restored(path: Path) -> Snapshot:
    snapshot = make_store(path).restore(gpt2_snapshot(0)).snapshot
    assert snapshot is not None
    return snapshot


# ---------------------------------------------------------------- the store


def test_updates_go_on_while_the_writer_has_not_begun(tmp_path: Path) -> None:
    gate = Gate()
    store, live = make_store(tmp_path, async_="on", fault=gate), gpt2_snapshot(20)
    assert store.save(live) == []
    for _ in range(4):
        assert store.before_update() == []
        train_on(live)
    assert store.pending
    assert folder.done_steps(tmp_path) == []
    gate.open()
    (event,) = store.join()
    assert isinstance(event, Saved)
    assert not store.pending
    assert store.before_update() == []
    assert_same_snapshot(restored(tmp_path), gpt2_snapshot(20))


@pytest.mark.parametrize("begun_s", [0, 0.003, 0.01, 0.03])
def test_updates_go_on_in_the_middle_of_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun_s: float
) -> None:
    slow_down(monkeypatch, piece_bytes=1024, write_s=0.002)
    store, live = make_store(tmp_path, async_="on"), gpt2_snapshot(20)
    store.save(live)
    time.sleep(begun_s)
    updates, events = 0, store.before_update()
    while not events:
        train_on(live)
        updates += 1
        events = store.before_update()
    assert updates > 3
    assert all(isinstance(event, Saved) for event in events)
    assert_same_snapshot(restored(tmp_path), gpt2_snapshot(20))


def test_the_second_save_waits_for_the_first(tmp_path: Path) -> None:
    gate = Gate()
    store, live = make_store(tmp_path, async_="on", keep=1, fault=gate), gpt2_snapshot(20)
    store.save(live)
    store.before_update()
    train_on(live)
    threading.Timer(0.1, gate.open).start()
    (first,) = store.save(gpt2_snapshot(30))
    assert isinstance(first, Saved)
    assert first.step == 20
    assert first.blocked_ms > 50
    assert folder.done_steps(tmp_path) == [20]
    assert [type(event).__name__ for event in store.close()] == ["Saved", "Removed"]
    assert_same_snapshot(restored(tmp_path), gpt2_snapshot(30))
    assert len(names(tmp_path)) == 4


def test_without_spare_memory_the_update_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    monkeypatch.setattr(spare, "available_bytes", lambda: 0)
    store, live = make_store(tmp_path, async_="on", fault=gate), gpt2_snapshot(20)
    store.save(live)
    threading.Timer(0.2, gate.open).start()
    began = time.perf_counter()
    events = store.before_update()
    assert time.perf_counter() - began > 0.15
    train_on(live)
    (event,) = events + store.join()
    assert isinstance(event, Saved)
    assert event.blocked_ms > 150
    assert_same_snapshot(restored(tmp_path), gpt2_snapshot(20))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_while_training_goes_on(tmp_path: Path, code: int) -> None:
    gate = Gate()
    store = make_store(tmp_path, async_="on", fault=gate)
    gate.open()
    store.save(gpt2_snapshot(10))
    store.join()
    before = names(tmp_path)
    gate.close()
    gate.failure = OSError(code, os.strerror(code))
    events = store.save(gpt2_snapshot(20))
    events += store.before_update()
    gate.open()
    until = time.monotonic() + 10
    while not events and time.monotonic() < until:
        events += store.before_update()
    (event,) = events
    assert isinstance(event, Note)
    assert event.level == "error"
    assert os.strerror(code) in event.text
    assert names(tmp_path) == before
    gate.failure = None
    (event,) = store.save(gpt2_snapshot(30)) + store.join()
    assert isinstance(event, Saved)


def test_file_size_limit_while_training_goes_on(tmp_path: Path) -> None:
    code = """
import os, resource, sys, time
sys.path.insert(0, ".")
from pathlib import Path
from runner.checkpoint import disk
from tests.checkpoint_cases import gpt2_snapshot
from tests.test_checkpoint_store import make_store, save
from tests.test_checkpoint_overlap import train_on
disk._PIECE_BYTES = 1024
write = os.write
os.write = lambda fd, data: (time.sleep(0.005), write(fd, data))[1]
store, live = make_store(Path(sys.argv[1]), async_="on"), gpt2_snapshot(10)
print(save(store, live))
resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
events = store.save(gpt2_snapshot(20))
updates = 0
while not events:
    events += store.before_update()
    train_on(live)
    updates += 1
print(updates > 3, events)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "True [Note" in done.stdout
    assert "state_00000020_00000.bin.tmp: File too large" in done.stdout
    assert len(names(tmp_path)) == 4
    assert_same_snapshot(restored(tmp_path), gpt2_snapshot(10))


# ---------------------------------------------------------------- the pieces


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30_000), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
    budget=st.sampled_from([0, 5_000, 40_000, 1 << 30]),
    begin_s=st.floats(0, 0.004),
)
def test_any_interleaving_yields_the_bytes_of_its_moment(
    sizes: list[int], seed: int, budget: int, begin_s: float
) -> None:
    chunks = [torch.full((size,), i + 1, dtype=torch.uint8) for i, size in enumerate(sizes)]
    expected = b"".join(disk.memory(chunk).tobytes() for chunk in chunks)
    found = bytearray()
    delays = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "_PIECE_BYTES", 4096)
        patch.setattr(spare, "available_bytes", lambda: 2 * budget)
        pieces = Pieces(chunks, spare=SlowSpare(delays), ranks=1)

        def write() -> None:
            for piece in itertools.chain.from_iterable(pieces.of(chunk) for chunk in chunks):
                found.extend(slowly_read(piece, delays))
            pieces.close()

        writer = threading.Thread(target=write)
        writer.start()
        time.sleep(begin_s)
        for _ in range(3):
            pieces.detach()
            for chunk in chunks:
                chunk.fill_(0)
        writer.join(20)
    assert not writer.is_alive()
    assert bytes(found) == expected


class SlowSpare(Spare):
    def __init__(self, delays: random.Random) -> None:
        super().__init__()
        self._delays = delays

    def copy(self, data: Bytes, *, at: int) -> Bytes:
        time.sleep(self._delays.choice([0, 0, 0.0005, 0.003]))
        return super().copy(data, at=at)


def slowly_read(piece: Bytes, delays: random.Random) -> bytes:
    """Read a piece in two halves, with a pause in between: a change in it would show."""
    half = len(piece) // 2
    first = piece[:half].tobytes()
    time.sleep(delays.choice([0, 0, 0.0002, 0.001]))
    return first + piece[half:].tobytes()


def test_a_writer_that_gave_up_holds_nothing_back() -> None:
    chunk = torch.zeros(100, dtype=torch.uint8)
    pieces = Pieces([chunk, chunk.clone()], spare=Spare(), ranks=1)
    next(pieces.of(chunk))
    pieces.close()
    pieces.detach()


def test_memory_that_is_taken_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Spare()
    assert room.open(1 << 20, ranks=1) == 0
    kept = room.copy(disk.memory(b"abc"), at=(1 << 20) - 4096)
    monkeypatch.setattr(spare, "available_bytes", lambda: 0)
    assert room.open(1 << 20, ranks=1) == (1 << 20) - 4096
    monkeypatch.setattr(spare, "available_bytes", lambda: 16384)
    assert room.open(1 << 20, ranks=2) == (1 << 20) - 8192
    room.close()
    assert kept.tobytes() == b"abc"
    assert room.open(0, ranks=1) == 0


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("size", [0, 1, 63, 64, 4095, (1 << 20) + 7])
def test_a_copy_is_the_bytes_and_touches_no_others(
    size: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(memory, "_functions", lambda: None)
    data = torch.randint(0, 255, (size + 3,), dtype=torch.uint8)[3:].numpy()  # it may start anywhere
    place = np.frombuffer(arena.pages(size + 4096), np.uint8)
    place[:] = 255
    memory.copy(data, place[:size])
    assert place[:size].tobytes() == data.tobytes()
    assert (place[size:] == 255).all()


def test_live_memory_can_be_written_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    for numel in (0, 1, 3_000_000):
        values = arena.zeros(numel, device=torch.device("cpu"))
        assert values.tolist() == [0.0] * numel
        assert values.data_ptr() % 4096 == 0
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert bytes(arena.pages(10_000)) == bytes(10_000)


def test_limits_of_a_container_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = spare.available_bytes()
    assert machine > 1 << 20
    monkeypatch.setattr(spare, "_CGROUPS", tmp_path)
    assert abs(spare.available_bytes() - machine) < machine / 2
    group = tmp_path / "memory"
    group.mkdir()
    for parent, limit, use, cached in (
        (group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        (tmp_path, "memory.max", "memory.current", "inactive_file"),
    ):
        (parent / limit).write_text("2000000\n")
        (parent / use).write_text("1500000\n")
        (parent / "memory.stat").write_text(f"anon 5\n{cached} 100000\n")
        kinds = "memory" if parent == group else ""
        assert spare._group_bytes(kinds, "/gone/inner") == 600000
    (tmp_path / "memory.max").write_text("max\n")
    assert spare._group_bytes("", "/") == float("inf")


# ---------------------------------------------------------------- whole runs

VARIANTS = {
    "fp32": ["precision=fp32"],
    "bf16_master": ["precision=bf16_master"],
    "lion": ["precision=fp32", "optimizer=lion"],
    "sophia": ["precision=fp32", "optimizer=sophia", "optimizer.curvature_every=1"],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_saves_what_a_waiting_run_saves(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = [*TINY, *VARIANTS[name], "train.steps=24", "checkpoint.every=8"]
    ran(*same, dir=tmp_path / "waits")
    pending: list[int] = []
    polled = Store.before_update

    def before_update(self: Store) -> list[Event]:
        events = polled(self)
        pending.append(self.pending)
        return events

    monkeypatch.setattr(Store, "before_update", before_update)
    slow_down(monkeypatch, piece_bytes=2048, write_s=0.002)
    ran(*same, "checkpoint.async=on", dir=tmp_path / "goes_on")
    assert sum(pending) > 4, "hardly an update came while a checkpoint was written: nothing is proved"
    for step in (8, 16, 24):
        assert_same_files(tmp_path / "waits", tmp_path / "goes_on", step=step)
    assert done_steps(tmp_path / "goes_on") == [8, 16, 24]


@pytest.mark.dist
def test_ranks_save_what_waiting_ranks_save(tmp_path: Path) -> None:
    same = command(tmp_path, "parallel=zero1", "parallel.processes=2", "checkpoint.every=9")
    same = [*same, "precision=bf16_master"]
    run(*same, "run.name=waits", "checkpoint.async=off", cwd=tmp_path)
    run(*same, "run.name=goes_on", "checkpoint.async=on", "debug.slow_save_s=0.15", cwd=tmp_path)
    for step in (9, 18, 20):
        assert_same_files(tmp_path / "waits", tmp_path / "goes_on", step=step)
    assert done_steps(tmp_path / "goes_on") == [9, 18, 20]


@pytest.mark.parametrize(("mode", "waits"), [("auto", True), ("on", False)])
def test_a_small_checkpoint_is_complete_before_the_next_update(
    mode: str, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch, piece_bytes=1024, write_s=0.002)
    store = make_store(tmp_path, async_=mode)
    events = store.save(gpt2_snapshot(20)) + store.before_update()
    assert [type(event) for event in events] == ([Saved] if waits else [])
    assert store.pending != waits
    store.close()


def test_a_large_checkpoint_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.checkpoint.store.BRIEF", 10)
    slow_down(monkeypatch, piece_bytes=1024, write_s=0.002)
    store = make_store(tmp_path, async_="auto")
    assert store.save(gpt2_snapshot(20)) + store.before_update() == []
    store.close()
