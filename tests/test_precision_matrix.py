"""Every optimizer in every number format trains, skips a NaN step and goes on bit for bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from runner import micro_batch
from runner.cli import ConfigError
from runner.model.gpt2 import GPT2
from runner.precision import Precision
from tests.sessions import TINY, ran

OPTIMIZERS = {
    "adamw": "1e-2",
    "lion": "1e-3",
    "sophia": "1e-3",
    "muon": "1e-2",
    "adafactor": "1e-1",
    "sgd": "1e-1",
}
PRECISIONS = {
    "fp32": ["precision=fp32"],
    "bf16": ["precision=bf16"],
    "bf16_master": ["precision=bf16_master"],
    "fp8": ["precision=fp8", "precision.fp8_emulate=true"],
}
NAN_AT = 3  # the 0-based step that is refused
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")


def bits(value: Any) -> Any:
    """Return state with every tensor as its bytes, to be compared exactly."""
    if isinstance(value, torch.Tensor):
        return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize(
    "precision", ["fp32", "bf16", "bf16_master", pytest.param("fp8", marks=needs_torchao)]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_trains_skips_and_goes_on(optimizer: str, precision: str, tmp_path: Path) -> None:
    command = [
        *TINY,
        *PRECISIONS[precision],
        f"optimizer={optimizer}",
        f"optimizer.lr={OPTIMIZERS[optimizer]}",
    ]
    command.append(f"debug.nan_loss_at=[{NAN_AT}]")
    straight = ran(*command, "train.steps=6", dir=tmp_path / "straight")

    before = ran(*command, f"train.steps={NAN_AT}", dir=tmp_path / "parts")
    first = before.engine.weights.clone()
    skipped = ran(*command, f"train.steps={NAN_AT + 1}", dir=tmp_path / "parts")
    assert skipped.progress.step == NAN_AT + 1
    assert bits(skipped.engine.weights) == bits(first)
    assert bits(skipped.optimizer.state_dict()) == bits(before.optimizer.state_dict())
    resumed = ran(*command, "train.steps=6", dir=tmp_path / "parts")

    assert torch.isfinite(straight.engine.weights).all()
    assert (straight.engine.weights != first).float().mean() > 0.5
    assert bits(resumed.engine.weights) == bits(straight.engine.weights)
    assert bits(resumed.optimizer.state_dict()) == bits(straight.optimizer.state_dict())
    assert bits(resumed.stream.state_dict()) == bits(straight.stream.state_dict())
    assert resumed.rng.state_dict() == straight.rng.state_dict()


def model() -> GPT2:
    return GPT2(layers=2, heads=2, width=32, max_seq_len=16, vocab_size=64)


@needs_torchao
def test_fp8_is_near_the_truth_and_not_bf16s() -> None:
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    gradients, losses = {}, {}
    for mode in ("fp32", "bf16", "fp8"):
        precision, device = Precision(mode=mode, fp8_emulate=True), torch.device("cpu")  # type: ignore[arg-type]
        network = model()
        precision.convert(network, device=device)
        with precision.autocast(device)():
            loss = network(tokens, tokens)
        loss.backward()
        losses[mode] = float(loss.detach())
        gradients[mode] = torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])
    error = {m: (gradients[m] - gradients["fp32"]).norm() / gradients["fp32"].norm() for m in gradients}
    assert 0 < error["bf16"] < error["fp8"] < 0.1
    assert losses["fp8"] == pytest.approx(losses["fp32"], abs=0.01)


@needs_torchao
def test_fp8_swaps_a_strangers_layers_but_its_head() -> None:
    network = torch.nn.ModuleDict({"inner": torch.nn.Linear(16, 32), "lm_head": torch.nn.Linear(32, 48)})
    Precision(mode="fp8", fp8_emulate=True).convert(network, device=torch.device("cpu"))
    assert type(network["inner"]).__name__ == "Float8Linear"
    assert type(network["lm_head"]) is torch.nn.Linear
    with pytest.raises(ValueError, match="use precision=bf16 for this model"):
        Precision(mode="fp8", fp8_emulate=True).convert(torch.nn.LayerNorm(4), device=torch.device("cpu"))


def test_fp8_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"capability 8\.9 or later, not cpu"):
        Precision(mode="fp8").resolve(torch.device("cpu"))


@pytest.mark.parametrize("model_name", ["tiny", "llama_tiny"])
def test_blocks_computed_again_give_the_same_bits(model_name: str, tmp_path: Path) -> None:
    command = [*TINY, f"model={model_name}", "model.layers=2", "train.steps=4"]
    command += ["model.heads=2", "model.width=32", "checkpoint.every=0"]
    dropout = ["model.dropout=0.1"] if model_name == "tiny" else []
    kept = ran(*command, *dropout, dir=tmp_path / "kept")
    again = ran(*command, *dropout, "train.checkpoint_blocks=true", dir=tmp_path / "again")
    assert bits(kept.engine.weights) == bits(again.engine.weights)
    assert [n for n, _ in again.model.named_parameters()] == [n for n, _ in kept.model.named_parameters()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler about itself
def test_compiled_blocks_train_alike_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    command = [*TINY, "precision=fp32", "run.compile=blocks"]
    straight = ran(*command, "train.steps=6", dir=tmp_path / "straight")
    ran(*command, "train.steps=3", dir=tmp_path / "parts")
    resumed = ran(*command, "train.steps=6", dir=tmp_path / "parts")
    assert bits(resumed.engine.weights) == bits(straight.engine.weights)
    eager = ran(*TINY, "precision=fp32", "train.steps=6", dir=tmp_path / "eager")
    torch.testing.assert_close(straight.engine.weights, eager.engine.weights, rtol=1e-3, atol=1e-4)


def test_micro_batch_auto_fits_is_recorded_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [*TINY, "train.micro_batch=auto", "train.tokens_per_step=192"]
    first = ran(*command, "train.steps=2", dir=tmp_path)
    assert (first.plan.micro_batch, first.plan.accumulate) == (12, 1)
    assert '"micro_batch": 12' in (tmp_path / "manifest.json").read_text()
    monkeypatch.setattr(micro_batch, "CPU_TOKENS", 64)  # a smaller machine must not change the bits
    assert ran(*command, "train.steps=3", dir=tmp_path).plan.micro_batch == 12
    (tmp_path / "other").mkdir()
    assert ran(*command, "train.steps=3", dir=tmp_path / "other").plan.accumulate == 3
    with pytest.raises(ConfigError, match=r"auto needs train\.tokens_per_step"):
        ran(*TINY, "train.micro_batch=auto", dir=tmp_path / "third")


def test_the_largest_that_fits_is_found_without_trying_what_is_larger() -> None:
    tried: list[int] = []

    def fits(rows: int) -> bool:
        tried.append(rows)
        return rows <= 5

    assert micro_batch.divisors(24) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert micro_batch.largest_fitting(micro_batch.divisors(24), fits) == 4
    assert tried == [1, 2, 3, 4, 6]
    assert micro_batch.largest_fitting([1, 2], lambda rows: False) is None
