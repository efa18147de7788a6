"""Norm, guard and clip factor in Triton: the definitions' bits in its interpreter, IEEE code for Hopper."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.triton_programs import run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

SETTINGS = """
import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runner import triton_guard, triton_kernels
torch.set_num_threads(1)
np.seterr(all="ignore")
quickly = settings(max_examples=40, deadline=None, database=None, derandomize=True,
                   suppress_health_check=list(HealthCheck))

def bits(*tensors):
    # one NaN is as good as another: processors differ in its sign and payload
    values = [torch.where(t.isnan(), torch.nan, t) if t.is_floating_point() else t for t in tensors]
    return [value.numpy().tobytes() for value in values]
"""

SUMS = """
from runner import clip, norm
from runner.api import Slot

def judged(sums):
    ours = triton_kernels.norm(sums.clone())
    assert bits(ours) == bits(norm.norm_of(sums)), len(sums)

@quickly
@given(st.lists(st.floats(0, 1e300) | st.sampled_from([np.nan, np.inf, 1e-320]), min_size=1, max_size=70))
def norms(values):
    judged(torch.tensor(values, dtype=torch.float64))

@quickly
@given(st.floats(width=32), st.sampled_from([1e-3, 0.1, 1.0, 1, 3.7]))
def factors(value, max_norm):
    value = torch.tensor(value)
    ours = triton_kernels.clip_factor(value, max_norm=max_norm)
    assert bits(ours) == bits(clip.clip_by_norm(value, max_norm=max_norm))

norms()
factors()
for width, longer in ((4096, (1184, 4097)), (4, (31, 70))):  # 4: every row is halved in memory first
    triton_guard.WIDTH = width
    for n in (1, 2, 3, 4, 5, 7, 8, 9, *longer):
        sums = torch.rand(n, dtype=torch.float64)
        judged(sums)
        rows = torch.rand(3 * n + 5, dtype=torch.float64)
        starts = torch.tensor([0, n, n + 5, 3 * n + 5])
        out = torch.empty(3, dtype=torch.float64)
        expected = [norm.fold(rows[a:b]) for a, b in zip(starts[:-1], starts[1:])]
        triton_guard.row_sums(rows, starts=starts, longest=max(2 * n, 5), out=out)
        assert bits(out) == bits(torch.stack(expected)), (width, n)
    layout = (Slot("a", (9001,), 2, 0), Slot("b", (5,), 3, 18002), Slot("c", (40001,), 1, 18017))
    flat = torch.randn(18017 + 40001)
    sums = norm.ChunkSums(norm.chunks_of(layout, world=1), gradient=flat)
    ours = sums._sum_by_triton(triton_kernels).clone()
    sums._sum_by_torch()
    assert bits(ours) == bits(sums.sums)
print("equal")
"""

GUARD = """
from runner.outlier import Finite, ZScore

usual = st.floats(0.5, 8, width=32)
value = st.one_of(usual, usual, usual, st.just(2.5), st.floats(width=32))
steps = st.lists(st.tuples(value, value), min_size=1, max_size=40)
limits = st.sampled_from([0.0, 0.3, 1.0, 2.0])

@quickly
@given(steps, st.sampled_from([2, 3, 5, 8]), st.booleans(), limits, limits, st.integers(0, 40))
def scores(pairs, window, robust, loss_z, norm_z, cut):
    make = lambda: ZScore(max_loss_z=loss_z, max_norm_z=norm_z, window=window, robust=robust)
    ours, theirs = make(), make()
    for step, pair in enumerate(pairs):
        if step == cut:  # resumed from a checkpoint
            state, ours = ours.state_dict(), make()
            ours.load_state_dict(state)
        loss, norm = (torch.tensor(x, dtype=torch.float32) for x in pair)
        verdict = ours._by_triton(triton_kernels, loss, norm)
        assert [t.dtype for t in verdict] == [torch.bool, torch.float64, torch.float64, torch.int64]
        assert [t.shape for t in verdict] == [()] * 4
        assert bits(*verdict) == bits(*theirs(loss, norm)), (step, pair)
        assert bits(*ours.state_dict().values()) == bits(*theirs.state_dict().values())

@quickly
@given(value, value)
def finite(loss, norm):
    loss, norm = torch.tensor(loss), torch.tensor(norm)
    assert bits(*triton_kernels.judge_finite(loss, norm)) == bits(*Finite()(loss, norm))

scores()
finite()
numbers = np.random.default_rng(0)
for robust in (False, True):  # the default window, across its end, with spikes
    ours, theirs = (ZScore(max_loss_z=3, max_norm_z=3, robust=robust) for _ in range(2))
    for step in range(300):
        pair = numbers.normal(3, 1, 2) * (1e6 if step % 90 == 50 else 1)
        loss, norm = (torch.tensor(x, dtype=torch.float32) for x in pair)
        assert bits(*ours._by_triton(triton_kernels, loss, norm)) == bits(*theirs(loss, norm)), step
print("equal")
"""


@pytest.mark.parametrize("script", [SUMS, GUARD], ids=["sums", "guard"])
def test_interpreted_kernels_give_the_definitions_bits(script: str, tmp_path: Path) -> None:
    assert run(SETTINGS + script, interpret=True, tmp_path=tmp_path).strip() == "equal"


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from runner import triton_guard as k

def show(name, kernel, types, warps=4, **constants):
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()})
    options = {"num_warps": warps, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert len(made.asm["cubin"]) > 0
    print("###", name, made.metadata.shared)
    print(made.asm["ptx"])

doubles = dict.fromkeys(["x_ptr", "sums_ptr", "ring_ptr", "z_ptr"], "*fp64")
floats = dict.fromkeys(["loss_ptr", "norm_ptr", "limits_ptr"], "*fp32")
types = doubles | floats | dict.fromkeys(["seen_ptr", "reason_ptr", "starts_ptr"], "*i64")
types |= {"apply_ptr": "*u8", "n": "i32", "max_norm": "fp32"}
"""

PROGRAMS = """
show("rows", k.row_sums_kernel, types | {"out_ptr": "*fp64"}, SIZE=4096)
show("norm", k.norm_kernel, types | {"out_ptr": "*fp32"}, SIZE=2048)
show("clip", k.clip_kernel, types | {"out_ptr": "*fp32"}, warps=1)
show("finite", k.finite_kernel, types, warps=1)
show("guard", k.guard_kernel, types, warps=1, W=128, SIZE=128, ROBUST=False)
show("robust", k.guard_kernel, types, W=100, SIZE=128, ROBUST=True)
"""


def test_hopper_code_rounds_where_the_definitions_do(tmp_path: Path) -> None:
    text = run(COMPILED + PROGRAMS, interpret=False, tmp_path=tmp_path)
    programs = {part.split(" ", 1)[0]: part for part in text.split("### ")[1:]}
    assert set(programs) == {"rows", "norm", "clip", "finite", "guard", "robust"}
    for name, ptx in programs.items():
        assert "fma." not in ptx, name
        assert ".approx" not in ptx, name
        assert ".ftz" not in ptx, name
        assert int(ptx.split("\n", 1)[0].split()[1]) < 48 << 10, "static shared memory of a block"
    assert re.search(r"sqrt\.rn\.f64", programs["norm"])
    assert re.search(r"div\.rn\.f32", programs["clip"])
    for name in ("guard", "robust"):
        assert re.search(r"sqrt\.rn\.f64", programs[name])
        assert re.search(r"div\.rn\.f64", programs[name])
    # Rows that are halved in memory: what one round stores, the next round's threads may read.
    loop = programs["rows"]
    store = loop.index("st.global")
    assert "bar.sync" in loop[store:]


def test_an_old_triton_divides_as_exactly(tmp_path: Path) -> None:
    old = "from runner import triton_ieee\ntriton_ieee._FLUSHES = triton.language.constexpr(True)\n"
    clip = next(line for line in PROGRAMS.splitlines() if line.startswith('show("clip"'))
    text = run(COMPILED + old + clip, interpret=False, tmp_path=tmp_path)
    assert "begin inline asm" in text
    assert "div.rn.f32" in text
    assert ".ftz" not in text
