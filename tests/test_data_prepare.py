"""From text to shards: same bytes for any number of threads, restart after a kill, one-line errors."""

import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.data.build import Document, build
from runner.data.documents import assign, find_sources, read_texts
from runner.data.manifest import read_manifest, verify
from runner.data.prepare import Options, main, parse, prepare
from runner.data.shard import ShardReader, read_header
from runner.data.tokenizer import ByteTokenizer, tokenizer

WORDS = ["call", "me", "ishmael", "some", "years", "ago", "never", "mind", "how", "long", "precisely"]


def texts(n, *, length=40):
    rng = np.random.default_rng(5)
    return [" ".join(rng.choice(WORDS, int(rng.integers(1, length)))) for _ in range(n)]


def tokens_of(folder, split):
    manifest = read_manifest(folder)
    shards = [read_header(folder / entry["file"]) for entry in manifest["splits"][split]["shards"]]
    reader = ShardReader(shards)
    parts = [reader.read(i, start=0, count=shard.tokens) for i, shard in enumerate(shards)]
    reader.close()
    return [int(token) for part in parts for token in part]


def hashes(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in Path(folder).iterdir()}


def write_jsonl(path, rows):
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": row, "id": i}) + "\n" for i, row in enumerate(rows))
    return path


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", ["byte", "gpt2"])
def test_shards_are_the_documents_eot_first(tmp_path, name, workers):
    rows = texts(300)
    write_jsonl(tmp_path / "a.jsonl", rows)
    options = Options(
        input=str(tmp_path / "*.jsonl"),
        output=str(tmp_path / "out"),
        tokenizer=name,
        val_fraction=0.2,
        shard_tokens=1000,
        workers=workers,
    )
    manifest = prepare(options)
    t = tokenizer(name)
    documents = list(assign(rows, split="hash", val_fraction=0.2))
    for split in ("train", "val"):
        chosen = [document.text for document in documents if document.split == split]
        expected = [token for text in chosen for token in [t.eot, *t.encode(text)]]
        assert tokens_of(tmp_path / "out", split) == expected
        entry = manifest["splits"][split]
        assert entry["documents"] == len(chosen)
        assert entry["text_bytes"] == sum(map(len, chosen))
        assert entry["tokens"] == len(expected)
        assert [shard["tokens"] for shard in entry["shards"][:-1]] == [1000] * (len(entry["shards"]) - 1)
    assert 20 < len([d for d in documents if d.split == "val"]) < 100
    assert verify(tmp_path / "out") == []
    before = hashes(tmp_path / "out")
    prepare(options)  # complete: left as it is
    prepare(replace(options, output=str(tmp_path / "other"), workers=4 - workers))
    assert hashes(tmp_path / "out") == hashes(tmp_path / "other") == before


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=20),
    shard_tokens=st.integers(1, 50),
    stop_after=st.integers(0, 25),
    workers=st.integers(1, 3),
)
def test_stopped_anywhere_it_continues_to_the_same_bytes(
    tmp_path_factory, lengths, shard_tokens, stop_after, workers
):
    tmp_path = tmp_path_factory.mktemp("stop")
    documents = [Document("val" if i % 3 == 2 else "train", "x" * n) for i, n in enumerate(lengths)]
    settings = {
        "tokenizer": ByteTokenizer(),
        "key": {"k": 1},
        "shard_tokens": shard_tokens,
        "workers": workers,
    }
    build(documents, tmp_path / "straight", **settings)

    class StoppedError(Exception):
        pass

    def stop(progress):
        if progress.documents > stop_after:
            raise StoppedError

    for _ in range(2):
        try:
            build(documents, tmp_path / "broken", **settings, progress=stop)
        except StoppedError:
            assert not read_manifest(tmp_path / "broken")["complete"]
    encoded = []

    class Watching(ByteTokenizer):
        def encode_array(self, text):
            encoded.append(text)
            return super().encode_array(text)

    build(documents, tmp_path / "broken", **(settings | {"tokenizer": Watching()}))
    assert hashes(tmp_path / "straight") == hashes(tmp_path / "broken")
    assert len(encoded) <= len(documents)


def test_killed_command_continues_after_its_last_shard(tmp_path):
    rows = texts(6000, length=200)
    write_jsonl(tmp_path / "a.jsonl.gz", rows)
    arguments = [f"input={tmp_path}/a.jsonl.gz", "tokenizer=byte", "shard_tokens=20000", "workers=1"]
    command = [sys.executable, "-m", "runner.data.prepare", *arguments]
    first = subprocess.Popen([*command, f"output={tmp_path}/broken"], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "broken" / "train_000005.bin").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    first.send_signal(signal.SIGKILL)
    first.wait()
    kept = (tmp_path / "broken" / "train_000003.bin").stat().st_mtime_ns
    for name in ("broken", "straight"):
        done = subprocess.run(
            [*command, f"output={tmp_path}/{name}"], capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        assert "complete" in done.stdout
    assert (tmp_path / "broken" / "train_000003.bin").stat().st_mtime_ns == kept
    found = {k: v for k, v in hashes(tmp_path / "broken").items() if not k.endswith(".tmp")}
    assert found == hashes(tmp_path / "straight")


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [(2000, [1000, 1000]), (2001, [1000, 1001]), (2099, [1000, 1099]), (2100, [1000, 1000, 100]), (99, [99])],
)
def test_a_rest_that_is_too_short_to_train_on_ends_the_shard_before(tmp_path, tokens, sizes):
    documents = [Document("train", "x" * (tokens - 1))]
    settings = {"tokenizer": ByteTokenizer(), "key": {}, "shard_tokens": 1000}
    manifest = build(documents, tmp_path, **settings)
    assert [shard["tokens"] for shard in manifest["splits"]["train"]["shards"]] == sizes
    assert manifest["splits"]["train"]["tokens"] == tokens
    assert len(tokens_of(tmp_path, "train")) == tokens
    assert verify(tmp_path) == []
    good = hashes(tmp_path)
    # Killed between the last shard and the manifest that knows of it.
    before = read_manifest(tmp_path) | {"complete": False}
    before["splits"]["train"]["shards"] = [
        {"file": "train_000000.bin", "tokens": 1000, "sha256": "", "document": 0, "token": 1000}
    ]
    (tmp_path / "manifest.json").write_text(json.dumps(before))
    build(documents, tmp_path, **settings)
    assert hashes(tmp_path) == good


def test_damaged_shard_is_found_and_written_again(tmp_path):
    documents = [Document("train", text) for text in texts(50)]
    settings = {"tokenizer": ByteTokenizer(), "key": {}, "shard_tokens": 500}
    build(documents, tmp_path, **settings)
    good = hashes(tmp_path)
    path = tmp_path / "train_000001.bin"
    raw = bytearray(path.read_bytes())
    raw[1100] ^= 1
    path.write_bytes(raw)
    (problem,) = verify(tmp_path)
    assert "train_000001.bin: differs" in problem
    manifest = read_manifest(tmp_path) | {"complete": False}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    build(documents, tmp_path, **settings)
    assert hashes(tmp_path) == good


def test_other_inputs_are_refused_not_reused(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", texts(20))
    options = Options(input=str(tmp_path / "a.jsonl"), output=str(tmp_path / "out"), tokenizer="byte")
    prepare(options)
    with pytest.raises(ValueError, match=r"differs in tokenizer"):
        prepare(replace(options, tokenizer="gpt2"))
    write_jsonl(tmp_path / "a.jsonl", texts(21))
    with pytest.raises(ValueError, match="differs in sources"):
        prepare(options)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "x.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="choose an empty folder"):
        prepare(replace(options, output=str(tmp_path / "foreign")))


def test_a_folder_without_shards_is_free_for_other_inputs(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"ab\xff\xfe")
    write_jsonl(tmp_path / "good.jsonl", texts(20))
    options = Options(input=str(tmp_path / "bad.txt"), output=str(tmp_path / "out"), tokenizer="byte")
    with pytest.raises(ValueError, match="not UTF-8"):
        prepare(options)
    assert prepare(replace(options, input=str(tmp_path / "good.jsonl")))["complete"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', "line 2: no text under 'text'"),
        ("a.jsonl", b'{"text": "x"}\n{"body": "y"}\n', "found: body"),
        ("a.jsonl", b'{"text": "x"}\nnonsense\n', "line 2"),
        ("a.jsonl", b"[1]\n", "found: list"),
        ("a.txt", b"ab\xff\xfe", "not UTF-8"),
        ("a.jsonl.gz", b"not gzip", "a.jsonl.gz"),
        ("a.txt.gz", gzip.compress(b"x" * 5000, mtime=0)[:-9], "a.txt.gz"),
    ],
)
def test_bad_input_is_named_with_its_place(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")) as caught:
        list(read_texts(tmp_path / name))
    assert words in str(caught.value)


@given(st.text("ab <>\n"), st.sampled_from(["<>", "\n", "<", "\n\n", "a b"]), st.sampled_from([3, 4, 1000]))
def test_separated_texts(tmp_path_factory, text, separator, piece_chars):
    path = tmp_path_factory.mktemp("sep") / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runner.data.documents._PIECE_CHARS", piece_chars)
        found = list(read_texts(path, separator=separator))
    assert found == [part for part in text.split(separator) if part.strip()]
    assert "".join(read_texts(path)) == text


def test_line_ends_and_long_pieces_survive(tmp_path):
    text = "a\r\nb\rc\n" + "x" * 3_000_000
    (tmp_path / "a.txt").write_bytes((text + "\n\n" + text).encode())
    assert list(read_texts(tmp_path / "a.txt", separator="\n\n")) == [text, text]


def test_splits_are_functions_of_the_number():
    rows = texts(100)
    every = list(assign(rows, split="every", val_fraction=0, every=10))
    assert [i for i, d in enumerate(every) if d.split == "val"] == list(range(9, 100, 10))
    one, two = ([d.split for d in assign(rows, split="hash", val_fraction=0.3, seed=seed)] for seed in (0, 1))
    assert one != two
    assert [d.split for d in assign(rows[:50], split="hash", val_fraction=0.3)] == one[:50]
    tail = list(assign(["line one\nline two\nline three\n"], split="tail", val_fraction=0.4))
    assert [d.split for d in tail] == ["train", "val"]
    assert tail[1].text == "line three\n"
    assert tail[0].text + tail[1].text == "line one\nline two\nline three\n"


def test_sources_in_byte_order_or_one_line(tmp_path):
    for name in ("b.txt", "B.txt", "a10.txt", "a2.txt"):
        (tmp_path / name).write_text("x")
    assert [p.name for p in find_sources(f"{tmp_path}/*.txt", key="k")] == [
        "B.txt",
        "a10.txt",
        "a2.txt",
        "b.txt",
    ]
    with pytest.raises(ValueError, match="matches no file"):
        find_sources(f"{tmp_path}/*.md", key="k")
    with pytest.raises(ValueError, match="a folder: name its files"):
        find_sources(str(tmp_path), key="k")


def test_all_mistakes_of_the_command_at_once(capsys):
    assert main(["inptu=x", "workers=two", "split=random", "verify=yes"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 6
    assert all(line.startswith("runner.data.prepare: error: ") for line in lines)
    assert "did you mean input=" in lines[0]
    assert "workers=two" in lines[1]
    assert "hash, every, tail" in lines[2]
    assert "true and false" in lines[3]
    assert main(["--help"]) == 0
    assert "shard_tokens" in capsys.readouterr().out


def test_values_of_the_command():
    options = parse(["input=x", "output=y", "separator=\\n\\n", "shard_tokens=1_000", "val_fraction=0.5"])
    assert (options.separator, options.shard_tokens, options.val_fraction) == ("\n\n", 1000, 0.5)
    for bad in ("val_fraction=1", "shard_tokens=0", "every=0"):
        with pytest.raises(ValueError, match=bad.split("=")[0]):
            prepare(parse(["input=x", "output=y", bad]))


def test_verify_command(tmp_path, capsys):
    assert main(["verify=true", f"output={tmp_path}"]) == 1
    assert "no manifest" in capsys.readouterr().out
    build([Document("train", "hello")], tmp_path, tokenizer=ByteTokenizer(), key={})
    assert main(["verify=true", f"output={tmp_path}"]) == 0
    os.truncate(tmp_path / "train_000000.bin", 1030)
    assert main(["verify=true", f"output={tmp_path}"]) == 1
    assert "truncated" in capsys.readouterr().out


def test_missing_packages_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match="pip install pyarrow"):
        list(read_texts(tmp_path / "a.parquet"))
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    (source,) = find_sources(str(tmp_path / "saved"), key="k")
    with pytest.raises(ValueError, match="pip install datasets"):
        list(read_texts(source))


def test_parquet_and_saved_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = texts(3000)
    table = arrow.table({"text": rows, "n": list(range(len(rows)))})
    parquet.write_table(table, tmp_path / "a.parquet")
    dataset = datasets.Dataset(table, fingerprint="test")
    dataset.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": dataset}).save_to_disk(str(tmp_path / "dict"))
    assert list(read_texts(tmp_path / "a.parquet")) == rows
    assert list(read_texts(tmp_path / "saved")) == rows
    assert list(read_texts(tmp_path / "dict" / "train")) == rows
    for path in ("a.parquet", "saved"):
        with pytest.raises(ValueError, match="no column 'body': it has text, n"):
            list(read_texts(tmp_path / path, field="body"))
    with pytest.raises(ValueError, match="holds the splits train"):
        list(read_texts(tmp_path / "dict"))
