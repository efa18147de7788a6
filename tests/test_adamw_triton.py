"""The Triton kernels without a GPU: interpreted against the definitions, and compiled ahead for Hopper."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.triton_programs import run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


INTERPRETED = """
import torch
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle, InterpreterBuilder
from runner import norm, rng, triton_kernels
from runner.api import Segment, Slot
from runner.optimizer import reference
from runner.optimizer.compiled import trial_step
from runner.optimizer.reference import Part
torch.set_num_threads(1)

def fma(self, x, y, z):  # the interpreter rounds twice; a GPU does not
    result = reference.fma(*(torch.from_numpy(a.data.copy()) for a in (x, y, z)))
    return TensorHandle(result.numpy(), z.dtype)

InterpreterBuilder.create_fma = fma

def part(seed, half, keep, pad):
    full = torch.randn(2, 3, 1500 + 2 * pad, generator=torch.Generator().manual_seed(seed))
    exact = full[0]
    param = (exact.bfloat16() if half else exact.clone())[:, pad:pad + 1500]
    grad = (full[1] * 1e-3)[:, pad:pad + 1500]
    segment = Segment("s", "matrix", (1500 + 2 * pad,), param, grad, 0, start=pad)
    zeros = lambda: torch.zeros(3, 1500)
    return Part(segment, zeros(), zeros(), param.float() if keep else None, 0.1)

def bits(part):
    held = [part.segment.param, part.m, part.v] + ([] if part.master is None else [part.master])
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in held]

for half, keep in ((False, False), (True, True), (True, False)):
    for pad in (0, 7):
        ours, theirs = ([part(k, half, keep, pad) for k in (1, 2)] for _ in range(2))
        for t in (1, 2):
            step = trial_step(t=t)
            seeds = torch.tensor([-5, 77 * t], dtype=torch.int32)
            for apply in (True, False):
                triton_kernels.adamw(ours, scalars=torch.stack(step[1:]), scale=step.scale if apply else
                                     torch.tensor(float("nan")), seeds=seeds, apply=torch.tensor(apply))
            reference.update(theirs, step=step, seeds=[int(s) & 0xFFFFFFFF for s in seeds])
            assert [bits(p) for p in ours] == [bits(p) for p in theirs], (half, keep, pad, t)

layout = (Slot("a", (9001,), 2, 0), Slot("b", (5,), 3, 18002))
flat = torch.randn(18017)
sums = norm.ChunkSums(norm.chunks_of(layout, world=1), gradient=flat)
assert torch.equal(sums._sum_by_triton(triton_kernels), sums())

for apply in (True, False):
    state = torch.tensor([rng.START, rng.START])
    plain = rng.ModelRng()
    for _ in range(3):
        plain.micro_step()
    seeds = triton_kernels.draws(state, pending=3, count=16, apply=torch.tensor(apply))
    if apply:
        assert [int(s) & 0xFFFFFFFF for s in seeds] == plain.update(16)
    expected = [plain.state, plain.last_update]
    assert [int(s) & (1 << 64) - 1 for s in state] == expected
print("equal")
"""


def test_interpreted_kernels_give_the_definitions_bits(tmp_path: Path) -> None:
    assert run(INTERPRETED, interpret=True, tmp_path=tmp_path).strip() == "equal"


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from runner import triton_kernels as k

def ptx(kernel, types, constants):
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

floats = ["grad_ptr", "m_ptr", "v_ptr", "master_ptr", "scalars_ptr", "scale_ptr"]
types = dict.fromkeys(floats, "*fp32") | {"apply_ptr": "*u8", "seed_ptr": "*i32", "decay": "fp32"}
types |= dict.fromkeys(["n", "start", "param_stride", "grad_stride"], "i32")
for half in (False, True):
    print("### adamw", half)
    constants = {"HALF": half, "MASTER": half, "SIZE": 1024}
    print(ptx(k.adamw_kernel, types | {"param_ptr": "*i16" if half else "*fp32"}, constants))
print("### norm")
types = {"x_ptr": "*fp32", "first_ptr": "*i64", "length_ptr": "*i64", "out_ptr": "*fp64"}
print(ptx(k.block_sums_kernel, types, {"LANES": 32, "ROWS": 64}))
print("### draws")
types = {"state_ptr": "*i64", "seeds_ptr": "*i32", "apply_ptr": "*u8", "pending": "i32", "count": "i32"}
print(ptx(k.draws_kernel, types, {}))
"""


def test_hopper_code_has_exactly_the_fused_operations_that_llmc_writes(tmp_path: Path) -> None:
    text = run(COMPILED, interpret=False, tmp_path=tmp_path)
    fp32, half, norm, _draws = text.split("### ")[1:]
    for ptx in (fp32, half):
        elements = 1024 // 128  # of one thread
        assert len(re.findall(r"\bfma\.rn\.f32\b", ptx)) == 4 * elements
        assert len(re.findall(r"\bdiv\.rn\.f32\b", ptx)) == 3 * elements
        assert len(re.findall(r"\bsqrt\.rn\.f32\b", ptx)) == elements
        assert ".ftz" not in ptx
        assert ".approx" not in ptx
        assert not re.findall(r"\b(?:mul|add|sub)\.f32\b", ptx)  # .rn forbids contraction
    # In the norm a fused float64 operation rounds as two: the square of a float32 is exact.
    assert "fma.rn.f64" in norm or ("mul.rn.f64" in norm and "add.rn.f64" in norm)
