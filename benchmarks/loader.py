"""Batches must cost the same from any amount of data, and thousands of shards must open at once."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np

from benchmarks.results import Row
from benchmarks.workloads import FOLDER
from runner.data.loader import Loader
from runner.data.mt19937 import Twister, permutation
from runner.data.shard import GPT2, HEADER_BYTES, HEADER_INTS, MAX_SHARD_TOKENS, ShardReader, find_shards
from runner.data.shard import read_header as header_of
from runner.data.stream import Shape, ShardSource
from runner.job import keep_freed_memory

SHAPE = Shape(8, 1024)
TURNS, TURN = 50, 40  # batches; more than the loader reads at once


def measure() -> list[Row]:
    """Make sparse shards, read batches of 8 x 1024 tokens in shuffled order."""
    keep_freed_memory()  # as a run does
    folder = FOLDER / "sparse"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        small = [_sparse(folder / "small.bin", tokens=2_000_000)]
        large = [_sparse(folder / f"large_{i:03d}.bin", tokens=MAX_SHARD_TOKENS) for i in range(25)]  # 107 GB
        rows = [_batch("4 MB", small), _batch("100 GB", large)]
        how = f"8 x 1024 tokens, median of {TURNS} turns of {TURN} on one thread, sparse files"
        ratio = rows[1].value / rows[0].value
        rows.append(Row("batch at 100 GB / at 4 MB", ratio, "x", 2.0, 1.5, how))
        for i in range(10_000):
            _sparse(folder / f"many_{i:05d}.bin", tokens=10_000)
        began = time.thread_time()
        shards = [header_of(path) for path in find_shards(str(folder / "many_*.bin"))]
        Loader(ShardSource(ShardReader(shards), SHAPE, shuffle=True)).next()
        rows.append(Row("start on 10,000 shards", time.thread_time() - began, "s", 1.0, 0.2, "cpu"))
        began = time.thread_time()
        permutation(Twister(42), 1_000_000)
        rows.append(Row("llm.c's permutation of a million", 1e3 * (time.thread_time() - began), "ms"))
        return rows
    finally:
        shutil.rmtree(folder)


def _batch(name: str, paths: list[Path]) -> Row:
    loader = Loader(ShardSource(ShardReader([header_of(path) for path in paths]), SHAPE, shuffle=True))
    loader.next()
    times = []
    for _ in range(TURNS):
        began = time.thread_time()
        for _ in range(TURN):
            loader.next()
        times.append((time.thread_time() - began) / TURN)
    loader.close()
    return Row(f"a batch from {name}", 1e6 * float(np.median(times)), "us")


def _sparse(path: Path, *, tokens: int) -> Path:
    header = np.zeros(HEADER_INTS, np.int32)
    header[:3] = GPT2.magic, GPT2.version, tokens
    with path.open("wb") as file:
        file.write(header.tobytes())
        file.truncate(HEADER_BYTES + 2 * tokens)
    return path


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main("loader")
