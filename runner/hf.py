"""Hugging Face's names and layouts for the weights of this package's models, both ways.

GPT-2: `GPT2LMHeadModel`, whose Conv1D layers keep matrices as (in, out), the transpose of ours. Llama:
`LlamaForCausalLM`, whose rotary pairs are (i, i + D/2) as ours, so that no row changes its place.
L layers, C channels, V vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.checkpoint.safetensors_format import read_file
from runner.hf_config import read_shape
from runner.model.gpt2 import GPT2
from runner.model.llama import Llama

Tensors = dict[str, Tensor]

_GPT2_BLOCK = {
    "ln1w": "ln_1.weight",
    "ln1b": "ln_1.bias",
    "qkvw": "attn.c_attn.weight",
    "qkvb": "attn.c_attn.bias",
    "attprojw": "attn.c_proj.weight",
    "attprojb": "attn.c_proj.bias",
    "ln2w": "ln_2.weight",
    "ln2b": "ln_2.bias",
    "fcw": "mlp.c_fc.weight",
    "fcb": "mlp.c_fc.bias",
    "fcprojw": "mlp.c_proj.weight",
    "fcprojb": "mlp.c_proj.bias",
}
_GPT2_TRANSPOSED = {"qkvw", "attprojw", "fcw", "fcprojw"}
_GPT2_TOP = {
    "embed.wte": "wte.weight",
    "embed.wpe": "wpe.weight",
    "final.lnfw": "ln_f.weight",
    "final.lnfb": "ln_f.bias",
}
_GPT2_MASKS = re.compile(r"h\.\d+\.attn\.(?:bias|masked_bias)")  # constants that old files carry along

_LLAMA_BLOCK = {
    "ln1w": ("input_layernorm",),
    "qkvw": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "qnormw": ("self_attn.q_norm",),
    "knormw": ("self_attn.k_norm",),
    "attprojw": ("self_attn.o_proj",),
    "ln2w": ("post_attention_layernorm",),
    "gateupw": ("mlp.gate_proj", "mlp.up_proj"),
    "downw": ("mlp.down_proj",),
}
_LLAMA_TOP = {
    "embed.wte": "model.embed_tokens.weight",
    "final.lnfw": "model.norm.weight",
    "final.headw": "lm_head.weight",
}


class Described(NamedTuple):
    """A Hugging Face model in our terms: constructor arguments and tensors by our parameter names."""

    kind: str  # gpt2 or llama
    shape: dict[str, Any]
    tensors: Tensors


# ---------------------------------------------------------------- export


def to_hugging_face(model: nn.Module, *, dtype: torch.dtype) -> Tensors:
    """Return the model's tensors under Hugging Face's names, in `dtype`, without vocabulary padding.

    ValueError for a model that no layout of theirs holds.
    """
    own = {name: tensor.detach().to("cpu", dtype) for name, tensor in model.named_parameters()}
    if isinstance(model, GPT2):
        return dict(_gpt2_to(own, model))
    if isinstance(model, Llama):
        return dict(_llama_to(own, model))
    raise ValueError(f"to=hf: transformers has no layout for a {type(model).__name__}; use to=safetensors")


def _gpt2_to(own: Tensors, model: GPT2) -> Iterator[tuple[str, Tensor]]:
    for ours, theirs in _GPT2_TOP.items():
        tensor = own[ours]
        yield f"transformer.{theirs}", tensor[: model.vocab_size] if ours == "embed.wte" else tensor
    for layer in range(model.layers):
        for ours, theirs in _GPT2_BLOCK.items():
            tensor = own[f"blocks.{layer}.{ours}"]
            yield f"transformer.h.{layer}.{theirs}", tensor.T if ours in _GPT2_TRANSPOSED else tensor


def _llama_to(own: Tensors, model: Llama) -> Iterator[tuple[str, Tensor]]:
    for ours, theirs in _LLAMA_TOP.items():
        if ours in own:
            yield theirs, own[ours]
    for layer in range(model.layers):
        for ours, several in _LLAMA_BLOCK.items():
            tensor = own.get(f"blocks.{layer}.{ours}")
            if tensor is None:
                continue
            parts = torch.split(tensor, _rows(ours, model)) if len(several) > 1 else (tensor,)
            for theirs, part in zip(several, parts, strict=True):
                yield f"model.layers.{layer}.{theirs}.weight", part


def _rows(name: str, model: Llama) -> list[int]:
    """Return how many rows each part of a joined matrix has."""
    if name == "gateupw":
        return [model.feed_forward] * 2
    head = model.width // model.heads
    return [model.heads * head, model.kv_heads * head, model.kv_heads * head]


# ---------------------------------------------------------------- import


def read_hugging_face(folder: Path) -> Described:
    """Read config.json and the safetensors of a folder; ValueError with one line if we cannot hold it."""
    kind, shape = read_shape(folder / "config.json")
    tensors = _read_tensors(folder)
    if kind == "gpt2":
        return Described("gpt2", shape, _gpt2_from(tensors, folder))
    return Described("llama", shape, _llama_from(tensors, folder, shape))


def _read_tensors(folder: Path) -> Tensors:
    index = folder / "model.safetensors.index.json"
    names = _shards(index) if index.exists() else ["model.safetensors"]
    tensors: Tensors = {}
    for name in names:
        tensors |= read_file(folder / name).tensors
    return tensors


def _shards(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: not an index of safetensors files ({error!r})") from None
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError(f"{index}: names files that are not beside it: {', '.join(map(str, names))}")
    return names


def _gpt2_from(tensors: Tensors, folder: Path) -> Tensors:
    theirs = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    head = theirs.pop("lm_head.weight", None)
    if head is not None and not ("wte.weight" in theirs and torch.equal(head, theirs["wte.weight"])):
        raise ValueError(f"{folder}: lm_head is not the embedding; a GPT-2 here ties them")
    theirs = {name: tensor for name, tensor in theirs.items() if not _GPT2_MASKS.fullmatch(name)}
    blocks = {theirs_: ours for ours, theirs_ in _GPT2_BLOCK.items()}
    top = {theirs_: ours for ours, theirs_ in _GPT2_TOP.items()}
    own: Tensors = {}
    for name, tensor in theirs.items():
        match = re.fullmatch(r"h\.(\d+)\.(.+)", name)
        ours = blocks.get(match[2]) if match else top.get(name)
        if ours is None:
            raise ValueError(f"{folder}: tensor {name} is not part of a GPT-2")
        own[f"blocks.{match[1]}.{ours}" if match else ours] = tensor.T if ours in _GPT2_TRANSPOSED else tensor
    return own


def _llama_from(tensors: Tensors, folder: Path, shape: Mapping[str, Any]) -> Tensors:
    rest = dict(tensors)
    own = {ours: rest.pop(theirs) for ours, theirs in _LLAMA_TOP.items() if theirs in rest}
    if shape["tied_head"]:
        own.pop("final.headw", None)
    for layer in range(shape["layers"]):
        for ours, several in _LLAMA_BLOCK.items():
            names = [f"model.layers.{layer}.{part}.weight" for part in several]
            if all(name in rest for name in names):
                own[f"blocks.{layer}.{ours}"] = torch.cat([rest.pop(name) for name in names])
    rest = {name: tensor for name, tensor in rest.items() if not name.endswith("rotary_emb.inv_freq")}
    if rest:
        raise ValueError(f"{folder}: tensor {min(rest)} is not part of a Llama ({len(rest)} left over)")
    return own
