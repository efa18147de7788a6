"""The twister against llm.c's own draws, structs and permutations."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.data.mt19937 import STRUCT_BYTES, Twister, permutation

GOLDEN = json.loads((Path(__file__).parent / "golden" / "twister.json").read_text())
SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("stream", GOLDEN["streams"], ids=lambda s: str(s["seed"]))
def test_draws_are_llmc(stream):
    expected = stream["randint32"]
    assert Twister(stream["seed"]).draws(len(expected)).tolist() == expected


@pytest.mark.parametrize("row", GOLDEN["permutations"], ids=lambda r: f"{r['seed']}-{r['numel']}")
def test_permutations_are_llmc(row):
    twister = Twister(row["seed"])
    first = permutation(twister, row["numel"])
    assert first.tolist() == row["perm"]
    raw = twister.to_bytes()
    assert int.from_bytes(raw[8:12], "little") == row["left_after"]
    assert int.from_bytes(raw[12:16], "little") == row["next_after"]
    # llm.c permutes the same array again, from where it stands
    assert first[permutation(twister, row["numel"])].tolist() == row["perm_again"]


@pytest.mark.parametrize("row", GOLDEN["positions"], ids=lambda r: str(r["draws"]))
def test_struct_fields_are_llmc(row):
    twister = Twister(42)
    twister.draws(row["draws"])
    raw = twister.to_bytes()
    words = np.frombuffer(raw, "<u4")
    assert (words[2], words[3]) == (row["left_"], row["next_"])
    assert (words[4], words[4 + 623]) == (row["state_0"], row["state_623"])
    assert twister.draws(1)[0] == row["next_output"]


@pytest.mark.parametrize("name", GOLDEN["raw_structs"])
def test_raw_structs_both_ways(name):
    raw = bytes.fromhex(GOLDEN["raw_structs"][name])
    twister = Twister(42)
    twister.draws(int(name.split("_")[2]))
    ours = twister.to_bytes()
    assert len(ours) == STRUCT_BYTES
    assert ours[8:] == raw[8:]
    assert ours[:8] == bytes(8)  # llm.c leaves garbage in seed_
    other = Twister(7)
    other.from_bytes(raw)
    assert other.to_bytes() == ours
    assert other.draws(1300).tolist() == twister.draws(1300).tolist()


@pytest.mark.parametrize("raw", [b"", bytes(STRUCT_BYTES), b"\xff" * STRUCT_BYTES])
def test_damaged_struct_is_refused(raw):
    with pytest.raises(ValueError, match="twister state"):
        Twister(0).from_bytes(raw)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_outside_32_bits_is_refused(seed):
    with pytest.raises(ValueError, match="32"):
        Twister(seed)


@given(seed=SEEDS, n=st.integers(0, 3000), before=st.integers(0, 1300))
def test_permutation_equals_the_swap_loop(seed, n, before):
    twister, other = Twister(seed), Twister(seed)
    twister.draws(before)
    other.draws(before)
    naive = list(range(n))
    draws = iter(other.draws(max(0, n - 1)).tolist())
    for i in range(n - 1, 0, -1):
        j = next(draws) % (i + 1)
        naive[i], naive[j] = naive[j], naive[i]
    found = permutation(twister, n)
    assert found.dtype == np.int32
    assert found.tolist() == naive
    assert sorted(naive) == list(range(n))
    assert twister.to_bytes() == other.to_bytes()


@given(seed=SEEDS, cuts=st.lists(st.integers(0, 700), max_size=6))
def test_state_roundtrip_anywhere(seed, cuts):
    straight, broken = Twister(seed), Twister(seed)
    for cut in cuts:
        resumed = Twister(0)
        resumed.from_bytes(broken.to_bytes())
        broken = resumed
        assert straight.draws(cut).tolist() == broken.draws(cut).tolist()
        assert straight.to_bytes() == broken.to_bytes()
