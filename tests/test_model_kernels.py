"""The CPU kernels, compiled and of torch operations, against plain ones: values, gradients, memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from runner.model import attention as attention_module
from runner.model import compiled
from runner.model.attention import attention, split_heads
from runner.model.gpt2 import GPT2
from runner.model.layers import PIECE, add_layer_norm, gelu, layer_norm
from runner.model.llama import Llama
from runner.model.llama_layers import add_rms_norm, rms_norm, rotate, swiglu
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
    return attention(*split_heads(qkv, heads=2, groups=2, kernels=kernels), kernels=kernels)


def rotated(qkv: Tensor, *, kernels: Any) -> Tensor:
    cos, sin = (x.float() for x in angles(qkv.shape[1], 3, torch.float64))
    parts = split_heads(qkv, heads=4, groups=2, kernels=kernels, cos=cos, sin=sin)
    return torch.cat([part * (i + 1) for i, part in enumerate(parts)], 1)


def grouped(q: Tensor, k: Tensor, v: Tensor, *, kernels: Any) -> Tensor:
    return attention(q, k, v, kernels=kernels)


def rms(x: Tensor, weight: Tensor, *, kernels: Any) -> Tensor:
    return rms_norm(x, weight, eps=1e-5, kernels=kernels)


def moved(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, *, kernels: Any) -> Tensor:
    total, y = add_layer_norm(x, delta, weight, bias, kernels=kernels)
    return total.sin() + y


def moved_rms(x: Tensor, delta: Tensor, weight: Tensor, *, kernels: Any) -> Tensor:
    total, y = add_rms_norm(x, delta, weight, eps=1e-5, kernels=kernels)
    return total.sin() + y


def only_the_norm(x: Tensor, delta: Tensor, weight: Tensor, *, kernels: Any) -> Tensor:
    return add_rms_norm(x, delta, weight, eps=1e-5, kernels=kernels)[1]


def only_the_sum(x: Tensor, delta: Tensor, weight: Tensor, *, kernels: Any) -> Tensor:
    return add_rms_norm(x, delta, weight, eps=1e-5, kernels=kernels)[0] + 0 * weight


CASES: dict[str, tuple[Kernel, list[tuple[int, ...]]]] = {
    "layer_norm": (layer_norm, [(3, 5, 8), (8,), (8,)]),
    "rms_norm": (rms, [(3, 5, 8), (8,)]),
    "gelu": (gelu, [(3, 7)]),
    "swiglu": (swiglu, [(2, 3, 8)]),
    "rotate": (turned, [(2, 3, 5, 8)]),
    "wide layer_norm": (layer_norm, [(70, 48), (48,), (48,)]),
    "odd layer_norm": (layer_norm, [(40, 19), (19,), (19,)]),
    "add_layer_norm": (moved, [(3, 13, 20), (3, 13, 20), (20,), (20,)]),
    "add_rms_norm": (moved_rms, [(3, 13, 20), (3, 13, 20), (20,)]),
    "only the norm": (only_the_norm, [(2, 3, 8), (2, 3, 8), (8,)]),
    "only the sum": (only_the_sum, [(2, 3, 8), (2, 3, 8), (8,)]),
    "wide gelu": (gelu, [(5, 67)]),
    "wide swiglu": (swiglu, [(3, 70)]),
    "split and rotate": (rotated, [(2, 7, 48)]),
    "wide attention": (attended, [(1, 37, 48)]),
    "attention": (attended, [(2, 11, 24)]),
    "grouped attention": (grouped, [(2, 4, 9, 6), (2, 2, 9, 6), (2, 2, 9, 6)]),
}


@pytest.fixture(params=["kept", "recomputed"])
def weights_kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "BLOCK", 4)
    if request.param == "recomputed":
        monkeypatch.setattr(attention_module, "KEPT_BYTES", 0)


@pytest.fixture(params=["compiled", "torch"])
def kernel_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(compiled, "usable", lambda *_: False)
    elif compiled.identity() == "torch":
        pytest.skip("no C compiler")


@pytest.mark.usefixtures("weights_kept")
@pytest.mark.parametrize("name", list(CASES))
def test_gradient_is_the_derivative(name: str) -> None:
    kernel, shapes = CASES[name]
    inputs = [normal(*shape, seed=i, dtype=torch.float64) for i, shape in enumerate(shapes)]
    assert gradcheck(lambda *x: kernel(*x, kernels="fast"), inputs)


@pytest.mark.usefixtures("weights_kept", "kernel_set")
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


@pytest.mark.usefixtures("kernel_set")
@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
def test_block_attention_equals_plain_at_every_length(length: int) -> None:
    q, k, v = (normal(1, 2, length, 8, seed=i) for i in range(3))
    torch.testing.assert_close(
        attention(q, k, v, kernels="fast"), attention(q, k, v, kernels="plain"), atol=2e-6, rtol=1e-5
    )


@pytest.mark.usefixtures("kernel_set")
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


@pytest.mark.usefixtures("kernel_set")
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


@pytest.mark.usefixtures("kernel_set")
@given(chunk=st.integers(1, 20), scale=st.floats(-4, 4), z_loss=st.sampled_from([0.0, 0.1]))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pytest.mark.usefixtures("kernel_set")
def test_loss_survives_huge_logits() -> None:
    x, head = torch.full((1, 1, 1), 1e4), torch.tensor([[1.0], [-1.0]])
    with torch.no_grad():
        loss = head_loss(x, head, torch.tensor([[1]]), reduction="mean", chunk=1, kernels="fast")
    assert loss.item() == 2e4


@pytest.mark.usefixtures("kernel_set")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_input_is_not_hidden(bad: float) -> None:
    x, head, targets = loss_inputs()
    with torch.no_grad():
        x[0, 0, 0] = bad
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


@pytest.mark.usefixtures("kernel_set")
@pytest.mark.parametrize("vocab", [7, 65, 256, 3001])
def test_loss_of_any_vocabulary(vocab: int) -> None:
    x, head = normal(2, 40, 16), normal(vocab, 16, seed=1)
    targets = torch.randint(vocab, (2, 40), generator=torch.Generator().manual_seed(3))
    gradients = []
    for kernels in ("fast", "plain"):
        x.grad = head.grad = None
        loss = head_loss(x, head, targets, reduction="mean", chunk=32, kernels=kernels)
        loss.backward()
        gradients.append((loss, x.grad, head.grad))
    for fast, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, plain, atol=1e-6, rtol=1e-5)


@pytest.mark.usefixtures("kernel_set")
@pytest.mark.parametrize("target", [-1, 11])
def test_a_target_outside_of_the_vocabulary_is_refused(target: int) -> None:
    x, head, targets = loss_inputs()
    targets[1, 3] = target
    with pytest.raises((IndexError, RuntimeError), match="out"):
        head_loss(x, head, targets, reduction="mean", chunk=4, kernels="fast")


@pytest.mark.usefixtures("kernel_set")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "gelu", "swiglu", "attention", "add_layer_norm"])
def test_layers_do_not_hide_a_non_finite_number(name: str, bad: float) -> None:
    kernel, shapes = CASES[name]
    inputs = [normal(*shape, seed=i).detach() for i, shape in enumerate(shapes)]
    inputs[0].view(-1)[0] = bad
    for kernels in ("fast", "plain"):
        assert not kernel(*inputs, kernels=kernels).isfinite().all(), kernels


@pytest.mark.skipif(compiled.identity() == "torch", reason="no C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(CASES))
def test_no_bit_depends_on_the_number_of_threads(name: str, dtype: torch.dtype) -> None:
    kernel, shapes = CASES[name]
    shapes = [(64 * shape[0], *shape[1:]) if len(shape) > 1 else shape for shape in shapes]
    results, before = [], torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            inputs = [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
            y = kernel(*inputs, kernels="fast")
            y.backward(normal(*y.shape, seed=9, dtype=dtype).detach())
            results.append([y.detach(), *(x.grad for x in inputs)])
        finally:
            torch.set_num_threads(before)
    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            assert torch.equal(one, other)


def test_a_norm_under_autocast_hands_over_what_the_product_reads() -> None:
    x, weight, bias = normal(4, 32), normal(32, seed=1), normal(32, seed=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer_norm(x, weight, bias, kernels="fast")
        total, z = add_layer_norm(x, x.bfloat16(), weight, bias, kernels="fast")
    if compiled.identity() != "torch":
        assert y.dtype == z.dtype == torch.bfloat16
    assert total.dtype == torch.float32
    plain = layer_norm(x, weight, bias, kernels="plain")
    torch.testing.assert_close(y.float(), plain, atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(total, x + x.bfloat16())


@pytest.mark.skipif(compiled.identity() == "torch", reason="no C compiler")
def test_exponentials_are_accurate_to_single_precision() -> None:
    """A softmax over two keys is a logistic function, so it shows the exponential by itself."""
    z = torch.linspace(-86, 0, 100_001)
    scores = torch.stack([torch.zeros_like(z), z], 1)[:, None, :].contiguous()
    weights = compiled.softmax_(scores.clone(), start=1, scale=1.0)[:, 0]
    exact = scores[:, 0].double().softmax(-1)
    assert ((weights.double() - exact) / exact).abs().max() < 5e-7
