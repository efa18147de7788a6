"""The store: what is saved comes back, what is damaged is named, and nothing good is ever lost."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.api import Event, Note, Saved, Snapshot
from runner.checkpoint import folder, llmc_format
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
    with pytest.raises(
        ValueError, match=r"2 ranks with unsharded .* use its kind of parallel, .* stay exact"
    ):
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
