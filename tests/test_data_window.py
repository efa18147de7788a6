"""Random windows as in a loop that draws randint(0, len(x) - T), and rows that wrap around."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.data.shard import Shard, ShardReader
from runner.data.stream import Shape
from runner.data.window import RowSource, WindowSource, random_words, rows_in


class MemoryReader(ShardReader):
    """Shards in memory: token = 1000 * shard + position."""

    def __init__(self, sizes):
        super().__init__([Shard(Path(f"{i}.bin"), size, np.dtype("<u4")) for i, size in enumerate(sizes)])

    def read(self, index, *, start, count):
        assert 0 <= start <= self.shards[index].tokens - count
        return (1000 * index + np.arange(start, start + count)).astype(np.uint32)


def philox(counter, key):
    """Philox 4x64 with 10 rounds, written down from Salmon et al. 2011."""
    a, b, c, d = counter, 0, 0, 0
    k, m = key, 0
    for _ in range(10):
        left, right = a * 0xD2E7470EE14C6C93, c * 0xCA5A826395121157
        a, b, c, d = (right >> 64) ^ b ^ k, right % 2**64, (left >> 64) ^ d ^ m, left % 2**64
        k, m = (k + 0x9E3779B97F4A7C15) % 2**64, (m + 0xBB67AE8584CAA73B) % 2**64
    return [a, b, c, d]


def test_words_are_philox():
    # known answer of its authors for counter 0 and key 0
    assert [f"{word:016x}" for word in philox(0, 0)] == [
        *("16554d9eca36314c", "db20fe9d672d0fdc", "d7e772cee186176b", "7e68b68aec7ba23b")
    ]
    expected = philox(1, 42) + philox(2, 42)  # numpy counts before it generates
    assert random_words(42, start=0, count=8).tolist() == expected
    whole = random_words(7, start=0, count=40)
    for start in range(30):
        assert np.array_equal(random_words(7, start=start, count=10), whole[start : start + 10])


def test_starts_cover_exactly_the_places_where_a_window_fits():
    sizes, seq_len = [30, 8, 9, 14], 8
    source = WindowSource(MemoryReader(sizes), Shape(64, seq_len), seed=1)
    starts = np.concatenate([source.take()[0][:, 0] for _ in range(300)])
    places = {1000 * i + start for i, size in enumerate(sizes) for start in range(max(0, size - seq_len))}
    found, counts = np.unique(starts, return_counts=True)
    assert set(found.tolist()) == places  # starts in [0, n - T), none in the shard of exactly T tokens
    expected = len(starts) / len(places)
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert chi2 < 70  # 28 degrees of freedom: p < 2e-5


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), at=st.integers(0, 20), world=st.sampled_from([1, 2, 4]))
def test_same_rows_for_any_number_of_ranks_and_after_a_resume(seed, at, world):
    sizes = [200, 50]
    whole = WindowSource(MemoryReader(sizes), Shape(8, 10), seed=seed)
    ranks = [
        WindowSource(MemoryReader(sizes), Shape(8 // world, 10, r, world), seed=seed) for r in range(world)
    ]
    for _ in range(at):
        expected = whole.take()
        assert np.array_equal(expected, np.concatenate([rank.take() for rank in ranks], axis=1))
        assert np.array_equal(expected[0, :, 1:], expected[1, :, :-1])
    resumed = WindowSource(MemoryReader(sizes), Shape(8, 10), seed=seed)
    resumed.load_state_dict(whole.state_dict())
    assert np.array_equal(resumed.take(), whole.take())
    assert all(isinstance(value, int | str) for value in whole.state_dict().values())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"order": "shuffle"}, "data.order=shuffle"),
        ({"window_seed": 5}, "data.seed=5"),
        ({"windows": 1}, "files"),
    ],
)
def test_state_of_another_run_is_refused(change, words):
    source = WindowSource(MemoryReader([100]), Shape(2, 8), seed=1)
    with pytest.raises(ValueError, match=words):
        source.load_state_dict(source.state_dict() | change)


def test_rows_wrap_and_all_ranks_have_batches():
    sizes = [25, 3, 17]  # 3 rows of 8, none, 2
    assert rows_in(MemoryReader(sizes).shards, 8) == 5
    ranks = [RowSource(MemoryReader(sizes), Shape(2, 8, rank, 2)) for rank in range(2)]
    rows = [0, 8, 16, 2000, 2008]
    seen = [int(row) for _ in range(5) for rank in ranks for row in rank.take()[0][:, 0]]
    assert seen == [rows[k % 5] for k in range(20)]
    state = ranks[1].state_dict()
    again = RowSource(MemoryReader(sizes), Shape(2, 8, 1, 2))
    again.load_state_dict(state)
    assert np.array_equal(again.take(), ranks[1].take())
