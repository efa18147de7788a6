"""Number formats: what the matrix products compute in and what the weights are stored in."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

Mode = Literal["fp32", "bf16", "bf16_master", "fp8"]

FP32_ERROR = 2e-6  # relative; single precision reaches 3e-7 on the probe, bf16 only 3e-3
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # x86 and arm names in /proc/cpuinfo
CPUINFO = Path("/proc/cpuinfo")
FP8_CAPABILITY = (8, 9)  # Ada and Hopper are the first with fp8 matrix units


class Precision:
    """Choose the number formats of a run.

    auto: bf16 where the device multiplies it in hardware, else fp32. bf16: fp32 weights, matrix
    products in bf16 (autocast). bf16_master: bf16 weights beside an fp32 master copy in the
    optimizer. fp8: torchao's row-wise scaled products.
    """

    def __init__(
        self,
        *,
        mode: Literal["auto", "fp32", "bf16", "bf16_master", "fp8"] = "auto",
        tf32: bool = True,
        cpu_library: Literal["auto", "torch"] = "auto",
        fp8_emulate: bool = False,
    ) -> None:
        self.mode = mode
        self.tf32 = tf32
        self.cpu_library = cpu_library
        self.fp8_emulate = fp8_emulate

    def resolve(self, device: torch.device) -> Mode:
        """Return the mode that runs on `device`; ValueError if it cannot."""
        if self.mode == "auto":
            return "bf16" if _has_bf16(device) else "fp32"
        if self.mode == "fp8":
            _require_fp8(device, emulate=self.fp8_emulate)
        return self.mode

    def param_dtype(self, device: torch.device) -> torch.dtype:
        """Return what the model's weights are stored in."""
        return torch.bfloat16 if self.resolve(device) == "bf16_master" else torch.float32

    def autocast(self, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
        """Return a factory of the context that forward passes run in."""
        if self.resolve(device) in ("bf16", "fp8"):
            return _reused(partial(torch.autocast, device.type, dtype=torch.bfloat16))
        return nullcontext

    def apply(self, device: torch.device) -> dict[str, str]:
        """Set the process's matrix libraries, once, before the first product; return what was chosen.

        The choice decides the bits of every result, so it belongs into the manifest.
        """
        chosen: dict[str, str] = {"mode": self.resolve(device)}
        if device.type == "cpu":
            chosen["fp32_matmul"] = self._choose_cpu_library()
        else:
            torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
            chosen["fp32_matmul"] = "tf32" if self.tf32 else "fp32"
        return chosen

    def convert(self, model: torch.nn.Module, *, device: torch.device) -> None:
        """Let the products of the model's blocks run in fp8 if this is the mode; in place.

        The embedding and the output projection stay as they are. Blocks multiply by their `linear`, other
        models' `nn.Linear` are swapped but for the one named as a head.
        """
        if self.resolve(device) != "fp8":
            return
        from runner import fp8

        if not fp8.convert(model, emulate=self.fp8_emulate):
            raise ValueError(
                f"precision.mode=fp8: {type(model).__name__} has neither blocks with a `linear` nor a "
                "torch.nn.Linear of multiples of 16 to convert; use precision=bf16 for this model"
            )

    def _choose_cpu_library(self) -> str:
        """Let oneDNN multiply fp32 matrices if it does so in full precision.

        torch offers oneDNN only under the name of a lower precision; where the CPU has no bf16 or
        tf32 path for it the products stay in fp32 and are up to twice as fast. So it is tried first.
        """
        if self.cpu_library == "auto":
            torch.set_float32_matmul_precision("medium")
            if _matmul_error() < FP32_ERROR:
                return "onednn"
        torch.set_float32_matmul_precision("highest")
        return "torch"


def _reused(make: Callable[[], torch.autocast]) -> Callable[[], torch.autocast]:
    """Hand out one context again and again, which is quicker than making it; inside of any, another.

    A context keeps what it has to put back in itself, so it must not be entered twice at a time, not even
    where a part of a model has switched autocast off in between.
    """
    context = make()

    def hand_out() -> torch.autocast:
        inside = torch.autocast_increment_nesting() > 1
        torch.autocast_decrement_nesting()
        return make() if inside else context

    return hand_out


def _matmul_error() -> float:
    """Return the relative error of fp32 products, the worst of a layer's and of attention's shapes."""
    generator = torch.Generator().manual_seed(0)
    errors = []
    for shape in ((256, 512), (4, 64, 64)):
        a, b = (torch.randn(shape, generator=generator) for _ in range(2))
        exact = a.double() @ b.double().transpose(-2, -1)
        errors.append(((a @ b.transpose(-2, -1)).double() - exact).norm() / exact.norm())
    return float(max(errors))


def _has_bf16(device: torch.device) -> bool:
    """Whether `device` multiplies bf16 in hardware."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu":
        return False
    return CPUINFO.exists() and any(
        BF16_FLAGS & set(line.partition(":")[2].split())
        for line in CPUINFO.read_text().splitlines()
        if line.lower().startswith(("flags", "features"))
    )


def _require_fp8(device: torch.device, *, emulate: bool) -> None:
    on_gpu = device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
    if not (on_gpu or emulate):
        raise ValueError(
            f"precision.mode=fp8 needs a CUDA device of capability 8.9 or later, not {device}; "
            "use precision=bf16, or try its numbers with precision.fp8_emulate=true"
        )
    if importlib.util.find_spec("torchao") is None:
        raise ValueError("precision.mode=fp8 needs torchao; pip install torchao, or use precision=bf16")
