"""Shards beyond 2 GiB are read to their end; llm.c cuts the offset to 32 bits and fails there."""

import os
from pathlib import Path

import numpy as np
import pytest

from runner.data.shard import GPT2, MAX_SHARD_TOKENS, ShardReader, read_header
from runner.data.stream import Shape, ShardSource
from runner.describe import Options, describe


def sparse_shard(path: Path, tokens: int, *, known: dict[int, list[int]]) -> Path:
    """Write a shard that is a hole but for the runs of tokens in `known`, by position."""
    header = np.zeros(256, "<i4")
    header[:3] = GPT2.magic, GPT2.version, tokens
    with path.open("wb") as file:
        file.write(header.tobytes())
        file.truncate(1024 + 2 * tokens)
        for position, values in known.items():
            file.seek(1024 + 2 * position)
            file.write(np.array(values, "<u2").tobytes())
    if os.stat(path).st_blocks * 512 > 1 << 24:
        pytest.skip("this file system has no sparse files")
    return path


@pytest.mark.parametrize("tokens", [MAX_SHARD_TOKENS, 1_073_741_824 + 4097])
def test_the_last_sample_of_a_large_shard(tmp_path, tokens):
    B, T = 4, 1024
    samples = (tokens - 1) // (B * T)
    last = (samples - 1) * B * T
    values = list(range(B * T + 1))
    path = sparse_shard(tmp_path / "x.bin", tokens, known={last: values})
    shard = read_header(path)
    assert shard.tokens == tokens
    assert last * 2 + 1024 >= 2**31
    source = ShardSource(ShardReader([shard]), Shape(B, T), shuffle=False)
    source.load_state_dict({**source.state_dict(), "sample_slot": samples - 1})
    inputs, targets = source.take()
    assert inputs.reshape(-1).tolist() == values[:-1]
    assert targets.reshape(-1).tolist() == values[1:]
    assert source.state_dict()["sample_slot"] == samples
    assert source.take()[0].max() == 0  # the next epoch begins at the start
    source.close()


@pytest.mark.parametrize("sample", [1023, 1024])
def test_both_sides_of_two_gibibytes(tmp_path, sample):
    """Samples of 2 MiB: llm.c reads number 1023 and fails to seek to 1024."""
    B, T = 1024, 1024
    start = sample * B * T
    path = sparse_shard(tmp_path / "x.bin", 1025 * B * T + 1, known={start: [7, 8, 9]})
    source = ShardSource(ShardReader([read_header(path)]), Shape(B, T), shuffle=False)
    source.load_state_dict({**source.state_dict(), "sample_slot": sample})
    assert source.take()[0].reshape(-1)[:4].tolist() == [7, 8, 9, 0]
    source.close()


@pytest.mark.slow
def test_a_large_shard_is_inspected_to_its_end(tmp_path):
    path = sparse_shard(tmp_path / "x.bin", 2**30 + 10, known={2**30 + 9: [50256]})
    assert "largest token id 50256" in list(describe(path, Options()))
