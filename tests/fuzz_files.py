"""Mutate the files that we read with a fixed seed: each must load or give one clear ValueError.

    PYTHONPATH=. python tests/fuzz_files.py [mutations] [seed]

A crash, another exception, more than 2 s or much memory for one file is a failure.
"""

from __future__ import annotations

import random
import resource
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from runner.checkpoint import llmc_format, safetensors_format, side_file
from runner.checkpoint.disk import memory
from runner.data.eval_file import read_examples
from runner.data.shard import LLAMA3, ShardReader, read_header
from runner.data.tokenizer_file import read_tokenizer
from tests.checkpoint_cases import gpt2_snapshot, other_snapshot

MAX_SECONDS, MAX_BYTES, ADDRESS_BYTES = 2.0, 16 << 20, 8 << 30
EXTREMES = (0, 1, -1, 2, 255, 2**15, 2**16, 2**31 - 1, -(2**31), 2**32 - 1, 2**62, 2**63 - 1, -(2**63))


def subjects() -> dict[str, tuple[bytes, Callable[[Path], object]]]:
    """Return an intact file of every kind, with its reader."""
    golden = Path(__file__).parent / "golden"
    tiny = golden / "tiny"
    state = golden / "state" / "fp32_shuffle_master" / "state_00000015_00000.bin"
    zero1 = golden / "state_zero1" / "state_00000002_00001.bin"
    snapshot, other = gpt2_snapshot(), other_snapshot()

    def joined(chunks: list[bytes]) -> bytes:
        return b"".join(memory(chunk).tobytes() for chunk in chunks)

    side = side_file.dumps({"parts": snapshot.parts, "stream": snapshot.stream, "env": snapshot.env})
    unframed = side.encode()
    return {
        "model": (joined(llmc_format.model_chunks(snapshot)), llmc_format.read_model),
        "state": (state.read_bytes(), lambda p: llmc_format.read_state(p, params=2040)),
        "zero1": (zero1.read_bytes(), lambda p: llmc_format.read_state(p, params=8896)),
        "st_model": (
            joined(safetensors_format.model_chunks(other)),
            lambda p: safetensors_format.read_model(p, layout=other.layout),
        ),
        "st_state": (joined(safetensors_format.state_chunks(other)), safetensors_format.read_state),
        "side": (side_file.frame(side, files={"a.bin": [1, "0"]}), side_file.read),
        "side_content": (unframed, lambda p: side_file.loads(p.read_bytes().decode("latin-1"))),
        "shard": ((tiny / "tiny_val.bin").read_bytes(), read_shard),
        "shard_u32": (wide_shard((tiny / "nano_val.bin").read_bytes()), read_shard),
        "eval": ((tiny / "tiny_eval10.bin").read_bytes(), read_examples),
        "tokenizer": ((tiny / "tiny_tokenizer.bin").read_bytes(), read_tokenizer),
    }


def wide_shard(narrow: bytes) -> bytes:
    """Return a GPT-2 shard as a llama-3 shard."""
    tokens = np.frombuffer(narrow, "<u2", offset=1024).astype("<u4")
    header = np.zeros(256, "<i4")
    header[:3] = LLAMA3.magic, LLAMA3.version, len(tokens)
    return header.tobytes() + tokens.tobytes()


def read_shard(path: Path) -> object:
    """Read a whole shard of the small vocabulary."""
    shard = read_header(path)
    reader = ShardReader([shard], limit=257)
    try:
        tokens = reader.read(0, start=0, count=shard.tokens)
    finally:
        reader.close()
    assert len(tokens) == (path.stat().st_size - 1024) // shard.dtype.itemsize
    return tokens


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Apply one to three mutations: cut, grow, flip, overwrite, extreme integer, move."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = rng.choice(MUTATIONS)(data, rng)
    return data


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _grow(data: bytes, rng: random.Random) -> bytes:
    return data + rng.randbytes(rng.choice((1, 4, 2520, 4096)))


def _flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 3, 20))):
        if changed:
            changed[_at(changed, rng)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _overwrite(data: bytes, rng: random.Random) -> bytes:
    at = _at(data, rng)
    return data[:at] + rng.randbytes(rng.choice((1, 8, 64))) + data[at + 8 :]


def _extreme(data: bytes, rng: random.Random) -> bytes:
    width = rng.choice((4, 8))
    at = _at(data, rng) // 4 * 4
    value = (rng.choice(EXTREMES) % 2 ** (8 * width)).to_bytes(width, "little")
    return data[:at] + value + data[at + width :]


def _digits(data: bytes, rng: random.Random) -> bytes:
    """Make a number in text extreme."""
    at = _at(data, rng)
    return data[:at] + str(rng.choice(EXTREMES)).encode() + data[at + 1 :]


def _move(data: bytes, rng: random.Random) -> bytes:
    a, b = sorted((_at(data, rng), _at(data, rng)))
    return data[:a] + data[b:] + data[a:b]


MUTATIONS = (_cut, _grow, _flip, _overwrite, _extreme, _digits, _move)


def _at(data: bytes | bytearray, rng: random.Random) -> int:
    """Pick a position, half of them in the header."""
    end = min(len(data), 1024) if rng.random() < 0.5 else len(data)
    return rng.randrange(end) if end else 0


def fuzz(count: int, seed: int, folder: Path) -> Counter[str]:
    """Run `count` mutations; return how often each kind of file loaded or was refused."""
    rng, outcome = random.Random(seed), Counter[str]()
    kinds = list(subjects().items())
    tracemalloc.start()
    for i in range(count):
        kind, (intact, read) = kinds[i % len(kinds)]
        path = folder / f"{kind}.file"
        path.write_bytes(mutate(intact, rng))
        tracemalloc.reset_peak()
        base, start = tracemalloc.get_traced_memory()[0], time.monotonic()
        message = "loaded"
        try:
            read(path)
            outcome[f"{kind} loaded"] += 1
        except ValueError as error:
            message = str(error)
            outcome[f"{kind} refused"] += 1
        assert message.strip(), (i, kind)
        assert "\n" not in message, (i, kind, message)
        seconds, peak = time.monotonic() - start, tracemalloc.get_traced_memory()[1] - base
        assert seconds < MAX_SECONDS, (i, kind, seconds)
        assert peak < MAX_BYTES, (i, kind, peak)
    tracemalloc.stop()
    return outcome


def main() -> None:
    given = [int(argument) for argument in sys.argv[1:3]]
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))  # tensors escape tracemalloc
    count, seed = (*given, *(10_000, 0)[len(given) :])
    with tempfile.TemporaryDirectory() as folder:
        for name, times in sorted(fuzz(count, seed, Path(folder)).items()):
            print(f"{name}: {times}")


if __name__ == "__main__":
    main()
