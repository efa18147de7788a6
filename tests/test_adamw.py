"""AdamW against llm.c's golden values, and every implementation against every other, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from runner.api import Segment
from runner.optimizer import compiled
from runner.optimizer.adamw import AdamW

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
def test_an_update_gives_llmcs_values(index: int, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[index]
    adamw = optimizer_of(case, kernels=kernels, monkeypatch=monkeypatch)
    adamw.update(step=case["t"] - 1, lr=case["lr"], scale=one(case["grad_scale"]), apply=TRUE)
    state = adamw.state_dict()
    for ours, theirs in (("m", "m_out"), ("v", "v_out")):
        assert torch.allclose(state[ours], torch.tensor(case[theirs]), rtol=0, atol=3e-8)
    assert torch.allclose(adamw.segments[0].param[0], torch.tensor(case["param_out"]), rtol=0, atol=3e-8)
