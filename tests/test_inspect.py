"""Inspecting: every kind of file is named with its fields, damage is one line, nothing else is touched."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from runner.checkpoint import side_file
from runner.checkpoint.inspect_state import read, values_per_array
from runner.data.tokenizer import ByteTokenizer
from runner.describe import LLAMA3_FIELDS, Options, describe
from runner.inspect import main

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
TINY = GOLDEN / "tiny"
STATES = json.loads((GOLDEN / "state.json").read_text())["files"]
KEPT = [
    row
    for row in STATES
    if row["file"].split("/")[-1].startswith("state_") and (GOLDEN / "state" / row["file"]).exists()
]


def text(path: Path, options: Options = Options()) -> str:  # noqa: B008 (immutable)
    return "\n".join(describe(path, options))


def header(*ints: int) -> bytes:
    return np.array([*ints, *[0] * (256 - len(ints))], "<i4").tobytes()


@pytest.mark.parametrize("row", KEPT, ids=lambda row: row["file"].split("/")[0])
def test_state_files_without_their_model(row):
    path = GOLDEN / "state" / row["file"]
    lines = text(path)
    assert f"optimizer state of step {row['step']}, rank 0 of 1" in lines
    assert f"rng_state={row['rng_state']} rng_state_last_update={row['rng_state_last_update']}" in lines
    where = f"current_shard_idx={row['current_shard_idx']} current_sample_idx={row['current_sample_idx']}"
    assert where in lines
    assert f"master={bool(row['use_master_weights'])} shuffle={bool(row['should_shuffle'])}" in lines
    assert values_per_array(path) == (8896 if row["file"].startswith("bf16") else 2040)


def test_both_ranks_of_zero1_are_read():
    for rank in (0, 1):
        lines = text(GOLDEN / "state_zero1" / f"state_00000002_0000{rank}.bin")
        assert f"rank {rank} of 2, 4448 values each" in lines


def test_the_next_batch_of_a_state_is_what_training_reads_next():
    path = GOLDEN / "state" / "fp32_shuffle_master" / "state_00000015_00000.bin"
    data = str(TINY / "nanoeq_train_*.bin")
    lines = text(path, Options(data=data, batch=2, seq_len=8))
    state = read(path).stream
    shard = np.fromfile(TINY / f"nanoeq_train_00000{state['shard_order'][state['shard_slot']]}.bin", "<u2")[
        512:
    ]
    sample = int(state["sample_order"][state["sample_slot"]])
    for row in (0, 1):
        want = shard[sample * 16 + row * 8 :][:8].tolist()
        assert f"next batch, row {row} {want}" in lines
    with pytest.raises(ValueError, match="samples in nanoeq"):
        text(path, Options(data=data, batch=2, seq_len=16))


def test_models_have_a_norm_per_tensor():
    lines = text(TINY / "tiny_init_bf16.bin")
    assert "GPT-2 model, 39808 parameters of bf16" in lines
    assert "vocab_size=257" in lines
    assert len([line for line in lines.splitlines() if " norm " in line]) == 16
    weights = np.fromfile(TINY / "tiny_init.bin", "<f4")[256:]
    want = np.linalg.norm(weights[: 384 * 32].astype(np.float64))
    assert f"[384, 32] norm {want:.6g}" in text(TINY / "tiny_init.bin")


def test_shards_evaluation_and_tokenizer_files():
    options = Options(tokenizer=ByteTokenizer())
    shard = text(TINY / "tiny_val.bin", options)
    assert "token shard, 4000 tokens of uint16" in shard
    assert "largest token id 256" in shard
    assert "25+63=88" in shard
    assert "10 questions with 4 endings" in text(TINY / "tiny_eval10.bin", options)
    assert "tokenizer, 257 tokens, end of text 256" in text(TINY / "tiny_tokenizer.bin")


def test_llama3_shards_models_and_both_debug_states(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(header(20240801, 7, 3) + np.array([1, 128000, 5], "<u4").tobytes())
    assert "3 tokens of uint32" in text(path)
    assert "largest token id 128000" in text(path)
    path.write_bytes(header(20240803, 5, *range(2, 16)) + np.zeros(10, "<u2").tobytes())
    assert "llama-3 model, 10 parameters of bf16" in text(path)
    assert all(f"{name}={value}" in text(path) for value, name in enumerate(LLAMA3_FIELDS, start=2))
    tokens = np.arange(12, dtype="<i4").tobytes() + np.arange(1, 13, dtype="<i4").tobytes()
    for head in (header(20240327, 2, 2, 6), header(20240803, 2, 6)):
        path.write_bytes(head + tokens + np.zeros(100, "<f4").tobytes())
        assert "debug state, 2 sequences of 6 tokens, 100 values" in text(path)
        assert "targets [1, 2, 3, 4, 5, 6]" in text(path)


def test_our_own_files(tmp_path):
    save_file({"a": torch.ones(3, 4)}, tmp_path / "x.safetensors", metadata={"step": "7"})
    lines = text(tmp_path / "x.safetensors")
    assert "safetensors, 1 tensors, 12 values" in lines
    assert "step 7" in lines
    assert "[3, 4] fp32 norm 3.4641" in lines
    content = {
        "step": 7,
        "rank": 0,
        "world": 1,
        "model": {"kind": "gpt2"},
        "env": {},
        "parts": {"outlier": {}},
    }
    (tmp_path / "extra.json").write_bytes(
        side_file.frame(side_file.dumps(content), files={"m.bin": [9, "ab"]})
    )
    lines = text(tmp_path / "extra.json")
    assert "side file of step 7, rank 0 of 1" in lines
    assert "m.bin" in lines
    (tmp_path / "manifest.json").write_text('{"runner": "1"}')
    with pytest.raises(ValueError, match="not a side file of a checkpoint"):
        text(tmp_path / "manifest.json")


def test_values_that_are_not_finite_are_counted(tmp_path):
    save_file({"a": torch.tensor([1.0, float("nan"), float("inf")])}, tmp_path / "x.safetensors")
    assert "2 not finite" in text(tmp_path / "x.safetensors")


SUBJECTS = [
    *(TINY / f"{name}.bin" for name in ("nano_val", "tiny_eval5", "tiny_tokenizer", "nano_init")),
    *(
        GOLDEN / "state" / name / "state_00000015_00000.bin"
        for name in ("fp32_shuffle_master", "fp32_noshuffle_master")
    ),
]


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(SUBJECTS),
    st.integers(0, 255),
    st.sampled_from([0, 1, -1, 2**31 - 1, -(2**31), 7]),
    st.integers(-9, 9),
)
def test_damage_is_one_line_and_never_a_crash(tmp_path_factory, path, place, value, tail):
    raw = bytearray(path.read_bytes())
    raw[4 * place : 4 * place + 4] = int(value).to_bytes(4, "little", signed=True)
    raw = raw + bytes(tail) if tail > 0 else raw[: len(raw) + tail]
    damaged = tmp_path_factory.mktemp("x") / "x.bin"
    damaged.write_bytes(raw)
    try:
        lines = text(damaged)
    except ValueError as error:
        lines = str(error)
        assert "\n" not in lines
        assert "x.bin" in lines
    assert lines


def test_the_command_goes_on_after_a_damaged_file(tmp_path, capsys):
    (tmp_path / "bad.bin").write_bytes(b"\1\2")
    code = main([str(tmp_path / "bad.bin"), str(TINY / "nano_val.bin"), "tokenizer=byte"])
    printed = capsys.readouterr()
    assert code == 1
    assert "bad.bin: 2 bytes, too short" in printed.err
    assert printed.err.count("\n") == 1
    assert "300 tokens" in printed.out
    assert main([]) == 2
    assert main(["x.bin", "colour=red"]) == 2
    assert main(["x.bin", "data=y", "batch=2"]) == 2
    assert main([str(tmp_path)]) == 2


def test_the_command_line_starts():
    command = [sys.executable, "-m", "runner.inspect", str(TINY / "nano_init.bin")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "GPT-2 model, 2040 parameters of fp32" in done.stdout
