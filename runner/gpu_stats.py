"""Read a GPU's clock, power, temperature and throttle reasons through NVML, off the training thread.

Needs `nvidia-ml-py`. Whatever a board does not report (fan speed and power on some) is None; where
there is no NVML at all, one line says so and every reading is empty.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any, NamedTuple

import torch
from annotated_types import Ge

from runner.api import Event, GpuState, View

log = logging.getLogger(__name__)

# NVML's clock event reasons (nvml.h); "idle" and the application's own clock limits are no fault.
THROTTLE_REASONS = {
    0x0000000000000004: "power cap",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000010: "sync boost",
    0x0000000000000020: "software thermal slowdown",
    0x0000000000000040: "hardware thermal slowdown",
    0x0000000000000080: "power brake",
}


class GpuReading(NamedTuple):
    """One look at a GPU; None where the board or driver has no figure."""

    sm_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    utilization_percent: float | None = None
    throttle: tuple[str, ...] | None = None  # () = running freely


class GpuStats:
    """Read one GPU on request; a request never blocks and at most one is under way."""

    def __init__(self, *, uuid: str | None) -> None:
        """Open a GPU by the `uuid` torch gives (NVML also counts hidden ones); None = there is none."""
        self._nvml: Any = _open(uuid)
        self._handle = _handle(self._nvml, uuid) if self._nvml else None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="gpu-stats") if self._handle else None
        self._pending: Future[GpuReading] | None = None
        self.latest = GpuReading()

    def request(self) -> None:
        """Start a reading unless one is under way, and take over the last one that is done."""
        if self._worker is None:
            return
        if self._pending is not None:
            if not self._pending.done():
                return
            self.latest = self._pending.result()
        self._pending = self._worker.submit(read, self._nvml, self._handle)

    def close(self) -> None:
        """End the thread and release NVML."""
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
            self._nvml.nvmlShutdown()
            self._worker = None


class GpuReadings:
    """An evaluator that reports the GPU's state (llm.c's -lg); silent where there is no GPU.

    A reading is taken by a thread, so the state that is reported is the one asked for a period before.
    """

    def __init__(self, *, every: Annotated[int, Ge(1)]) -> None:
        self.every = every
        self._stats: GpuStats | None = None

    def __call__(self, view: View, step: int) -> Iterator[Event]:
        if self._stats is None:
            self._stats = GpuStats(uuid=_uuid(view.engine.device))
        self._stats.request()
        reading = self._stats.latest
        if reading.throttle is not None or reading.sm_clock_mhz is not None:
            figures = [math.nan if figure is None else figure for figure in reading[:4]]
            clock, power, temperature, utilization = (float(figure) for figure in figures)
            yield GpuState(step, clock, power, temperature, utilization, reading.throttle or ())

    def close(self) -> None:
        """End the reading thread."""
        if self._stats is not None:
            self._stats.close()


def _uuid(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def read(nvml: Any, handle: Any) -> GpuReading:
    """Read every field on its own, so that one a board does not support costs none of the others."""

    def field(get: Callable[[], float]) -> float | None:
        try:
            return float(get())
        except (nvml.NVMLError, AttributeError):
            return None

    mask = field(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    milliwatts = field(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    return GpuReading(
        sm_clock_mhz=field(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        power_w=None if milliwatts is None else milliwatts / 1e3,
        temperature_c=field(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        utilization_percent=field(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        throttle=None if mask is None else throttle_reasons(int(mask)),
    )


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """Name the set bits of NVML's clock event mask."""
    return tuple(name for bit, name in THROTTLE_REASONS.items() if mask & bit)


def _open(uuid: str | None) -> Any:
    if uuid is None:
        log.info("GPU readings are off: no GPU")
        return None
    try:
        import pynvml  # an optional package
    except ModuleNotFoundError:
        log.info("GPU readings are off: pip install nvidia-ml-py")
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.info("GPU readings are off: %s", error)
        return None
    return pynvml


def _handle(nvml: Any, uuid: str | None) -> Any:
    name = str(uuid)
    try:
        return nvml.nvmlDeviceGetHandleByUUID(name if name.startswith(("GPU-", "MIG-")) else f"GPU-{name}")
    except nvml.NVMLError as error:
        log.info("GPU readings are off: no GPU with UUID %s (%s)", name, error)
        nvml.nvmlShutdown()
        return None
