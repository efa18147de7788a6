"""One rank's walk through token shards in llm.c's order, to the sample (llmc/dataloader.h).

Everything here is host arithmetic on numpy arrays; `loader.Loader` turns it into an `api.Stream`.
With P ranks of B sequences of T tokens, sample k of a shard is its tokens from k*P*B*T on, and rank r
reads B*T + 1 of them from column r*B*T. The tail that fills no sample is never read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from runner.data.mt19937 import Twister, permutation
from runner.data.shard import ShardReader

State = dict[str, Any]
Pair = NDArray[np.int64]  # [2, B, T]: inputs, targets

LLMC_SHUFFLE_SEED = 42


class Shape(NamedTuple):
    """How a rank's batches are cut out of the tokens."""

    micro_batch: int  # B, sequences
    seq_len: int  # T, tokens
    rank: int = 0
    world: int = 1  # P, ranks

    @property
    def rank_tokens(self) -> int:
        return self.micro_batch * self.seq_len

    @property
    def step_tokens(self) -> int:
        """Tokens of one sample: a micro-batch of every rank."""
        return self.world * self.rank_tokens

    def samples(self, tokens: int) -> int:
        """Return how many samples a shard of `tokens` tokens holds."""
        return max(0, tokens - 1) // self.step_tokens


class Position(NamedTuple):
    """Where the last batch came from: `start` is the position of its first token in the file."""

    path: Path | None
    start: int
    epoch: int


class Source(Protocol):
    """An endless source of host batches; its state is the position after the last `take`."""

    @property
    def position(self) -> Position: ...

    def take(self) -> Pair: ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...

    def close(self) -> None: ...


class ShardSource:
    """Samples of one shard after the other: in file order, or shuffled by llm.c's permutations.

    Shuffled: the order of the shards is permuted at each reset from where it stands, and each opened
    shard's samples by a fresh permutation. The generator is seeded with `seed + rank`, so each rank
    walks its own order of shards; as it always reads its own column, an epoch covers all once.
    """

    def __init__(
        self, reader: ShardReader, shape: Shape, *, shuffle: bool, seed: int = LLMC_SHUFFLE_SEED
    ) -> None:
        self._reader = reader
        self._shape = shape
        self._twister = Twister(seed + shape.rank) if shuffle else None
        self._shard_order = np.arange(len(reader.shards), dtype=np.int32)
        self._epoch = -1
        self._position = Position(None, 0, 0)
        self._reset()

    @property
    def order(self) -> Literal["shuffle", "sequential"]:
        return "sequential" if self._twister is None else "shuffle"

    @property
    def position(self) -> Position:
        return self._position

    def take(self) -> Pair:
        if self._sample_slot >= self._samples:
            self._advance()
        shard = self._shard_index(self._shard_slot)
        sample = self._sample_slot
        if self._twister is not None:
            sample = int(self._sample_order[sample])
        start = sample * self._shape.step_tokens + self._shape.rank * self._shape.rank_tokens
        tokens = self._reader.read(shard, start=start, count=self._shape.rank_tokens + 1)
        self._sample_slot += 1
        self._position = Position(self._reader.shards[shard].path, start, self._epoch)
        pair = np.empty((2, self._shape.micro_batch, self._shape.seq_len), np.int64)
        pair[0].reshape(-1)[:] = tokens[:-1]
        pair[1].reshape(-1)[:] = tokens[1:]
        return pair

    def state_dict(self) -> State:
        """Return what llm.c's state file holds, and the epoch and the shape, which it does not.

        `shard_slot` and `sample_slot` are places in the orders (llm.c's current_shard_idx and
        current_sample_idx); the arrays are never changed in place, so they need no copy.
        """
        state: State = {
            "order": self.order,
            "shard_slot": self._shard_slot,
            "sample_slot": self._sample_slot,
            "shards": len(self._reader.shards),
            "epoch": self._epoch,
            **shape_state(self._shape),
        }
        if self._twister is not None:
            state |= {
                "shard_order": self._shard_order,
                "samples": self._samples,
                "sample_order": self._sample_order,
                "twister": self._twister.to_bytes(),
            }
        return state

    def load_state_dict(self, state: State) -> None:
        """Take over a state of ours, or the fields of a state file that llm.c wrote.

        The number of samples is compared with the shard that is being resumed, whatever shard a
        fresh start would open first. An index at the end of a shard advances at the next `take`.
        A state of another number of ranks that is marked `recut` goes on in file order where they
        were together; shuffled, a new pass begins, as each rank's order was its own.
        """
        saved_order = state.get("order", "shuffle" if "twister" in state else "sequential")
        require_same("order", saved=saved_order, current=self.order, way_out=f"data.order={saved_order}")
        state, other_ranks = recut(state, self._shape, counter="sample_slot")
        require_same_shape(state, self._shape)
        count = len(self._reader.shards)
        shard_order = np.asarray(state.get("shard_order", self._shard_order), np.int32).copy()
        require_same(
            "number of shards",
            saved=state.get("shards", len(shard_order)),
            current=count,
            way_out=_SAME_FILES,
        )
        slot = int(state["shard_slot"])
        if not 0 <= slot < count or not np.array_equal(np.sort(shard_order), np.arange(count)):
            raise ValueError(f"saved data position is damaged: shard slot {slot} of {count} shards")
        if self._twister is not None and other_ranks:
            self._twister.from_bytes(bytes(state["twister"]))
            self._shard_order, self._epoch = shard_order, int(state.get("epoch", 0))
            self._reset()
            return
        if self._twister is not None:
            self._load_shuffle(state, resumed=int(shard_order[slot]))
        self._shard_order = shard_order
        self._enter(slot, sample_slot=int(state["sample_slot"]))
        self._epoch = int(state.get("epoch", 0))

    def close(self) -> None:
        self._reader.close()

    def _load_shuffle(self, state: State, *, resumed: int) -> None:
        assert self._twister is not None
        sample_order = np.asarray(state["sample_order"], np.int32).copy()
        shard = self._reader.shards[resumed]
        require_same(
            f"samples in {shard.path.name}",
            saved=len(sample_order),
            current=self._shape.samples(shard.tokens),
            way_out=_SAME_FILES,
        )
        if not np.array_equal(np.sort(sample_order), np.arange(len(sample_order))):
            raise ValueError("saved data position is damaged: its order of samples is no permutation")
        self._twister.from_bytes(bytes(state["twister"]))
        self._sample_order = sample_order

    def _shard_index(self, slot: int) -> int:
        return int(self._shard_order[slot])

    def _reset(self) -> None:
        self._epoch += 1
        if self._twister is not None:
            self._shard_order = self._shard_order[permutation(self._twister, len(self._shard_order))]
        self._open(0)

    def _advance(self) -> None:
        while self._sample_slot >= self._samples:
            if self._shard_slot + 1 < len(self._shard_order):
                self._open(self._shard_slot + 1)
            else:
                self._reset()

    def _open(self, slot: int) -> None:
        self._enter(slot, sample_slot=0)
        if self._twister is not None:
            self._sample_order = permutation(self._twister, self._samples)

    def _enter(self, slot: int, *, sample_slot: int) -> None:
        self._shard_slot = slot
        self._sample_slot = sample_slot
        self._samples = self._shape.samples(self._reader.shards[self._shard_index(slot)].tokens)


_SAME_FILES = "resume with the data files that the run started with"


def shape_state(shape: Shape) -> State:
    """Return the part of a state that says how batches were cut; llm.c's files lack it."""
    return {"micro_batch": shape.micro_batch, "seq_len": shape.seq_len, "world": shape.world}


def recut(state: State, shape: Shape, *, counter: str) -> tuple[State, bool]:
    """Return a state marked `recut` as one of this number of ranks, and whether the number differs.

    `counter` counts micro-batches of one rank; what all ranks together have read stays the same.
    """
    before = int(state.get("world", shape.world))
    if not state.get("recut") or before == shape.world:
        return state, False
    read = int(state[counter]) * before
    shuffled = state.get("order") == "shuffle"
    if read % shape.world and not shuffled:
        raise ValueError(
            f"saved data position: {read} micro-batches were read by {before} ranks, which {shape.world} "
            f"cannot share equally; resume with a divisor of {before} ranks"
        )
    return {**state, counter: read // shape.world, "world": shape.world}, True


def require_same_shape(state: State, shape: Shape) -> None:
    """Raise ValueError if a state was saved with another cut of batches."""
    for name, current in shape_state(shape).items():
        key = "parallel.processes" if name == "world" else f"train.{name}"
        saved = state.get(name, current)
        require_same(key, saved=saved, current=current, way_out=f"{key}={saved}")


def require_same(what: str, *, saved: object, current: object, way_out: str) -> None:
    """Raise ValueError if a saved data position does not fit this run."""
    if saved != current:
        raise ValueError(f"saved data position has {what} {saved}, this run has {current}: {way_out}")
