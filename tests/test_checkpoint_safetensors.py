"""Safetensors checkpoints: any state round-trips, and the safetensors library agrees about the files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from runner.checkpoint import safetensors_format
from runner.checkpoint.disk import write_file
from tests.checkpoint_cases import assert_equal, gpt2_snapshot, other_snapshot


def test_model_file_opens_in_the_safetensors_library(tmp_path: Path) -> None:
    snapshot = other_snapshot()
    path = tmp_path / "model.safetensors"
    write_file(path, safetensors_format.model_chunks(snapshot))
    tensors = load_file(path)
    assert sorted(tensors) == ["embed", "layers.0.gate", "layers.1.gate"]
    assert torch.equal(tensors["embed"].view(-1), snapshot.weights[:28])
    assert torch.equal(tensors["layers.1.gate"], snapshot.weights[40:52].view(4, 3))
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    snapshot = gpt2_snapshot(dtype=dtype)
    path = tmp_path / "model.safetensors"
    written = write_file(path, safetensors_format.model_chunks(snapshot))
    weights, model, again = safetensors_format.read_model(path, layout=snapshot.layout)
    assert_equal(weights, snapshot.weights)
    assert model == snapshot.model
    assert again == written


def test_state_round_trip(tmp_path: Path) -> None:
    for snapshot in (other_snapshot(), gpt2_snapshot(master=True)):
        path = tmp_path / "state.safetensors"
        written = write_file(path, safetensors_format.state_chunks(snapshot))
        state, at, again = safetensors_format.read_state(path)
        assert_equal(state["optimizer"], snapshot.optimizer)
        assert_equal(state["stream"], snapshot.stream)
        assert state["rng"] == snapshot.rng
        assert at == {"step": 20, "rank": 0, "world": 1}
        assert again == written
        assert set(load_file(path)) == set(safetensors_format.read_file(path).tensors)


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {
        "a": torch.arange(6).view(2, 3),
        "b": torch.ones(2, dtype=torch.bfloat16),
        "c": torch.tensor(True),
    }
    save_file(tensors, path, metadata={"k": "v"})
    content = safetensors_format.read_file(path)
    assert_equal(dict(sorted(content.tensors.items())), tensors)
    assert content.metadata == {"k": "v"}


def test_other_model_is_named(tmp_path: Path) -> None:
    snapshot = other_snapshot()
    path = tmp_path / "model.safetensors"
    write_file(path, safetensors_format.model_chunks(snapshot))
    wider = (snapshot.layout[0], snapshot.layout[1]._replace(shape=(4, 6)))
    with pytest.raises(
        safetensors_format.MismatchError, match=r"layers.0.gate has shape \[4, 3\] in the file"
    ):
        safetensors_format.read_model(path, layout=wider)
    deeper = (snapshot.layout[0], snapshot.layout[1]._replace(layers=3))
    with pytest.raises(
        safetensors_format.MismatchError, match=r"layers.2.gate has shape \(absent\) in the file"
    ):
        safetensors_format.read_model(path, layout=deeper)


def header_of(table: Any) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text


F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        (2**40).to_bytes(8, "little") + b"{}",
        header_of(b"{"),
        header_of(b"[" * 100_000),
        header_of([]),
        header_of({"a": 1}),
        header_of({"a": {**F32, "dtype": "F33"}}) + bytes(4),
        header_of({"a": {**F32, "shape": [-1]}}) + bytes(4),
        header_of({"a": {**F32, "shape": [2**62, 4]}}) + bytes(4),
        header_of({"a": {**F32, "data_offsets": [0, 2**62]}}) + bytes(4),
        header_of({"a": {**F32, "data_offsets": [4, 8]}}) + bytes(8),
        header_of({"a": F32, "b": F32}) + bytes(4),
        header_of({"a": F32}) + bytes(3),
        header_of({"a": F32}) + bytes(5),
        header_of({"a": F32, "__metadata__": {"x": 1}}) + bytes(4),
        header_of(b'{"a":{},"a":{}}'),
    ],
)
def test_damaged_file_is_a_value_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=str(path)):
        safetensors_format.read_file(path)


def test_state_metadata_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for state in ("[]", '{"optimizer":{},"stream":{},"rng":{}}', '{"optimizer":1,"stream":{},"rng":{}}', "x"):
        path.write_bytes(
            header_of({"__metadata__": {"step": "1", "rank": "0", "world": "1", "state": state}})
        )
        with pytest.raises(ValueError, match="not a state file"):
            safetensors_format.read_state(path)


def test_names_need_a_star_for_stacked_slots() -> None:
    snapshot = other_snapshot()
    bad = replace(snapshot, layout=(snapshot.layout[1]._replace(name="gate"),))
    with pytest.raises(AssertionError, match="needs a"):
        safetensors_format.model_chunks(bad)
