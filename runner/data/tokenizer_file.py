"""llm.c's tokenizer file, which its programs decode samples with (llmc/tokenizer.h)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from runner.data.shard import HEADER_BYTES, HEADER_INTS, write_whole
from runner.data.tokenizer import Tokenizer

MAGIC = 20240328
_GPT2_EOT = 50256  # version 1 has no field for it


class TokenizerFile(NamedTuple):
    """The bytes of every token; enough to decode, not to encode."""

    tokens: tuple[bytes, ...]
    eot: int

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text; broken UTF-8 and ids beyond the vocabulary become U+FFFD."""
        known = range(len(self.tokens))
        parts = (self.tokens[t] if t in known else "�".encode() for t in map(int, tokens))
        return b"".join(parts).decode("utf-8", errors="replace")


def write_tokenizer(path: Path, tokenizer: Tokenizer) -> None:
    """Write `tokenizer` in version 2; ValueError if a token has more than 255 bytes.

    The format knows no empty token, so an id without a meaning is written as U+FFFD.
    """
    header = np.zeros(HEADER_INTS, "<u4")
    header[:4] = MAGIC, 2, tokenizer.vocab_size, tokenizer.eot
    body = bytearray()
    for token in range(tokenizer.vocab_size):
        content = tokenizer.token_bytes(token) or "�".encode()
        if len(content) > 255:
            raise ValueError(f"{path}: token {token} has {len(content)} bytes, the format holds at most 255")
        body.append(len(content))
        body += content
    write_whole(path, header.tobytes(), bytes(body))


def read_tokenizer(path: Path) -> TokenizerFile:
    """Read a tokenizer file of version 1 or 2; ValueError with one line if it is damaged."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read as a tokenizer file: {error.strerror}") from None
    if len(raw) < HEADER_BYTES:
        raise ValueError(f"{path}: {len(raw)} bytes, shorter than a tokenizer file's header")
    magic, version, size, eot = (int(word) for word in np.frombuffer(raw, "<u4", count=4))
    if magic != MAGIC or version not in (1, 2):
        raise ValueError(f"{path}: magic {magic} version {version}, a tokenizer file has {MAGIC} and 1 or 2")
    tokens: list[bytes] = []
    at = HEADER_BYTES
    while len(tokens) < size and at < len(raw) and raw[at] and at + raw[at] < len(raw):
        tokens.append(raw[at + 1 : at + 1 + raw[at]])
        at += 1 + raw[at]
    if len(tokens) != size or at != len(raw):
        raise ValueError(f"{path}: {len(tokens)} of {size} tokens in {len(raw)} bytes: the file is damaged")
    return TokenizerFile(tuple(tokens), _GPT2_EOT if version == 1 else eot)
