"""The CPU kernels against plain torch operations: values, gradients, memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from runner.model import attention as attention_module
from runner.model.attention import attention, split_heads
from runner.model.gpt2 import GPT2
from runner.model.layers import PIECE, gelu, layer_norm, rms_norm, rotate, swiglu
from runner.model.llama import Llama
from runner.model.loss import head_loss

Kernel = Callable[..., Tensor]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def angles(positions: int, pairs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = torch.arange(positions * pairs, dtype=dtype).view(positions, pairs) / 7
    return angle.cos(), angle.sin()


def turned(x: Tensor, *, kernels: Any) -> Tensor:
    return rotate(x, *angles(x.shape[2], x.shape[3] // 2, torch.float64), kernels=kernels)


def attended(qkv: Tensor, *, kernels: Any) -> Tensor:
    return attention(*split_heads(qkv, heads=2, kernels=kernels), kernels=kernels)


def grouped(q: Tensor, k: Tensor, v: Tensor, *, kernels: Any) -> Tensor:
    return attention(q, k, v, kernels=kernels)


def rms(x: Tensor, weight: Tensor, *, kernels: Any) -> Tensor:
    return rms_norm(x, weight, eps=1e-5, kernels=kernels)


CASES: dict[str, tuple[Kernel, list[tuple[int, ...]]]] = {
    "layer_norm": (layer_norm, [(3, 5, 8), (8,), (8,)]),
    "rms_norm": (rms, [(3, 5, 8), (8,)]),
    "gelu": (gelu, [(3, 7)]),
    "swiglu": (swiglu, [(2, 3, 8)]),
    "rotate": (turned, [(2, 3, 5, 8)]),
    "attention": (attended, [(2, 11, 24)]),
    "grouped attention": (grouped, [(2, 4, 9, 6), (2, 2, 9, 6), (2, 2, 9, 6)]),
}


@pytest.fixture(params=["kept", "recomputed"])
def weights_kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "BLOCK", 4)
    if request.param == "recomputed":
        monkeypatch.setattr(attention_module, "KEPT_BYTES", 0)


@pytest.mark.usefixtures("weights_kept")
@pytest.mark.parametrize("name", list(CASES))
def test_gradient_is_the_derivative(name: str) -> None:
    kernel, shapes = CASES[name]
    inputs = [normal(*shape, seed=i, dtype=torch.float64) for i, shape in enumerate(shapes)]
    assert gradcheck(lambda *x: kernel(*x, kernels="fast"), inputs)


@pytest.mark.usefixtures("weights_kept")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize("name", list(CASES))
def test_fast_equals_plain(name: str, dtype: torch.dtype, tolerance: float) -> None:
    kernel, shapes = CASES[name]
    results = {}
    for kernels in ("fast", "plain"):
        inputs = [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
        y = kernel(*inputs, kernels=kernels)
        y.backward(normal(*y.shape, seed=9, dtype=dtype).detach())
        results[kernels] = [y, *(x.grad for x in inputs)]
        assert all(x is not None and x.dtype == dtype for x in results[kernels])
    for fast, plain in zip(results["fast"], results["plain"], strict=True):
        torch.testing.assert_close(fast, plain, atol=tolerance * 3, rtol=tolerance)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
def test_block_attention_equals_plain_at_every_length(length: int) -> None:
    q, k, v = (normal(1, 2, length, 8, seed=i) for i in range(3))
    torch.testing.assert_close(
        attention(q, k, v, kernels="fast"), attention(q, k, v, kernels="plain"), atol=2e-6, rtol=1e-5
    )


def test_bf16_attention_gradients_are_close_to_fp64() -> None:
    dy = normal(2, 2, 256, 32, seed=9, dtype=torch.bfloat16).detach()
    errors = []
    exact = [normal(2, 2, 256, 32, seed=i, dtype=torch.bfloat16).detach().double() for i in range(3)]
    inputs = [x.bfloat16().requires_grad_() for x in exact]
    exact = [x.requires_grad_() for x in exact]
    attention(*inputs, kernels="fast").backward(dy)
    attention(*exact, kernels="plain").backward(dy.double())
    for ours, true in zip(inputs, exact, strict=True):
        assert ours.grad is not None
        assert true.grad is not None
        errors.append(((ours.grad.double() - true.grad).norm() / true.grad.norm()).item())
    assert max(errors) < 8e-3


def test_gelu_over_many_pieces_and_extremes() -> None:
    x = torch.linspace(-50, 50, PIECE + 1000).requires_grad_()
    y = gelu(x, kernels="fast")
    y.sum().backward()
    reference = x.detach().double().requires_grad_()
    gelu(reference, kernels="plain").sum().backward()
    assert x.grad is not None
    assert reference.grad is not None
    torch.testing.assert_close(y.double(), gelu(reference, kernels="plain"), atol=4e-7, rtol=2e-7)
    torch.testing.assert_close(x.grad.double(), reference.grad, atol=3e-6, rtol=0)  # of a slope near 1


def loss_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    targets = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(3))
    return normal(2, 7, 6, dtype=dtype), normal(11, 6, seed=1, dtype=dtype), targets


@given(chunk=st.integers(1, 20), scale=st.floats(-4, 4), z_loss=st.sampled_from([0.0, 0.1]))
@settings(max_examples=30, deadline=None)
def test_chunked_loss_equals_plain_with_any_upstream_gradient(
    chunk: int, scale: float, z_loss: float
) -> None:
    gradients = {}
    for kernels in ("fast", "plain"):
        x, head, targets = loss_inputs()
        options: dict[str, Any] = {"reduction": "mean", "chunk": chunk, "kernels": kernels, "z_loss": z_loss}
        loss = head_loss(x, head, targets, **options)
        (loss * scale).backward()
        gradients[kernels] = (loss, x.grad, head.grad)
    for fast, plain in zip(gradients["fast"], gradients["plain"], strict=True):
        torch.testing.assert_close(fast, plain, atol=2e-6, rtol=2e-6)


def test_chunked_loss_backward_twice_adds_twice() -> None:
    x, head, targets = loss_inputs()
    loss = head_loss(x, head, targets, reduction="mean", chunk=4, kernels="fast")
    loss.backward(retain_graph=True)
    assert x.grad is not None
    once = x.grad.clone()
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * once)


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_token_losses_equal_plain(z_loss: float) -> None:
    x, head, targets = loss_inputs()
    options: dict[str, Any] = {"reduction": "none", "chunk": 3, "z_loss": z_loss}
    plain = head_loss(x, head, targets, kernels="plain", **options)
    with torch.no_grad():
        fast = head_loss(x, head, targets, kernels="fast", **options)
    torch.testing.assert_close(fast, plain)
    head_loss(x, head, targets, kernels="fast", **options).sum().backward()  # differentiable as well
    assert head.grad is not None


def test_loss_survives_huge_logits() -> None:
    x, head = torch.full((1, 1, 1), 1e4), torch.tensor([[1.0], [-1.0]])
    with torch.no_grad():
        loss = head_loss(x, head, torch.tensor([[1]]), reduction="mean", chunk=1, kernels="fast")
    assert loss.item() == 2e4


def test_non_finite_input_is_not_hidden() -> None:
    x, head, targets = loss_inputs()
    with torch.no_grad():
        x[0, 0, 0] = math.nan
    loss = head_loss(x, head, targets, reduction="mean", chunk=4, kernels="fast")
    loss.backward()
    assert loss.isnan()
    assert head.grad is not None
    assert head.grad.isnan().any()


def test_loss_never_holds_all_logits() -> None:
    """The largest tensor that the chunked loss makes is the head's gradient, not [N, V] logits."""
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(
                t.numel() for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor)
            )
            return out

    x, head = normal(1, 512, 4), normal(300, 4)
    with Sizes():
        head_loss(
            x, head, torch.zeros(1, 512, dtype=torch.long), reduction="mean", chunk=16, kernels="fast"
        ).backward()
    assert max(sizes) <= max(16 * 300, 512 * 4)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # these two are of the
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # compiler itself
@pytest.mark.parametrize("kernels", ["fast", "plain"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_blocks_compile_without_graph_breaks(name: str, kernels: Any) -> None:
    shape = {"layers": 1, "heads": 2, "width": 16, "max_seq_len": 8, "vocab_size": 20, "kernels": kernels}
    model = GPT2(**shape) if name == "gpt2" else Llama(**shape, kv_heads=1, feed_forward=24)
    x = torch.arange(16).view(2, 8)
    eager = model(x, x)
    model.blocks[0].compile(fullgraph=True, backend="aot_eager")
    loss = model(x, x)
    loss.backward()
    torch.testing.assert_close(loss, eager)
