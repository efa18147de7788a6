"""The kernels of a device against their definitions on the CPU, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.results import Row
from runner import norm
from runner.api import Segment, Slot
from runner.optimizer.adamw import AdamW
from runner.outlier import Median, ZScore
from runner.rng import ModelRng

UPDATES = 6
LAYERS, WIDTH = 3, 70_001


def measure(device: torch.device) -> list[Row]:
    """Return for each kernel how many values differ."""
    checks: dict[str, Callable[[torch.device], int]] = {
        "AdamW, fp32 weights": lambda d: _adamw(d, half=False, master=False),
        "AdamW, bf16 weights, stochastic rounding, master": lambda d: _adamw(d, half=True, master=True),
        "AdamW, bf16 weights, stochastic rounding, no master": lambda d: _adamw(d, half=True, master=False),
        "gradient norm": _norm,
        "guard, z-scores": lambda d: _guard(d, ZScore(max_loss_z=3.0, max_norm_z=3.0, window=16)),
        "guard, median": lambda d: _guard(d, Median(max_ratio=2.0, window=16, warmup=4)),
    }
    how = f"{device.type} against the definition on the CPU"
    return [
        Row(f"{name}: values that differ", check(device), "", 0, 0, how) for name, check in checks.items()
    ]


def _adamw(device: torch.device, *, half: bool, master: bool) -> int:
    """Compare after updates of which one is refused, with a nan in its gradient."""
    ours = _optimizer(device, half=half, master=master)
    theirs = _optimizer(torch.device("cpu"), half=half, master=master)
    theirs[0]._bind()
    theirs[0]._compiled = None  # the definition in torch operations
    generator = torch.Generator().manual_seed(1)
    for step in range(UPDATES):
        gradient = torch.randn(LAYERS, WIDTH, generator=generator) * 10.0 ** (step - 4)
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
    numel = sum(slot.numel for slot in layout)
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(2))
    chunks = norm.chunks_of(layout, world=1)
    ours = norm.ChunkSums(chunks, gradient=flat.to(device))()
    definition = norm.ChunkSums(chunks, gradient=flat)
    definition._sum_by_torch()
    total = _differ(norm.norm_of(ours).cpu(), norm.norm_of(definition.sums))
    return _differ(ours.cpu(), definition.sums) + total


def _guard(device: torch.device, part: ZScore | Median) -> int:
    """Compare the tensor arithmetic on the device with what a CPU run computes."""
    other = type(part)(**_settings(part))
    generator = torch.Generator().manual_seed(3)
    differ = 0
    for step in range(300):
        loss, value = (3 + torch.randn(2, generator=generator)).unbind()
        if step % 41 == 7:
            loss = loss * float("nan")
        if step % 53 == 9:
            value = value * 1000
        ours, theirs = part(loss.to(device), value.to(device)), other(loss, value)
        differ += sum(_differ(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))
    return differ


def _settings(part: ZScore | Median) -> dict[str, float]:
    names = ("max_loss_z", "max_norm_z", "window", "max_ratio", "warmup")
    return {name: getattr(part, name) for name in names if hasattr(part, name)}


def _differ(a: Tensor, b: Tensor) -> int:
    same = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b
    return int((~same).sum())
