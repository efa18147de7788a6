"""Each optimizer against its definition in numpy; what a skip may change (nothing); roles and rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runner.api import Optimizer, Segment
from runner.config import build
from runner.curvature import curvature_of
from runner.optimizer.options import Options, assemble
from runner.rng import ModelRng
from runner.schedule import compose_plan
from runner.signature import signature_of
from tests.sessions import TINY, opened

LR = 0.01
SHAPES = {  # name: (role, shape, layers)
    "embed.weight": ("embedding", (6, 4), 1),
    "blocks.*.weight": ("matrix", (4, 8), 2),
    "blocks.*.bias": ("vector", (8,), 2),
    "lm_head": ("head", (6, 4), 1),
}
NODES: dict[str, dict[str, Any]] = {
    "adamw": {"_target_": "runner.optimizer.adamw.AdamW", "weight_decay": 0.1},
    "lion": {"_target_": "runner.plugins.optimizer.lion.Lion"},
    "sophia": {"_target_": "runner.plugins.optimizer.sophia.Sophia"},
    "muon": {"_target_": "runner.optimizer.muon.Muon"},
    "adafactor": {"_target_": "torch.optim.Adafactor", "weight_decay": 0.1},
    "sgd": {"_target_": "torch.optim.SGD", "momentum": 0.9, "weight_decay": 0.1},
    "nadam": {"_target_": "torch.optim.NAdam", "weight_decay": 0.1},
}


def segments(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> list[Segment]:
    """Return segments of random weights and gradients, whole and in flat order."""
    generator = torch.Generator().manual_seed(seed)
    made, offset = [], 0
    for index, (name, (role, shape, layers)) in enumerate(SHAPES.items()):
        flat = (layers, math.prod(shape))
        param, grad = (torch.randn(flat, generator=generator) for _ in range(2))
        made.append(Segment(name, role, shape, param.to(dtype), grad, offset, 0, index))  # type: ignore[arg-type]
        offset += param.numel()
    return made


def optimizer(name: str, parts: list[Segment], **extra: Any) -> Optimizer:
    node = {"lr": LR, **NODES[name], **extra}
    takes = frozenset(signature_of(node["_target_"]).parameters)
    make: Callable[..., Any] = partial(build)
    return assemble(parts, node=node, make=make, takes=takes, rng=ModelRng())


def update(made: Optimizer, step: int = 0, *, scale: float = 1.0, apply: bool = True, lr: float = LR) -> None:
    made.update(step=step, lr=lr, scale=torch.tensor(scale), apply=torch.tensor(apply))


def bits(made: Optimizer, parts: list[Segment]) -> list[bytes]:
    found = [part.param.clone().view(torch.uint8).numpy().tobytes() for part in parts]

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, list | tuple):
            for item in value:
                walk(item)
        elif isinstance(value, torch.Tensor):
            found.append(value.clone().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.append(repr(value).encode())

    walk(made.state_dict())
    return found


# ---------------------------------------------------------------- ten-line definitions in float64


def lion(p, grads, *, decay, betas=(0.9, 0.99)):
    m = np.zeros_like(p)
    for g in grads:
        p = p * (1 - LR * decay) - LR * np.sign(betas[0] * m + (1 - betas[0]) * g)
        m = betas[1] * m + (1 - betas[1]) * g
    return p


def sophia(p, grads, *, decay, h, rho=0.04, beta=0.965):
    m = np.zeros_like(p)
    for g in grads:
        m = beta * m + (1 - beta) * g
        p = p * (1 - LR * decay) - LR * np.clip(m / np.maximum(rho * h, 1e-12), -1, 1)
    return p


def sgd(p, grads, *, decay, momentum=0.9):
    v = np.zeros_like(p)
    for i, g in enumerate(grads):
        g = g + decay * p
        v = momentum * v + g if i else g
        p = p - LR * v
    return p


def adamw(p, grads, *, decay, betas=(0.9, 0.95), eps=1e-8):
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, 1):
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        step = m / (1 - betas[0] ** t) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
        p = p - LR * (step + decay * p)
    return p


def muon(p, grads, *, decay, momentum=0.95):
    b = np.zeros_like(p)
    for g in grads:
        b = b + (1 - momentum) * (g - b)
        x = g + momentum * (b - g)
        x = x / np.linalg.norm(x)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
        p = p * (1 - LR * decay) - LR * 0.2 * math.sqrt(max(p.shape)) * x
    return p


def adafactor(p, grads, *, decay, eps2=1e-3):
    row, col = np.zeros(p.shape[0]), np.zeros(p.shape[1])
    for t, g in enumerate(grads, 1):
        beta, rho = 1 - t**-0.8, min(LR, 1 / math.sqrt(t))
        alpha = max(eps2, np.sqrt(np.mean(p * p))) * rho
        p = p * (1 - LR * decay)
        row = beta * row + (1 - beta) * np.mean(g * g, 1)
        col = beta * col + (1 - beta) * np.mean(g * g, 0)
        u = g / np.sqrt(np.outer(row, col) / np.mean(row))
        p = p - alpha * u / max(1.0, np.sqrt(np.mean(u * u)))
    return p


def trained(name: str, *, steps: int = 4) -> tuple[list[Segment], list[list[np.ndarray]], list[np.ndarray]]:
    """Return the segments after some updates, the gradients of each, and the initial weights."""
    parts = segments()
    before = [part.param.double().numpy().copy() for part in parts]
    made = optimizer(name, parts)
    grads: list[list[np.ndarray]] = [[] for _ in parts]
    for step in range(steps):
        for part, kept, fresh in zip(parts, grads, segments(seed=step + 1), strict=True):
            part.grad.copy_(fresh.grad)
            kept.append(0.5 * fresh.grad.double().numpy())
        update(made, step, scale=0.5)
    return parts, grads, before


def compare(name: str, reference: Callable[..., Any], *, roles: set[str], decay: float, rtol: float) -> None:
    parts, grads, before = trained(name)
    for part, history, p in zip(parts, grads, before, strict=True):
        if part.role not in roles:
            continue
        for layer in range(part.param.shape[0]):
            shaped = [g[layer].reshape(part.shape) for g in history]
            own = decay if part.role != "vector" else 0.0
            expected = reference(p[layer].reshape(part.shape), shaped, decay=own)
            got = part.param[layer].double().numpy().reshape(part.shape)
            np.testing.assert_allclose(
                got - p[layer].reshape(part.shape),
                expected - p[layer].reshape(part.shape),
                rtol=rtol,
                atol=rtol * LR,
            )


ALL = {"embedding", "matrix", "vector", "head"}


def test_lion_is_its_definition() -> None:
    compare("lion", lion, roles=ALL, decay=1.0, rtol=1e-4)


def test_sgd_of_torch_is_its_definition_and_decays_by_role() -> None:
    compare("sgd", sgd, roles=ALL, decay=0.1, rtol=1e-4)


def test_muon_orthogonalises_matrices_and_leaves_the_rest_to_adamw() -> None:
    compare("muon", muon, roles={"matrix"}, decay=0.1, rtol=0.05)  # torch iterates in bfloat16
    compare("muon", adamw, roles={"embedding", "vector", "head"}, decay=0.1, rtol=1e-3)


def test_adafactor_of_torch_is_its_definition() -> None:
    compare("adafactor", adafactor, roles={"matrix", "embedding", "head"}, decay=0.1, rtol=1e-3)


def test_sophia_is_its_definition_after_an_estimate() -> None:
    parts = segments()
    made = optimizer("sophia", parts)
    observer = curvature_of(made)
    assert [observer.due(step) for step in (0, 1, 9, 10)] == [True, False, False, True]
    observer.observe(samples=50, apply=torch.tensor(True))
    h = [0.01 * 50 * part.grad.double().numpy() ** 2 for part in parts]
    observer.observe(samples=50, apply=torch.tensor(False))
    before = [part.param.double().numpy().copy() for part in parts]
    for step in range(3):
        update(made, step)
    for part, p, curvature in zip(parts, before, h, strict=True):
        grads = [part.grad.double().numpy()] * 3
        expected = sophia(p, grads, decay=0.0 if part.role == "vector" else 0.2, h=curvature)
        np.testing.assert_allclose(part.param.double().numpy(), expected, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------- laws of every optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NODES)
def test_a_skip_changes_nothing_whatever_the_gradient_holds(name: str, dtype: torch.dtype) -> None:
    parts = segments(dtype)
    made = optimizer(name, parts)
    for step in range(2):
        update(made, step)
    before = bits(made, parts)
    for part, bad in zip(parts, (math.nan, math.inf, -math.inf, 1e38), strict=True):
        part.grad.fill_(bad)
    update(made, 2, scale=0.0, apply=False)
    update(made, 3, scale=math.nan, apply=False)
    assert bits(made, parts) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NODES)
def test_a_state_goes_on_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    """Also across a skip before the checkpoint and one after it."""
    rng = ModelRng()
    parts, grads = segments(dtype), [segments(seed=step + 5) for step in range(6)]

    def steps(made: Optimizer, own: list[Segment], which: range) -> None:
        for step in which:
            for part, fresh in zip(own, grads[step], strict=True):
                part.grad.copy_(fresh.grad)
            update(made, step, apply=step not in (1, 4))

    node = {"lr": LR, **NODES[name]}
    takes = frozenset(signature_of(node["_target_"]).parameters)
    straight = assemble(parts, node=node, make=build, takes=takes, rng=rng)
    steps(straight, parts, range(3))
    again, other = segments(dtype, seed=99), ModelRng()
    for part, source in zip(again, parts, strict=True):
        part.param.copy_(source.param)
    resumed = assemble(again, node=node, make=build, takes=takes, rng=other)
    resumed.load_state_dict(_copied(straight.state_dict()))
    other.load_state_dict(rng.state_dict())
    steps(straight, parts, range(3, 6))
    steps(resumed, again, range(3, 6))
    assert bits(straight, parts) == bits(resumed, again)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value.clone() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", NODES)
def test_the_gradient_is_read_and_never_written(name: str) -> None:
    parts = segments()
    before = [part.grad.clone() for part in parts]
    made = optimizer(name, parts)
    for step in range(2):
        update(made, step, scale=0.25)
    assert all(torch.equal(part.grad, kept) for part, kept in zip(parts, before, strict=True))


@pytest.mark.parametrize("name", NODES)
def test_a_learning_rate_of_zero_moves_nothing(name: str) -> None:
    parts = segments()
    before = [part.param.clone() for part in parts]
    update(optimizer(name, parts), lr=0.0)
    assert all(torch.equal(part.param, kept) for part, kept in zip(parts, before, strict=True))


@pytest.mark.parametrize("name", NODES)
def test_bfloat16_weights_are_a_master_copy_rounded(name: str) -> None:
    exact, half = segments(), segments(torch.bfloat16)
    for a, b in zip(exact, half, strict=True):
        a.param.copy_(b.param)
    one, other = optimizer(name, exact), optimizer(name, half)
    for step in range(5):
        update(one, step)
        update(other, step)
    master = other.state_dict()["master"].split([part.param.numel() for part in half])
    for a, b, kept in zip(exact, half, master, strict=True):
        assert torch.equal(kept.view_as(a.param), a.param)
        assert torch.allclose(b.param.float(), a.param, rtol=2**-7, atol=1e-6)


def test_torchs_counters_follow_the_loops_steps() -> None:
    parts = segments()
    made = optimizer("nadam", parts)
    for step, apply in enumerate((True, False, False, True)):
        update(made, step, apply=apply)
    assert {float(entries["step"]) for entries in made.state_dict()["tensors"].values()} == {4.0}


def test_rates_and_decay_by_role() -> None:
    plain, scaled = segments(), segments()
    one = optimizer("adamw", plain)
    other = optimizer("adamw", scaled, lr_scale={"embedding": 0.0, "vector": 2.0}, decay_scale={"head": 0.0})
    before = [part.param.clone() for part in plain]
    update(one)
    update(other)
    embedding, matrix, vector, head = zip(before, plain, scaled, strict=True)
    assert torch.equal(embedding[2].param, embedding[0])
    assert torch.equal(matrix[1].param, matrix[2].param)
    moved, twice = vector[1].param - vector[0], vector[2].param - vector[0]
    torch.testing.assert_close(twice, 2 * moved, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(head[1].param, head[2].param - LR * 0.1 * head[0], rtol=0, atol=1e-6)


def test_roles_split_between_optimizers_keep_their_state() -> None:
    parts = segments()
    made = optimizer("muon", parts, lr_scale={"embedding": 3.0, "vector": 0.5})
    update(made)
    kept, weights = _copied(made.state_dict()), [part.param.clone() for part in parts]
    update(made, 1)
    expected = bits(made, parts)
    again = segments()
    for part, source in zip(again, weights, strict=True):
        part.param.copy_(source)
    resumed = optimizer("muon", again, lr_scale={"embedding": 3.0, "vector": 0.5})
    resumed.load_state_dict(kept)
    update(resumed, 1)
    assert bits(resumed, again) == expected
    with pytest.raises(ValueError, match="it has the parts"):
        optimizer("muon", segments(), lr_scale={"head": 2.0}).load_state_dict(kept)


def test_the_rate_of_a_larger_step() -> None:
    assert Options().lr_factor(7) == 1
    assert Options(lr_scaling="linear", reference_tokens=100).lr_factor(400) == 4
    assert Options(lr_scaling="sqrt", reference_tokens=100).lr_factor(400) == 2
    with pytest.raises(ValueError, match=r"needs optimizer\.reference_tokens"):
        Options(lr_scaling="sqrt")
    with pytest.raises(ValueError, match=r"optimizer.lr_scale.bias: no such role; use one of matrix"):
        Options(lr_scale={"bias": 1.0})


def test_a_run_scales_its_schedule_and_the_drawing_shows_it(tmp_path: Path) -> None:
    command = [
        "optimizer=lion",
        "optimizer.lr_scaling=sqrt",
        "optimizer.reference_tokens=8",
        "optimizer.lr=1e-3",
    ]
    session = opened(*TINY, *command, "train.steps=5", dir=tmp_path)
    assert session.plan.tokens == 32
    assert session.scheduler(0) == pytest.approx(2e-3)
    assert compose_plan([*TINY, *command, "train.steps=5"]).lr == [session.scheduler(s) for s in range(5)]
    session.engine.close()
