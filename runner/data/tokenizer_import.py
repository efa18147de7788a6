"""Tokenizers from local files: tiktoken ranks and Hugging Face's `tokenizer.json`."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runner.data.tokenizer import EOT_TEXT, GPT2_PATTERN, BpeTokenizer, Tokenizer, byte_alphabet

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+" + _REST
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _CONTRACTIONS + "?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _CONTRACTIONS + "?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Vocabulary(NamedTuple):
    """What a file of ranks does not say: how words are cut, and the special tokens."""

    pattern: str
    special: dict[str, int]
    eot: int


_VOCABULARIES = {
    "gpt2": _Vocabulary(GPT2_PATTERN, {EOT_TEXT: 50256}, 50256),
    "r50k_base": _Vocabulary(GPT2_PATTERN, {EOT_TEXT: 50256}, 50256),
    "p50k_base": _Vocabulary(GPT2_PATTERN, {EOT_TEXT: 50256}, 50256),
    "cl100k_base": _Vocabulary(
        _WORDS,
        {
            EOT_TEXT: 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
        100257,
    ),
    "o200k_base": _Vocabulary(_CASED_WORDS, {EOT_TEXT: 199999, "<|endofprompt|>": 200018}, 199999),
    "llama3": _Vocabulary(
        _WORDS,
        {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|reserved_special_token_247|>": 128255},
        128001,
    ),
}

_EOT_TEXTS = (EOT_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[EOS]", "[SEP]")
_STRESS = 'I\'ll say "naïve" 12345 times:\r\n\n\t  x+=1;  \n漢字 é🙂🏽 \u200b<|endoftext|>  '


def read_tiktoken(path: Path, *, pattern_name: str | None = None) -> BpeTokenizer:
    """Read a file of ranks in tiktoken's format; ValueError with one line if it cannot be used."""
    name = pattern_name or path.stem
    if name not in _VOCABULARIES:
        raise ValueError(
            f"tokenizer={path}: the word pattern {name!r} is not known; append one of "
            f"{', '.join(_VOCABULARIES)} after a colon, as in {path}:cl100k_base"
        )
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_read(path).splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError(f"tokenizer={path}: line {number} is not a base64 token and its rank") from None
    vocabulary = _VOCABULARIES[name]
    clashes = set(ranks.values()) & set(vocabulary.special.values())
    if len(set(ranks.values())) != len(ranks) or clashes or any(bytes([b]) not in ranks for b in range(256)):
        raise ValueError(f"tokenizer={path}: not a complete set of ranks for {name}")
    return BpeTokenizer(
        name, ranks=ranks, pattern=vocabulary.pattern, special=vocabulary.special, eot=vocabulary.eot
    )


def read_hugging_face(path: Path) -> Tokenizer:
    """Read a `tokenizer.json`; ValueError with one line if it cannot be used.

    Byte-level BPE runs through tiktoken, which is several times faster and gives the same ids; other
    kinds need the package `tokenizers`.
    """
    content = _read(path)
    try:
        spec = json.loads(content)
        eot = _find_eot(path, spec)
        bpe = _as_byte_level_bpe(path.parent.name or path.stem, spec, eot=eot)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"tokenizer={path}: not a tokenizer.json ({type(error).__name__}: {error})"
        ) from None
    if bpe is not None:
        return bpe
    try:
        library = importlib.import_module("tokenizers")
    except ImportError:
        raise ValueError(
            f"tokenizer={path}: is not plain byte-level BPE and needs a package: pip install tokenizers"
        ) from None
    return HuggingFaceTokenizer(path.parent.name or path.stem, library.Tokenizer.from_str(content), eot=eot)


class HuggingFaceTokenizer:
    """Any `tokenizer.json` through the package `tokenizers`; special tokens in a text stay text."""

    def __init__(self, name: str, tokenizer: Any, *, eot: int) -> None:
        self.name = name
        self.eot = eot
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_array(self, text: str) -> NDArray[Any]:
        return np.array(self.encode(text), np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        known = range(self.vocab_size)
        runs = groupby(map(int, tokens), key=lambda token: token in known)
        return "".join(self._text(list(run)) if ok else "�" * len(list(run)) for ok, run in runs)

    def token_bytes(self, token: int) -> bytes:
        return self._text([token]).encode()

    def fingerprint(self) -> str:
        return hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


def _as_byte_level_bpe(name: str, spec: dict[str, Any], *, eot: int) -> BpeTokenizer | None:
    """Return the same tokenizer for tiktoken, or None if its rules are others than tiktoken's.

    tiktoken merges the pair whose result has the lowest id, so ids must rise in the order of merges.
    """
    model = spec["model"]
    pattern = _word_pattern(spec.get("pre_tokenizer"))
    plain = model.get("type") == "BPE" and not any(
        model.get(key)
        for key in ("dropout", "byte_fallback", "end_of_word_suffix", "continuing_subword_prefix")
    )
    added = {token["content"]: int(token["id"]) for token in spec.get("added_tokens") or []}
    only_special = all(token["special"] for token in spec.get("added_tokens") or [])
    if pattern is None or not plain or not only_special or spec.get("normalizer"):
        return None
    alphabet = byte_alphabet()
    ids = {token: int(rank) for token, rank in model["vocab"].items() if token not in added}
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    merged = ["".join(merge) for merge in merges]
    order = [ids.get(token, -1) for token in merged]
    rising = all(before < after for before, after in zip([-1, *order], order, strict=False))
    if not rising or set(ids) != set(merged) | set(alphabet):
        return None
    ranks = {bytes(alphabet[c] for c in token): rank for token, rank in ids.items()}
    tokenizer = BpeTokenizer(name, ranks=ranks, pattern=pattern, special=added, eot=eot)
    # A pattern that leaves characters out would lose them in tiktoken.
    return tokenizer if tokenizer.decode(tokenizer.encode(_STRESS)) == _STRESS else None


def _word_pattern(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """Return the regular expression that cuts words, None if they are cut in another way."""
    if pre_tokenizer is None:
        return None
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    if steps[-1]["type"] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    own_pattern = steps[-1].get("use_regex", True)
    if len(steps) == 1:
        return GPT2_PATTERN if own_pattern else None
    split = steps[0]
    isolated = split["type"] == "Split" and split.get("behavior") == "Isolated" and not split.get("invert")
    if len(steps) > 2 or own_pattern or not isolated:
        return None
    pattern: str | None = split["pattern"].get("Regex")
    return pattern


def _find_eot(path: Path, spec: dict[str, Any]) -> int:
    ids = dict(spec["model"]["vocab"]) if isinstance(spec["model"]["vocab"], dict) else {}
    ids |= {token["content"]: int(token["id"]) for token in spec.get("added_tokens") or []}
    for text in _EOT_TEXTS:
        if text in ids:
            return int(ids[text])
    raise ValueError(f"tokenizer={path}: has no end-of-text token; looked for {', '.join(_EOT_TEXTS)}")


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ValueError(f"tokenizer={path}: cannot be read: {reason}") from None
