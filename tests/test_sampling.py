"""Sampling: exact sets, defined ties, and no id that a tokenizer cannot decode."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.sampling import keep_top_k, keep_top_p, sample

INF = math.inf
LOGITS = st.lists(st.integers(-6, 6), min_size=1, max_size=20)  # integers, so that ties are common


def kept(logits):
    return {i for i, x in enumerate(logits.tolist()) if x > -INF}


@settings(deadline=None)
@given(values=LOGITS, k=st.integers(1, 25))
def test_top_k_keeps_exactly_k_and_of_equals_the_lowest_ids(values, k):
    best = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    assert kept(keep_top_k(torch.tensor(values, dtype=torch.float32), k=k)) == set(best)


@settings(deadline=None)
@given(values=LOGITS, p=st.floats(0.01, 1.0))
def test_top_p_keeps_the_smallest_set_that_reaches_p(values, p):
    logits = torch.tensor(values, dtype=torch.float32)
    chosen = kept(keep_top_p(logits, p=p))
    mass = logits.double().softmax(-1).tolist()
    best = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if p == 1.0:
        assert chosen == set(best)
        return
    assert chosen == set(best[: len(chosen)])
    last = best[len(chosen) - 1]
    assert len(chosen) == len(best) or sum(mass[i] for i in chosen) >= p - 1e-9
    assert sum(mass[i] for i in chosen - {last}) < p + 1e-9


def test_top_p_at_exact_equality_takes_no_extra_token():
    logits = torch.tensor([0.0, 0.0, 0.0, 0.0])  # a quarter each, exactly
    assert kept(keep_top_p(logits, p=0.5)) == {0, 1}
    assert kept(keep_top_p(logits, p=0.51)) == {0, 1, 2}
    assert kept(keep_top_p(logits, p=1e-9)) == {0}
    assert kept(keep_top_p(logits, p=1.0)) == {0, 1, 2, 3}


def test_rows_are_filtered_apart():
    logits = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    assert [kept(row) for row in keep_top_k(logits, k=1)] == [{2}, {0}]
    assert [kept(row) for row in keep_top_p(logits, p=0.5)] == [{2}, {0}]


def test_temperature_zero_is_greedy_draws_nothing_and_takes_the_first_of_equals():
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0]])
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    assert sample(logits, vocab_size=4, temperature=0.0, generator=generator).tolist() == [1]
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("temperature", [1e-300, 1e-8, 1e-3])
def test_tiny_temperatures_are_greedy_not_nan(temperature):
    logits = torch.tensor([[1e4, -3.0, 2e4]])
    assert sample(logits, vocab_size=3, temperature=temperature).tolist() == [2]


def test_padded_ids_are_never_drawn():
    logits = torch.zeros(4000, 8)
    logits[:, 6:] = 100.0
    for settings_ in ({}, {"temperature": 0.0}, {"top_k": 8}, {"top_p": 0.99}):
        assert sample(logits, vocab_size=6, **settings_).max() < 6


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(20000, 3)
    generator = torch.Generator().manual_seed(1)
    counts = sample(logits, vocab_size=3, generator=generator).bincount(minlength=3) / 20000
    assert counts.tolist() == pytest.approx([0.5, 0.3, 0.2], abs=0.02)
    flat = sample(logits, vocab_size=3, temperature=2.0, generator=generator).bincount(minlength=3) / 20000
    root = torch.tensor([0.5, 0.3, 0.2]).sqrt()
    assert flat.tolist() == pytest.approx((root / root.sum()).tolist(), abs=0.02)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
    ],
)
def test_impossible_settings_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        sample(torch.zeros(1, 4), vocab_size=4, **bad)
