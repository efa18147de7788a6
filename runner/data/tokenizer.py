"""Tokenizers that work offline: bytes, GPT-2's BPE from the shipped ranks, and local files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import tiktoken

EOT_TEXT = "<|endoftext|>"
_REPLACEMENT = "�"

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
"""How GPT-2 cuts text into words before merging (possessive form, the same words as the original)."""


class Tokenizer(Protocol):
    """`api.Tokenizer`, and what preparing data needs besides."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eot(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def encode_array(self, text: str) -> NDArray[Any]:
        """Return `encode(text)` as an array of unsigned integers."""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for; empty for an id without a meaning."""

    def fingerprint(self) -> str:
        """Return a sha256 that changes with anything that changes the ids."""


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 ... 255, and 256 for the end of a text."""

    name = "byte"
    vocab_size = 257
    eot = 256

    def encode(self, text: str) -> list[int]:
        return list(_utf8(text))

    def encode_array(self, text: str) -> NDArray[Any]:
        return np.frombuffer(_utf8(text), np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return decode_bytes(self, tokens)

    def token_bytes(self, token: int) -> bytes:
        if token == self.eot:
            return EOT_TEXT.encode()
        return bytes([token]) if 0 <= token < 256 else b""

    def fingerprint(self) -> str:
        return hashlib.sha256(b"bytes 0-255, eot 256").hexdigest()


class BpeTokenizer:
    """Byte-pair encoding of bytes by tiktoken; text that looks like a special token stays text."""

    def __init__(
        self, name: str, *, ranks: dict[bytes, int], pattern: str, special: dict[str, int], eot: int
    ) -> None:
        self.name = name
        self.eot = eot
        self.vocab_size = max(max(ranks.values()), eot, *special.values()) + 1
        self._ranks = ranks
        self._pattern = pattern
        self._special = special

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def encode_array(self, text: str) -> NDArray[Any]:
        return self._encoding.encode_to_numpy(_valid(text), disallowed_special=())

    def decode(self, tokens: Sequence[int]) -> str:
        return decode_bytes(self, tokens)

    def token_bytes(self, token: int) -> bytes:
        return self._bytes.get(token, b"")

    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr((self._pattern, sorted(self._special.items()), self.eot)).encode())
        for token, rank in sorted(self._ranks.items(), key=lambda item: item[1]):
            digest.update(b"%d %s\n" % (rank, token.hex().encode()))
        return digest.hexdigest()

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        return {rank: token for token, rank in self._ranks.items()} | {
            token: text.encode() for text, token in self._special.items()
        }

    @cached_property
    def _encoding(self) -> tiktoken.Encoding:
        import tiktoken

        return tiktoken.Encoding(
            self.name,
            pat_str=self._pattern,
            mergeable_ranks=self._ranks,
            special_tokens=self._special,
        )


def tokenizer(name_or_path: str) -> Tokenizer:
    """Return the tokenizer of a name (`byte`, `gpt2`) or from a local file; ValueError if there is none.

    Files: a Hugging Face `tokenizer.json`, or tiktoken ranks `x.tiktoken`, whose word pattern is named
    by the file's stem or after a colon (`ranks.tiktoken:cl100k_base`).
    """
    if name_or_path == "byte":
        return ByteTokenizer()
    if name_or_path == "gpt2":
        return gpt2()
    from runner.data.tokenizer_import import read_hugging_face, read_tiktoken

    path, _, pattern = name_or_path.partition(":")
    if path.endswith(".tiktoken"):
        return read_tiktoken(Path(path).expanduser(), pattern_name=pattern or None)
    if name_or_path.endswith(".json"):
        return read_hugging_face(Path(name_or_path).expanduser())
    raise ValueError(
        f"tokenizer={name_or_path!r} is not known: allowed are byte, gpt2, a path to a tokenizer.json "
        "or a path to a *.tiktoken file"
    )


def gpt2() -> BpeTokenizer:
    """Return GPT-2's tokenizer (50257 tokens) from the ranks shipped in `assets/vocab.bpe`."""
    text = files("runner.data").joinpath("assets", "vocab.bpe").read_text("utf-8")
    merges = [tuple(line.split(" ")) for line in text.splitlines()[1:] if line]
    ranks = {bytes([byte]): rank for rank, byte in enumerate(byte_alphabet().values())}
    to_bytes = byte_alphabet()
    for left, right in merges:
        ranks[bytes(to_bytes[c] for c in left + right)] = len(ranks)
    eot = len(ranks)
    return BpeTokenizer("gpt2", ranks=ranks, pattern=GPT2_PATTERN, special={EOT_TEXT: eot}, eot=eot)


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable character for each byte, in the order of the tokens 0 ... 255.

    Printable Latin-1 bytes stand for themselves, the other 68 take the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(rest)}


def decode_bytes(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Return the text of any ids: broken UTF-8 and ids beyond the vocabulary become U+FFFD."""
    unknown = _REPLACEMENT.encode()
    known = range(tokenizer.vocab_size)
    parts = (tokenizer.token_bytes(int(token)) if int(token) in known else unknown for token in tokens)
    return b"".join(parts).decode("utf-8", errors="replace")


def _utf8(text: str) -> bytes:
    return _valid(text).encode("utf-8")


def _valid(text: str) -> str:
    """Return `text` with lone surrogates (from JSON escapes) joined or replaced, as tiktoken does."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
