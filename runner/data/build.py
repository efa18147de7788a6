"""From documents to shards of tokens and their manifest, restartable shard by shard."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runner.data.manifest import TOKENIZER_FILE, Manifest, fresh_manifest, save_manifest, start_or_continue
from runner.data.shard import MAX_SHARD_TOKENS, ShardReader, Tokens, layout_for, read_header, write_shard
from runner.data.tokenizer import Tokenizer
from runner.data.tokenizer_file import write_tokenizer

DEFAULT_SHARD_TOKENS = 100_000_000  # llm.c's fineweb.py
REST = 0.1  # of shard_tokens: a last shard of less becomes the end of the one before
_CHUNK_BYTES = 1 << 20  # of text per job of a thread: by bytes, so that one long document is no long tail


class Document(NamedTuple):
    """One text and the split it belongs to ("train" or "val")."""

    split: str
    text: str


class Progress(NamedTuple):
    """What has been read and tokenised so far."""

    documents: int
    text_bytes: int
    tokens: int


class _Job(NamedTuple):
    """One document on its way: `skip` if finished shards hold it already."""

    number: int
    split: str
    text: str
    skip: bool


class _Encoded(NamedTuple):
    number: int
    split: str
    text_bytes: int
    tokens: NDArray[Any] | None


def build(
    documents: Iterable[Document],
    folder: Path,
    *,
    tokenizer: Tokenizer,
    key: dict[str, Any],
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    workers: int = 1,
    progress: Callable[[Progress], None] | None = None,
) -> Manifest:
    """Write `documents` as shards `<split>_000000.bin`, ... into `folder`; return the manifest.

    Each holds `shard_tokens` tokens, but for the last: between `REST` of that and 1 + `REST`.

    Each document is an end-of-text token and its tokens, so every document starts after one, as in
    llm.c's data. `key` (plain JSON) says what the shards are made from: a folder with a complete
    manifest of the same key is left as it is, an incomplete one is continued after its last complete
    shard, one of another key is refused. The bytes written do not depend on `workers`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    manifest = start_or_continue(folder, fresh_manifest(tokenizer, key=key, shard_tokens=shard_tokens))
    if manifest["complete"]:
        return manifest
    writers = {
        split: _SplitWriter(folder, split, manifest, tokenizer, shard_tokens) for split in ("train", "val")
    }
    jobs = (
        _Job(index, document.split, document.text, writers[document.split].has(index))
        for index, document in enumerate(documents)
    )
    seen = Progress(0, 0, 0)
    for encoded in _encode_all(jobs, tokenizer, workers=workers):
        tokens = writers[encoded.split].add(encoded)
        seen = Progress(seen.documents + 1, seen.text_bytes + encoded.text_bytes, seen.tokens + tokens)
        if progress is not None:
            progress(seen)
    for writer in writers.values():
        writer.finish()
    write_tokenizer(folder / TOKENIZER_FILE, tokenizer)
    manifest["complete"] = True
    save_manifest(folder, manifest)
    return manifest


class _SplitWriter:
    """Collects one split's tokens and writes a shard whenever one is full."""

    def __init__(
        self, folder: Path, split: str, manifest: Manifest, tokenizer: Tokenizer, shard_tokens: int
    ) -> None:
        self._folder = folder
        self._split = split
        self._manifest = manifest
        self._entry = manifest["splits"][split]
        self._buffer: Tokens = np.empty(shard_tokens, layout_for(tokenizer.vocab_size).dtype)
        self._filled = 0
        last = self._entry["shards"][-1] if self._entry["shards"] else {"document": 0, "token": 0}
        self._document: int = last["document"]  # first document of which tokens are still missing
        self._token: int = last["token"]  # how many of its tokens are there already
        self._end = (self._document, self._token)  # the same after what has been added since

    def has(self, index: int) -> bool:
        """Whether finished shards hold all of document `index`."""
        return index < self._document

    def add(self, encoded: _Encoded) -> int:
        """Append a document; return how many tokens were new."""
        self._entry["documents"] += 1
        self._entry["text_bytes"] += encoded.text_bytes
        if encoded.tokens is None:
            return 0
        tokens = encoded.tokens
        done = self._token if encoded.number == self._document else 0
        added = len(tokens) - done
        self._end = (encoded.number, len(tokens))
        while done < len(tokens):
            take = min(len(tokens) - done, len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + take] = tokens[done : done + take]
            self._filled += take
            done += take
            if self._filled == len(self._buffer):
                self._flush(encoded.number, token=done)
        return added

    def finish(self) -> None:
        """Write what is left as a last, shorter shard; a mere rest goes to the end of the shard before.

        A shard that holds no batch cannot be trained on, and its tokens would be in the way.
        """
        if not self._filled:
            return
        left, shards = self._buffer[: self._filled], self._entry["shards"]
        short = self._filled < len(self._buffer) * REST
        if short and shards and shards[-1]["tokens"] + self._filled <= MAX_SHARD_TOKENS:
            left = np.concatenate((self._take_back(), left))
        self._write(left, document=self._end[0], token=self._end[1])

    def _flush(self, document: int, *, token: int) -> None:
        self._write(self._buffer[: self._filled], document=document, token=token)

    def _write(self, tokens: Tokens, *, document: int, token: int) -> None:
        name = f"{self._split}_{len(self._entry['shards']):06d}.bin"
        digest = write_shard(self._folder / name, tokens)
        shard = {"file": name, "tokens": tokens.size, "sha256": digest, "document": document, "token": token}
        self._entry["shards"].append(shard)
        self._entry["tokens"] += tokens.size
        self._filled = 0
        save_manifest(self._folder, self._manifest)

    def _take_back(self) -> Tokens:
        """Return the tokens of the last shard, which is to be written again."""
        shard = read_header(self._folder / self._entry["shards"].pop()["file"])
        self._entry["tokens"] -= shard.tokens
        with closing(ShardReader([shard])) as reader:
            return reader.read(0, start=0, count=shard.tokens)


def _encode_all(jobs: Iterable[_Job], tokenizer: Tokenizer, *, workers: int) -> Iterator[_Encoded]:
    """Encode in threads (tiktoken releases the GIL), yield in order, hold a bounded number of chunks."""
    with ThreadPoolExecutor(workers) as pool:
        running: deque[Future[list[_Encoded]]] = deque()
        for chunk in _chunks(jobs):
            running.append(pool.submit(_encode_chunk, chunk, tokenizer))
            if len(running) > 2 * workers:
                yield from running.popleft().result()
        while running:
            yield from running.popleft().result()


def _encode_chunk(chunk: list[_Job], tokenizer: Tokenizer) -> list[_Encoded]:
    eot = np.array([tokenizer.eot], np.uint32)
    encoded = []
    for job in chunk:
        tokens = None if job.skip else np.concatenate((eot, tokenizer.encode_array(job.text)))
        text_bytes = len(job.text.encode("utf-8", "surrogatepass"))
        encoded.append(_Encoded(job.number, job.split, text_bytes, tokens))
    return encoded


def _chunks(jobs: Iterable[_Job]) -> Iterator[list[_Job]]:
    chunk: list[_Job] = []
    size = 0
    for job in jobs:
        chunk.append(job)
        size += len(job.text)
        if size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def thread_count() -> int:
    """Return how many CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
