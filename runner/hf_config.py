"""Hugging Face's config.json for the models of this package, both ways."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.model.gpt2 import GPT2
from runner.model.layers import LAYER_NORM_EPS
from runner.model.llama import Llama


def config_of(model: nn.Module, *, dtype: torch.dtype, eot: int | None) -> dict[str, Any]:
    """Return what config.json must say for transformers to compute what `model` computes."""
    if isinstance(model, GPT2):
        own = _gpt2_config(model)
    else:
        assert isinstance(model, Llama)
        own = _llama_config(model)
    return own | {
        "vocab_size": model.vocab_size,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": eot,
        "eos_token_id": eot,
    }


def _gpt2_config(model: GPT2) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_positions": model.max_seq_len,
        "n_embd": model.width,
        "n_layer": model.layers,
        "n_head": model.heads,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": LAYER_NORM_EPS,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout),
        "tie_word_embeddings": True,
    }


def _llama_config(model: Llama) -> dict[str, Any]:
    qk_norm = model.blocks[0].qnormw is not None
    return {
        # Llama with normalised queries and keys is what Qwen3 is.
        "architectures": ["Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if qk_norm else "llama",
        "max_position_embeddings": model.max_seq_len,
        "hidden_size": model.width,
        "intermediate_size": model.feed_forward,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.width // model.heads,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": model.final.headw is None,
    }


def read_shape(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the kind (gpt2 or llama) and our constructor's arguments; ValueError if we cannot hold it."""
    try:
        config = json.loads(path.read_text("utf-8"))
        kind = config["model_type"]
        if kind not in ("gpt2", "llama", "qwen3"):
            raise _UnsupportedError(f"{path}: model_type={kind} is not supported, only gpt2, llama and qwen3")
        shape = _gpt2_shape(path, config) if kind == "gpt2" else _llama_shape(path, config)
    except _UnsupportedError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{path}: not the config.json of a language model ({error!r})") from None
    return "gpt2" if kind == "gpt2" else "llama", shape


class _UnsupportedError(ValueError):
    """A well-formed config.json of a model that ours cannot be."""


def _gpt2_shape(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    _require(path, config, activation_function={"gelu_new", "gelu_pytorch_tanh"}, layer_norm_epsilon={1e-5})
    _require(path, config, scale_attn_weights={True}, scale_attn_by_inverse_layer_idx={False})
    _require(path, config, n_inner={None, 4 * config["n_embd"]}, tie_word_embeddings={True})
    names = {"layers": "n_layer", "heads": "n_head", "width": "n_embd", "max_seq_len": "n_positions"}
    return {ours: config[theirs] for ours, theirs in names.items()} | {"vocab_size": config["vocab_size"]}


def _llama_shape(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    head = config["hidden_size"] // config["num_attention_heads"]
    _require(
        path, config, hidden_act={"silu"}, attention_bias={False}, mlp_bias={False}, head_dim={head, None}
    )
    _require(path, config, use_sliding_window={False})
    # Newer files keep the base of the rotary angles in a table of its own, along with any stretching of it.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise _UnsupportedError(f"{path}: rope {rope} is not supported; only plain rotary positions are")
    return {
        "layers": config["num_hidden_layers"],
        "heads": config["num_attention_heads"],
        "kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "width": config["hidden_size"],
        "feed_forward": config["intermediate_size"],
        "max_seq_len": config["max_position_embeddings"],
        "vocab_size": config["vocab_size"],
        "rope_theta": float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        "norm_eps": config["rms_norm_eps"],
        "tied_head": config.get("tie_word_embeddings", False),
        "qk_norm": config["model_type"] == "qwen3",
    }


def _require(path: Path, config: Mapping[str, Any], **allowed: set[Any]) -> None:
    for name, values in allowed.items():
        if name in config and config[name] not in values:
            raise _UnsupportedError(
                f"{path}: {name}={config[name]} is not supported, only {sorted(map(str, values))}"
            )
