"""Documents from files: text, JSON lines, parquet, datasets saved to disk; and which are held out."""

from __future__ import annotations

import glob
import gzip
import hashlib
import importlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

from runner.data.build import Document

Split = Literal["hash", "every", "tail"]
Kind = Literal["dataset", "parquet", "json lines", "text"]

_PIECE_CHARS = 1 << 20  # read at a time when a text is cut at a separator


def find_sources(pattern: str, *, key: str) -> list[Path]:
    """Return the files (or dataset folders) of a pattern in byte order; ValueError if there is none."""
    found = sorted(glob.glob(os.path.expanduser(pattern), recursive=True), key=os.fsencode)
    paths = [Path(name) for name in found if not Path(name).is_dir() or _is_dataset(Path(name))]
    if not paths:
        folder = " (a folder: name its files, as in folder/*.txt)" if found else ""
        raise ValueError(f"{key}={pattern!r} matches no file{folder}")
    special = [path for path in paths if not path.is_file() and not path.is_dir()]
    if special:
        raise ValueError(
            "\n".join(
                f"{key}: {path}: is a pipe or a device; write its text to a file first" for path in special
            )
        )
    unreadable = [path for path in paths if not os.access(path, os.R_OK)]
    if unreadable:
        raise ValueError(
            "\n".join(f"{key}: {path}: cannot be read: permission denied" for path in unreadable)
        )
    return paths


def read_texts(path: Path, *, field: str = "text", separator: str | None = None) -> Iterator[str]:
    """Yield the documents of one source; ValueError names the place of a bad one.

    `.jsonl` (one object a line, its `field`), `.parquet` and folders written by `save_to_disk` (their
    column `field`); anything else is UTF-8 text, cut at `separator` or whole. `.gz` is unpacked.
    """
    try:
        yield from _texts_by_kind(path, field, separator)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None


def assign(
    texts: Iterable[str], *, split: Split, val_fraction: float, seed: int = 0, every: int = 0
) -> Iterator[Document]:
    """Yield each text with its split, a function of its number alone (and of `seed`).

    `hash`: a share of about `val_fraction`, chosen by a hash of seed and number. `every`: the last of
    each `every` texts. `tail`: the end of each text, `val_fraction` of its characters, from a line's
    start on.
    """
    threshold = int(val_fraction * 2**64)
    for number, text in enumerate(texts):
        if split == "tail":
            cut = _tail(text, val_fraction)
            parts = (Document("train", text[:cut]), Document("val", text[cut:]))
            yield from (part for part in parts if part.text)
        elif split == "every":
            yield Document("val" if number % every == every - 1 else "train", text)
        else:
            word = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
            yield Document("val" if int.from_bytes(word) < threshold else "train", text)


def _tail(text: str, fraction: float) -> int:
    cut = len(text) - round(len(text) * fraction)
    line_start = text.find("\n", cut) + 1
    return line_start if 0 < line_start < len(text) else cut


def _open(path: Path) -> IO[str]:
    encoding = "utf-8-sig"  # a byte order mark at the start says how the file is encoded; it is no text
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding=encoding, newline="")
    return path.open(encoding=encoding, newline="")


def kind_of(path: Path) -> Kind:
    """Return how `read_texts` reads a source, which its name decides."""
    name = path.name.removesuffix(".gz")
    if path.is_dir():
        return "dataset"
    if name.endswith(".parquet"):
        return "parquet"
    return "json lines" if name.endswith((".jsonl", ".ndjson")) else "text"


def _texts_by_kind(path: Path, field: str, separator: str | None) -> Iterator[str]:
    kind = kind_of(path)
    if kind == "dataset":
        yield from _dataset_texts(path, field)
    elif kind == "parquet":
        yield from _parquet_texts(path, field)
    elif kind == "json lines":
        yield from _json_texts(path, field)
    else:
        yield from _plain_texts(path, separator)


def _plain_texts(path: Path, separator: str | None) -> Iterator[str]:
    with _open(path) as file:
        if separator is None:
            yield from filter(None, [file.read()])
        else:
            yield from _pieces(file, separator)


def _pieces(file: IO[str], separator: str) -> Iterator[str]:
    held: list[str] = []  # of the text under way; joined once, however long it gets
    while piece := file.read(_PIECE_CHARS):
        edge = held[-1][1 - len(separator) :] if held and len(separator) > 1 else ""
        held.append(piece)
        if separator in edge + piece:
            *whole, rest = "".join(held).split(separator)
            yield from filter(str.strip, whole)
            held = [rest]
    yield from filter(str.strip, ["".join(held)])


def _json_texts(path: Path, field: str) -> Iterator[str]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _json_text(line, field, where=f"{path}: line {number}")


def _json_text(line: str, field: str, *, where: str) -> str:
    try:
        return _text_of(json.loads(line), field)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _parquet_texts(path: Path, field: str) -> Iterator[str]:
    parquet = _optional("pyarrow.parquet", "pyarrow", path)
    file = parquet.ParquetFile(path)
    if field not in file.schema_arrow.names:
        raise ValueError(f"{path}: no column {field!r}: it has {', '.join(file.schema_arrow.names)}")
    for batch in file.iter_batches(batch_size=1024, columns=[field]):
        for text in batch.column(0).to_pylist():
            yield _text_of({field: text}, field)


def _dataset_texts(path: Path, field: str) -> Iterator[str]:
    dataset = _optional("datasets", "datasets", path).load_from_disk(str(path))
    if isinstance(dataset, dict):
        raise ValueError(
            f"{path}: holds the splits {', '.join(dataset)}: name one, as in {path}/{next(iter(dataset))}"
        )
    if field not in dataset.column_names:
        raise ValueError(f"{path}: no column {field!r}: it has {', '.join(dataset.column_names)}")
    for row in dataset:
        yield _text_of(row, field)


def _text_of(row: Any, field: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"no text under {field!r} (found: {found})")
    text: str = row[field]
    return text


def _optional(module: str, package: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(f"{path}: reading it needs a package: pip install {package}") from None


def _is_dataset(path: Path) -> bool:
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
