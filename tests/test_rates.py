"""A schedule asked ahead of the run gives the run the same rates and the same errors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.rates import Rates


@given(total=st.integers(1, 200), steps=st.lists(st.integers(0, 199), max_size=30))
def test_any_order_of_steps_gets_the_schedules_own_rates(total, steps):
    asked = []

    def schedule(step):
        asked.append(step)
        return 0.5 ** (step % 100)

    rates = Rates(schedule, steps=total)
    for step in (step % total for step in steps):
        assert rates(step) == 0.5 ** (step % 100)
    assert all(0 <= step < total for step in asked)  # what lies past the end may be an error


def test_an_error_belongs_to_the_step_that_makes_it():
    def schedule(step):
        if step == 5:
            raise ValueError("no rate at 5")
        return float(step)

    rates = Rates(schedule, steps=100)
    assert [rates(step) for step in range(5)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    for _ in range(2):
        with pytest.raises(ValueError, match="no rate at 5"):
            rates(5)
    assert rates(6) == 6.0


def test_a_long_run_asks_once_for_each_step():
    asked = []
    rates = Rates(lambda step: asked.append(step) or float(step), steps=1000)
    assert [rates(step) for step in range(1000)] == [float(step) for step in range(1000)]
    assert asked == list(range(1000))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1e-3, 1e300, None, "0.1", 1j, torch.ones(2)])
def test_what_is_no_rate_ends_the_run_at_its_step_with_one_line(bad):
    rates = Rates(lambda step: bad if step == 7 else 0.5, steps=50)
    assert [rates(step) for step in range(7)] == [0.5] * 7
    with pytest.raises(ValueError, match=r"^scheduler: the learning rate at step 7 of 50 is .* float32"):
        rates(7)


@pytest.mark.parametrize(
    "given", [0.1, np.float64(0.1), np.float32(0.1), torch.tensor(0.1), torch.tensor(0.1).double(), 1, True]
)
def test_a_plugins_number_of_any_kind_becomes_the_float32_value_that_is_used(given):
    rate = Rates(lambda step: given, steps=3)(0)
    assert type(rate) is float
    assert rate == float(np.float32(float(given)))
