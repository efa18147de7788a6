"""The corpora that a config can name: the built-in book, a text of one's own, ready-made shards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge

from runner.data.build import Document, Manifest
from runner.data.cache import cached
from runner.data.splits import Files, Splits, Where
from runner.data.tokenizer import Tokenizer, tokenizer_for

if TYPE_CHECKING:
    from runner.api import Stream

MOBY_DICK_SHA256 = "52ee15b20f3a51012d739d2c7cb730c0ef9c4d6a8ab1a54526cb1f56bb7f082c"
_VAL_CHAPTER = 9  # the last of every ten chapters is for validation: 13 of 135, 7.8 % of the text


class Moby:
    """Moby-Dick, shipped with the package: 135 chapters as documents, every tenth for validation."""

    def __init__(
        self,
        *,
        tokenizer: str = "byte",
        order: Literal["shuffle", "sequential", "windows"] = "shuffle",
        seed: Annotated[int, Ge(0)] | None = None,
        prefetch: Annotated[int, Ge(0)] | None = None,
        cache: str | None = None,
    ) -> None:
        self.tokenizer: Tokenizer = tokenizer_for(tokenizer)
        self.vocab_size = self.tokenizer.vocab_size
        self._cache = cache
        self._splits = Splits(
            self._locate, vocab_size=self.vocab_size, order=order, seed=seed, prefetch=prefetch, scan=False
        )

    def check(self, *, micro_batch: int, seq_len: int, world: int, vocab_size: int | None) -> list[str]:
        return self._splits.check(
            micro_batch=micro_batch, seq_len=seq_len, world=world, vocab_size=vocab_size
        )

    def train(self, **where: Any) -> Stream:
        return self._splits.train(Where(**where))

    def val(self, **where: Any) -> Stream:
        return self._splits.val(Where(**where))

    def fingerprint(self) -> dict[str, Any]:
        return self._splits.fingerprint() | {"tokenizer": self.tokenizer.fingerprint()}

    def bytes_per_token(self, split: str = "val") -> float | None:
        """Return the mean length of a split's token in bytes of text, for bits per byte."""
        return self._splits.bytes_per_token(split)

    def _locate(self) -> Files:
        folder, manifest = cached(
            moby_documents,
            name="moby",
            key={"corpus": "moby", "text": MOBY_DICK_SHA256},
            tokenizer=self.tokenizer,
            cache=self._cache,
        )
        return _files(str(folder), manifest)


def moby_documents() -> Iterator[Document]:
    """Yield the chapters, each with its split."""
    text = files("runner.data").joinpath("assets", "moby_dick.txt").read_text("ascii")
    for index, chapter in enumerate(re.split(r"\n(?=CHAPTER \d+\. )", text)):
        yield Document("val" if index % 10 == _VAL_CHAPTER else "train", chapter)


def _files(folder: str, manifest: Manifest) -> Files:
    ratio = {
        name: split["text_bytes"] / split["tokens"]
        for name, split in manifest["splits"].items()
        if split["tokens"]
    }
    return Files(f"{folder}/train_*.bin", f"{folder}/val_*.bin", ("data", "data"), ratio)
