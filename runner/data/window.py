"""Sequences that start anywhere: random windows, and validation rows that wrap around."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.data.shard import Shard, ShardReader
from runner.data.stream import (
    Pair,
    Position,
    Shape,
    State,
    recut,
    require_same,
    require_same_shape,
    shape_state,
)


def random_words(seed: int, *, start: int, count: int) -> NDArray[np.uint64]:
    """Return words `start` ... of the Philox stream of `seed`: a pure function of its arguments.

    Philox is counter-based (Salmon et al. 2011), four words to a counter, and numpy keeps the raw
    words of its bit generators the same across versions.
    """
    block, skip = divmod(start, 4)
    philox = np.random.Philox(key=seed, counter=block)
    return philox.random_raw(skip + count)[skip:].astype(np.uint64)


def rows_in(shards: Sequence[Shard], seq_len: int) -> int:
    """Return how many rows of T tokens and their targets lie end to end in the shards."""
    return sum(max(0, shard.tokens - 1) // seq_len for shard in shards)


class WindowSource:
    """Random windows of T + 1 tokens, uniform over all places of all shards where one fits.

    As in a loop that draws `randint(0, len(x) - T)`: the starts of a shard with n tokens are
    [0, n - T), no window crosses into another shard. Row number k of the run takes word k of the
    seed's random stream, whatever the number of ranks, so the position is one integer.
    """

    def __init__(self, reader: ShardReader, shape: Shape, *, seed: int) -> None:
        self._reader = reader
        self._shape = shape
        self._seed = seed
        self._batches = 0
        self._ends = np.cumsum(
            [max(0, shard.tokens - shape.seq_len) for shard in reader.shards], dtype=np.int64
        )
        self._position = Position(None, 0, 0)

    @property
    def position(self) -> Position:
        """Where the last batch's first row starts."""
        return self._position

    def take(self) -> Pair:
        rows = self._shape.micro_batch
        first = (self._batches * self._shape.world + self._shape.rank) * rows
        total = int(self._ends[-1])
        # The high half of word * total is uniform in [0, total) up to a bias of total / 2**64.
        places = [(int(word) * total) >> 64 for word in random_words(self._seed, start=first, count=rows)]
        self._batches += 1
        pair, self._position = _read_rows(
            self._reader, self._shape, [self._locate(place) for place in places]
        )
        return pair

    def state_dict(self) -> State:
        return {
            "order": "windows",
            "batches": self._batches,
            "window_seed": self._seed,
            "windows": int(self._ends[-1]),
            **shape_state(self._shape),
        }

    def load_state_dict(self, state: State) -> None:
        saved = state.get("order", "shuffle")
        require_same("order", saved=saved, current="windows", way_out=f"data.order={saved}")
        state, _ = recut(state, self._shape, counter="batches")
        require_same_shape(state, self._shape)
        same_files = "resume with the data files that the run started with"
        require_same("windows", saved=state["windows"], current=int(self._ends[-1]), way_out=same_files)
        way_out = f"data.seed={state['window_seed']}"
        require_same("seed", saved=state["window_seed"], current=self._seed, way_out=way_out)
        self._batches = int(state["batches"])

    def close(self) -> None:
        self._reader.close()

    def _locate(self, place: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, place, side="right"))
        return shard, place - (int(self._ends[shard - 1]) if shard else 0)


class RowSource:
    """Rows end to end in file order, starting over after the last: any small set fills any batch.

    Rank r takes rows r*B ... of each batch of P*B rows, so all ranks always have a batch.
    """

    def __init__(self, reader: ShardReader, shape: Shape) -> None:
        self._reader = reader
        self._shape = shape
        self._batches = 0
        self._rows = [
            (index, row * shape.seq_len)
            for index, shard in enumerate(reader.shards)
            for row in range(rows_in([shard], shape.seq_len))
        ]
        self._position = Position(None, 0, 0)

    @property
    def position(self) -> Position:
        """Where the last batch's first row starts."""
        return self._position

    def take(self) -> Pair:
        batch = self._batches * self._shape.world + self._shape.rank
        first = batch * self._shape.micro_batch
        chosen = [self._rows[(first + row) % len(self._rows)] for row in range(self._shape.micro_batch)]
        self._batches += 1
        pair, position = _read_rows(self._reader, self._shape, chosen)
        self._position = position._replace(epoch=first // len(self._rows))
        return pair

    def state_dict(self) -> State:
        return {"order": "rows", "batches": self._batches, **shape_state(self._shape)}

    def load_state_dict(self, state: State) -> None:
        require_same(
            "order", saved=state.get("order"), current="rows", way_out="open the validation set anew"
        )
        require_same_shape(state, self._shape)
        self._batches = int(state["batches"])

    def close(self) -> None:
        self._reader.close()


def _read_rows(reader: ShardReader, shape: Shape, rows: Sequence[tuple[int, int]]) -> tuple[Pair, Position]:
    pair: NDArray[Any] = np.empty((2, shape.micro_batch, shape.seq_len), np.int64)
    for row, (shard, start) in enumerate(rows):
        tokens = reader.read(shard, start=start, count=shape.seq_len + 1)
        pair[0, row] = tokens[:-1]
        pair[1, row] = tokens[1:]
    shard, start = rows[0]
    return pair, Position(reader.shards[shard].path, start, 0)
