"""Llama's architecture, and both models against the `transformers` library."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from runner.api import LanguageModel
from runner.model.gpt2 import GPT2
from runner.model.llama import Llama

KERNELS: list[Literal["fast", "plain"]] = ["fast", "plain"]


def small(**options: Any) -> Llama:
    shape = {"layers": 2, "heads": 4, "kv_heads": 2, "width": 32, "feed_forward": 48}
    return Llama(**(shape | {"max_seq_len": 24, "vocab_size": 50} | options))


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(seed))


def shake(model: torch.nn.Module) -> None:
    """Move every parameter away from its initial value, so that none can hide a mistake."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)


@pytest.mark.parametrize("options", [{}, {"tied_head": True}, {"qk_norm": True}, {"z_loss": 0.01}])
def test_fast_equals_plain(options: dict[str, Any]) -> None:
    x, y = tokens(2, 24), tokens(2, 24, seed=1)
    results = []
    for kernels in KERNELS:
        model = small(kernels=kernels, loss_chunk=10, **options)
        shake(model)
        loss = model(x, y)
        loss.backward()
        results.append([loss, model(x), *(p.grad for p in model.parameters())])
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
def test_as_many_kv_heads_as_heads_is_multi_head_attention(kernels: Literal["fast", "plain"]) -> None:
    grouped, full = small(kv_heads=2, kernels=kernels), small(kv_heads=4, kernels=kernels)
    shake(grouped)
    weights = grouped.state_dict()
    for name, value in weights.items():
        if name.endswith("qkvw"):  # give every query head its own copy of the shared head
            q, k, v = value.view(8, 8, 32).split([4, 2, 2])
            weights[name] = torch.cat([q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)]).view(96, 32)
    full.load_state_dict(weights)
    x = tokens(2, 24)
    torch.testing.assert_close(grouped(x), full(x), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("steps", [(1,) * 24, (5, 1, 18)])
def test_cached_logits_equal_recomputed_ones(
    steps: tuple[int, ...], kernels: Literal["fast", "plain"]
) -> None:
    model = small(kernels=kernels).eval()
    shake(model)
    x = tokens(3, 24)
    cache = model.new_cache(3)
    with torch.no_grad():
        logits = torch.cat([model(piece, cache=cache) for piece in x.split(list(steps), 1)], 1)
        expected = model(x)
    torch.testing.assert_close(logits, expected, atol=3e-6, rtol=1e-5)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_initial_weights() -> None:
    model = small(width=256, feed_forward=512, zero_head=True, scale_embedding=True)
    assert isinstance(model, LanguageModel)
    assert model.final.headw is not None
    assert not model.final.headw.any()
    assert model.embed.wte.std().item() == pytest.approx(0.02 * 16, rel=0.02)
    named = dict(model.named_parameters())
    assert named["blocks.1.qkvw"].std().item() == pytest.approx(0.02, rel=0.02)
    assert named["blocks.1.downw"].std().item() == pytest.approx(0.02 / 2, rel=0.02)  # 1/sqrt(2L), L = 2
    assert model(tokens(1, 24), tokens(1, 24)).item() == pytest.approx(torch.tensor(50.0).log().item())


def test_z_loss_is_for_training_only() -> None:
    model, x = small(z_loss=0.1), tokens(2, 24)
    assert model(x, x) > model.eval()(x, x)
    torch.testing.assert_close(model(x, x), small(z_loss=0.0)(x, x))


def test_flops_count_every_parameter() -> None:
    model = small()
    assert model.flops_per_token(24) == 6 * sum(p.numel() for p in model.parameters()) + 6 * 2 * 32 * 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3, "kv_heads": 3}, r"model\.width=32 is not model\.heads=3 times an even number"),
        ({"heads": 32, "kv_heads": 1}, "even number of channels"),
        ({"kv_heads": 3}, r"model\.heads=4 is not a multiple of model\.kv_heads=3"),
        ({"tied_head": True, "zero_head": True}, r"model\.tied_head=true excludes"),
    ],
)
def test_impossible_shape_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**options)


def test_llama_logits_equal_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = small(rope_theta=500.0).eval()
    shake(model)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=24, rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    ours = dict(model.named_parameters())
    named = {"model.embed_tokens.weight": ours["embed.wte"], "model.norm.weight": ours["final.lnfw"]}
    named["lm_head.weight"] = ours["final.headw"]
    for i in range(2):
        ln1, qkv, proj, ln2, gate_up, down = (
            ours[f"blocks.{i}.{name}"] for name in ("ln1w", "qkvw", "attprojw", "ln2w", "gateupw", "downw")
        )
        q, k, v = qkv.split([32, 16, 16])
        gate, up = gate_up.chunk(2)
        layer = {
            "input_layernorm": ln1, "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
            "self_attn.o_proj": proj, "post_attention_layernorm": ln2, "mlp.gate_proj": gate,
            "mlp.up_proj": up, "mlp.down_proj": down,
        }  # fmt: skip
        named |= {f"model.layers.{i}.{name}.weight": value for name, value in layer.items()}
    theirs.load_state_dict({name: value.detach() for name, value in named.items()})
    x = tokens(2, 24)
    with torch.no_grad():
        torch.testing.assert_close(model(x), theirs(x).logits, atol=1e-5, rtol=1e-5)


def test_gpt2_logits_equal_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = GPT2(layers=2, heads=4, width=32, max_seq_len=24, vocab_size=50).eval()
    shake(model)
    config = transformers.GPT2Config(vocab_size=50, n_positions=24, n_embd=32, n_layer=2, n_head=4)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    ours = {name: value.detach() for name, value in model.named_parameters()}
    named = {"wte.weight": ours["embed.wte"][:50], "wpe.weight": ours["embed.wpe"]}
    named |= {"ln_f.weight": ours["final.lnfw"], "ln_f.bias": ours["final.lnfb"]}
    parts = {"ln_1": "ln1", "attn.c_attn": "qkv", "attn.c_proj": "attproj", "ln_2": "ln2"}
    parts |= {"mlp.c_fc": "fc", "mlp.c_proj": "fcproj"}
    for i in range(2):
        for part, name in parts.items():
            named[f"h.{i}.{part}.weight"] = ours[f"blocks.{i}.{name}w"].t()
            named[f"h.{i}.{part}.bias"] = ours[f"blocks.{i}.{name}b"]
    missing = theirs.transformer.load_state_dict(named, strict=False).missing_keys
    assert not [name for name in missing if not name.endswith("attn.bias")]
    x = tokens(2, 24)
    with torch.no_grad():
        torch.testing.assert_close(model(x), theirs(x).logits, atol=1e-5, rtol=1e-5)
