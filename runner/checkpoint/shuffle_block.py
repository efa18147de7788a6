"""Lay out the end of an llm.c state file: the data loader's permutations and its Mersenne twister.

u64 shards g, g int32 order; u64 n, n int32 sample order of the current shard; the 2520-byte generator.
Source: llm.c's save_state and mt19937_state.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from runner.api import State
from runner.checkpoint.reader import Reader

_TWISTER_BYTES = 2520
_TWISTER = struct.Struct("<QiI624I2I")  # seed_ (llm.c never sets it), left_, next_, state_, MATRIX_A
_TWISTER_MATRIX = (0, 0x9908B0DF)
_MAX_INT = 2**31 - 1


def pack(stream: State) -> bytes:
    """Encode the orders and the twister of a shuffling stream."""
    shards = np.ascontiguousarray(stream["shard_order"], "<i4")
    samples = np.ascontiguousarray(stream["sample_order"], "<i4")
    assert len(stream["twister"]) == _TWISTER_BYTES, "the twister's struct is 2520 bytes"
    counted = (struct.pack("<Q", len(a)) + a.tobytes() for a in (shards, samples))
    return b"".join((*counted, bytes(stream["twister"])))


def size(file: Reader, at: int) -> int | None:
    """Return the shuffle block's size if one can start at byte `at`; None if not."""
    total = 0
    for _ in ("shards", "samples"):
        count = file.peek_u64(at + total)
        if count is None or not 1 <= count <= _MAX_INT:
            return None
        total += 8 + 4 * count
    return total + _TWISTER_BYTES


def read(file: Reader, *, shard_slot: int, sample_slot: int) -> State:
    """Read the block; ValueError if the orders are no permutations or the position is outside them."""

    def permutation(what: str) -> Any:
        (count,) = struct.unpack("<Q", file.take(8))
        order = np.frombuffer(file.take(4 * count), "<i4").astype(np.int32)
        seen = np.bincount(order[(order >= 0) & (order < count)], minlength=count)
        if not (seen == 1).all():
            raise ValueError(f"{file.path}: the {what} order is not a permutation of {count}")
        return order

    shards, samples, twister = permutation("shard"), permutation("sample"), file.take(_TWISTER_BYTES)
    fields = _TWISTER.unpack(twister)
    if not (1 <= fields[1] <= 624 and fields[2] <= 624 and fields[-2:] == _TWISTER_MATRIX):
        raise ValueError(f"{file.path}: damaged Mersenne twister (left {fields[1]}, next {fields[2]})")
    if shard_slot >= len(shards) or sample_slot > len(samples):
        where = f"shard {shard_slot} of {len(shards)}, sample {sample_slot} of {len(samples)}"
        raise ValueError(f"{file.path}: its data position does not exist ({where})")
    block = {"shard_order": shards, "samples": len(samples), "sample_order": samples}
    return {**block, "twister": twister}
