"""The norm's value, and that nothing but the gradient decides its bits."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner import norm
from runner.api import Slot

LAYOUT = (
    Slot("wte", (403, 48), 1, 0),
    Slot("blocks.*.ln1w", (48,), 3, 19344),
    Slot("blocks.*.odd", (7,), 3, 19488),  # fewer elements than chunks
    Slot("blocks.*.fcw", (192, 48), 3, 19509),
)
NUMEL = 19509 + 3 * 192 * 48


def gradient(seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)) * scale


def sums_of(flat: torch.Tensor, *, world: int = 1) -> torch.Tensor:
    return norm.ChunkSums(norm.chunks_of(LAYOUT, world=world), gradient=flat)().clone()


def test_chunks_cover_every_element_once() -> None:
    for world in (1, 3, 8):
        chunks = norm.chunks_of(LAYOUT, world=world)
        covered = [i for chunk in chunks for i in range(chunk.offset, chunk.offset + chunk.length)]
        assert covered == list(range(NUMEL))
        assert len(chunks) == norm.count_chunk_sums(LAYOUT, world=world)


def test_the_size_of_the_buffer() -> None:
    assert norm.count_chunk_sums(LAYOUT, world=1) == 10 * 8
    assert norm.count_chunk_sums(LAYOUT, world=8) == 10 * 8
    assert norm.count_chunk_sums(LAYOUT, world=3) == 10 * 24


@given(seed=st.integers(0, 1000), exponent=st.integers(-30, 15))
def test_the_value_is_the_exact_norm_rounded(seed: int, exponent: int) -> None:
    flat = gradient(seed, 2.0**exponent)
    exact = math.sqrt(math.fsum(float(x) ** 2 for x in flat[::16]))
    flat[torch.arange(NUMEL) % 16 != 0] = 0
    assert float(norm.norm_of(sums_of(flat))) == pytest.approx(exact, rel=1.2e-7)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_that_sum_their_shards_get_the_bits_of_one(world: int) -> None:
    flat = gradient()
    chunks = norm.chunks_of(LAYOUT, world=world)
    share = norm.chunks_per_layer(world) // world
    gathered = torch.zeros(len(chunks), dtype=torch.float64)
    for rank in range(world):
        own = [i for i, chunk in enumerate(chunks) if chunk.part // share == rank]
        gathered[own] = norm.ChunkSums([chunks[i] for i in own], gradient=flat)()
    assert torch.equal(gathered, sums_of(flat))


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_do_not_change_a_bit(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one = sums_of(gradient())
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert torch.equal(sums_of(gradient()), one)


def test_the_kernel_gives_the_definitions_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    if norm._kernel() is None:
        pytest.skip("no compiled kernel on this machine")
    compiled = sums_of(gradient())
    monkeypatch.setattr(norm, "_kernel", lambda: None)
    assert torch.equal(sums_of(gradient()), compiled)


@pytest.mark.parametrize("kernels", [True, False])
def test_non_finite_values(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        monkeypatch.setattr(norm, "_kernel", lambda: None)
    for value, expected in ((math.inf, math.inf), (-math.inf, math.inf), (math.nan, math.nan)):
        flat = gradient()
        flat[19344 + 50] = value
        sums = sums_of(flat)
        assert float(norm.norm_of(sums)) == pytest.approx(expected, nan_ok=True)
        assert norm.first_non_finite(sums, LAYOUT, world=1) == "blocks.*.ln1w"
    huge = torch.full((NUMEL,), 3e38)
    assert norm.norm_of(sums_of(huge)) == math.inf
    assert norm.first_non_finite(sums_of(gradient()), LAYOUT, world=1) is None
    assert norm.norm_of(sums_of(torch.zeros(NUMEL))) == 0


def test_the_norm_of_each_tensor() -> None:
    flat = gradient()
    norms = norm.slot_norms(sums_of(flat), LAYOUT, world=1)
    for slot in LAYOUT:
        exact = flat[slot.offset : slot.offset + slot.numel].double().norm()
        assert norms[slot.name] == pytest.approx(float(exact), rel=1e-7)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=40))
def test_fold_is_a_sum(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    assert float(norm.fold(x)) == pytest.approx(np.sum(values), abs=1e-9)
    assert torch.equal(x, torch.tensor(values, dtype=torch.float64))


@pytest.mark.parametrize("limit", ["1", "2"])
def test_a_team_smaller_than_asked_for_does_all_the_work(limit: str) -> None:
    """OMP_THREAD_LIMIT gives fewer threads than torch asks for; no share of the work may be left out."""
    code = (
        "import torch; from runner import norm; from runner.model import compiled;"
        "torch.set_num_threads(4); g = torch.arange(100_000.0) / 1e5;"
        "chunks = [norm.Chunk(i * 10_000, 10_000, 0, 0, i) for i in range(10)];"
        "print(float(norm.norm_of(norm.ChunkSums(chunks, gradient=g)())));"
        "print(hash(tuple(compiled.gelu(g)[0].tolist())) if compiled.identity() != 'torch' else 0)"
    )
    printed = []
    for variables in ({}, {"OMP_THREAD_LIMIT": limit}):
        environment = {**os.environ, **variables, "OMP_NUM_THREADS": "4"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        printed.append(done.stdout)
    assert printed[0] == printed[1]
    assert float(printed[0].split()[0]) > 100
