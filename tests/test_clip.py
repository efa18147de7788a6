"""Clipping: one factor, llm.c's bits, and what non-finite norms give."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.clip import clip_by_norm

NORMS = st.floats(0, 2.0**100, width=32)
LIMITS = st.floats(1e-6, 1e6)


@settings(deadline=None)
@given(norm=NORMS, max_norm=LIMITS)
def test_the_factor_is_the_float32_quotient(norm, max_norm):
    factor = clip_by_norm(torch.tensor(norm), max_norm=max_norm)
    limit = np.float32(max_norm)
    want = limit / np.float32(norm) if np.float32(norm) > limit else np.float32(1)
    assert factor.dtype == torch.float32
    assert factor.shape == ()
    assert factor.item() == want


@settings(deadline=None)
@given(norm=NORMS, max_norm=LIMITS)
def test_a_clipped_gradient_meets_the_limit(norm, max_norm):
    factor = clip_by_norm(torch.tensor(norm), max_norm=max_norm).item()
    assert 0 < factor <= 1
    assert norm * factor <= max_norm * (1 + 3e-7)


def test_the_limit_itself_is_not_clipped():
    assert clip_by_norm(torch.tensor(1.0), max_norm=1.0).item() == 1.0


def test_nan_leaves_one_and_infinity_zero():
    assert clip_by_norm(torch.tensor(math.nan), max_norm=1.0).item() == 1.0
    assert clip_by_norm(torch.tensor(math.inf), max_norm=1.0).item() == 0.0


def test_none_is_off_and_zero_an_error():
    assert clip_by_norm(torch.tensor(1e9), max_norm=None).item() == 1.0
    for bad in (0.0, -1.0, math.nan, 1e-50):  # the last is 0 as float32
        with pytest.raises(ValueError, match=r"clip.max_norm=.* null"):
            clip_by_norm(torch.tensor(1.0), max_norm=bad)
