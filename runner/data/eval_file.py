"""Multiple-choice questions: llm.c's evaluation file, HellaSwag-like JSON lines, and llm.c's shares of ranks.

File (llmc/dataloader.h, dev/data/data_common.py): 256 i32 of header (20240522, version 1, examples, bytes of
the longest), then per example as u16: 65535, its bytes, its index, label, number of completions (4), then the
context and each completion, each after its length.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runner.data.shard import HEADER_BYTES, HEADER_INTS, write_whole

MAGIC, VERSION = 20240522, 1
COMPLETIONS = 4
START = 65535  # u16 that starts an example; no token id

Ids = tuple[int, ...]


class Question(NamedTuple):
    """A context, its possible continuations and the index of the true one, as text."""

    context: str
    endings: tuple[str, ...]
    label: int


class Example(NamedTuple):
    """A question as token ids."""

    context: Ids
    endings: tuple[Ids, ...]
    label: int


class Rows(NamedTuple):
    """Examples laid out for a model, one row per ending: R = examples x endings, T tokens."""

    inputs: NDArray[np.int64]  # [R, T], zero beyond the ending
    targets: NDArray[np.int64]  # [R, T], the ending's tokens one position early
    mask: NDArray[np.bool_]  # [R, T], true where a target is to be predicted


# ---------------------------------------------------------------- llm.c's file


def read_examples(path: Path, *, seq_len: int | None = None) -> list[Example]:
    """Read and check a whole file; ValueError with one line that names it and what is wrong.

    With `seq_len` T llm.c's own limits hold too: the longest example below 10 T bytes, and context plus
    completion below T tokens.
    """
    body, count, longest = _body(path)
    if seq_len is not None and not 0 < longest < 10 * seq_len:
        raise ValueError(f"{path}: longest example {longest} bytes, llm.c takes less than 10 x {seq_len}")
    examples: list[Example] = []
    at = 0
    while len(examples) < count:
        try:
            example, size = _example(body, at, index=len(examples), longest=longest)
        except ValueError as error:
            raise ValueError(f"{path}: example {len(examples)} of {count}: {error}") from None
        at += size
        examples.append(example)
        if seq_len is not None:
            _check_length(path, example, index=len(examples) - 1, seq_len=seq_len)
    if at != len(body):
        raise ValueError(f"{path}: {2 * (len(body) - at)} bytes after the last of {count} examples")
    return examples


def _body(path: Path) -> tuple[NDArray[np.uint16], int, int]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read as an evaluation file: {error.strerror}") from None
    if len(raw) < HEADER_BYTES:
        raise ValueError(f"{path}: {len(raw)} bytes, shorter than an evaluation file's header")
    magic, version, count, longest = (int(word) for word in np.frombuffer(raw, "<i4", count=4))
    if (magic, version) != (MAGIC, VERSION):
        raise ValueError(f"{path}: magic {magic} version {version}, an evaluation file has {MAGIC} and 1")
    if len(raw) % 2 or not 0 < count <= (len(raw) - HEADER_BYTES) // 2:
        raise ValueError(f"{path}: {count} examples in {len(raw)} bytes: the file is damaged")
    return np.frombuffer(raw, "<u2", offset=HEADER_BYTES), count, longest


def _example(body: NDArray[np.uint16], at: int, *, index: int, longest: int) -> tuple[Example, int]:
    """Return the example at u16 `at`, and how many u16 it takes."""
    if at + 6 > len(body):
        raise ValueError("the file ends before it")
    start, size, stored, label, completions = (int(word) for word in body[at : at + 5])
    if start != START:
        raise ValueError(f"starts with {start}, not {START}")
    if size > longest or size % 2 or at + size // 2 > len(body):
        raise ValueError(f"{size} bytes, the longest has {longest} and {2 * (len(body) - at)} are left")
    if stored != index % 2**16:
        raise ValueError(f"its index is {stored}")
    if completions != COMPLETIONS or label >= completions:
        raise ValueError(f"label {label} of {completions} completions, it must have {COMPLETIONS}")
    parts: list[Ids] = []
    end, cursor = at + size // 2, at + 5
    for _ in range(1 + completions):
        length = int(body[cursor]) if cursor < end else 0
        if length == 0 or cursor + 1 + length > end:
            raise ValueError(f"a part of {length} tokens in {size} bytes")
        parts.append(tuple(body[cursor + 1 : cursor + 1 + length].tolist()))
        cursor += 1 + length
    if cursor != end:
        raise ValueError(f"{size} bytes, its parts take {2 * (cursor - at)}")
    return Example(parts[0], tuple(parts[1:]), label), size // 2


def _check_length(path: Path, example: Example, *, index: int, seq_len: int) -> None:
    longest = len(example.context) + max(map(len, example.endings))
    if longest >= seq_len:
        raise ValueError(f"{path}: example {index} has {longest} tokens, llm.c takes less than {seq_len}")


def write_examples(path: Path, examples: Sequence[Example]) -> None:
    """Write llm.c's evaluation file; ValueError for what it cannot hold."""
    chunks: list[NDArray[np.uint16]] = []
    for index, example in enumerate(examples):
        parts = (example.context, *example.endings)
        if len(example.endings) != COMPLETIONS or not all(parts):
            raise ValueError(f"{path}: example {index} must have a context and {COMPLETIONS} endings")
        size = 2 * (5 + sum(1 + len(part) for part in parts))
        words = [START, size, index % 2**16, example.label, COMPLETIONS]
        for part in parts:
            words += [len(part), *part]
        if size > START or max(words[1:]) >= START:
            raise ValueError(f"{path}: example {index} ({size} bytes) has numbers beyond 16 bits")
        chunks.append(np.array(words, "<u2"))
    header = np.zeros(HEADER_INTS, "<i4")
    longest = max((chunk.nbytes for chunk in chunks), default=0)
    header[:4] = MAGIC, VERSION, len(examples), longest
    write_whole(path, header.tobytes(), *(chunk.tobytes() for chunk in chunks))


# ---------------------------------------------------------------- JSON lines


def read_questions(path: Path) -> list[Question]:
    """Read HellaSwag-like lines {"ctx", "endings", "label"}; ValueError names the line that is wrong."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as JSON lines: {error}") from None
    return [_question(line, f"{path}:{i}") for i, line in enumerate(lines, start=1) if line.strip()]


def _question(line: str, where: str) -> Question:
    try:
        fields = json.loads(line)
        context, endings, label = fields["ctx"], tuple(fields["endings"]), int(fields["label"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{where}: not a question with ctx, endings and label ({error!r})") from None
    good = isinstance(context, str) and context and all(isinstance(e, str) and e for e in endings)
    if not good or len(endings) < 2 or not 0 <= label < len(endings):
        raise ValueError(f"{where}: needs a ctx, at least 2 endings, and a label that names one of them")
    return Question(context, endings, label)


# ---------------------------------------------------------------- shares and rows


def share(count: int, *, rank: int, world: int) -> range:
    """Return the examples of one rank: ceil(count / world) in a row, as llm.c cuts them.

    llm.c's last ranks die where that leaves nothing for them; here their range is empty.
    """
    each = -(-count // world)
    return range(min(count, rank * each), min(count, (rank + 1) * each))


def rows(examples: Iterable[Example], *, seq_len: int) -> Rows:
    """Lay examples out in rows of `seq_len` tokens; those that are longer lose the start of their context."""
    chosen = list(examples)
    count = sum(len(example.endings) for example in chosen)
    inputs, targets = (np.zeros((count, seq_len), np.int64) for _ in range(2))
    mask = np.zeros((count, seq_len), np.bool_)
    row = 0
    for example in chosen:
        context, endings = _cropped(example, seq_len)
        for ending in endings:
            start, end = len(context) - 1, len(context) + len(ending) - 1
            inputs[row, : end + 1] = context + ending
            targets[row, start:end] = ending
            mask[row, start:end] = True
            row += 1
    return Rows(inputs, targets, mask)


def _cropped(example: Example, seq_len: int) -> tuple[Ids, tuple[Ids, ...]]:
    """Cut all endings to the same context, so that they stay comparable."""
    endings = tuple(ending[: seq_len - 1] for ending in example.endings)
    room = seq_len - max(map(len, endings))
    return example.context[-room:], endings
