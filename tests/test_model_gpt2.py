"""GPT-2 against llm.c's CPU trainer: logits, losses, gradients and whole training curves."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.api import LanguageModel
from runner.model.descriptor import descriptor
from runner.model.gpt2 import GPT2
from tests.model_golden import CPU_TRAIN, GOLDEN, CpuTrainerAdamW, batches, load_model, stacked

RUNS = {run["name"]: run for run in CPU_TRAIN["runs"]}
KERNELS: list[Literal["fast", "plain"]] = ["fast", "plain"]


def small(**options: Any) -> GPT2:
    shape = {"layers": 2, "heads": 2, "width": 16, "max_seq_len": 24, "vocab_size": 50}
    return GPT2(**(shape | options))


def tokens(*shape: int, vocab: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["highest", "medium"])
def matmul_library(request: pytest.FixtureRequest) -> Any:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    if request.param == "medium":
        from runner.precision import FP32_ERROR, _matmul_error

        if _matmul_error() > FP32_ERROR:
            torch.set_float32_matmul_precision(before)
            pytest.skip("oneDNN does not multiply in full precision on this CPU")
    yield request.param
    torch.set_float32_matmul_precision(before)


def test_named_parameters_are_in_llmc_order() -> None:
    order = "wte wpe ln1w ln1b qkvw qkvb attprojw attprojb ln2w ln2b fcw fcb fcprojw fcprojb lnfw lnfb"
    assert list(stacked(small())) == order.split()


@pytest.mark.parametrize("kernels", KERNELS)
def test_first_batch_logits_equal_llmc(kernels: Literal["fast", "plain"]) -> None:
    model = load_model("tiny_rough.bin", kernels=kernels)
    x, _ = next(batches("tiny_train.bin"))
    golden = np.fromfile(GOLDEN / "logits_every_8th.f32", dtype=np.float32).reshape(-1, 257)
    with torch.no_grad():
        logits = model(x).flatten(0, 1)[::8]
    np.testing.assert_allclose(logits.numpy(), golden, atol=3e-6, rtol=0)


@pytest.mark.usefixtures("matmul_library")
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ["rough_default", "init_default"])
def test_first_batch_losses_and_gradients_equal_llmc(name: str, kernels: Literal["fast", "plain"]) -> None:
    run = RUNS[name]
    model = load_model(run["model"], kernels=kernels)
    x, y = next(batches(run["data"]))
    with torch.no_grad():
        losses = model(x, y, reduction="none")
    np.testing.assert_allclose(losses.flatten().numpy(), run["first_batch_token_losses"], atol=4e-6)
    loss = model(x, y)
    loss.backward()
    assert loss.item() == pytest.approx(run["first_batch_loss"], abs=1e-6)
    for tensor, l2 in run["first_batch_grads"].items():
        gradient = torch.cat([p.grad.flatten() for p in stacked(model)[tensor] if p.grad is not None])
        assert gradient.double().norm().item() == pytest.approx(l2, rel=1e-6), tensor
    assert not model.embed.wte.grad[model.vocab_size :].any()


def mean_as_llmc(model: GPT2, x: torch.Tensor, y: torch.Tensor) -> float:
    """Sum the token losses one after the other in fp32, whose rounding (3e-6) the golden values contain."""
    with torch.no_grad():
        losses = model(x, y, reduction="none").flatten().numpy()
    return float(np.cumsum(losses, dtype=np.float32)[-1] / np.float32(len(losses)))


def train_as_llmc(
    run: dict[str, Any], *, kernels: Literal["fast", "plain"]
) -> tuple[GPT2, list[float], list[float]]:
    model = load_model(run["model"], kernels=kernels)
    optimizer, losses, norms = CpuTrainerAdamW(model, run=run), [], []
    data = batches(run["data"])
    x, y = next(data)
    for step in range(run["steps"]):
        if step > 0 and run["mode"] == "next":
            x, y = next(data)
        loss = model(x, y)
        loss.backward()
        losses.append(mean_as_llmc(model, x, y))
        assert loss.item() == pytest.approx(losses[-1], abs=4e-6)
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        norms.append(torch.cat(gradients).double().norm().item())
        optimizer.step()
    return model, losses, norms


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", list(RUNS))
def test_training_curve_equals_llmc(name: str, kernels: Literal["fast", "plain"]) -> None:
    run = RUNS[name]
    model, losses, norms = train_as_llmc(run, kernels=kernels)
    curve = np.array(run["curve"])
    np.testing.assert_allclose(losses, curve[:, 1], atol=2e-6, rtol=0)
    np.testing.assert_allclose(norms, curve[:, 2], rtol=2e-6)
    with torch.no_grad():
        val = [mean_as_llmc(model, x, y) for x, y in islice(batches(run["val"]), 5)]
    assert np.mean(val) == pytest.approx(run["val_loss_after_5_batches"], abs=3e-6)
    for tensor, golden in run["final_params"].items():
        values = torch.cat([p.detach().flatten() for p in stacked(model)[tensor]])
        np.testing.assert_allclose(values[:4].numpy(), golden["first"], atol=2e-6)
        assert values[-1].item() == pytest.approx(golden["last"], abs=2e-6)
    assert not model.embed.wte[model.vocab_size :].any()


@pytest.mark.parametrize("kernels", KERNELS)
def test_gradient_accumulation_equals_one_batch(kernels: Literal["fast", "plain"]) -> None:
    model = small(kernels=kernels, loss_chunk=7)
    x, y = tokens(4, 24), tokens(4, 24, seed=1)
    model(x, y).backward()
    whole = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    for rows in (slice(0, 2), slice(2, 4)):
        (model(x[rows], y[rows]) / 2).backward()
    for p, g in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(p.grad, g, atol=2e-7, rtol=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("steps", [(1,) * 24, (5, 1, 18), (24,)])
def test_cached_logits_equal_recomputed_ones(
    steps: tuple[int, ...], kernels: Literal["fast", "plain"]
) -> None:
    model = load_model("tiny_rough.bin", kernels=kernels).eval()
    x = next(batches("tiny_train.bin"))[0][:, :24]
    cache = model.new_cache(len(x))
    with torch.no_grad():
        expected = model(x)
        pieces = [model(piece, cache=cache) for piece in x.split(list(steps), 1)]
    logits = torch.cat(pieces, 1)
    torch.testing.assert_close(logits, expected, atol=3e-6, rtol=0)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    draws = [
        torch.multinomial(z.flatten(0, 1).softmax(-1), 1, generator=torch.Generator().manual_seed(7))
        for z in (logits, expected)
    ]
    assert torch.equal(*draws)


def test_bf16_autocast_stays_close_to_fp32() -> None:
    model = load_model("tiny_rough.bin")
    x, y = next(batches("tiny_train.bin"))
    expected = model(x, y)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x, y)
        per_token = model(x, y, reduction="none")
    loss.backward()
    assert loss.dtype == per_token.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=3e-3)
    assert per_token.mean().item() == pytest.approx(loss.item(), rel=1e-3)
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert norm.item() == pytest.approx(RUNS["rough_default"]["first_batch_grad_norm"], rel=2e-2)


def test_bf16_weights_train() -> None:
    model = small().bfloat16()
    loss = model(tokens(2, 24), tokens(2, 24, seed=1))
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters())


def test_dropout_only_in_training_and_repeatable() -> None:
    model, x = small(dropout=0.5), tokens(2, 24)
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        draws.append(model(x))
    assert torch.equal(*draws)
    model.eval()
    assert torch.equal(model(x), small(dropout=0.0).eval()(x))
    assert not torch.equal(draws[0], model(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, r"model\.width=16 is not a multiple of model\.heads=3"),
        ({"padded_vocab": 40}, r"model\.padded_vocab=40 is less than the vocabulary of 50"),
    ],
)
def test_impossible_shape_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**options)


def test_too_long_sequence_is_refused() -> None:
    model = small()
    with pytest.raises(ValueError, match=r"25 tokens is longer than model\.max_seq_len=24"):
        model(tokens(1, 25))
    cache = model.new_cache(1)
    model(tokens(1, 24), cache=cache)
    with pytest.raises(ValueError, match="25 tokens"):
        model(tokens(1, 1), cache=cache)


def test_header_padding_and_flops() -> None:
    model = small()
    assert isinstance(model, LanguageModel)
    assert model.header() == {
        "max_seq_len": 24, "vocab_size": 50, "layers": 2, "heads": 2, "channels": 16, "padded_vocab": 128,
    }  # fmt: skip
    C, L, T = 16, 2, 24
    count = 128 * C + T * C + L * (12 * C * C + 13 * C) + 2 * C  # llmc model file
    assert sum(p.numel() for p in model.parameters()) == count
    assert model.flops_per_token(10) == 6 * count + 6 * L * C * 10


@given(st.integers(1, 24), st.integers(0, 23))
@settings(max_examples=20, deadline=None)
def test_no_token_sees_the_future(length: int, changed: int) -> None:
    model, x = small().eval(), tokens(1, length)
    other = x.clone()
    changed %= length
    other[0, changed] = (other[0, changed] + 1) % 50
    with torch.no_grad():
        before, after = model(x), model(other)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.equal(before[:, changed], after[:, changed])


THREADS = """
import hashlib, sys, torch
torch.set_num_threads(int(sys.argv[1]))
from runner.model.gpt2 import GPT2
model = GPT2(layers=2, heads=4, width=64, max_seq_len=128, vocab_size=257)
x = torch.randint(257, (8, 129), generator=torch.Generator().manual_seed(1))
digest = hashlib.sha256()
for dtype in (torch.float32, torch.bfloat16):
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        loss = model(x[:, :-1], x[:, 1:])
    loss.backward()
    for tensor in (loss, *(p.grad for p in model.parameters())):
        digest.update(tensor.detach().numpy().tobytes())
print(digest.hexdigest())
"""


def test_gradient_bits_do_not_depend_on_threads_or_process() -> None:
    digests = {
        subprocess.run([sys.executable, "-c", THREADS, n], capture_output=True, text=True, check=True).stdout
        for n in ("1", "2")
    }
    assert len(digests) == 1


def test_descriptors_give_llmc_shapes() -> None:
    assert descriptor("d12") == descriptor("gpt2:d12")
    assert descriptor("d48") == {
        "layers": 48, "heads": 25, "width": 1600, "max_seq_len": 1024, "vocab_size": 50257,
    }  # fmt: skip
    assert descriptor("gpt3:c1536")["heads"] == 16
    assert descriptor("gpt3:c1536")["max_seq_len"] == 2048
    for text in ("d7", "x", "gpt3:c5140", "gpt2:12", "", "d"):
        with pytest.raises(ValueError, match="is unknown; allowed: d6, d12"):
            descriptor(text)
