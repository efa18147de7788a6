"""The store: what is saved comes back, what is damaged is named, and nothing good is ever lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.api import Event, Note, Removed, Saved, Snapshot
from runner.checkpoint import disk, folder, llmc_format, load
from runner.checkpoint.finite import first_non_finite
from runner.checkpoint.host_copies import HostCopies
from runner.checkpoint.store import Store
from tests.checkpoint_cases import assert_same_snapshot, gpt2_snapshot, other_snapshot

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parent.parent


def make_store(path: Path, **changes: Any) -> Store:
    arguments: dict[str, Any] = {
        "every": 10,
        "keep": None,
        "major_every": 0,
        "resume": "auto",
        "format": "auto",
        "allow_reshard": False,
        "strict_env": False,
        "async_": "auto",
        "dir": path,
    }
    return Store(**(arguments | changes))


def save(store: Store, snapshot: Snapshot) -> list[Event]:
    return store.save(snapshot) + store.join()


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def texts(events: Any, level: str | None = None) -> str:
    return "\n".join(e.text for e in events if isinstance(e, Note) and level in (None, e.level))


# ---------------------------------------------------------------- save and restore


@pytest.mark.parametrize("make", [gpt2_snapshot, other_snapshot])
@pytest.mark.parametrize("mode", ["auto", "off"])
def test_what_was_saved_comes_back(tmp_path: Path, make: Any, mode: str) -> None:
    store = make_store(tmp_path / "a" / "run", async_=mode)
    fresh = store.restore(make(0))
    assert (fresh.snapshot, fresh.events) == (None, ())
    (event,) = save(store, make(20))
    assert isinstance(event, Saved)
    assert event.bytes == sum(p.stat().st_size for p in store.dir.iterdir())
    again = make_store(store.dir).restore(make(0))
    assert again.snapshot is not None
    assert_same_snapshot(again.snapshot, make(20))
    assert again.events == ()


@pytest.mark.parametrize("order", ["shuffle", "sequential", "windows"])
@pytest.mark.parametrize("master", [False, True])
def test_llmc_files_and_side_file_share_the_stream(tmp_path: Path, order: str, master: bool) -> None:
    snapshot = gpt2_snapshot(20, dtype=torch.bfloat16, master=master, order=order)
    snapshot.stream["epoch"] = 4
    save(make_store(tmp_path), snapshot)
    again = make_store(tmp_path).restore(snapshot).snapshot
    assert again is not None
    assert_same_snapshot(again, snapshot)
    assert "model_00000020.bin" in names(tmp_path)


def test_names_are_llmc_names(tmp_path: Path) -> None:
    save(make_store(tmp_path), gpt2_snapshot(20))
    assert names(tmp_path) == [
        "DONE_00000020",
        "extra_00000020_00000.json",
        "model_00000020.bin",
        "state_00000020_00000.bin",
    ]
    assert (tmp_path / "DONE_00000020").stat().st_size == 0


def test_format_can_be_chosen_or_refused(tmp_path: Path) -> None:
    save(make_store(tmp_path, format="safetensors"), gpt2_snapshot(20))
    assert "model_00000020.safetensors" in names(tmp_path)
    again = make_store(tmp_path, format="safetensors").restore(gpt2_snapshot(0)).snapshot
    assert again is not None
    assert_same_snapshot(again, gpt2_snapshot(20))
    with pytest.raises(
        ValueError, match=r"checkpoint.format=llmc: .* this run has llama with groups, flag, nan"
    ):
        make_store(tmp_path, format="llmc").restore(other_snapshot(0))


def test_cadence_is_llmcs() -> None:
    store = make_store(Path("x"), every=20)
    assert [step for step in range(51) if store.due(step, last=step == 50)] == [20, 40, 50]
    store.resumed_step = 40
    assert [step for step in range(51) if store.due(step, last=step == 50)] == [20, 50]
    assert not any(make_store(Path("x"), every=0).due(step, last=True) for step in range(5))


def test_copies_are_independent_and_reused() -> None:
    copies = HostCopies()
    live = other_snapshot(20)
    held = copies.take(live)
    copies.wait_host()
    copies.wait_device()
    live.weights.zero_()
    live.optimizer["groups"][0]["exp_avg"].zero_()
    assert_same_snapshot(held, other_snapshot(20))
    assert copies.take(other_snapshot(30)).weights.data_ptr() == held.weights.data_ptr()
    copies.close()


# ---------------------------------------------------------------- several ranks


def saved_by_ranks(path: Path, *, world: int, sharded: bool, step: int = 20) -> None:
    """Save as `world` ranks would, in lockstep."""
    barrier = threading.Barrier(world, timeout=20)
    flags = [False] * world

    def run(rank: int) -> None:
        def any_rank(flag: bool) -> bool:
            flags[rank] = flag
            barrier.wait()
            result = any(flags)
            barrier.wait()
            return result

        store = make_store(path, rank=rank, any_rank=any_rank, barrier=lambda: barrier.wait() and None)
        assert store.restore(gpt2_snapshot(0, rank=rank, world=world, sharded=sharded)).snapshot is None
        snapshot = gpt2_snapshot(step, rank=rank, world=world, sharded=sharded)
        snapshot.parts["rank"] = {"is": rank}
        events = save(store, snapshot)
        assert [type(e) for e in events] == ([Saved] if rank == 0 else [])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("sharded", [False, True])
def test_each_rank_has_its_state(tmp_path: Path, sharded: bool) -> None:
    saved_by_ranks(tmp_path, world=2, sharded=sharded)
    assert len(names(tmp_path)) == 1 + 1 + 2 + 2
    for rank in (0, 1):
        live = gpt2_snapshot(0, rank=rank, world=2, sharded=sharded)
        again = make_store(tmp_path, rank=rank).restore(live).snapshot
        assert again is not None
        assert again.parts["rank"] == {"is": rank}
        assert (again.rank, again.world) == (rank, 2)


def test_other_topology_needs_permission(tmp_path: Path) -> None:
    saved_by_ranks(tmp_path, world=2, sharded=True)
    with pytest.raises(
        ValueError, match=r"written by 2 ranks with sharded .* this run has 1 rank with unsharded"
    ):
        make_store(tmp_path).restore(gpt2_snapshot(0))
    with pytest.raises(ValueError, match=r"2 ranks with sharded .* 2 ranks with unsharded"):
        make_store(tmp_path).restore(gpt2_snapshot(0, world=2))
    restored = make_store(tmp_path, allow_reshard=True).restore(gpt2_snapshot(0))
    assert restored.resharded
    assert restored.snapshot is not None
    assert restored.snapshot.world == 1
    assert "re-cut from 2 to 1 ranks" in texts(restored.events)
    halves = [gpt2_snapshot(20, rank=r, world=2, sharded=True).optimizer["m"] for r in (0, 1)]
    wte = 1024 // 2
    assert torch.equal(restored.snapshot.optimizer["m"][:wte], halves[0][:wte])
    assert torch.equal(restored.snapshot.optimizer["m"][wte : 2 * wte], halves[1][:wte])


def test_missing_rank_file_is_named(tmp_path: Path) -> None:
    saved_by_ranks(tmp_path, world=2, sharded=True)
    (tmp_path / "state_00000020_00001.bin").unlink()
    with pytest.raises(
        ValueError, match=r"no checkpoint .* is intact .*state_00000020_00001.bin: No such file"
    ):
        make_store(tmp_path).restore(gpt2_snapshot(0, world=2, sharded=True))


def test_failure_of_another_rank_leaves_nothing(tmp_path: Path) -> None:
    answers = iter([False] * 4 + [False, True])  # space, written, named, done; space, written
    other = {
        "any_rank": lambda flag: next(answers),
        "gather": lambda own: [own, "/disk1: No space left on device"],
    }
    store = make_store(tmp_path, **other)
    save(store, gpt2_snapshot(10))
    told = texts(save(store, gpt2_snapshot(20)), "error")
    assert told == "checkpoint 20 not written, older ones stay: /disk1: No space left on device"
    assert folder.done_steps(tmp_path) == [10]
    assert not any(name.endswith(".tmp") or "00000020" in name for name in names(tmp_path))


# ---------------------------------------------------------------- damage


def three(path: Path) -> None:
    store = make_store(path)
    for step in (10, 20, 30):
        save(store, gpt2_snapshot(step))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name", ["model_00000030.bin", "state_00000030_00000.bin", "extra_00000030_00000.json"]
)
@pytest.mark.parametrize("harm", [truncate, flip, Path.unlink])
def test_damaged_newest_falls_back_to_the_next_older(tmp_path: Path, name: str, harm: Any) -> None:
    three(tmp_path)
    harm(tmp_path / name)
    if (harm, name[:5]) == (Path.unlink, "extra"):
        (tmp_path / "state_00000030_00000.bin").unlink()  # else it counts as one that llm.c wrote
    live = gpt2_snapshot(0)
    restored = make_store(tmp_path).restore(live)
    assert restored.snapshot is not None
    assert_same_snapshot(restored.snapshot, gpt2_snapshot(20))
    note = texts(restored.events, "warning")
    assert "checkpoint 30" in note
    assert str(tmp_path) in note
    assert "damaged" in note


def test_run_goes_on_over_a_damaged_checkpoint(tmp_path: Path) -> None:
    three(tmp_path)
    truncate(tmp_path / "model_00000030.bin")
    store = make_store(tmp_path, keep=2)
    assert store.restore(gpt2_snapshot(0)).snapshot is not None
    assert (
        texts(save(store, gpt2_snapshot(25)), "warning")
        == f"{tmp_path} holds later checkpoints of another run, left alone: [30]"
    )
    assert folder.done_steps(tmp_path) == [20, 25, 30]
    events = save(store, gpt2_snapshot(30))
    assert [type(e) for e in events] == [Saved]
    assert_same_snapshot(make_store(tmp_path).restore(gpt2_snapshot(0)).snapshot, gpt2_snapshot(30))  # type: ignore[arg-type]


def test_nothing_intact_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    three(tmp_path)
    for step in (10, 20, 30):
        truncate(tmp_path / f"model_{step:08d}.bin")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is intact .*run.overwrite=true") as caught:
        make_store(tmp_path).restore(gpt2_snapshot(0))
    assert "\n" not in str(caught.value)
    assert folder.done_steps(tmp_path) == [10, 20, 30]


@pytest.mark.parametrize(
    "name", ["DONE_junk", "DONE_00000099.tmp", "DONE_000000990", "DONE_99", "xDONE_00000099"]
)
def test_only_exact_names_count(tmp_path: Path, name: str) -> None:
    three(tmp_path)
    (tmp_path / name).touch()
    restored = make_store(tmp_path).restore(gpt2_snapshot(0))
    assert restored.snapshot is not None
    assert restored.snapshot.step == 30


def test_file_of_another_step_is_damage(tmp_path: Path) -> None:
    three(tmp_path)
    for name in ("state_{:08d}_00000.bin", "extra_{:08d}_00000.json"):
        shutil.copy(tmp_path / name.format(20), tmp_path / name.format(30))
    restored = make_store(tmp_path).restore(gpt2_snapshot(0))
    assert restored.snapshot is not None
    assert restored.snapshot.step == 20
    assert "not the side file of step 30" in texts(restored.events)


def test_leftovers_are_cleaned_and_strangers_left(tmp_path: Path) -> None:
    three(tmp_path)
    (tmp_path / "DONE_00000030").unlink()
    for name in ("model_00000040.bin.tmp", "DONE_00000040.tmp", ".probe_12_34.tmp"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "model_00000007.bin").write_bytes(b"mine")
    (tmp_path / "notes.tmp").write_bytes(b"mine")
    restored = make_store(tmp_path).restore(gpt2_snapshot(0))
    assert restored.snapshot is not None
    assert restored.snapshot.step == 20
    assert "removed the unfinished checkpoint of step 30 (3 files" in texts(restored.events)
    assert "left alone model_00000007.bin" in texts(restored.events)
    assert {"notes.tmp", "model_00000007.bin"} <= set(names(tmp_path))
    assert not any("00000030" in name or "00000040" in name or "probe" in name for name in names(tmp_path))


# ---------------------------------------------------------------- llm.c's own


def golden_live(case: str, **changes: Any) -> Snapshot:
    model = llmc_format.read_model(GOLDEN / case / "model_00000015.bin")
    params = model.header.params
    names = ("m", "v", "master") if case.endswith("_master") else ("m", "v")
    live = replace(
        gpt2_snapshot(0),
        layout=llmc_format.gpt2_layout(model.header.shape),
        model={"kind": "gpt2", **model.header.shape},
        weights=torch.zeros(params, dtype=model.header.dtype),
        optimizer={name: torch.zeros(params) for name in names},
    )
    return replace(live, **changes)


@pytest.mark.parametrize("case", sorted(p.name for p in (GOLDEN / "state").iterdir()))
def test_llmc_checkpoint_resumes(tmp_path: Path, case: str) -> None:
    shutil.copytree(GOLDEN / "state" / case, tmp_path, dirs_exist_ok=True)
    live = golden_live(f"state/{case}")
    live.model["dropout"] = 0.1  # which llm.c's header does not know
    restored = make_store(tmp_path, resume="must").restore(live)
    assert restored.snapshot is not None
    assert restored.snapshot.step == 15
    assert restored.snapshot.parts == {}
    assert "_00000.json (llm.c wrote it, or it was lost)" in texts(restored.events)
    again = make_store(tmp_path)
    save(again, replace(restored.snapshot, step=15))
    for name in ("model_00000015.bin", "state_00000015_00000.bin"):
        assert (tmp_path / name).read_bytes() == (GOLDEN / "state" / case / name).read_bytes()


def test_llmc_master_weights_are_dropped_where_none_are_kept(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "state/fp32_shuffle_master", tmp_path, dirs_exist_ok=True)
    live = golden_live("state/fp32_shuffle_master")
    del live.optimizer["master"]
    restored = make_store(tmp_path).restore(live)
    assert restored.snapshot is not None
    assert set(restored.snapshot.optimizer) == {"m", "v"}
    assert "its master weights are not used" in texts(restored.events)


def test_llmc_zero1_checkpoint_needs_its_ranks(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "state_zero1", tmp_path, dirs_exist_ok=True)
    (tmp_path / "DONE_00000002").touch()
    (tmp_path / "state_00000002_00001.bin").unlink()
    with pytest.raises(ValueError, match=r"state_00000002_00001.bin: No such file"):
        make_store(tmp_path).restore(gpt2_snapshot(0))


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
from tests.test_checkpoint_store import make_store, save
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
    with pytest.raises(ValueError, match=r"run.dir: cannot write to .*file/run \(Not a directory\)"):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_first_non_finite_element_is_found(dtype: torch.dtype) -> None:
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
