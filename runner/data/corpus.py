"""The corpora that a config can name: the built-in book, a text of one's own, ready-made shards."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Le, Lt

from runner.data.build import Document
from runner.data.cache import cached
from runner.data.documents import Split, assign, find_sources, kind_of, read_texts
from runner.data.manifest import Manifest
from runner.data.splits import Files, Splits, Where
from runner.data.tokenizer import tokenizer as tokenizer_for

if TYPE_CHECKING:
    from runner import api
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
        seed: Annotated[int, Ge(0), Le(2147483647)] | None = None,
        prefetch: Annotated[int, Ge(0)] | None = None,
        cache: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer_for(tokenizer)
        self.tokenizer: api.Tokenizer | None = self._tokenizer
        self.vocab_size = self._tokenizer.vocab_size
        self._cache = cache
        self._splits = Splits(
            self._locate,
            vocab_size=self.vocab_size,
            order=order,
            seed=seed,
            prefetch=prefetch,
            ready_made=False,
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
        return self._splits.fingerprint() | {"tokenizer": self._tokenizer.fingerprint()}

    def bytes_per_token(self, split: str = "val") -> float | None:
        """Return the mean length of a split's token in bytes of text, for bits per byte."""
        return self._splits.bytes_per_token(split)

    def _locate(self) -> Files:
        folder, manifest = cached(
            moby_documents,
            name="moby",
            key={"corpus": "moby", "text": MOBY_DICK_SHA256},
            tokenizer=self._tokenizer,
            cache=self._cache,
        )
        return _files(str(folder), manifest)


class Text:
    """Text files of one's own, tokenised on first use into the cache; meant for up to a few gigabytes.

    Without a `separator` every file is a document and its end is held out; with one, the documents
    between separators are, by a hash of their number.
    """

    def __init__(
        self,
        *,
        path: str,
        tokenizer: str = "gpt2",
        separator: str | None = None,
        val_fraction: Annotated[float, Gt(0), Lt(1)] = 0.1,
        order: Literal["shuffle", "sequential", "windows"] = "shuffle",
        seed: Annotated[int, Ge(0), Le(2147483647)] | None = None,
        prefetch: Annotated[int, Ge(0)] | None = None,
        cache: str | None = None,
    ) -> None:
        if separator == "":
            raise ValueError(
                "data.separator='' separates nothing: give a text, or null for one document a file"
            )
        self._tokenizer = tokenizer_for(tokenizer)
        self.tokenizer: api.Tokenizer | None = self._tokenizer
        self.vocab_size = self._tokenizer.vocab_size
        self._path = path
        # A shell and Hydra both leave \\n as it is; the same spelling as in runner.data.prepare.
        self._separator = separator if separator is None else separator.replace("\\n", "\n")
        self._val_fraction = val_fraction
        self._cache = cache
        self._splits = Splits(
            self._locate,
            vocab_size=self.vocab_size,
            order=order,
            seed=seed,
            prefetch=prefetch,
            ready_made=False,
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
        return self._splits.fingerprint() | {"tokenizer": self._tokenizer.fingerprint()}

    def bytes_per_token(self, split: str = "val") -> float | None:
        """Return the mean length of a split's token in bytes of text, for bits per byte."""
        return self._splits.bytes_per_token(split)

    def _locate(self) -> Files:
        paths = find_sources(self._path, key="data.path")
        split: Split = "tail" if self._separator is None else "hash"
        key = {
            "corpus": "text",
            "files": [[_sha256(path), kind_of(path)] for path in paths],
            "separator": self._separator,
            "split": [split, self._val_fraction],
        }
        folder, manifest = cached(
            lambda: assign(self._texts(paths), split=split, val_fraction=self._val_fraction),
            name="text",
            key=key,
            tokenizer=self._tokenizer,
            cache=self._cache,
        )
        for name, entry in manifest["splits"].items():
            if not entry["shards"]:
                raise ValueError(
                    f"data.path={self._path!r} leaves nothing for {name} at data.val_fraction="
                    f"{self._val_fraction}: "
                    "give more text or another data.separator"
                )
        return _files(str(folder), manifest)

    def _texts(self, paths: Iterable[Path]) -> Iterator[str]:
        for path in paths:
            yield from read_texts(path, separator=self._separator)


class Shards:
    """Ready-made shards in llm.c's formats, such as `runner.data.prepare` or llm.c's scripts write."""

    def __init__(
        self,
        *,
        train: str,
        val: str,
        vocab_size: Annotated[int, Ge(1)] = 50257,
        tokenizer: str | None = None,
        order: Literal["shuffle", "sequential", "windows"] = "shuffle",
        seed: Annotated[int, Ge(0), Le(2147483647)] | None = None,
        prefetch: Annotated[int, Ge(0)] | None = None,
    ) -> None:
        self._tokenizer = tokenizer_for(tokenizer) if tokenizer is not None else None
        self.tokenizer: api.Tokenizer | None = self._tokenizer
        if self._tokenizer is not None and self._tokenizer.vocab_size > vocab_size:
            raise ValueError(
                f"data.vocab_size={vocab_size} is less than the {self._tokenizer.vocab_size} tokens of "
                f"data.tokenizer={tokenizer}: set data.vocab_size={self._tokenizer.vocab_size}"
            )
        self.vocab_size = vocab_size
        self._files = Files(train, val, ("data.train", "data.val"), {})
        self._splits = Splits(
            lambda: self._files,
            vocab_size=vocab_size,
            order=order,
            seed=seed,
            prefetch=prefetch,
            ready_made=True,
        )

    def check(self, *, micro_batch: int, seq_len: int, world: int, vocab_size: int | None) -> list[str]:
        return self._splits.check(
            micro_batch=micro_batch, seq_len=seq_len, world=world, vocab_size=vocab_size
        )

    def train(self, **where: Any) -> Stream:
        return self._splits.train(Where(**where))

    def val(self, **where: Any) -> Stream:
        return self._splits.val(Where(**where))

    def warnings(self) -> list[str]:
        """Return a line if validation shards are trained on."""
        return self._splits.warnings()

    def fingerprint(self) -> dict[str, Any]:
        tokenizer = self._tokenizer.fingerprint() if self._tokenizer is not None else None
        return self._splits.fingerprint() | {"tokenizer": tokenizer}

    def bytes_per_token(self, split: str = "val") -> float | None:
        """Return the mean length of a split's token in bytes of text; None without a tokenizer.

        Reads the whole split.
        """
        if self._tokenizer is None:
            return None
        tokens = self._splits.count_tokens(split)
        known = [token for token in range(len(tokens)) if token != self._tokenizer.eot]
        lengths = np.zeros(len(tokens), np.int64)
        lengths[known] = [len(self._tokenizer.token_bytes(token)) for token in known]
        return float(tokens @ lengths) / float(tokens.sum())


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


def _sha256(path: Path) -> str:
    if path.is_dir():
        raise ValueError(
            f"data.path: {path} is a dataset folder: make shards of it with `python -m runner.data.prepare`"
        )
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
