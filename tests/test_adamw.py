"""AdamW against llm.c's golden values, and every implementation against every other, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.api import Segment
from runner.optimizer import compiled, reference
from runner.optimizer.adamw import AdamW
from runner.optimizer.master import differing

GOLDEN = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "adamw.json").read_text())["cases"]
TRUE, FALSE = torch.tensor(True), torch.tensor(False)


def one(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float32)


def optimizer_of(case: dict, *, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> AdamW:
    param, grad = (torch.tensor([case[key]], dtype=torch.float32) for key in ("param", "grad"))
    segment = Segment("w", "matrix", tuple(param.shape[1:]), param, grad, 0)
    monkeypatch.setattr(compiled, "_proved", lambda: kernels)
    adamw = AdamW(
        [segment],
        lr=case["lr"],
        betas=(case["beta1"], case["beta2"]),
        eps=case["eps"],
        weight_decay=case["weight_decay"],
    )
    adamw.load_state_dict({"m": torch.tensor(case["m"]), "v": torch.tensor(case["v"])})
    return adamw


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("index", range(len(CASES)))
def test_an_update_gives_llmcs_bits(index: int, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[index]
    adamw = optimizer_of(case, kernels=kernels, monkeypatch=monkeypatch)
    adamw.update(step=case["t"] - 1, lr=case["lr"], scale=one(case["grad_scale"]), apply=TRUE)
    state = adamw.state_dict()
    for ours, theirs in (("m", "m_out"), ("v", "v_out")):
        assert torch.equal(state[ours], torch.tensor(case[theirs]))
    assert torch.equal(adamw.segments[0].param[0], torch.tensor(case["param_out"]))


# ---------------------------------------------------------------- fused multiply-add


def exact_fma(a: float, b: float, c: float) -> np.float32:
    """Round the exact rational a * b + c to float32, to nearest even, by integers."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    near = np.float32(float(exact))
    candidates = {near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))}

    def rank(x: np.float32) -> tuple[Fraction, int]:
        return abs(Fraction(float(x)) - exact), int(x.view(np.int32)) & 1

    return min((x for x in candidates if np.isfinite(x)), key=rank)


floats = st.floats(width=32, min_value=-(2.0**40), max_value=2.0**40)


@given(a=floats, b=floats, c=floats)
def test_fma_rounds_once(a: float, b: float, c: float) -> None:
    args = [torch.tensor([x], dtype=torch.float32) for x in (a, b, c)]
    assert reference.fma(*args).numpy()[0] == exact_fma(a, b, c)


@given(c=st.integers(2**23, 2**24 - 1), exponent=st.integers(-100, 60), negative=st.booleans())
@pytest.mark.parametrize(("x", "y"), [(2**23 - 1, 2**23 + 1), (8392705, 8384513)])  # 2^46 - 1 and 2^46 + 1
def test_fma_is_right_where_rounding_twice_is_wrong(
    x: int, y: int, c: int, exponent: int, negative: bool
) -> None:
    """The product is half a last place of c, give or take what float64 cannot hold beside c."""
    sign = -1.0 if negative else 1.0
    values = (x * 2.0**-23, sign * y * 2.0 ** (exponent - 24), sign * c * 2.0**exponent)
    args = [torch.tensor([value], dtype=torch.float32) for value in values]
    assert reference.fma(*args).numpy()[0] == exact_fma(*values)


@given(a=st.integers(1, 2**24 - 1), b=st.integers(1, 2**24 - 1), c=st.integers(-(2**24), 2**24))
def test_fma_is_right_among_subnormals(a: int, b: int, c: int) -> None:
    values = (a * 2.0**-90, b * 2.0**-90, c * 2.0**-149)
    args = [torch.tensor([value], dtype=torch.float32) for value in values]
    assert reference.fma(*args).numpy()[0] == exact_fma(*values)


@given(st.lists(st.tuples(floats, floats, floats), min_size=1, max_size=9))
def test_fma_without_branches_is_the_same(values: list[tuple[float, float, float]]) -> None:
    a, b, c = torch.tensor(values, dtype=torch.float32).unbind(1)
    product = a.double() * b.double()
    branchless = reference._odd(product, c.double(), product + c).float()
    assert torch.equal(branchless, reference.fma(a, b, c))


# ---------------------------------------------------------------- whole optimizers


def random_segments(*, dtype: torch.dtype, seed: int = 0, pad: int = 0) -> list[Segment]:
    """Three slots, one of them (with `pad`) a strided part of its layers."""
    generator = torch.Generator().manual_seed(seed)
    segments, offset = [], 0
    for index, (role, layers, n) in enumerate(
        [("embedding", 1, 20_011), ("vector", 3, 37), ("matrix", 2, 1025)]
    ):
        full = torch.randn(2, layers, n + 2 * pad, generator=generator)
        param, grad = full[0].to(dtype)[:, pad : pad + n], full[1][:, pad : pad + n] * 1e-3
        segments.append(
            Segment(f"s{index}", role, (n + 2 * pad,), param, grad, offset, start=pad, index=index)
        )
        offset += layers * n
    return segments


def optimizer(*, dtype: torch.dtype, master: bool = True, seed: int = 0, pad: int = 0) -> AdamW:
    return AdamW(random_segments(dtype=dtype, seed=seed, pad=pad), lr=1e-3, master=master)


def bits_of(adamw: AdamW) -> list[bytes]:
    tensors = [*adamw.state_dict().values(), *(segment.param for segment in adamw.segments)]
    return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]


KINDS = [(torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)]


@pytest.mark.parametrize("pad", [0, 5])
@pytest.mark.parametrize(("dtype", "master"), KINDS)
def test_compiled_at_any_thread_count_and_torch_give_the_same_bits(
    dtype: torch.dtype, master: bool, pad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled._proved():
        pytest.skip("no compiled kernel on this machine")
    results = []
    for threads, kernels in ((1, True), (2, True), (3, True), (1, False)):
        monkeypatch.setattr(compiled, "_proved", lambda kernels=kernels: kernels)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        adamw = optimizer(dtype=dtype, master=master, pad=pad)
        for step in range(3):
            adamw.update(step=step, lr=1e-3, scale=one(0.3), apply=TRUE)
        results.append(bits_of(adamw))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize(("dtype", "master"), KINDS)
def test_a_skip_leaves_every_bit(
    dtype: torch.dtype, master: bool, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_proved", lambda: kernels)
    adamw = optimizer(dtype=dtype, master=master)
    adamw.update(step=0, lr=1e-3, scale=one(1.0), apply=TRUE)
    before, stream = bits_of(adamw), adamw._rng.state_dict()
    for segment in adamw.segments:
        segment.grad.fill_(float("nan"))
    adamw.update(step=1, lr=1e-3, scale=one(float("nan")), apply=FALSE)
    assert bits_of(adamw) == before
    assert adamw._rng.state_dict() == stream


@pytest.mark.parametrize(("dtype", "master"), KINDS)
def test_the_branchless_path_selects_and_equals_the_branching_one(dtype: torch.dtype, master: bool) -> None:
    branching, branchless = (optimizer(dtype=dtype, master=master) for _ in range(2))
    branching.update(step=0, lr=1e-3, scale=one(0.5), apply=TRUE)
    branchless._bind()
    scalars, seeds = branchless._scalars(0, lr=1e-3), branchless._rng.update(3)
    step = reference.Step(one(0.5), *scalars.unbind())
    reference.update(branchless._parts, step=step, seeds=seeds, apply=TRUE)
    assert bits_of(branchless) == bits_of(branching)
    for segment in branchless.segments:
        segment.grad.fill_(float("nan"))
    reference.update(branchless._parts, step=step, seeds=seeds, apply=FALSE)
    assert bits_of(branchless) == bits_of(branching)


def test_decay_goes_by_role_and_t_by_the_step() -> None:
    adamw = AdamW(random_segments(dtype=torch.float32), lr=1e-3, weight_decay=0.5)
    before = [segment.param.clone() for segment in adamw.segments]
    for segment in adamw.segments:
        segment.grad.zero_()
    adamw.update(step=7, lr=1e-2, scale=one(1.0), apply=TRUE)
    embedding, vector, matrix = adamw.segments
    assert torch.equal(vector.param, before[1])
    for segment, old in ((embedding, before[0]), (matrix, before[2])):
        assert torch.allclose(segment.param, old * (1 - 1e-2 * 0.5), rtol=1e-6)


def test_the_gradient_is_read_only() -> None:
    adamw = optimizer(dtype=torch.float32)
    before = [segment.grad.clone() for segment in adamw.segments]
    adamw.update(step=0, lr=1e-3, scale=one(0.5), apply=TRUE)
    assert all(torch.equal(segment.grad, old) for segment, old in zip(adamw.segments, before, strict=True))


@pytest.mark.parametrize(("dtype", "master"), KINDS)
def test_state_goes_on_where_it_stopped(dtype: torch.dtype, master: bool) -> None:
    whole, first = (optimizer(dtype=dtype, master=master) for _ in range(2))
    for adamw in (whole, first):
        adamw.update(step=0, lr=1e-3, scale=one(1.0), apply=TRUE)
    second = optimizer(dtype=dtype, master=master)
    for ours, theirs in zip(second.segments, first.segments, strict=True):
        ours.param.copy_(theirs.param)
    second.load_state_dict(first.state_dict())
    second._rng.load_state_dict(first._rng.state_dict())
    for adamw in (whole, second):
        adamw.update(step=1, lr=1e-3, scale=one(1.0), apply=TRUE)
    assert bits_of(second) == bits_of(whole)


def test_a_wrong_state_is_refused_by_name() -> None:
    adamw = optimizer(dtype=torch.bfloat16)
    state = adamw.state_dict()
    with pytest.raises(ValueError, match=r"'master' is missing.*optimizer.master=false"):
        adamw.load_state_dict({"m": state["m"], "v": state["v"]})
    with pytest.raises(ValueError, match=r"'m' holds 3 values.*needs 22172"):
        adamw.load_state_dict(state | {"m": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"optimizer.betas\[1\]: 1.0"):
        AdamW(adamw.segments, lr=1e-3, betas=(0.9, 1.0))


def test_the_master_rounds_to_llmcs_model_file() -> None:
    """A bf16 checkpoint of llm.c: rounding its master weights again gives its model file."""
    golden = np.load(GOLDEN / "rounded_master.npz")
    _, _, T, _, L, _, C, Vp = (int(x) for x in golden["header"])
    shapes = [(1, Vp * C), (1, T * C), *((L, n) for n in (C, C, 3 * C * C, 3 * C, C * C, C, C, C))]
    shapes += [*((L, n) for n in (4 * C * C, 4 * C, 4 * C * C, C)), (1, C), (1, C)]
    weights = torch.from_numpy(golden["weights"].view(np.int16)).view(torch.bfloat16)
    segments, offset = [], 0
    for index, shape in enumerate(shapes):
        param = weights[offset : offset + shape[0] * shape[1]].view(shape)
        segments.append(Segment(str(index), "matrix", shape[1:], param, param.float(), offset, index=index))
        offset += param.numel()
    assert offset == len(weights) == len(golden["master"])
    master, last_update = torch.from_numpy(golden["master"]), int(golden["last_update"])
    assert differing(segments, master=master, last_update=last_update) == []
    weights[offset - 1] += 1
    assert differing(segments, master=master, last_update=last_update) == ["15"]
    assert differing(segments, master=master, last_update=last_update + 1) != []


def test_kernels_can_be_off_and_many_processes_may_build_at_once(tmp_path: Path) -> None:
    code = "from runner import native; print(native.load('update') is not None)"

    def start(kernels: str) -> subprocess.Popen[str]:
        env = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "RUNNER_KERNELS": kernels}
        return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)

    processes = [start("on"), start("on"), start("off")]
    outputs = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert outputs == (["True", "True", "False"] if shutil.which("cc") else ["False"] * 3)
    assert len(list(tmp_path.glob("runner/update-*.so"))) == (1 if shutil.which("cc") else 0)
    assert not list(tmp_path.glob("**/*.tmp"))
