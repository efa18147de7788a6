"""Read an llm.c state file on its own, without the model that says how long its arrays are."""

from __future__ import annotations

import struct
from pathlib import Path

from runner.checkpoint import llmc_format
from runner.checkpoint.llmc_format import StateFile
from runner.checkpoint.reader import Reader
from runner.data.shard import ShardReader, inspect_shards
from runner.data.stream import Shape, ShardSource

_MAX_ENTRIES = 1 << 20  # shards and samples together, tried one by one
_TWISTER_BYTES = 2520


def read(path: Path) -> StateFile:
    """Read a state file whose model is not known; ValueError if no array length fits the file."""
    return llmc_format.read_state(path, params=values_per_array(path))


def values_per_array(path: Path) -> int:
    """Find the length of m, v and master from the file's size, its flags and the counts of its orders."""
    with Reader(path) as file:
        header = file.take(1024)
        master, shuffled = struct.unpack_from("<2i", header, 16)
        width = 4 * (3 if master else 2)
        body = file.size - 1024
        if not shuffled:
            return body // width
        for entries in range(2, min(_MAX_ENTRIES, body // 4)):
            numel, rest = divmod(body - 16 - _TWISTER_BYTES - 4 * entries, width)
            if rest == 0 and numel > 0 and _entries_at(file, 1024 + width * numel) == entries:
                return numel
    raise ValueError(f"{path}: {file.size} bytes, no length of its arrays fits; the file is damaged")


def _entries_at(file: Reader, at: int) -> int | None:
    """Return the number of shards and samples if a shuffle block starts at byte `at`."""
    shards = file.peek_u64(at)
    if shards is None or not 1 <= shards < _MAX_ENTRIES:
        return None
    samples = file.peek_u64(at + 8 + 4 * shards)
    return None if samples is None or not 1 <= samples < _MAX_ENTRIES else shards + samples


def next_batch(
    file: StateFile, data: str, *, micro_batch: int | None, seq_len: int | None
) -> list[list[int]]:
    """Return the rows of inputs that come next when training goes on from `file`.

    ValueError if the shards are not those of the run.
    """
    assert micro_batch is not None
    assert seq_len is not None
    shards, problems = inspect_shards(data, key="data")
    if problems:
        raise ValueError("; ".join(problems))
    shape = Shape(micro_batch, seq_len, file.header.rank, file.header.world)
    reader = ShardReader(shards)
    try:
        source = ShardSource(reader, shape, shuffle=file.header.shuffled)
        source.load_state_dict(file.stream)
        rows: list[list[int]] = source.take()[0].tolist()
    finally:
        reader.close()
    return rows
