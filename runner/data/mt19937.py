"""llm.c's Mersenne twister and its permutation, draw for draw (llmc/rand.h)."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

STRUCT_BYTES = 2520
_WORDS = 624
_HEAD = struct.Struct("<QiI")  # seed_ u64, left_ i32, next_ u32
_MATRIX_A = struct.pack("<II", 0, 0x9908B0DF)


class Twister:
    """One generator of 32-bit words; `seed` in [0, 2**32).

    Its state goes to and from the 2520-byte struct of llm.c's state files. llm.c never sets the
    struct's first field, `seed_`; here its 8 bytes are always 0 when written and ignored when read.
    """

    def __init__(self, seed: int) -> None:
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed={seed} must lie in [0, 2**32): the generator takes 32 bits")
        self._bits = np.random.MT19937()
        seeded = np.random.RandomState(seed).get_state(legacy=False)  # classic init_genrand
        self._place(seeded["state"]["key"], seeded["state"]["pos"])
        self._drawn = False

    def draws(self, n: int) -> NDArray[np.uint32]:
        """Return the next `n` words."""
        self._drawn |= n > 0
        self._packed = b""
        return self._bits.random_raw(n).astype(np.uint32)

    def to_bytes(self) -> bytes:
        """Return the state as llm.c's struct mt19937_state."""
        if not self._packed:
            self._packed = self._pack()
        return self._packed

    def _pack(self) -> bytes:
        state = self._bits.state["state"]
        left = _WORDS + 1 - int(state["pos"])
        # llm.c counts `next_` from 0 until its first refill, which comes with the first draw.
        following = int(state["pos"]) if self._drawn else 0
        words = np.asarray(state["key"]).astype("<u4").tobytes()
        return _HEAD.pack(0, left, following) + words + _MATRIX_A

    def from_bytes(self, raw: bytes) -> None:
        """Take over the state in llm.c's struct; ValueError if it is not one."""
        if len(raw) != STRUCT_BYTES:
            raise ValueError(f"twister state has {len(raw)} bytes, expected {STRUCT_BYTES}")
        _, left, following = _HEAD.unpack_from(raw)
        if not 1 <= left <= _WORDS or raw[-8:] != _MATRIX_A:
            raise ValueError(f"twister state is damaged: left_={left}, matrix {raw[-8:].hex()}")
        words = np.frombuffer(raw, "<u4", count=_WORDS, offset=_HEAD.size).astype(np.uint32)
        self._place(words, _WORDS + 1 - left)
        self._drawn = following != 0

    def _place(self, key: NDArray[np.uint32], position: int) -> None:
        self._packed = b""  # kept from one draw to the next, as a state is asked for with every batch
        self._bits.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": position}}


def permutation(twister: Twister, n: int) -> NDArray[np.int32]:
    """Return llm.c's random permutation of 0 ... n-1; takes n-1 draws (none for n <= 1).

    The rule: for i from n-1 down to 1, swap entries i and j = draw mod (i+1). Nothing below loops
    over i. Entry i is final after its own swap, when it holds what entry j held just before; and what
    an entry e held just before step i came from step i', the last earlier one that chose e (the
    smallest i' > i with j' = e), which left there what entry i' held just before step i'. So every
    value is found by following such links to a step whose entry nobody had chosen before.
    """
    if n <= 1:
        return np.arange(n, dtype=np.int32)
    chosen = np.zeros(n, np.int64)  # j of step i; step 0 chooses itself
    chosen[1:] = (twister.draws(n - 1) % np.arange(n, 1, -1, dtype=np.uint32))[::-1]

    by_choice = np.sort((chosen << 32) | np.arange(n))
    entry, step = (by_choice >> 32).astype(np.int32), by_choice.astype(np.uint32).astype(np.int32)
    new_entry = np.concatenate(([True], entry[1:] != entry[:-1]))
    before = np.full(n, -1, np.int32)  # the step before this one that chose the same entry
    again = np.flatnonzero(~new_entry)
    before[step.take(again - 1)] = step.take(again)

    first = np.flatnonzero(new_entry)
    target, link = entry.take(first), step.take(first)  # the last step that chose each entry ...
    itself = np.flatnonzero(link == target)  # ... but one that chose its own entry moved nothing
    link[itself] = before.take(link.take(itself))
    moved = np.flatnonzero(link >= 0)
    held = np.arange(n, dtype=np.int32)  # what entry i held just before step i, once followed to the end
    held[target.take(moved)] = link.take(moved)
    while not np.array_equal(further := held.take(held), held):
        held = further

    result = chosen.astype(np.int32)
    again = np.flatnonzero(before >= 0)
    result[again] = held.take(before.take(again))
    return result
