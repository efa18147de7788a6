"""GPU readings: every field on its own, and nothing but a line where there is no GPU."""

import logging
from types import SimpleNamespace

import pytest
import torch

from runner import gpu_stats
from runner.api import GpuState, metrics
from runner.gpu_stats import GpuReading, GpuReadings, GpuStats, read, throttle_reasons


class NVMLError(Exception):
    pass


def refuse(*_):
    raise NVMLError


def board(**changed):
    fields = {
        "NVMLError": NVMLError,
        "NVML_CLOCK_SM": 1,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda h: 0x44,
        "nvmlDeviceGetPowerUsage": lambda h: 312_500,
        "nvmlDeviceGetClockInfo": lambda h, kind: 1980,
        "nvmlDeviceGetTemperature": lambda h, kind: 61,
        "nvmlDeviceGetUtilizationRates": lambda h: SimpleNamespace(gpu=97),
    }
    return SimpleNamespace(**fields | changed)


def test_a_reading_has_units_and_names():
    want = GpuReading(1980, 312.5, 61, 97, ("power cap", "hardware thermal slowdown"))
    assert read(board(), "h") == want
    assert throttle_reasons(0x1) == ()  # idle


def test_a_field_the_board_lacks_costs_only_itself():
    lacking = board(nvmlDeviceGetPowerUsage=refuse)
    del lacking.nvmlDeviceGetCurrentClocksEventReasons
    assert read(lacking, "h") == GpuReading(1980, None, 61, 97, None)


def test_requests_are_read_by_a_thread(monkeypatch):
    monkeypatch.setattr(gpu_stats, "_open", lambda uuid: board())
    stats = GpuStats(uuid="abc")
    stats.request()
    stats._pending.result()
    stats.request()
    assert stats.latest.power_w == 312.5
    stats.close()
    stats.close()
    stats.request()


@pytest.mark.parametrize("uuid", [None, "no-such-gpu"])
def test_without_a_gpu_there_is_one_line_and_empty_readings(uuid, caplog):
    with caplog.at_level(logging.INFO):
        stats = GpuStats(uuid=uuid)
        stats.request()
    assert stats.latest == GpuReading()
    assert len(caplog.records) == 1
    stats.close()


def test_the_evaluator_reports_what_it_asked_for_a_period_before(monkeypatch):
    monkeypatch.setattr(gpu_stats, "_open", lambda uuid: board())
    readings = GpuReadings(every=2)
    view = SimpleNamespace(engine=SimpleNamespace(device=torch.device("cpu")))
    monkeypatch.setattr(gpu_stats, "_uuid", lambda device: "abc")
    assert list(readings(view, 2)) == []
    readings._stats._pending.result()
    (state,) = readings(view, 4)
    assert state == GpuState(4, 1980, 312.5, 61, 97, ("power cap", "hardware thermal slowdown"))
    assert metrics(state)["gpu/power_w"] == 312.5
    readings.close()


def test_the_evaluator_is_silent_without_a_gpu():
    view = SimpleNamespace(engine=SimpleNamespace(device=torch.device("cpu")))
    readings = GpuReadings(every=2)
    assert [list(readings(view, step)) for step in (2, 4)] == [[], []]
