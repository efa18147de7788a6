"""llm.c's batches to the token, its state files, and exact resumption anywhere."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.data.loader import Loader
from runner.data.shard import Shard, ShardReader, inspect_shards
from runner.data.stream import Shape, ShardSource

GOLDEN = Path(__file__).parent / "golden"
RUNS = json.loads((GOLDEN / "dataloader.json").read_text())["runs"]
STATES = json.loads((GOLDEN / "loader_state.json").read_text())["states"]


class MemoryReader(ShardReader):
    """Shards in memory: token = 1000 * shard + position."""

    def __init__(self, sizes):
        super().__init__([Shard(Path(f"{i}.bin"), size, np.dtype("<u4")) for i, size in enumerate(sizes)])

    def read(self, index, *, start, count):
        assert start + count <= self.shards[index].tokens
        return (1000 * index + np.arange(start, start + count)).astype(np.uint32)


def name(run):
    ranks = f"{run['rank']}of{run['num_processes']}"
    return f"{run['pattern']}-{run['B']}x{run['T']}-{ranks}-{run['should_shuffle']}"


def open_run(run, *, prefetch=0):
    need = run["B"] * run["T"] * run["num_processes"] + 1
    shards, problems = inspect_shards(str(GOLDEN / "dataloader_shards" / run["pattern"]), key="k", need=need)
    assert not problems
    shape = Shape(run["B"], run["T"], run["rank"], run["num_processes"])
    source = ShardSource(ShardReader(shards), shape, shuffle=bool(run["should_shuffle"]))
    return Loader(source, prefetch=prefetch), [shard.path.name for shard in shards]


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("run", RUNS, ids=name)
def test_batches_are_llmc(run, prefetch):
    loader, names = open_run(run, prefetch=prefetch)
    state = loader.state_dict()
    if run["should_shuffle"]:
        assert state["shard_order"].tolist() == run["shard_indices_after_init"]
        assert state["sample_order"].tolist() == run["intra_after_init"]
    for slot, shard, sample_slot, sample, first, last, target, last_target, samples in run["batches"]:
        inputs, targets = loader.next()
        assert inputs.shape == targets.shape == (run["B"], run["T"])
        assert (inputs[0, 0], inputs[-1, -1]) == (first, last)
        assert (targets[0, 0], targets[-1, -1]) == (target, last_target)
        assert (np.diff(inputs.flatten()) == 1).all()
        state = loader.state_dict()
        assert (state["shard_slot"], state["sample_slot"]) == (slot, sample_slot + 1)
        step = run["B"] * run["T"] * run["num_processes"]
        assert loader.position.path.name == names[shard]
        assert loader.position.start == sample * step + run["rank"] * run["B"] * run["T"]
        if run["should_shuffle"]:
            assert state["samples"] == samples
    assert (state["shard_slot"], state["sample_slot"]) == (
        run["current_shard_idx"],
        run["current_sample_idx"],
    )
    if run["should_shuffle"]:
        assert int.from_bytes(state["twister"][8:12], "little") == run["rng_left"]
        assert int.from_bytes(state["twister"][12:16], "little") == run["rng_next"]
    loader.close()


def as_state(golden):
    return {
        "order": "shuffle",
        "shard_slot": golden["current_shard_idx"],
        "sample_slot": golden["current_sample_idx"],
        "shard_order": np.array(golden["shard_indices"], np.int32),
        "samples": golden["shard_num_samples"],
        "sample_order": np.array(golden["intra_shard_indices"], np.int32),
        "twister": bytes.fromhex(golden["twister_hex"]),
    }


def agrees(state, golden):
    assert state["shard_slot"] == golden["current_shard_idx"]
    assert state["sample_slot"] == golden["current_sample_idx"]
    assert state["shard_order"].tolist() == golden["shard_indices"]
    assert state["sample_order"].tolist() == golden["intra_shard_indices"]
    assert int.from_bytes(state["twister"][8:12], "little") == golden["mt_left"]


def test_our_state_after_30_batches_is_that_of_llmc_state_file():
    source = ShardSource(MemoryReader([400] * 3), Shape(2, 8), shuffle=True)
    for _ in range(30):
        source.take()
    agrees(source.state_dict(), STATES[0])
    assert source.state_dict()["twister"][8:] == bytes.fromhex(STATES[0]["twister_hex"])[8:]


def test_llmc_state_file_goes_on_to_its_next_state():
    source = ShardSource(MemoryReader([400] * 3), Shape(2, 8), shuffle=True)
    source.load_state_dict(as_state(STATES[0]))
    for _ in range(30):
        source.take()
    agrees(source.state_dict(), STATES[1])


def take(source, n):
    return [source.take()[0].flatten().tolist() for _ in range(n)]


def as_llmc(state):
    """Keep only what llm.c's file holds."""
    return {k: v for k, v in state.items() if k not in ("epoch", "micro_batch", "seq_len", "world", "shards")}


SIZES = st.lists(st.integers(41, 200), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(
    sizes=SIZES,
    shuffle=st.booleans(),
    at=st.integers(0, 80),
    world=st.sampled_from([1, 2]),
    bare=st.booleans(),
)
def test_resume_anywhere_is_exact(sizes, shuffle, at, world, bare):
    shape = Shape(2, 10, world - 1, world)
    straight = ShardSource(MemoryReader(sizes), shape, shuffle=shuffle)
    take(straight, at)
    state = straight.state_dict()
    resumed = ShardSource(MemoryReader(sizes), shape, shuffle=shuffle)
    take(resumed, 3)
    resumed.load_state_dict(as_llmc(state) if bare else state)
    assert take(straight, 60) == take(resumed, 60)
    after, other = straight.state_dict(), resumed.state_dict()
    assert as_llmc(after).keys() == as_llmc(other).keys()
    for key, value in as_llmc(after).items():
        assert np.array_equal(value, other[key])


@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 2**31), stops=st.lists(st.integers(0, 40), max_size=4))
def test_each_sample_once_an_epoch_despite_interruptions(sizes, seed, stops):
    world, per_epoch, seen = 2, 0, Counter()
    shape = Shape(1, 20, 0, world)
    per_epoch = sum(shape.samples(size) for size in sizes)
    for rank in range(world):
        mine = shape._replace(rank=rank)
        source = ShardSource(MemoryReader(sizes), mine, shuffle=True, seed=seed)
        for taken in range(2 * per_epoch):
            if taken in stops:
                state = source.state_dict()
                source = ShardSource(MemoryReader(sizes), mine, shuffle=True, seed=seed)
                source.load_state_dict(state)
            seen[int(source.take()[0, 0, 0])] += 1
            assert source.position.epoch == taken // per_epoch
    expected = {
        1000 * shard + 20 * place
        for shard, size in enumerate(sizes)
        for place in range(shape.samples(size) * world)
    }
    assert seen == dict.fromkeys(expected, 2)


def test_unequal_shards_resume_in_every_shard():
    """llm.c compares with the shard that a fresh start opens and aborts."""
    sizes = [370, 310, 340]
    straight = ShardSource(MemoryReader(sizes), Shape(2, 8), shuffle=True)
    for _ in range(100):
        state = as_llmc(straight.state_dict())
        fresh = ShardSource(MemoryReader(sizes), Shape(2, 8), shuffle=True)
        fresh.load_state_dict(state)
        assert take(fresh, 1) == take(straight, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"order": "sequential"}, "data.order=sequential"),
        ({"shards": 4}, "number of shards 4"),
        ({"micro_batch": 3}, "train.micro_batch=3"),
        ({"seq_len": 9}, "train.seq_len=9"),
        ({"world": 2}, "parallel.processes=2"),
        ({"shard_slot": 7}, "shard slot 7"),
        ({"shard_order": np.array([0, 0, 1], np.int32)}, "damaged"),
        ({"sample_order": np.arange(5, dtype=np.int32)}, "samples in"),
        ({"sample_order": np.zeros(21, np.int32)}, "no permutation"),
        ({"twister": bytes(2520)}, "twister state is damaged"),
    ],
)
def test_state_of_another_run_is_refused(change, words):
    source = ShardSource(MemoryReader([370, 310, 340]), Shape(2, 8), shuffle=True)
    before = take(ShardSource(MemoryReader([370, 310, 340]), Shape(2, 8), shuffle=True), 5)
    with pytest.raises(ValueError, match=words):
        source.load_state_dict(source.state_dict() | change)
    assert take(source, 5) == before  # nothing was half loaded


def test_unshuffled_state_has_no_permutation():
    source = ShardSource(MemoryReader([100, 100]), Shape(1, 8), shuffle=False)
    assert source.state_dict().keys() == {
        *("order", "shard_slot", "sample_slot", "shards", "epoch", "micro_batch", "seq_len", "world")
    }
    source.load_state_dict({"shard_slot": 1, "sample_slot": 12})  # at the end: advances with the next
    assert take(source, 1) == [list(range(8))]
    with pytest.raises(ValueError, match="order sequential"):
        ShardSource(MemoryReader([100]), Shape(1, 8), shuffle=True).load_state_dict(source.state_dict())


def test_own_seed_changes_the_order_and_rank_adds_to_it():
    def orders(seed, rank):
        reader = MemoryReader([500] * 4)
        return (
            ShardSource(reader, Shape(1, 8, rank, 2), shuffle=True, seed=seed)
            .state_dict()["sample_order"]
            .tolist()
        )

    assert orders(42, 1) == orders(43, 0)
    assert orders(42, 0) != orders(7, 0)
