"""Reading the golden models and the reference optimizer of llm.c's CPU trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runner.model.gpt2 import GPT2

GOLDEN = Path(__file__).parent / "golden" / "model"
CPU_TRAIN: dict[str, Any] = json.loads((GOLDEN / "cpu_train.json").read_text())
HEADER_BYTES = 1024
B, T = 4, 64


def stacked(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Group the parameters by llm.c's tensor name, in the order of first appearance."""
    tensors: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        tensors.setdefault(name.rsplit(".", 1)[-1], []).append(parameter)
    return tensors


def load_model(file: str, **options: Any) -> GPT2:
    header = np.fromfile(GOLDEN / file, dtype=np.int32, count=8)
    _, _, max_seq_len, vocab_size, layers, heads, width, _ = (int(n) for n in header)
    model = GPT2(
        layers=layers, heads=heads, width=width, max_seq_len=max_seq_len, vocab_size=vocab_size, **options
    )
    weights = torch.from_numpy(np.fromfile(GOLDEN / file, dtype=np.float32, offset=HEADER_BYTES))
    parts = [p for group in stacked(model).values() for p in group]
    assert sum(p.numel() for p in parts) == len(weights)
    with torch.no_grad():
        for part, values in zip(parts, weights.split([p.numel() for p in parts]), strict=True):
            part.copy_(values.view_as(part))
    return model


def batches(file: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets in file order, as llm.c's unshuffled loader does."""
    tokens = torch.from_numpy(
        np.fromfile(GOLDEN / file, dtype=np.uint16, offset=HEADER_BYTES).astype(np.int64)
    )
    for i in range((len(tokens) - 1) // (B * T)):
        span = tokens[i * B * T : (i + 1) * B * T + 1]
        yield span[:-1].view(B, T), span[1:].view(B, T)


class CpuTrainerAdamW:
    """llm.c train_gpt2.c, gpt2_update: bias-corrected moments, decay on every tensor."""

    def __init__(self, model: nn.Module, *, run: dict[str, Any]) -> None:
        self.run, self.t = run, 0
        self.state = [(p, torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()]

    @torch.no_grad()
    def step(self) -> None:
        self.t += 1
        beta1, beta2 = self.run["beta1"], self.run["beta2"]
        for p, m, v in self.state:
            assert p.grad is not None
            m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
            v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
            m_hat, v_hat = m / (1 - beta1**self.t), v / (1 - beta2**self.t)
            update = m_hat / (v_hat.sqrt() + self.run["eps"]) + self.run["weight_decay"] * p
            p.sub_(self.run["lr"] * update)
            p.grad = None
