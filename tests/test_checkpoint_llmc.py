"""llm.c's files: its own golden files come back byte for byte, and nothing damaged is accepted."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.api import Slot, Snapshot
from runner.checkpoint import llmc_format
from runner.checkpoint.disk import Chunk, memory
from runner.checkpoint.reshard import is_sharded, reshard
from tests.checkpoint_cases import gpt2_snapshot, stream

GOLDEN = Path(__file__).parent / "golden"
STATES = sorted(GOLDEN.glob("state*/**/state_*.bin"))
MODELS = sorted([*GOLDEN.glob("state*/**/model_*.bin"), *GOLDEN.glob("tiny/nano*_init*.bin")])


def joined(chunks: list[Chunk]) -> bytes:
    return b"".join(memory(chunk).tobytes() for chunk in chunks)


def golden_snapshot(state: Path) -> Snapshot:
    model = llmc_format.read_model(next(state.parent.glob("model_*.bin")))
    file = llmc_format.read_state(state, params=model.header.params)
    return Snapshot(
        step=file.header.step,
        rank=file.header.rank,
        world=file.header.world,
        layout=llmc_format.gpt2_layout(model.header.shape),
        model={"kind": "gpt2", **model.header.shape},
        weights=model.weights,
        optimizer=file.optimizer,
        stream=file.stream,
        rng=file.header.rng,
    )


@pytest.mark.parametrize("path", MODELS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_model_file_is_rewritten_byte_for_byte(path: Path) -> None:
    file = llmc_format.read_model(path)
    snapshot = replace(gpt2_snapshot(), model={"kind": "gpt2", **file.header.shape}, weights=file.weights)
    assert joined(llmc_format.model_chunks(snapshot)) == path.read_bytes()
    assert llmc_format.read_model_header(path) == file.header


@pytest.mark.parametrize("path", STATES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_state_file_is_rewritten_byte_for_byte(path: Path) -> None:
    snapshot = golden_snapshot(path)
    assert llmc_format.holds(snapshot)
    assert joined(llmc_format.state_chunks(snapshot)) == path.read_bytes()


def test_state_fields_are_those_that_llmc_reports() -> None:
    rows = [row for row in json.loads((GOLDEN / "state.json").read_text())["files"] if row["kept"]]
    assert len(rows) == 6
    for row in rows:
        snapshot = golden_snapshot(GOLDEN / "state" / row["file"])
        assert (snapshot.step, snapshot.world, snapshot.rank) == (15, 1, 0)
        assert snapshot.rng["state"] == int(row["rng_state"], 16)
        assert snapshot.rng["last_update"] == int(row["rng_state_last_update"], 16)
        assert snapshot.stream["shard_slot"] == row["current_shard_idx"]
        assert snapshot.stream["sample_slot"] == row["current_sample_idx"]
        assert set(snapshot.optimizer) == set(row["stats"])
        for name, stats in row["stats"].items():
            assert snapshot.optimizer[name][:4].tolist() == stats["first4"]
        if row["should_shuffle"]:
            assert snapshot.stream["shard_order"].tolist() == row["shard_indices"]
            assert snapshot.stream["sample_order"].tolist() == row["intra_shard_indices"]
            left, nxt = struct.unpack_from("<iI", snapshot.stream["twister"], 8)
            assert (left, nxt) == (row["mt_left"], row["mt_next"])


def test_zero1_halves_are_slices_of_each_layer() -> None:
    ranks = [golden_snapshot(GOLDEN / "state_zero1" / f"state_00000002_0000{r}.bin") for r in (0, 1)]
    assert all(is_sharded(snapshot) for snapshot in ranks)
    whole = reshard(ranks, world=1, rank=0, sharded=False)
    # lr was 0 in that run, so the joined master must be the model's own weights
    assert torch.equal(whole.optimizer["master"], whole.weights)
    for rank in (0, 1):
        again = reshard([whole], world=2, rank=rank, sharded=True)
        assert torch.equal(again.optimizer["m"], ranks[rank].optimizer["m"])
        assert torch.equal(again.optimizer["master"], ranks[rank].optimizer["master"])


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=4),
    worlds=st.tuples(st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3, 4])),
    seed=st.integers(0, 9),
)
def test_recutting_loses_nothing(shapes: list[tuple[int, int]], worlds: tuple[int, int], seed: int) -> None:
    layout: list[Slot] = []
    for i, (layers, extent) in enumerate(shapes):
        offset = layout[-1].offset + layout[-1].numel if layout else 0
        layout.append(Slot(f"t{i}.*", (extent * 12,), layers, offset))
    numel = sum(slot.numel for slot in layout)
    whole = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    base = replace(gpt2_snapshot(), layout=tuple(layout), weights=whole, optimizer={"m": whole, "t": 3})
    for world in worlds:
        cut = [reshard([base], world=world, rank=rank, sharded=True) for rank in range(world)]
        assert all(s.optimizer["m"].numel() == numel // world for s in cut)
        base = reshard(cut, world=1, rank=0, sharded=False)
        assert torch.equal(base.optimizer["m"], whole)


def test_recutting_refuses_what_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match=r"embed.wte has 1024 elements per layer, which 3 ranks"):
        reshard([gpt2_snapshot()], world=3, rank=0, sharded=True)


def test_stream_of_another_order_goes_to_the_side_file_whole() -> None:
    windows = {"order": "windows", "batches": 7}
    snapshot = replace(gpt2_snapshot(), stream=windows)
    assert llmc_format.stream_rest(windows) == windows
    header = joined(llmc_format.state_chunks(snapshot))[:1024]
    assert struct.unpack_from("<2Q", header, 120) == (0, 0)
    assert llmc_format.stream_rest({**stream(), "epoch": 2}) == {"epoch": 2}


# ---------------------------------------------------------------- damage


def damaged(tmp_path: Path, data: bytes, name: str) -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


MODEL = (GOLDEN / "state/fp32_shuffle_master/model_00000015.bin").read_bytes()
STATE = (GOLDEN / "state/fp32_shuffle_master/state_00000015_00000.bin").read_bytes()


def with_int(data: bytes, index: int, value: int) -> bytes:
    return data[: 4 * index] + struct.pack("<i", value) + data[4 * index + 4 :]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "too few"),
        (MODEL[:500], "too few"),
        (MODEL[:-1], "its header asks for 9184"),
        (MODEL + b"\0", "its header asks for 9184"),
        (with_int(MODEL, 0, 20240327), "magic 20240327"),
        (with_int(MODEL, 1, 4), "version 4, known are 3"),
        (with_int(MODEL, 1, 5), "its header asks for"),
        (with_int(MODEL, 4, 2**31 - 1), "its header asks for"),
        (with_int(MODEL, 6, -8), "damaged header"),
        (with_int(MODEL, 5, 3), "impossible shape"),
        (with_int(MODEL, 200, 1), "damaged header"),
    ],
)
def test_damaged_model_is_one_clear_line(tmp_path: Path, data: bytes, reason: str) -> None:
    path = damaged(tmp_path, data, "model.bin")
    with pytest.raises(ValueError, match=reason) as caught:
        llmc_format.read_model(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "too few"),
        (STATE[:-1], "parameters on 1 ranks need"),
        (STATE + b"\0", "parameters on 1 ranks need"),
        (STATE[:4000], "need"),
        (with_int(STATE, 0, 1), "magic 1"),
        (with_int(STATE, 1, 2), "version 2"),
        (with_int(STATE, 2, 0), "world 0"),
        (with_int(STATE, 3, 1), "rank 1"),
        (with_int(STATE, 4, 2), "master 2"),
        (with_int(STATE, 4, 0), "need"),
        (with_int(STATE, 5, 0), "need"),
        (with_int(STATE, 10, -1), "step -1"),
        (with_int(STATE, 7, 1), "damaged header"),
        (with_int(STATE, 30, 3), "position does not exist"),
        (with_int(STATE, 33, 1), "position does not exist"),
        (STATE[:25504] + struct.pack("<Q", 2**62) + STATE[25512:], "need"),
        (STATE[:25512] + struct.pack("<i", 1) + STATE[25516:], "shard order is not a permutation"),
        (STATE[:25532] + struct.pack("<i", -5) + STATE[25536:], "sample order is not a permutation"),
        (STATE[:25636] + struct.pack("<i", 0) + STATE[25640:], "Mersenne twister"),
        (STATE[:-4] + b"\0\0\0\0", "Mersenne twister"),
    ],
)
def test_damaged_state_is_one_clear_line(tmp_path: Path, data: bytes, reason: str) -> None:
    path = damaged(tmp_path, data, "state.bin")
    with pytest.raises(ValueError, match=reason) as caught:
        llmc_format.read_state(path, params=2040)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a regular file"):
        llmc_format.read_model(tmp_path)
    with pytest.raises(ValueError, match="No such file"):
        llmc_format.read_model(tmp_path / "absent.bin")


def test_state_of_both_sizes_is_told_apart_by_its_length(tmp_path: Path) -> None:
    for sharded in (False, True):
        for order in ("shuffle", "sequential"):
            snapshot = gpt2_snapshot(rank=1, world=2, sharded=sharded, order=order, master=True)
            path = damaged(tmp_path, joined(llmc_format.state_chunks(snapshot)), "state.bin")
            file = llmc_format.read_state(path, params=snapshot.weights.numel())
            assert file.header.numel == snapshot.optimizer["m"].numel()
            assert np.array_equal(file.optimizer["master"], snapshot.optimizer["master"])
