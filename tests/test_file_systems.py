"""File systems that lack something: locks, the sync of a folder, a size. None of it costs a run."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.api import Saved
from runner.checkpoint import disk, folder
from runner.cli import ConfigError
from runner.launch import claim
from runner.sweep.lock import locked
from runner.sweep.status import is_running
from tests.checkpoint_cases import gpt2_snapshot
from tests.test_checkpoint_store import make_store, save


@contextmanager
def failing(module: Any, name: str, number: int) -> Iterator[None]:
    """Let a system call fail with this error number."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, fail)
        yield


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_there_are_no_locks_a_run_and_a_sweep_start_and_say_so(
    number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), failing(fcntl, "flock", number):
        with claim({"root": str(tmp_path), "name": "x"}) as run:
            (run / "main.log").touch()
            assert not is_running(run)
        with locked(tmp_path / "sweep"):
            pass
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(": ", 1)[0] for line in said] == [str(tmp_path / "x"), str(tmp_path / "sweep")]
    assert [line.split()[-2] for line in said] == ["run.name", "sweep.name"]
    assert all("no locks" in line for line in said)


def test_a_lock_that_fails_otherwise_is_no_lock(tmp_path: Path) -> None:
    run = claim({"root": str(tmp_path), "name": "x"})
    with failing(fcntl, "flock", errno.EIO), pytest.raises(OSError, match="Input/output"), run:
        pass


def test_a_held_lock_is_still_held(tmp_path: Path) -> None:
    run = {"root": str(tmp_path), "name": "x"}
    with claim(run) as folder:
        assert is_running(folder)
        with pytest.raises(ConfigError, match="in use by process"), claim(run):
            pass


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_folder_that_cannot_be_synced_holds_checkpoints(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(number, os.strerror(number))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    store = make_store(tmp_path, keep=1)
    for step in (10, 20):
        assert any(isinstance(event, Saved) for event in save(store, gpt2_snapshot(step)))
    assert folder.done_steps(tmp_path) == [20]


def test_a_failing_disk_is_no_file_system_without_sync(tmp_path: Path) -> None:
    with failing(os, "fsync", errno.EIO), pytest.raises(OSError, match="Input/output"):
        disk.fsync_dir(tmp_path)


def test_a_file_system_that_tells_no_size_is_not_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: unknown)
    assert any(isinstance(event, Saved) for event in save(make_store(tmp_path), gpt2_snapshot(10)))
    full = SimpleNamespace(f_blocks=1000, f_bavail=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    assert not any(isinstance(event, Saved) for event in save(make_store(tmp_path), gpt2_snapshot(20)))
