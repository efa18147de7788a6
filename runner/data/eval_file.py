"""Multiple-choice questions: llm.c's evaluation file and HellaSwag-like JSON lines.

File (llmc/dataloader.h, dev/data/data_common.py): 256 i32 of header (20240522, version 1, examples, bytes of
the longest), then per example as u16: 65535, its bytes, its index, label, number of completions (4), then the
context and each completion, each after its length.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray

from runner.data.shard import HEADER_BYTES, HEADER_INTS, write_whole

if TYPE_CHECKING:
    from runner.api import Tokenizer

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


class Questions:
    """The questions of a file: llm.c's .bin, which holds token ids, or HellaSwag-like .jsonl of text."""

    def __init__(self, *, path: str, limit: Annotated[int, Ge(1)] | None = None) -> None:
        file = Path(path).expanduser()
        if file.suffix not in (".bin", ".jsonl"):
            raise ValueError(f"questions.path={path}: expected llm.c's .bin or HellaSwag-like .jsonl")
        self._examples = read_examples(file)[:limit] if file.suffix == ".bin" else None
        self._texts = read_questions(file)[:limit] if file.suffix == ".jsonl" else []

    def __call__(self, tokenizer: Tokenizer | None) -> list[Example]:
        """Return the examples; ValueError if they are text and there is no tokenizer."""
        return tokenize(self._texts, tokenizer) if self._examples is None else self._examples


def tokenize(questions: Sequence[Question], tokenizer: Tokenizer | None) -> list[Example]:
    """Encode as llm.c's hellaswag.py does: the context, then each ending after a space."""
    if tokenizer is None:
        raise ValueError("the questions are text: set data.tokenizer, or drop this evaluation")
    examples = []
    for question in questions:
        endings = (tuple(tokenizer.encode(f" {ending}")) for ending in question.endings)
        examples.append(Example(tuple(tokenizer.encode(question.context)), tuple(endings), question.label))
    return examples


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
        # Not `splitlines`: a text may hold the other separators that it cuts at, as U+2028.
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as JSON lines: {error}") from None
    questions = [_question(line, f"{path}:{i}") for i, line in enumerate(lines, start=1) if line.strip()]
    if not questions:
        raise ValueError(f"{path}: holds no question: a line each with ctx, endings and label")
    return questions


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
