"""The meter: rates of this session only, pauses in no figure, and a state that adds up."""

import contextlib
import logging
import math

import pytest

from runner import meter as module
from runner.meter import Meter


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "perf_counter", clock)
    return clock


def step(meter, clock, *, seconds=0.5, tokens=1000):
    clock.now += seconds
    return meter.tick(tokens)


def test_a_steady_run_reads_its_true_rate_from_the_first_step(clock):
    meter = Meter()
    meter.start()
    for _ in range(50):
        speed = step(meter, clock)
        assert speed.step_ms == pytest.approx(500)
        assert speed.tokens_per_s == pytest.approx(2000)
    assert meter.eta_s(10) == pytest.approx(5.0)
    assert speed.mfu == -1


def test_pauses_are_in_no_figure(clock):
    meter = Meter()
    meter.start()
    for i in range(20):
        if i % 3 == 0:
            with meter.pause():
                clock.now += 60
        with meter.pause():
            clock.now += 7
        speed = step(meter, clock)
        assert speed.step_ms == pytest.approx(500)
        assert speed.tokens_per_s == pytest.approx(2000)
    assert meter.train_s == pytest.approx(10)
    assert meter.eta_s(2) == pytest.approx(1)


def test_a_pause_that_raises_is_still_one(clock):
    meter = Meter()
    meter.start()
    with contextlib.suppress(RuntimeError), meter.pause():
        clock.now += 60
        raise RuntimeError
    assert step(meter, clock).step_ms == pytest.approx(500)


def test_the_slow_first_step_is_forgotten_at_once(clock):
    meter = Meter()
    meter.start()
    assert step(meter, clock, seconds=50).tokens_per_s == pytest.approx(20)
    assert step(meter, clock).tokens_per_s == pytest.approx(2000)
    assert meter.train_s == pytest.approx(50.5)


def test_the_rate_follows_with_llmc_weights(clock):
    meter = Meter()
    meter.start()
    step(meter, clock)
    step(meter, clock, seconds=1.0)
    mean_s = (0.95 * 0.05 * 1.0 + 0.05 * 0.5) / (1 - 0.95**2)
    assert step(meter, clock).tokens_per_s == pytest.approx(1000 / mean_s)
    fresh = Meter(smoothing=0.0)
    fresh.start()
    for seconds in (1, 2, 4):
        assert step(fresh, clock, seconds=seconds).tokens_per_s == pytest.approx(1000 / seconds)


def test_after_a_resume_rates_are_of_the_session_and_totals_of_the_run(clock):
    before = Meter()
    before.start()
    for _ in range(10):
        step(before, clock)
    after = Meter()
    after.load_state_dict(before.state_dict())
    clock.now += 1e6
    after.start()
    speed = step(after, clock, seconds=0.25)
    assert speed.tokens_per_s == pytest.approx(4000)
    assert after.eta_s(4) == pytest.approx(1)
    assert after.tokens == 11_000
    assert after.train_s == pytest.approx(5.25)


def test_mfu_is_one_ranks_share(clock):
    meter = Meter(peak_tflops=1.0, flops_per_token=10**9, world=4)
    meter.start()
    assert step(meter, clock, tokens=1000).mfu == pytest.approx(250 * 1e9 / 0.5 / 1e12)


def test_the_peak_is_looked_up_or_given_and_an_unknown_gpu_is_one_line(caplog):
    assert Meter(device_name="NVIDIA H200", dtype="bf16").peak_tflops == 989.5
    assert Meter(device_name="NVIDIA H200", peak_tflops=500.0).peak_tflops == 500.0
    with caplog.at_level(logging.INFO):
        assert Meter(device_name="Some GPU").peak_tflops == -1
        Meter()  # a CPU has no name to look up and is not worth a line
    (record,) = caplog.records
    assert "meter.peak_tflops" in record.getMessage()


def test_nothing_is_known_before_the_first_step():
    assert math.isnan(Meter().eta_s(10))
    with pytest.raises(ValueError, match=r"meter\.peak_tflops=0"):
        Meter(peak_tflops=0)
    with pytest.raises(ValueError, match=r"meter\.smoothing=1"):
        Meter(smoothing=1.0)
