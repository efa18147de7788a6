"""Shard files: what is refused and how, exact reading, safe writing."""

import errno
import hashlib
import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from runner.data.shard import (
    GPT2,
    HEADER_BYTES,
    LLAMA3,
    ShardReader,
    as_tokens,
    find_shards,
    inspect_shards,
    layout_for,
    read_header,
    scan_range,
    write_shard,
)

GOLDEN = Path(__file__).parent / "golden"
SHARDS = GOLDEN / "dataloader_shards"
ERRORS = json.loads((GOLDEN / "dataloader.json").read_text())["errors"]


def header(*, magic=GPT2.magic, version=1, tokens=0):
    words = np.zeros(256, "<i4")
    words[:3] = magic, version, tokens
    return words.tobytes()


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case["pattern"])
def test_what_llmc_refuses_is_refused_in_one_line(case):
    need = case["B"] * case["T"] * case["num_processes"] + 1
    _, problems = inspect_shards(str(SHARDS / case["pattern"]), key="data.train", need=need)
    assert len(problems) == 1
    assert "\n" not in problems[0]
    assert "data.train" in problems[0]
    assert case["pattern"] in problems[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "0 bytes"),
        (b"x" * 1023, "1023 bytes, shorter"),
        (header(magic=20240522), "evaluation file"),
        (header(version=2), "version 2"),
        (header(magic=LLAMA3.magic, version=1), "version 1"),
        (header(tokens=10) + bytes(18), "10 tokens of uint16 make 1044: the file is truncated"),
        (header(tokens=10) + bytes(22), "followed by something else"),
        (header(tokens=-1), "counts -1 tokens: the file is damaged"),
        (header(magic=LLAMA3.magic, version=7, tokens=2) + bytes(4), "2 tokens of uint32 make 1032"),
    ],
)
def test_bad_file_is_named_with_its_fault(tmp_path, content, words):
    path = tmp_path / "bad.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.bin") as caught:
        read_header(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folder_and_missing_file_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none.bin"):
        with pytest.raises(ValueError, match="cannot be read"):
            read_header(path)


def test_all_problems_at_once(tmp_path):
    write_shard(tmp_path / "a.bin", np.arange(5, dtype=np.uint16))
    (tmp_path / "b.bin").write_bytes(b"nothing")
    write_shard(tmp_path / "c.bin", np.arange(50, dtype=np.uint16))
    shards, problems = inspect_shards(str(tmp_path / "*.bin"), key="data.val", need=10)
    assert [shard.tokens for shard in shards] == [5, 50]
    assert len(problems) == 2
    assert "5 tokens, but each shard needs 10" in problems[0]


def test_order_is_byte_order():
    names = [path.name for path in find_shards(str(SHARDS / "ord_*.bin"))]
    assert names == ["ord_10.bin", "ord_2.bin", "ord_B.bin", "ord__.bin", "ord_a.bin"]


@pytest.mark.parametrize(("dtype", "layout"), [(np.uint16, GPT2), (np.uint32, LLAMA3)])
def test_write_then_read(tmp_path, dtype, layout):
    tokens = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, 1000, dtype, endpoint=True)
    path = tmp_path / "x.bin"
    digest = write_shard(path, tokens)
    raw = path.read_bytes()
    assert np.frombuffer(raw, "<i4", 256)[:4].tolist() == [layout.magic, layout.version, 1000, 0]
    assert raw[HEADER_BYTES:] == tokens.tobytes()
    assert hashlib.sha256(raw).hexdigest() == digest
    assert os.listdir(tmp_path) == ["x.bin"]
    reader = ShardReader([read_header(path)])
    for start, count in [(0, 1000), (0, 0), (999, 1), (500, 17)]:
        assert np.array_equal(reader.read(0, start=start, count=count), tokens[start : start + count])
    reader.close()


@pytest.mark.parametrize("dtype", [np.int16, np.int64, np.uint8, np.float32])
def test_other_dtypes_are_not_written(tmp_path, dtype):
    with pytest.raises(ValueError, match="uint16 or uint32"):
        write_shard(tmp_path / "x.bin", np.zeros(3, dtype))
    assert not list(tmp_path.iterdir())


def test_ids_never_wrap():
    assert layout_for(65536) is GPT2
    assert layout_for(65537) is LLAMA3
    assert as_tokens(np.array([65535]), vocab_size=65536).dtype == np.uint16
    assert as_tokens(np.array([65536]), vocab_size=65537).tolist() == [65536]
    for bad in ([65536], [-1]):
        with pytest.raises(ValueError, match="must lie in"):
            as_tokens(np.array(bad), vocab_size=65536)


def test_range_is_checked_with_file_and_position(tmp_path):
    tokens = np.zeros(100, np.uint16)
    tokens[42] = 300
    write_shard(tmp_path / "x.bin", tokens)
    shard = read_header(tmp_path / "x.bin")
    reader = ShardReader([shard], limit=300)
    reader.read(0, start=43, count=57)
    with pytest.raises(ValueError, match=r"x\.bin: token 300 at position 42 .* 300"):
        reader.read(0, start=30, count=20)
    reader.close()
    assert len(scan_range([shard], limit=300, budget_bytes=1 << 20)) == 1
    assert scan_range([shard], limit=300, budget_bytes=84) == []  # 42 tokens: stops before it
    assert scan_range([shard], limit=301, budget_bytes=1 << 20) == []


@pytest.mark.parametrize("layout", [GPT2, LLAMA3])
def test_tokens_beyond_two_gib(tmp_path, layout):
    tokens = 1_200_000_000
    path = tmp_path / "big.bin"
    size = HEADER_BYTES + tokens * layout.dtype.itemsize
    with path.open("wb") as file:
        file.write(header(magic=layout.magic, version=layout.version, tokens=tokens))
        file.seek(size - 4 * layout.dtype.itemsize)
        file.write(np.array([1, 2, 3, 4], layout.dtype).tobytes())
    reader = ShardReader([read_header(path)])
    assert reader.read(0, start=tokens - 5, count=5).tolist() == [0, 1, 2, 3, 4]
    reader.close()


def test_memory_and_open_files_stay_bounded(tmp_path):
    chunk = 1_000_000
    for number in range(60):
        write_shard(tmp_path / f"{number:03d}.bin", np.zeros(chunk, np.uint16))
    shards, problems = inspect_shards(str(tmp_path / "*.bin"), key="x")
    assert not problems
    reader = ShardReader(shards)
    reader.read(0, start=0, count=chunk)
    files = len(os.listdir("/proc/self/fd"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for index in range(60):
        reader.read(index, start=0, count=chunk)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB; 120 MB were read
    assert len(os.listdir("/proc/self/fd")) - files <= 32
    reader.close()
    assert len(os.listdir("/proc/self/fd")) < files


def test_file_that_shrinks_is_named(tmp_path):
    path = tmp_path / "x.bin"
    write_shard(path, np.arange(1000, dtype=np.uint16))
    reader = ShardReader([read_header(path)])
    os.truncate(path, 1500)
    with pytest.raises(OSError, match=r"x\.bin: ended at byte 1500"):
        reader.read(0, start=0, count=1000)
    reader.close()


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.bin"
    write_shard(path, np.arange(3, dtype=np.uint16))
    before = path.read_bytes()

    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_shard(path, np.arange(9, dtype=np.uint16))
    assert path.read_bytes() == before


def test_a_failing_read_names_its_file(tmp_path, monkeypatch):
    write_shard(tmp_path / "x.bin", np.arange(100, dtype=np.uint16))
    reader = ShardReader([read_header(tmp_path / "x.bin")])

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(OSError, match="Input/output error") as caught:
        reader.read(0, start=0, count=10)
    assert caught.value.filename == str(tmp_path / "x.bin")
