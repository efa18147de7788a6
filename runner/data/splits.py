"""What every corpus of shards has in common: checks, streams and a fingerprint of two splits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runner.data.dealt import DealtSource
from runner.data.loader import Loader
from runner.data.shard import HEADER_BYTES, Shard, ShardReader, find_shards, inspect_shards, scan_range
from runner.data.stream import LLMC_SHUFFLE_SEED, Shape, ShardSource, Source
from runner.data.window import RowSource, WindowSource, rows_in

if TYPE_CHECKING:
    from runner.api import Stream

Order = Literal["shuffle", "sequential", "windows"]

_SCAN_BYTES = 512 << 20  # token ids checked before a start; those beyond are checked when read
_COUNT_TOKENS = 1 << 22  # read at a time when counting
_SAMPLE_BYTES = 1 << 16  # of each end of a shard that enter the fingerprint


class Files(NamedTuple):
    """Where the shards of both splits are; `keys` name them in messages."""

    train: str
    val: str
    keys: tuple[str, str]
    bytes_per_token: dict[str, float]  # by split; empty if unknown


@dataclass(frozen=True)
class Where:
    """What the program supplies when a stream is opened."""

    micro_batch: int
    seq_len: int
    rank: int = 0
    world: int = 1
    device: Any = "cpu"
    seed: int = 0

    @property
    def shape(self) -> Shape:
        return Shape(self.micro_batch, self.seq_len, self.rank, self.world)


class Splits:
    """Training and validation shards, read in one order.

    `locate` says where they are and may have to tokenise first; it raises ValueError with one line
    per problem. `prefetch` None means 2 batches on CUDA and none on a CPU, where reading costs less
    than handing over between threads.
    """

    def __init__(
        self,
        locate: Callable[[], Files],
        *,
        vocab_size: int,
        order: Order,
        seed: int | None,
        prefetch: int | None,
        ready_made: bool,
    ) -> None:
        self._locate = locate
        self._vocab_size = vocab_size
        self._order = order
        self._seed = seed
        self._prefetch = prefetch
        self._ready_made = ready_made
        self._files: Files | None = None

    @property
    def files(self) -> Files:
        if self._files is None:
            self._files = self._locate()
        return self._files

    def check(self, *, micro_batch: int, seq_len: int, world: int, vocab_size: int | None) -> list[str]:
        """Return one line per problem of the shards with this run's shape and model."""
        problems = []
        if vocab_size is not None and vocab_size < self._vocab_size:
            problems.append(
                f"data: token ids reach {self._vocab_size - 1}, but the model's vocabulary is {vocab_size}: "
                f"set model.vocab_size to at least {self._vocab_size} or choose another data.tokenizer"
            )
        try:
            files = self.files
        except ValueError as error:
            return problems + str(error).splitlines()
        shape = Shape(micro_batch, seq_len, world=world)
        train, found = self._inspect(files, "train", shape)
        val, more = self._inspect(files, "val", shape)
        if found and more and not self._ready_made and seq_len >= max(shard.tokens for shard in train):
            found = []  # the same mistake: no micro-batch of such rows fits either
        problems += found + more
        if self._ready_made:
            problems += scan_range(val + train, limit=self._vocab_size, budget_bytes=_SCAN_BYTES)
        return problems

    def warnings(self) -> list[str]:
        """Return a line if files of the validation split are files of the training split too."""
        splits = (find_shards(getattr(self.files, split)) for split in ("train", "val"))
        train, val = ({_identity(path): path for path in paths} for paths in splits)
        both = sorted(path.name for identity, path in val.items() if identity in train)
        if not both:
            return []
        what = "it is" if len(both) == len(val) == 1 else f"{len(both)} of its {len(val)} shards are"
        return [
            f"data.val={self.files.val!r}: {what} trained on as well ({both[0]}), so its loss tells "
            "what the model remembers; give data.val shards of its own"
        ]

    def train(self, where: Where) -> Stream:
        """Open the training stream."""
        reader = ShardReader(self._shards("train", where.shape), limit=self._vocab_size)
        source: Source
        if self._order == "windows":
            seed = where.seed if self._seed is None else self._seed
            source = WindowSource(reader, where.shape, seed=seed)
        else:
            seed = LLMC_SHUFFLE_SEED if self._seed is None else self._seed
            source = ShardSource(reader, where.shape, shuffle=self._order == "shuffle", seed=seed)
        return self._load(source, where)

    def val(self, where: Where) -> Stream:
        """Open the validation stream in file order, dealt to the ranks batch by batch.

        How the tokens are cut does not depend on the number of ranks, and so neither does the loss. A set
        with a shard shorter than one batch, which llm.c refuses, is read by rows that wrap around.
        """
        shards = self._shards("val", where.shape)
        reader = ShardReader(shards, limit=self._vocab_size)
        alone = where.shape._replace(rank=0, world=1)
        if not all(alone.samples(shard.tokens) for shard in shards):
            return self._load(RowSource(reader, where.shape), where)
        source: Source = ShardSource(reader, alone, shuffle=False)
        if where.world > 1:
            source = DealtSource(source, rank=where.rank, world=where.world)
        return self._load(source, where)

    def fingerprint(self) -> dict[str, Any]:
        """Identify the tokens: per split the number of files and tokens and a digest.

        The digest covers each file's name, size and 64 KiB of either end, so that it takes no time on
        shards of any size and survives a move to another folder.
        """
        prints: dict[str, Any] = {}
        for split, key in zip(("train", "val"), self.files.keys, strict=True):
            shards, problems = inspect_shards(getattr(self.files, split), key=key)
            if problems:
                raise ValueError("\n".join(problems))
            prints[split] = {
                "files": len(shards),
                "tokens": sum(shard.tokens for shard in shards),
                "digest": _digest(shards),
            }
        return prints

    def bytes_per_token(self, split: str) -> float | None:
        """Return the mean length of a token in bytes of text, None if the text is not known."""
        return self.files.bytes_per_token.get(split)

    def count_tokens(self, split: str) -> NDArray[np.int64]:
        """Return how often each id below the vocabulary size occurs in a split [V]."""
        shards, problems = inspect_shards(getattr(self.files, split), key=split)
        if problems:
            raise ValueError("\n".join(problems))
        counts = np.zeros(self._vocab_size, np.int64)
        with closing(ShardReader(shards, limit=self._vocab_size)) as reader:
            for index, shard in enumerate(shards):
                for start in range(0, shard.tokens, _COUNT_TOKENS):
                    tokens = reader.read(index, start=start, count=min(_COUNT_TOKENS, shard.tokens - start))
                    counts += np.bincount(tokens, minlength=self._vocab_size)
        return counts

    def _load(self, source: Source, where: Where) -> Stream:
        prefetch = self._prefetch
        if prefetch is None:
            prefetch = 2 if str(where.device).startswith("cuda") else 0
        return Loader(source, device=where.device, prefetch=prefetch)

    def _shards(self, split: str, shape: Shape) -> list[Shard]:
        shards, problems = self._inspect(self.files, split, shape)
        if problems:
            raise ValueError("\n".join(problems))
        return shards

    def _inspect(self, files: Files, split: str, shape: Shape) -> tuple[list[Shard], list[str]]:
        by_row = split == "val" or self._order == "windows"
        key = files.keys[0] if split == "train" else files.keys[1]
        pattern = getattr(files, split)
        if not by_row:
            return self._inspect_samples(pattern, key=key, shape=shape)
        shards, problems = inspect_shards(pattern, key=key)
        if not problems and rows_in(shards, shape.seq_len) == 0:
            most = max(shard.tokens for shard in shards)
            what = "no shard for validation" if split == "val" else "no shard"
            problems.append(
                f"{key}: {what} holds train.seq_len + 1 = {shape.seq_len + 1} tokens (most: {most}): "
                "lower train.seq_len or provide more text"
            )
        return shards, problems

    def _inspect_samples(self, pattern: str, *, key: str, shape: Shape) -> tuple[list[Shard], list[str]]:
        """Check shards that are read by samples: each must hold one, as llm.c asks.

        Of a corpus that was cut into shards here, which nobody can leave out, the last may be shorter.
        """
        need = shape.step_tokens + 1
        product = f"{shape.world} x {shape.micro_batch} x {shape.seq_len} + 1"
        why = f" for one micro-batch of every rank ({product}): lower train.micro_batch or train.seq_len"
        if self._ready_made:
            return inspect_shards(pattern, key=key, need=need, why=f"{why}, or leave out the shard")
        shards, problems = inspect_shards(pattern, key=key)
        most = max((shard.tokens for shard in shards), default=0)
        if not problems and most < need:
            problems.append(f"{key}: {most} tokens for training, but {need} are needed{why}")
        return shards, problems


def _identity(path: Path) -> tuple[int, int]:
    """Return what the names of one file have in common; cheaper than resolving 10,000 links."""
    status = path.stat()
    return status.st_dev, status.st_ino


def _digest(shards: list[Shard]) -> str:
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(f"{shard.path.name} {shard.tokens} {shard.dtype.str}\n".encode())
        with shard.path.open("rb") as file:
            digest.update(file.read(HEADER_BYTES + _SAMPLE_BYTES))
            file.seek(max(file.tell(), HEADER_BYTES + shard.tokens * shard.dtype.itemsize - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
