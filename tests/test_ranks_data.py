"""A data position goes on at another number of ranks: the same micro-batches in the same order."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.data.shard import Shard, ShardReader
from runner.data.stream import Shape, ShardSource
from runner.data.window import WindowSource

B, T = 1, 4


class Counting(ShardReader):
    """Shards whose tokens are their own places."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__([Shard(Path(f"{i}.bin"), size, np.dtype("<u4")) for i, size in enumerate(sizes)])

    def read(self, index: int, *, start: int, count: int) -> Any:
        return (1000 * index + np.arange(start, start + count)).astype(np.uint32)


def sources(order: str, world: int, sizes: list[int]) -> list[Any]:
    shapes = [Shape(B, T, rank, world) for rank in range(world)]
    if order == "windows":
        return [WindowSource(Counting(sizes), shape, seed=3) for shape in shapes]
    return [ShardSource(Counting(sizes), shape, shuffle=order == "shuffle") for shape in shapes]


def read(ranks: list[Any], steps: int) -> list[int]:
    """Return the first tokens of what all ranks read, in the order of the data."""
    return [int(source.take()[0, 0, 0]) for _ in range(steps) for source in ranks]


@settings(max_examples=40, deadline=None)
@given(
    order=st.sampled_from(["sequential", "windows"]),
    worlds=st.lists(st.sampled_from([1, 2, 4]), min_size=2, max_size=4),
    steps=st.integers(1, 3),
)
def test_a_recut_run_reads_what_one_rank_reads(order: str, worlds: list[int], steps: int) -> None:
    sizes = [8 * B * T * 4 + 1, 4 * B * T * 4 + 1]  # whole samples for any of these worlds
    seen: list[int] = []
    state: Any = None
    for world in worlds:
        ranks = sources(order, world, sizes)
        for source in ranks:
            if state is not None:
                source.load_state_dict({**state, "recut": True})
        seen += read(ranks, steps * 4 // world)
        state = ranks[0].state_dict()
    assert seen == read(sources(order, 1, sizes), len(seen))


def test_a_shuffled_run_begins_a_new_pass_that_covers_everything_once() -> None:
    sizes = [8 * T + 1, 8 * T + 1]
    before = sources("shuffle", 4, sizes)
    read(before, 3)
    states = [source.state_dict() for source in before]
    after = sources("shuffle", 2, sizes)
    for source, state in zip(after, states, strict=False):
        source.load_state_dict({**state, "recut": True})
    assert all(source.state_dict()["epoch"] == 1 for source in after)
    first_pass = Counter(read(after, 8))
    assert first_pass == Counter(1000 * shard + T * i for shard in range(2) for i in range(8))


def test_a_position_that_cannot_be_shared_is_named() -> None:
    (one,) = sources("windows", 1, [100])
    one.take()
    two = sources("windows", 2, [100])[0]
    with pytest.raises(
        ValueError, match="1 micro-batches were read by 1 ranks, which 2 cannot share equally"
    ):
        two.load_state_dict({**one.state_dict(), "recut": True})


def test_without_the_mark_another_number_of_ranks_is_refused() -> None:
    state = sources("windows", 4, [100])[0].state_dict()
    with pytest.raises(ValueError, match=r"parallel\.processes 4, this run has 2"):
        sources("windows", 2, [100])[0].load_state_dict(state)
