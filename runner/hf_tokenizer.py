"""Write a tokenizer as Hugging Face's tokenizer.json, so that their libraries read the text as we do."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from runner.data.tokenizer import EOT_TEXT, byte_alphabet


def tokenizer_files(name: str | None, *, eot: int | None, max_seq_len: int) -> dict[str, str]:
    """Return the files by name, for what data.tokenizer calls `name`; empty if there are none."""
    spec = _spec(name)
    if spec is None or eot is None:
        return {}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_seq_len,
        "clean_up_tokenization_spaces": False,
        **dict.fromkeys(("bos_token", "eos_token"), _text_of(spec, eot)),
    }
    return {"tokenizer.json": spec, "tokenizer_config.json": json.dumps(settings, indent=2)}


def _spec(name: str | None) -> str | None:
    if name == "byte":
        vocabulary = byte_alphabet()
        return json.dumps(_bytewise(vocabulary, merges=[], eot=256), ensure_ascii=False)
    if name == "gpt2":
        vocabulary = {character: rank for rank, character in enumerate(byte_alphabet())}
        text = files("runner.data").joinpath("assets", "vocab.bpe").read_text("utf-8")
        merges = [line for line in text.splitlines()[1:] if line]
        vocabulary |= {merge.replace(" ", ""): 256 + rank for rank, merge in enumerate(merges)}
        return json.dumps(_bytewise(vocabulary, merges=merges, eot=len(vocabulary)), ensure_ascii=False)
    if name is not None and name.endswith(".json") and Path(name).is_file():
        return Path(name).read_text("utf-8")
    return None


def _bytewise(vocabulary: dict[str, int], *, merges: list[str], eot: int) -> dict[str, Any]:
    """Return byte-level BPE as the format has it; without merges every byte is a token."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": bool(merges)}
    special = {"id": eot, "content": EOT_TEXT, "single_word": False, "lstrip": False, "rstrip": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**special, "normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary | {EOT_TEXT: eot}, "merges": merges},
    }


def _text_of(spec: str, eot: int) -> str:
    for token in json.loads(spec).get("added_tokens", []):
        if token.get("id") == eot:
            return str(token["content"])
    return EOT_TEXT
