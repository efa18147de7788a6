"""llm.c's token shards: find, check, read and write them (llmc/dataloader.h, dev/data/data_common.py)."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import struct
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runner.fault import naming

Tokens = NDArray[np.unsignedinteger[Any]]  # uint16 or uint32, as in the file

HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
MAX_SHARD_TOKENS = 2**31 - 1  # the count is an int32 of the header
_FIRST_INTS = struct.Struct("<3i")  # magic number, version, tokens
_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
_OPEN_FILES = 32  # per reader; an order that jumps between shards keeps the last ones open


class Layout(NamedTuple):
    """One kind of shard: what its header says and how wide its tokens are."""

    magic: int
    version: int
    dtype: np.dtype[Any]


GPT2 = Layout(20240520, 1, np.dtype("<u2"))
LLAMA3 = Layout(20240801, 7, np.dtype("<u4"))
_LAYOUTS = {layout.magic: layout for layout in (GPT2, LLAMA3)}
_OTHER_FILES = {
    20240522: "a multiple-choice evaluation file",
    20240326: "a GPT-2 model file",
    20240327: "a debug state file",
    20240328: "a tokenizer file",
    20240527: "an optimizer state file",
    20240803: "a llama-3 model file",
}


class Shard(NamedTuple):
    """A shard whose header and size were checked."""

    path: Path
    tokens: int
    dtype: np.dtype[Any]


def layout_for(vocab_size: int) -> Layout:
    """Return the narrowest layout that holds ids below `vocab_size`."""
    return GPT2 if vocab_size <= 2**16 else LLAMA3


def read_header(path: Path) -> Shard:
    """Check a file's header and exact size; ValueError with one line that names the file."""
    try:
        size, header = _size_and_start(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read as a token shard: {error.strerror}") from None
    if len(header) < HEADER_BYTES:
        raise ValueError(f"{path}: {size} bytes, shorter than a shard's header of {HEADER_BYTES} bytes")
    magic, version, tokens = _FIRST_INTS.unpack_from(header)
    layout = _LAYOUTS.get(magic)
    if layout is None:
        kind = f" ({_OTHER_FILES[magic]})" if magic in _OTHER_FILES else ""
        allowed = f"{GPT2.magic} (GPT-2, uint16) or {LLAMA3.magic} (llama-3, uint32)"
        raise ValueError(f"{path}: magic number {magic}{kind} is not that of a token shard: {allowed}")
    if version != layout.version:
        raise ValueError(f"{path}: version {version}, but magic {magic} goes with version {layout.version}")
    expected = HEADER_BYTES + tokens * layout.dtype.itemsize
    if tokens < 0:
        raise ValueError(f"{path}: its header counts {tokens} tokens: the file is damaged; write it again")
    if size != expected:
        fault = "truncated" if size < expected else "followed by something else"
        raise ValueError(
            f"{path}: {size} bytes, but {tokens} tokens of {layout.dtype.name} make {expected}: "
            f"the file is {fault}; copy or write it again"
        )
    return Shard(path, tokens, layout.dtype)


def _size_and_start(path: Path) -> tuple[int, bytes]:
    """Return a file's size and what a header has of it; 10,000 shards would feel `open`."""
    file = os.open(path, _READ)
    try:
        return os.fstat(file).st_size, os.read(file, HEADER_BYTES)
    finally:
        os.close(file)


def find_shards(pattern: str) -> list[Path]:
    """Return the files that match, in the byte order of their paths, as C's glob in llm.c."""
    found = glob.glob(os.path.expanduser(pattern))
    return [Path(name) for name in sorted(found, key=os.fsencode)]


def inspect_shards(pattern: str, *, key: str, need: int = 1, why: str = "") -> tuple[list[Shard], list[str]]:
    """Check every shard of a pattern; return the good ones and one line per problem.

    `key` names the config entry in messages. Each shard must hold `need` tokens; `why` says what for.
    """
    paths = find_shards(pattern)
    if not paths:
        return [], [f"{key}={pattern!r} matches no file"]
    shards: list[Shard] = []
    problems: list[str] = []
    for path in paths:
        try:
            shard = read_header(path)
        except ValueError as error:
            problems.append(f"{key}: {error}")
            continue
        shards.append(shard)
        if shard.tokens < need:
            problems.append(f"{key}: {path}: {shard.tokens} tokens, but each shard needs {need}{why}")
    return shards, problems


class ShardReader:
    """Reads runs of tokens from checked shards; files open on first use, no mapping, bounded memory.

    Token ids must lie below `limit`: an id beyond the model's vocabulary would otherwise surface as an
    assertion on the device that names nothing.
    """

    def __init__(self, shards: Sequence[Shard], *, limit: int | None = None) -> None:
        self.shards = tuple(shards)
        self._limit = limit
        self._files: OrderedDict[int, int] = OrderedDict()

    def read(self, index: int, *, start: int, count: int) -> Tokens:
        """Return `count` tokens from position `start` of shard `index`."""
        shard = self.shards[index]
        assert 0 <= start <= shard.tokens - count, (shard, start, count)
        size = count * shard.dtype.itemsize
        raw = read_exactly(
            self._file(index), size, HEADER_BYTES + start * shard.dtype.itemsize, path=shard.path
        )
        tokens: Tokens = np.frombuffer(raw, shard.dtype)
        if self._limit is not None:
            require_range(tokens, self._limit, path=shard.path, start=start)
        return tokens

    def close(self) -> None:
        """Close every file; reading opens them again."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _file(self, index: int) -> int:
        if index not in self._files:
            if len(self._files) >= _OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            self._files[index] = os.open(self.shards[index].path, _READ)
        self._files.move_to_end(index)
        return self._files[index]


def as_bytes(array: NDArray[Any]) -> memoryview:
    """Return the memory of a contiguous array as bytes."""
    return array.view(np.uint8).data


def read_exactly(file: int, size: int, offset: int, *, path: Path) -> bytes:
    """Return `size` bytes from `offset` of an open file; OSError naming it if it ends first."""
    parts: list[bytes] = []
    while size > 0:
        try:
            part = os.pread(file, size, offset)
        except OSError as error:  # of a broken disk: it knows no name
            error.filename = str(path)
            raise
        if not part:
            raise OSError(
                f"{path}: ended at byte {offset} while it was read: it is shorter than at the start"
            )
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def require_range(tokens: Tokens, limit: int, *, path: Path, start: int) -> None:
    """Raise ValueError naming file and position if a token is not below `limit`."""
    if tokens.size == 0 or int(tokens.max()) < limit:
        return
    first = int(np.argmax(tokens >= limit))
    raise ValueError(
        f"{path}: token {int(tokens[first])} at position {start + first} is not below the vocabulary size "
        f"{limit}: these shards were made with another tokenizer; use a model and data of one vocabulary"
    )


def scan_range(shards: Sequence[Shard], *, limit: int, budget_bytes: int) -> list[str]:
    """Check the ids in the first `budget_bytes` of the shards; one line per bad shard."""
    problems: list[str] = []
    reader = ShardReader(shards, limit=limit)
    chunk = 1 << 22  # tokens
    for index, shard in enumerate(shards):
        readable = min(shard.tokens, budget_bytes // shard.dtype.itemsize)
        budget_bytes -= readable * shard.dtype.itemsize
        try:
            for start in range(0, readable, chunk):
                reader.read(index, start=start, count=min(chunk, readable - start))
        except (ValueError, OSError) as error:
            problems.append(str(error))
    reader.close()
    return problems


def as_tokens(ids: NDArray[Any], *, vocab_size: int) -> Tokens:
    """Return ids in the dtype of their shard; ValueError if one does not fit the vocabulary."""
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(f"token ids {ids.min()} ... {ids.max()} must lie in [0, {vocab_size})")
    return ids.astype(layout_for(vocab_size).dtype)


def write_shard(path: Path, tokens: Tokens) -> str:
    """Write one shard whole or not at all (temporary name, fsync, rename); return its sha256.

    The dtype chooses the layout: uint16 is GPT-2's, uint32 llama-3's.
    """
    layout = {2: GPT2, 4: LLAMA3}.get(tokens.dtype.itemsize) if tokens.dtype.kind == "u" else None
    if layout is None:
        raise ValueError(f"{path}: tokens are {tokens.dtype}, a shard holds uint16 or uint32")
    if tokens.size > MAX_SHARD_TOKENS:
        raise ValueError(f"{path}: {tokens.size} tokens, a shard's header counts at most {MAX_SHARD_TOKENS}")
    header = np.zeros(HEADER_INTS, "<i4")
    header[:3] = layout.magic, layout.version, tokens.size
    body = np.ascontiguousarray(tokens, layout.dtype)
    write_whole(path, header.tobytes(), as_bytes(body))
    digest = hashlib.sha256(header.tobytes())
    digest.update(as_bytes(body))
    return digest.hexdigest()


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file so that a crash leaves either the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with naming(path), temporary.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # a full disk needs the room
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    temporary.replace(path)
