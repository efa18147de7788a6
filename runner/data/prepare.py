"""Turn text into token shards: `python -m runner.data.prepare input='data/*.jsonl.gz' output=shards`.

Killed work continues after its last complete shard when the same command runs again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TextIO, get_args, get_type_hints

from runner.command import HELP, keyed, leave, told
from runner.data.build import DEFAULT_SHARD_TOKENS, Progress, build, thread_count
from runner.data.documents import Split, assign, find_sources, read_texts
from runner.data.manifest import Manifest, verify
from runner.data.shard import MAX_SHARD_TOKENS
from runner.data.tokenizer import tokenizer

MOST_WORKERS = 1024
_EMPTY = "nothing: give more documents, a separator=, or split=tail, which holds out the end of each"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of the command, each as `name=value`."""

    input: str = ""  # file or glob: text, .jsonl, .parquet, a dataset saved to disk; .gz is unpacked
    output: str  # folder for the shards, manifest.json and tokenizer.bin
    tokenizer: str = "gpt2"  # byte, gpt2, a tokenizer.json or a *.tiktoken file
    field: str = "text"  # of JSON lines, parquet and datasets
    separator: str | None = None  # between the documents of a text file (\n is a line end); none: one a file
    split: Split = "hash"  # hash: by document; every: each every-th document; tail: the end of each
    val_fraction: float = 0.01  # of the documents (hash) or of each text (tail)
    every: int = 100
    seed: int = 0  # of the hash
    shard_tokens: int = DEFAULT_SHARD_TOKENS  # the last one may have a tenth more, or fewer
    workers: int = 0  # threads; 0: one per CPU. The shards do not depend on it
    verify: bool = False  # only compare the shards in `output` with their manifest


def prepare(options: Options, *, progress: Callable[[Progress], None] | None = None) -> Manifest:
    """Write the shards that `options` asks for and return their manifest; ValueError if it cannot."""
    _require_valid(options)
    sources = find_sources(options.input, key="input")
    key = {
        "sources": [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in sources],
        "field": options.field,
        "separator": options.separator,
        "split": [options.split, options.val_fraction, options.every, options.seed],
    }
    texts = (
        text
        for path in sources
        for text in read_texts(path, field=options.field, separator=options.separator)
    )
    documents = assign(
        texts,
        split=options.split,
        val_fraction=options.val_fraction,
        every=options.every,
        seed=options.seed,
    )
    manifest = build(
        documents,
        Path(options.output).expanduser(),
        tokenizer=tokenizer(options.tokenizer),
        key=key,
        shard_tokens=options.shard_tokens,
        workers=options.workers or thread_count(),
        progress=progress,
    )
    if not any(split["tokens"] for split in manifest["splits"].values()):
        raise ValueError(f"input={options.input!r} holds no text; name other files")
    return manifest


def parse(arguments: Sequence[str]) -> Options:
    """Return the options of `name=value` arguments; ValueError with one line per mistake."""
    known = [field.name for field in fields(Options)]
    hints = get_type_hints(Options)
    values: dict[str, object] = {}
    given, problems = keyed(arguments, known=known, paths=("input", "output"))
    for name, texts in given.items():
        try:
            values[name] = _convert(texts[-1], hints[name])
        except ValueError as error:
            problems.append(f"{name}={texts[-1]}: {error}")
    if "output" not in values:
        problems.append("output=FOLDER is missing")
    if "input" not in values and not values.get("verify"):
        problems.append("input=FILES is missing")
    if problems:
        raise ValueError("\n".join(problems))
    return Options(**values)  # type: ignore[arg-type]


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    if not arguments or set(arguments) & {*HELP, "help"}:
        print(__doc__, "\nOptions:", *(f"  {field.name}" for field in fields(Options)), sep="\n")
        return 0
    try:
        options = parse(arguments)
        if options.verify:
            problems = verify(Path(options.output))
            print(*problems or [f"{options.output}: every shard is as its manifest says"], sep="\n")
            return 1 if problems else 0
        manifest = prepare(options, progress=Report(sys.stderr))
    except (ValueError, OSError) as error:
        return told("runner.data.prepare", error)
    except KeyboardInterrupt:
        print("stopped: the same command continues after the last complete shard", file=sys.stderr)
        return 130
    for name, split in manifest["splits"].items():
        sizes = [shard["tokens"] for shard in split["shards"]]
        least = f" of at least {min(sizes)} tokens" if sizes else f" ({_EMPTY})"
        many = "1 shard" if len(sizes) == 1 else f"{len(sizes)} shards"
        amount = f"{split['tokens']} tokens of {split['documents']} documents in {many}{least}"
        print(f"{name}: {amount}")
    print(f"{options.output}: complete")
    return 0


class Report:
    """Writes one line of progress at most every other second."""

    def __init__(self, out: TextIO, *, every_s: float = 2.0) -> None:
        self._out = out
        self._every_s = every_s
        self._start = self._last = time.monotonic()

    def __call__(self, seen: Progress) -> None:
        now = time.monotonic()
        if now - self._last < self._every_s:
            return
        self._last = now
        megabytes, elapsed = seen.text_bytes / 1e6, now - self._start
        self._out.write(
            f"{seen.documents} documents, {megabytes:.0f} MB, {seen.tokens / 1e6:.1f} M new tokens, "
            f"{megabytes / elapsed:.1f} MB/s, {seen.tokens / 1e6 / elapsed:.2f} M tokens/s\n"
        )


def _convert(text: str, kind: object) -> object:
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError("allowed are true and false")
        return text == "true"
    if kind is int or kind is float:
        try:
            return kind(text.replace("_", ""))
        except ValueError:
            raise ValueError(f"expected a {'whole ' if kind is int else ''}number") from None
    if choices := get_args(kind):
        if type(None) in choices:  # the separator
            return None if text in ("", "null") else text.replace("\\n", "\n")
        if text not in choices:
            raise ValueError(f"allowed are {', '.join(choices)}")
    return text


def _require_valid(options: Options) -> None:
    if not 0 <= options.val_fraction < 1:
        raise ValueError(f"val_fraction={options.val_fraction} must lie in [0, 1)")
    if not 1 <= options.shard_tokens <= MAX_SHARD_TOKENS:
        raise ValueError(f"shard_tokens={options.shard_tokens} must lie in [1, {MAX_SHARD_TOKENS}]")
    if options.every < 1:
        raise ValueError(f"every={options.every} must be at least 1")
    if not 0 <= options.workers <= MOST_WORKERS:
        raise ValueError(f"workers={options.workers} must lie in 0..{MOST_WORKERS}; 0 is one per CPU")


if __name__ == "__main__":
    leave("runner.data.prepare", lambda: main(sys.argv[1:]))
