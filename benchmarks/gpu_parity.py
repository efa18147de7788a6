"""The kernels of a device against their definitions on the CPU, bit for bit."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

from benchmarks.results import Row
from runner import native, norm
from runner.api import Segment, Slot
from runner.clip import clip_by_norm
from runner.optimizer.adamw import AdamW
from runner.outlier import Finite, Median, ZScore
from runner.rng import ModelRng

UPDATES = 6
LAYERS, WIDTH = 3, 70_001
LONG_ROW = 68_000_000  # elements whose chunks have more blocks than a program folds in registers

Check = Callable[[torch.device], int]


def checks(device: torch.device) -> dict[str, Check]:
    """Return by name what counts the values that differ."""
    with_kernels: dict[str, Check] = {
        "AdamW, fp32 weights": functools.partial(_adamw, half=False, master=False),
        "AdamW, bf16 weights, stochastic rounding, master": functools.partial(_adamw, half=True, master=True),
        "AdamW, bf16 weights, stochastic rounding, no master": functools.partial(
            _adamw, half=True, master=False
        ),
        "gradient norm": _norm,
        "guard, z-scores": functools.partial(_guard, make=_zscore),
        "guard, z-scores, window 100": functools.partial(_guard, make=lambda: _zscore(window=100)),
        "guard, robust z-scores": functools.partial(_guard, make=lambda: _zscore(robust=True)),
        "guard, robust z-scores, window 100": functools.partial(
            _guard, make=lambda: _zscore(robust=True, window=100)
        ),
        "guard, median": functools.partial(_guard, make=lambda: Median(max_ratio=2.0, window=16, warmup=4)),
        "guard, finite": functools.partial(_guard, make=Finite),
        "clip factor": _clip,
        "llm.c's random stream": _stream,
    }
    if device.type != "cuda":
        return with_kernels
    plain = {
        f"{name}, without Triton": functools.partial(_without_triton, check=with_kernels[name])
        for name in ("AdamW, bf16 weights, stochastic rounding, master", "gradient norm")
    }
    plain |= {
        f"{name}, without Triton": functools.partial(_without_triton, check=check)
        for name, check in with_kernels.items()
        if name.startswith(("guard, z", "guard, r", "clip", "llm.c"))
    }
    return with_kernels | {"gradient norm, long rows": _long_norm} | plain


def measure(device: torch.device) -> Iterator[Row]:
    """Yield for each kernel how many values differ; one that fails is a row too."""
    for name, check in checks(device).items():
        try:
            differ, how = float(check(device)), f"{device.type} against the definition on the CPU"
        except Exception as error:
            differ, how = float("nan"), " ".join(f"{type(error).__name__}: {error}".split())[:300]
        yield Row(f"{name}: values that differ", differ, "", 0, 0, how)


def _without_triton(device: torch.device, *, check: Check) -> int:
    """Check the path that runs where Triton is missing."""
    with mock.patch.object(native, "triton_kernels", return_value=None):
        return check(device)


def _adamw(device: torch.device, *, half: bool, master: bool) -> int:
    """Compare after updates of which one is refused, with a nan in its gradient."""
    ours = _optimizer(device, half=half, master=master)
    theirs = _optimizer(torch.device("cpu"), half=half, master=master)
    theirs[0]._bind()
    theirs[0]._compiled = None  # the definition in torch operations
    generator = torch.Generator().manual_seed(1)
    for step in range(UPDATES):
        gradient = torch.randn(LAYERS, WIDTH, generator=generator) * 10.0 ** (step - 4)
        gradient[:, ::7] *= 1e-18  # whose squares are subnormal
        refused = step == 3
        for optimizer, segment in (ours, theirs):
            segment.grad.copy_(gradient)
            where = segment.grad.device
            scale = torch.tensor(float("nan") if refused else 0.37, device=where)
            optimizer.update(step=step, lr=1e-3, scale=scale, apply=torch.tensor(not refused, device=where))
    held = [
        [segment.param.cpu(), *(tensor.cpu() for tensor in optimizer.state_dict().values())]
        for optimizer, segment in (ours, theirs)
    ]
    return sum(_differ(a, b) for a, b in zip(*held, strict=True))


def _optimizer(device: torch.device, *, half: bool, master: bool) -> tuple[AdamW, Segment]:
    weights = torch.randn(LAYERS, WIDTH, generator=torch.Generator().manual_seed(0)).to(device)
    param = weights.bfloat16() if half else weights
    segment = Segment("a", "matrix", (WIDTH,), param, torch.zeros_like(weights), 0)
    return AdamW([segment], lr=1e-3, master=master, rng=ModelRng(device=device)), segment


def _norm(device: torch.device) -> int:
    layout = (Slot("a", (9001,), 2, 0), Slot("b", (5,), 3, 18002), Slot("c", (1 << 20,), 1, 18017))
    return _norm_of(layout, device)


def _long_norm(device: torch.device) -> int:
    return _norm_of((Slot("a", (LONG_ROW,), 1, 0),), device)


def _norm_of(layout: tuple[Slot, ...], device: torch.device) -> int:
    numel = sum(slot.numel for slot in layout)
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(2))
    chunks = norm.chunks_of(layout, world=1)
    ours = norm.ChunkSums(chunks, gradient=flat.to(device))()
    definition = norm.ChunkSums(chunks, gradient=flat)
    definition._sum_by_torch()
    total = _differ(norm.norm_of(ours).cpu(), norm.norm_of(definition.sums))
    return _differ(ours.cpu(), definition.sums) + total


def _zscore(*, robust: bool = False, window: int = 16) -> ZScore:
    return ZScore(max_loss_z=3.0, max_norm_z=3.0, window=window, robust=robust)


def _guard(device: torch.device, *, make: Callable[[], ZScore | Median | Finite]) -> int:
    """Compare what a device computes with what a CPU run does; resumed from a state in the middle."""
    ours, theirs = make(), make()
    generator = torch.Generator().manual_seed(3)
    differ = 0
    for step in range(300):
        loss, value = (3 + torch.randn(2, generator=generator)).unbind()
        if step % 41 == 7:
            loss = loss * float("nan")
        if step % 53 == 9:
            value = value * 1000
        if step == 150:
            state, ours = ours.state_dict(), make()
            ours.load_state_dict(state)
        verdicts = ours(loss.to(device), value.to(device)), theirs(loss, value)
        differ += sum(_differ(a.cpu(), b) for a, b in zip(*verdicts, strict=True))
    states = ours.state_dict(), theirs.state_dict()
    return differ + sum(_differ(states[0][name].cpu(), states[1][name]) for name in states[1])


def _clip(device: torch.device) -> int:
    norms = [0.0, 0.3, 1.0, 1.7, 3.1e38, float("inf"), float("nan"), 1e-40, *(i * 0.037 for i in range(200))]
    pairs = [(torch.tensor(norm), limit) for norm in norms for limit in (0.7, 1.0, 3.3)]
    return sum(
        _differ(clip_by_norm(norm.to(device), max_norm=limit).cpu(), clip_by_norm(norm, max_norm=limit))
        for norm, limit in pairs
    )


def _stream(device: torch.device) -> int:
    """Compare seeds and states after updates of which some are refused."""
    ours, theirs = ModelRng(device=device), ModelRng()
    differ = 0
    for step in range(12):
        for rng in (ours, theirs):
            rng.micro_step()
        applied = step % 5 != 2
        with contextlib.nullcontext() if device.type == "cuda" else _on_tensors(ours, device):
            seeds = ours.update_on_device(7, apply=torch.tensor(applied, device=device)).tolist()
        if applied:
            differ += [seed & 0xFFFFFFFF for seed in seeds] != theirs.update(7)
        differ += ours.state_dict() != theirs.state_dict()
    return differ


@contextlib.contextmanager
def _on_tensors(rng: ModelRng, device: torch.device) -> Iterator[None]:
    """Let the state of a CPU's stream live in a tensor."""
    if rng._on_device is None:
        rng._on_device = torch.tensor([rng._state, rng._last_update], device=device)
    yield


def _differ(a: Tensor, b: Tensor) -> int:
    same = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b
    return int((~same).sum())
