"""Describe a file line by line: llm.c's .bin files of every kind, our side files and safetensors.

B sequences, T tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from runner.api import Tokenizer
from runner.checkpoint import inspect_state, llmc_format, safetensors_format, side_file
from runner.checkpoint.reader import Reader, regular_size
from runner.data.eval_file import read_examples
from runner.data.shard import HEADER_BYTES, ShardReader, read_header
from runner.data.tokenizer_file import read_tokenizer

SHOWN = 24  # tokens of a sample

LLAMA3_FIELDS = (
    *("block_size", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "ffn_dim_multiplier"),
    *("multiple_of", "norm_eps", "rope_theta", "use_scaled_rope", "max_gen_batch_size"),
    *("version_major", "version_minor"),
)
"""Header ints 2 to 15 of a llama-3 model (llm.c train_llama3.py); fractions are cut off in it."""


class Options(NamedTuple):
    """What helps to describe: a tokenizer, and the shards that a state goes on with and how it cuts them."""

    tokenizer: Tokenizer | None = None
    data: str | None = None
    batch: int | None = None
    seq_len: int | None = None


def describe(path: Path, options: Options = Options()) -> Iterator[str]:  # noqa: B008 (immutable)
    """Yield lines that say what `path` holds; ValueError with one line if it is damaged or unknown."""
    size = regular_size(path)
    if path.suffix == ".safetensors":
        yield from _safetensors(path)
    elif path.suffix == ".json":
        yield from _side_file(path)
    else:
        magic = _magic(path)
        kind = KINDS.get(magic)
        if kind is None:
            raise ValueError(
                f"{path}: {size} bytes, magic {magic} is none of llm.c's: {', '.join(map(str, KINDS))}"
            )
        yield from kind(path, options)


def _magic(path: Path) -> int:
    with path.open("rb") as file:
        head = file.read(4)
    if len(head) < 4:
        raise ValueError(f"{path}: {len(head)} bytes, too short for any of llm.c's files")
    return int.from_bytes(head, "little", signed=True)


# ---------------------------------------------------------------- data


def _shard(path: Path, options: Options) -> Iterator[str]:
    shard = read_header(path)
    yield f"token shard, {shard.tokens} tokens of {shard.dtype.name}"
    reader = ShardReader([shard])
    first = reader.read(0, start=0, count=min(SHOWN, shard.tokens)).tolist()
    largest = 0
    for start in range(0, shard.tokens, 1 << 22):
        part = reader.read(0, start=start, count=min(1 << 22, shard.tokens - start))
        largest = max(largest, int(part.max()))
    reader.close()
    yield f"largest token id {largest}"
    yield from _sample("first tokens", first, options.tokenizer)


def _eval(path: Path, options: Options) -> Iterator[str]:
    examples = read_examples(path)
    labels = [sum(example.label == label for example in examples) for label in range(4)]
    longest = max(len(e.context) + max(map(len, e.endings)) for e in examples)
    yield f"evaluation file, {len(examples)} questions with 4 endings, longest {longest} tokens"
    yield f"true endings by place {labels}"
    yield from _sample("first context", examples[0].context[:SHOWN], options.tokenizer)
    for place, ending in enumerate(examples[0].endings):
        mark = " (true)" if place == examples[0].label else ""
        yield from _sample(f"ending {place}{mark}", ending[:SHOWN], options.tokenizer)


def _tokenizer(path: Path, options: Options) -> Iterator[str]:
    file = read_tokenizer(path)
    yield f"tokenizer, {len(file.tokens)} tokens, end of text {file.eot}"
    yield f"longest token {max(map(len, file.tokens), default=0)} bytes"
    yield f"first tokens {[token.decode('utf-8', 'replace') for token in file.tokens[:8]]}"


def _sample(what: str, tokens: Sequence[int], tokenizer: Tokenizer | None) -> Iterator[str]:
    yield f"{what} {list(tokens)}"
    if tokenizer is not None:
        yield f"{what} as text {tokenizer.decode(tokens)!r}"


# ---------------------------------------------------------------- models and states


def _model(path: Path, options: Options) -> Iterator[str]:
    file = llmc_format.read_model(path)
    yield f"GPT-2 model, {file.header.params} parameters of {_name(file.header.dtype)}"
    yield _fields(file.header.shape)
    for slot in llmc_format.gpt2_layout(file.header.shape):
        values = file.weights[slot.offset : slot.offset + slot.numel]
        stacked = f"{slot.layers} x " if "*" in slot.name else ""
        yield f"  {slot.name.replace('blocks.*.', ''):<10} {stacked}{list(slot.shape)} {_norm(values)}"


def _state(path: Path, options: Options) -> Iterator[str]:
    file = inspect_state.read(path)
    at, stream = file.header, file.stream
    yield f"optimizer state of step {at.step}, rank {at.rank} of {at.world}, {at.numel} values each"
    yield _fields({"master": "master" in at.arrays, "shuffle": at.shuffled})
    yield _fields({"rng_state": hex(at.rng["state"]), "rng_state_last_update": hex(at.rng["last_update"])})
    yield _fields({"current_shard_idx": at.shard_slot, "current_sample_idx": at.sample_slot})
    yield from (f"  {name:<10} {_norm(values)}" for name, values in file.optimizer.items())
    if at.shuffled:
        yield f"shards in order {stream['shard_order'].tolist()}"
        upcoming = stream["sample_order"][at.sample_slot : at.sample_slot + 8].tolist()
        yield f"{stream['samples']} samples in this shard, next {upcoming or 'none: the next shard begins'}"
    if options.data is not None:
        cut = {"micro_batch": options.batch, "seq_len": options.seq_len}
        rows = inspect_state.next_batch(file, options.data, **cut)
        for row, tokens in enumerate(rows):
            yield from _sample(f"next batch, row {row}", tokens[:SHOWN], options.tokenizer)


def _debug_state(path: Path, options: Options) -> Iterator[str]:
    with Reader(path) as file:
        header = struct.unpack("<256i", file.take(HEADER_BYTES))
        yield from _debug_body(file, header[1:4] if header[0] == _DEBUG else (2, *header[1:3]), options)


def _debug_body(file: Reader, fields: Sequence[int], options: Options) -> Iterator[str]:
    version, B, T = fields
    if version != 2 or B < 1 or T < 1 or file.size < HEADER_BYTES + 8 * B * T + 4:
        raise ValueError(f"{file.path}: version {version}, {B} x {T} tokens do not fit {file.size} bytes")
    inputs, targets = (file.tensor(B * T, torch.int32).view(B, T) for _ in range(2))
    rest = (file.size - HEADER_BYTES - 8 * B * T) // 4
    yield f"debug state, {B} sequences of {T} tokens, {rest} values: logits, loss, gradients"
    yield from _sample("inputs", inputs[0, :SHOWN].tolist(), options.tokenizer)
    yield from _sample("targets", targets[0, :SHOWN].tolist(), options.tokenizer)


def _llama3(path: Path, options: Options) -> Iterator[str]:
    with Reader(path) as file:
        header = struct.unpack("<256i", file.take(HEADER_BYTES))
        if not any(header[3:]):  # a debug state of the same magic
            yield from _debug_body(file, (2, *header[1:3]), options)
            return
        width = {3: 4, 5: 2}.get(header[1])
        body = file.size - HEADER_BYTES
        if width is None or body % width or any(header[16:]):
            raise ValueError(f"{path}: version {header[1]} with {body} bytes of weights is no llama-3 model")
        yield f"llama-3 model, {body // width} parameters of {'fp32' if width == 4 else 'bf16'}"
        yield _fields(dict(zip(LLAMA3_FIELDS, header[2:16], strict=True)))
        yield _norm(file.tensor(body // width, torch.float32 if width == 4 else torch.bfloat16))


_DEBUG = 20240327
KINDS: dict[int, Callable[[Path, Options], Iterator[str]]] = {
    20240520: _shard,
    20240801: _shard,
    20240522: _eval,
    20240326: _model,
    _DEBUG: _debug_state,
    20240328: _tokenizer,
    20240527: _state,
    20240803: _llama3,
}


# ---------------------------------------------------------------- our own files


def _safetensors(path: Path) -> Iterator[str]:
    file = safetensors_format.read_file(path)
    total = sum(tensor.numel() for tensor in file.tensors.values())
    yield f"safetensors, {len(file.tensors)} tensors, {total} values"
    for key, text in file.metadata.items():
        yield f"{key} {text if len(text) <= 300 else text[:300] + '...'}"
    for name, tensor in file.tensors.items():
        yield f"  {name:<32} {list(tensor.shape)} {_name(tensor.dtype)} {_norm(tensor)}"


def _side_file(path: Path) -> Iterator[str]:
    content = side_file.read(path)
    yield f"side file of step {content.get('step')}, rank {content.get('rank')} of {content.get('world')}"
    for key in ("model", "env"):
        yield f"{key} {content.get(key)}"
    yield f"parts {', '.join(content.get('parts', {}))}"
    for name, (size, digest) in content.get("files", {}).items():
        yield f"  {name:<32} {size} bytes, xxh3_64 {digest}"


def _fields(values: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(dtype, str(dtype).removeprefix("torch."))


def _norm(values: Tensor) -> str:
    """Return the norm and, if there are any, how many values are not finite."""
    if not values.is_floating_point():
        return ""
    bad = int((~torch.isfinite(values)).sum())
    return f"norm {float(values.double().norm()):.6g}" + (f", {bad} not finite" if bad else "")
