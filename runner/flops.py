"""Model FLOPs utilization, by llm.c's formula and to its float32 bits."""

from __future__ import annotations

from typing import Literal

import numpy as np

from runner.gpu_peaks import DATASHEET, SCALED

Dtype = Literal["fp32", "bf16", "fp16"]


def flops_per_token(params: int, *, layers: int, channels: int, seq_len: int) -> int:
    """Return training FLOPs per token, 6N + 6LCT (Kaplan et al. 2020, section 2.1, and llm.c).

    `params` counts every parameter, padded vocabulary included; `seq_len` is the length trained on, not
    the longest the model can read. Other tools count 12LCT for attention and report a higher MFU.
    """
    return 6 * params + 6 * layers * channels * seq_len


def mfu(flops_per_token: int, *, tokens: int, step_s: float, peak_tflops: float) -> float:
    """Return the share of one device's peak that its own `tokens` per step reached; -1 if unknown."""
    if peak_tflops <= 0 or step_s <= 0:
        return -1.0
    achieved = np.float32(flops_per_token * tokens) * (np.float32(1.0) / np.float32(step_s))
    return float(achieved / (np.float32(peak_tflops) * np.float32(1e12)))


def llmc_peak_tflops(device: str, dtype: Dtype) -> float:
    """Return the peak in llm.c's table, -1 for a name or dtype that it has no figure for.

    `fp32` is the TF32 column, also where TF32 is off.
    """
    if device not in SCALED:
        return -1.0
    family, cores, mhz = SCALED[device]
    base = {"fp32": family.tf32, "bf16": family.bf16, "fp16": family.fp16}[dtype]
    if base is None:
        return -1.0
    f32 = np.float32
    return float(f32(base) * (f32(cores) / f32(family.cores)) * (f32(mhz) / f32(family.mhz)))


def peak_tflops(device: str, dtype: Dtype) -> float:
    """Return a GPU's dense peak by its exact driver name; -1 when unknown, never a guess."""
    scaled = llmc_peak_tflops(device, dtype)
    if scaled > 0 or device not in DATASHEET:
        return scaled
    row = DATASHEET[device]
    peak = {"fp32": row.tf32, "bf16": row.bf16, "fp16": row.fp16}[dtype]
    return -1.0 if peak is None else peak
