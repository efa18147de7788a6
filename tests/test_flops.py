"""MFU: llm.c's table and formula to the bit, and -1 instead of a guess."""

import json
from pathlib import Path

import numpy as np
import pytest

from runner.flops import flops_per_token, llmc_peak_tflops, mfu, peak_tflops
from runner.gpu_peaks import DATASHEET, SCALED

GOLDEN = json.loads((Path(__file__).parent / "golden" / "mfu.json").read_text())
DTYPES = ("fp32", "fp16", "bf16")


@pytest.mark.parametrize("row", GOLDEN["flops_promised_TF"], ids=lambda r: r["device"] or "empty")
def test_peaks_are_those_of_llmc(row):
    for dtype in DTYPES:
        assert np.float32(llmc_peak_tflops(row["device"], dtype)) == np.float32(row[dtype])
        if row[dtype] > 0:
            assert peak_tflops(row["device"], dtype) == llmc_peak_tflops(row["device"], dtype)


def test_the_formula_is_llmc_to_the_bit():
    for row in GOLDEN["mfu_examples"]:
        flops = flops_per_token(row["num_parameters"], layers=row["L"], channels=row["C"], seq_len=row["T"])
        peak = llmc_peak_tflops(row["device"], row["precision"])
        got = mfu(flops, tokens=row["num_tokens"], step_s=row["dt"], peak_tflops=peak)
        assert np.float32(got) == np.float32(row["mfu"]), row


def test_flops_are_exact_beyond_32_bits():
    assert (
        flops_per_token(7 * 10**9, layers=96, channels=12288, seq_len=8192)
        == 42 * 10**9 + 6 * 96 * 12288 * 8192
    )


def test_unknown_is_minus_one():
    assert peak_tflops("NVIDIA H200 (modified)", "bf16") == -1
    assert peak_tflops("", "bf16") == -1
    assert peak_tflops("Tesla T4", "bf16") == -1
    assert peak_tflops("Tesla T4", "fp16") == 65
    assert mfu(10, tokens=10, step_s=1.0, peak_tflops=-1.0) == -1


def test_rows_beyond_llmc_are_sourced_dense_and_do_not_shadow_it():
    assert not set(DATASHEET) & set(SCALED)
    for name, row in DATASHEET.items():
        assert row.source
        if row.bf16 is not None:
            assert row.fp16 == row.bf16, name
            assert row.tf32 == pytest.approx(row.bf16 / 2, rel=0.03), name
    assert peak_tflops("NVIDIA H200", "bf16") == 989.5
