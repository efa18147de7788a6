"""What does not fit, what is kept, and what happens when a disk fails, fills up or knows no direct writes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.api import Event, Note, Removed, Saved
from runner.checkpoint import disk, folder, load, memory
from runner.checkpoint.finite import first_non_finite
from tests.checkpoint_cases import assert_same_snapshot, gpt2_snapshot
from tests.test_checkpoint_store import flip, golden_live, make_store, names, save, texts, three

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parent.parent


# ---------------------------------------------------------------- what does not fit


def test_other_model_names_the_fields(tmp_path: Path) -> None:
    save(make_store(tmp_path), gpt2_snapshot(20))
    live = golden_live("state/fp32_shuffle_nomaster")
    with pytest.raises(ValueError, match=r"model: checkpoint 20 has .*layers 2 \(run: 1\)") as caught:
        make_store(tmp_path).restore(live)
    assert "heads 2 (run: 1)" in str(caught.value)
    assert "kind" not in str(caught.value)


def test_other_precision_is_refused(tmp_path: Path) -> None:
    save(make_store(tmp_path), gpt2_snapshot(20))
    with pytest.raises(ValueError, match="precision: checkpoint 20 has float32 weights, this run bfloat16"):
        make_store(tmp_path).restore(gpt2_snapshot(0, dtype=torch.bfloat16))


def test_missing_master_is_refused(tmp_path: Path) -> None:
    save(make_store(tmp_path), gpt2_snapshot(20))
    with pytest.raises(ValueError, match=r"optimizer: checkpoint 20 has master \(absent\) \(run: float32\["):
        make_store(tmp_path).restore(gpt2_snapshot(0, master=True))


def test_changed_environment_warns_or_stops(tmp_path: Path) -> None:
    save(make_store(tmp_path), gpt2_snapshot(20))
    live = replace(gpt2_snapshot(0), env={"threads": 2, "torch": "x", "gpu": "y"})
    events = make_store(tmp_path).restore(live).events
    assert "gpu None -> 'y', threads 1 -> 2" in texts(events, "warning")
    with pytest.raises(ValueError, match=r"checkpoint.strict_env: .*threads 1 -> 2"):
        make_store(tmp_path, strict_env=True).restore(live)


def test_fresh_start_over_checkpoints_is_refused(tmp_path: Path) -> None:
    three(tmp_path)
    with pytest.raises(ValueError, match=r"holds checkpoints up to step 30, .*run.overwrite=true"):
        make_store(tmp_path, resume="never").restore(gpt2_snapshot(0))
    restored = make_store(tmp_path, resume="never").restore(gpt2_snapshot(0), overwrite=True)
    assert restored.snapshot is None
    assert [e.step for e in restored.events if isinstance(e, Removed)] == [10, 20, 30]
    assert names(tmp_path) == []
    with pytest.raises(ValueError, match="choose one"):
        make_store(tmp_path, resume="must").restore(gpt2_snapshot(0), overwrite=True)


def test_must_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint.resume=must: .* holds no DONE file"):
        make_store(tmp_path, resume="must").restore(gpt2_snapshot(0))


# ---------------------------------------------------------------- retention


def test_keep_counts_numerically_and_spares_majors(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep=2, major_every=9000)
    events: list[Event] = []
    for step in (8000, 9000, 10000, 11000, 99999):
        events += save(store, gpt2_snapshot(step))
    assert folder.done_steps(tmp_path) == [9000, 11000, 99999]
    assert [e.step for e in events if isinstance(e, Removed)] == [8000, 10000]
    assert not any("00008000" in name for name in names(tmp_path))


@pytest.mark.parametrize(
    ("keep", "every", "major_every", "told"),
    [(1, 5, 7, True), (None, 5, 7, False), (1, 5, 10, False), (1, 5, 0, False), (1, 0, 7, False)],
)
def test_majors_that_are_never_saved_are_told(
    keep: int | None, every: int, major_every: int, told: bool, tmp_path: Path
) -> None:
    lines = make_store(tmp_path, keep=keep, every=every, major_every=major_every).warnings()
    assert [("only the checkpoints of steps 35, 70, ... are kept" in line) for line in lines] == [True] * told


def test_low_step_in_an_old_folder_survives(tmp_path: Path) -> None:
    for step in (100, 200):
        save(make_store(tmp_path), gpt2_snapshot(step))
    store = make_store(tmp_path, keep=1)
    save(store, gpt2_snapshot(5))
    save(store, gpt2_snapshot(6))
    assert folder.done_steps(tmp_path) == [6, 100, 200]


def test_what_is_on_the_disk_is_not_written_again(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    assert len(save(store, gpt2_snapshot(10))) == 1
    inode = (tmp_path / "model_00000010.bin").stat().st_ino
    assert save(store, gpt2_snapshot(10)) == []
    again = make_store(tmp_path)
    again.restore(gpt2_snapshot(0))
    assert save(again, gpt2_snapshot(10)) == []
    assert (tmp_path / "model_00000010.bin").stat().st_ino == inode


def test_state_that_cannot_be_kept_is_known_at_the_start(tmp_path: Path) -> None:
    live = replace(gpt2_snapshot(0), parts={"logger": {"socket": object()}})
    with pytest.raises(ValueError, match=r"logger.socket: a checkpoint cannot keep a object"):
        make_store(tmp_path).restore(live)


def test_newest_reads_every_byte(tmp_path: Path) -> None:
    assert load.newest(tmp_path) == (None, ())
    three(tmp_path)
    flip(tmp_path / "model_00000030.bin")
    found, damaged = load.newest(tmp_path)
    assert found is not None
    assert found.step == 20
    assert len(damaged) == 1
    assert "model_00000030.bin: damaged (checksum" in damaged[0]


def test_resumed_checkpoint_is_kept(tmp_path: Path) -> None:
    save(make_store(tmp_path), gpt2_snapshot(10))
    store = make_store(tmp_path, keep=1)
    store.restore(gpt2_snapshot(0))
    save(store, gpt2_snapshot(20))
    save(store, gpt2_snapshot(30))
    assert folder.done_steps(tmp_path) == [10, 30]


@settings(max_examples=200, deadline=None)
@given(
    steps=st.sets(st.integers(0, 60), max_size=12),
    written=st.integers(0, 60),
    keep=st.none() | st.integers(1, 5),
    major_every=st.integers(0, 20),
    protect=st.sets(st.integers(0, 60), max_size=2),
)
def test_victims_never_include_what_must_stay(
    steps: set[int], written: int, keep: int | None, major_every: int, protect: set[int]
) -> None:
    steps |= {written}
    gone = folder.victims(steps, written=written, keep=keep, major_every=major_every, protect=protect)
    assert gone == sorted(set(gone) & steps)
    assert all(step < written and step not in protect for step in gone)
    assert not any(major_every and step % major_every == 0 for step in gone)
    left = sorted(step for step in steps - set(gone) if step <= written)
    if keep is None:
        assert gone == []
    else:
        newest = sorted(step for step in steps if step <= written)[-keep:]
        assert set(newest) <= set(left)
        assert all(s in protect or (major_every and s % major_every == 0) for s in set(left) - set(newest))


def test_llmc_victims_equal_llmcs_table() -> None:
    rows = json.loads((GOLDEN / "retention.json").read_text())["rows"]
    assert len(rows) == 48
    for row in rows:
        events, left = [], set()
        for step in range(1, row["x"] + 1):
            if step % row["n"] and step != row["x"]:
                continue
            events.append(f"W{step}")
            left.add(step)
            victim = folder.llmc_victim(step, every=row["n"], keep=row["nk"], major=row["nm"])
            if victim is not None:
                events.append(f"D{victim}")
                left.discard(victim)
        assert (events, sorted(left)) == (row["events"], row["left"]), row


# ---------------------------------------------------------------- disks that fail


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_failing_disk_keeps_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, at: int
) -> None:
    store = make_store(tmp_path)
    save(store, gpt2_snapshot(10))
    before = names(tmp_path)
    real, calls = os.fsync, iter(range(100))

    def failing(fd: int) -> None:
        if next(calls) == at:
            raise OSError(code, os.strerror(code))
        real(fd)

    monkeypatch.setattr(os, "fsync", failing)
    (event,) = save(store, gpt2_snapshot(20))
    monkeypatch.undo()
    assert isinstance(event, Note)
    assert event.level == "error"
    assert os.strerror(code) in event.text
    assert str(tmp_path) in event.text
    assert names(tmp_path) == before
    (event,) = save(store, gpt2_snapshot(30))
    assert isinstance(event, Saved)
    assert_same_snapshot(make_store(tmp_path).restore(gpt2_snapshot(0)).snapshot, gpt2_snapshot(30))  # type: ignore[arg-type]


def test_failing_rename_never_leaves_a_done_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path)
    save(store, gpt2_snapshot(10))
    real = os.replace

    def failing(source: Path, target: Path) -> None:
        if Path(target).name.startswith("model"):
            raise OSError(errno.EIO, "Input/output error", str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", failing)
    assert "model_00000020.bin" in texts(save(store, gpt2_snapshot(20)), "error")
    monkeypatch.undo()
    restored = make_store(tmp_path).restore(gpt2_snapshot(0))
    assert restored.snapshot is not None
    assert restored.snapshot.step == 10
    assert not any("00000020" in name for name in names(tmp_path))


def test_file_size_limit_in_the_middle_of_a_write(tmp_path: Path) -> None:
    """A real partial write: the process may not write files as large as the state file."""
    code = """
import resource, sys
sys.path.insert(0, ".")
from pathlib import Path
from tests.checkpoint_cases import gpt2_snapshot
from tests.test_checkpoint_store import golden_live, make_store, save
store = make_store(Path(sys.argv[1]))
print(save(store, gpt2_snapshot(10)))
resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
print(save(store, gpt2_snapshot(20)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "state_00000020_00000.bin.tmp: File too large" in done.stdout
    assert names(tmp_path) == [n for n in names(tmp_path) if "00000010" in n]
    assert len(names(tmp_path)) == 4


def test_full_disk_is_noticed_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path)
    monkeypatch.setattr(disk, "free_bytes", lambda path: 1000)
    (event,) = store.save(gpt2_snapshot(10))
    assert isinstance(event, Note)
    assert event.level == "warning"
    assert "1000 bytes free" in event.text
    assert not store.pending
    assert names(tmp_path) == []
    monkeypatch.undo()
    assert isinstance(save(store, gpt2_snapshot(20))[0], Saved)


def test_unwritable_folder_is_known_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"run.name: cannot write to .*file/run \(Not a directory\)"):
        make_store(tmp_path / "file" / "run").restore(gpt2_snapshot(0))


def test_non_finite_weights_are_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save(store, gpt2_snapshot(10))
    for value in (float("nan"), float("inf")):
        bad = gpt2_snapshot(20)
        slot = bad.layout[4]
        bad.weights[slot.offset + 3] = value
        (event,) = save(store, bad)
        assert isinstance(event, Note)
        assert event.level == "error"
        assert "blocks.*.qkvw holds non-finite weights" in event.text
    assert folder.done_steps(tmp_path) == [10]


def test_huge_finite_weights_are_finite() -> None:
    snapshot = gpt2_snapshot()
    snapshot.weights[:] = torch.finfo(torch.float32).max
    assert first_non_finite(disk.memory(snapshot.weights), torch.float32) is None


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_first_non_finite_element_is_found(
    dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(memory, "_functions", lambda: None)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[:4] = torch.tensor([0.0, -0.0, torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype)
    assert first_non_finite(disk.memory(values), dtype) is None
    assert first_non_finite(disk.memory(values[:0]), dtype) is None
    for bad in ("nan", "inf", "-inf", "-nan"):
        spoiled = values.clone()
        spoiled[[700, 900]] = -torch.tensor(float("nan")).to(dtype) if bad == "-nan" else float(bad)
        assert first_non_finite(disk.memory(spoiled), dtype) == 700, bad


def test_large_files_bypass_the_cache_and_match(tmp_path: Path) -> None:
    """Every path of the writer: direct from aligned memory, through the stage, and the unaligned end."""
    generator = torch.Generator().manual_seed(0)
    big = torch.randint(0, 255, (20 << 20,), dtype=torch.uint8, generator=generator)
    for chunks in (
        [b"x" * 1024, big],
        [b"x" * 1000, big],
        [big[1:], b"end", big[: 5 << 20]],
        [big[: 9 << 20]],
        [b"", big[:0], big],
    ):
        path = tmp_path / "file"
        written = disk.write_file(path, chunks)
        expected = b"".join(disk.memory(chunk).tobytes() for chunk in chunks)
        assert path.read_bytes() == expected
        assert written.size == len(expected)


def test_disk_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = torch.zeros(9 << 20, dtype=torch.uint8)
    real = os.open

    def no_direct(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", no_direct)
    disk.write_file(tmp_path / "file", [b"abc", big])
    assert (tmp_path / "file").stat().st_size == 3 + (9 << 20)
