"""The corpora that a config names: checked early, cached once, the same for every process."""

import ast
import hashlib
import json
import math
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import yaml

from runner.data.build import build
from runner.data.cache import cache_folder
from runner.data.corpus import MOBY_DICK_SHA256, Moby, Shards, Text, moby_documents
from runner.data.shard import write_shard

CONF = Path(__file__).parents[1] / "conf" / "data"
SHAPE = {"micro_batch": 2, "seq_len": 32, "world": 1}


def sha256(name):
    return hashlib.sha256(files("runner.data").joinpath("assets", name).read_bytes()).hexdigest()


def batches(stream, n):
    taken = [stream.next().inputs.flatten().tolist() for _ in range(n)]
    stream.close()
    return taken


@pytest.fixture
def shards(tmp_path):
    rng = np.random.default_rng(0)
    for name, size in (("train_0", 1000), ("train_1", 700), ("val_0", 300)):
        write_shard(tmp_path / f"{name}.bin", rng.integers(0, 256, size).astype(np.uint16))
    return {"train": f"{tmp_path}/train_*.bin", "val": f"{tmp_path}/val_*.bin"}


def test_assets_are_what_they_should_be():
    assert sha256("moby_dick.txt") == MOBY_DICK_SHA256
    assert sha256("vocab.bpe") == "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
    for name in ("LICENSE.moby_dick", "LICENSE.gpt2_bpe"):
        assert files("runner.data").joinpath("assets", name).is_file()


def test_moby_chapters_never_straddle_the_split():
    documents = list(moby_documents())
    assert len(documents) == 135
    assert all(document.text.startswith("CHAPTER ") for document in documents)
    held_out = [document.text.split(".")[0] for document in documents if document.split == "val"]
    assert held_out == [f"CHAPTER {n}" for n in range(10, 135, 10)]


@pytest.mark.parametrize(("name", "vocab_size"), [("byte", 257), ("gpt2", 50257)])
def test_moby(tmp_path, name, vocab_size):
    data = Moby(tokenizer=name, cache=str(tmp_path))
    assert data.check(**SHAPE, vocab_size=vocab_size) == []
    assert data.vocab_size == vocab_size
    documents = [document.text for document in moby_documents() if document.split == "val"]
    first = data.val(micro_batch=1, seq_len=500).next().inputs[0].tolist()
    assert first[0] == data.tokenizer.eot
    assert data.tokenizer.decode(first[1:]) == documents[0][: len(data.tokenizer.decode(first[1:]))]
    tokens = sum(1 + len(data.tokenizer.encode(text)) for text in documents)
    assert data.bytes_per_token("val") == sum(map(len, documents)) / tokens
    assert data.fingerprint()["val"]["tokens"] == tokens
    folder = next(tmp_path.iterdir())
    assert (folder / "tokenizer.bin").is_file()
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = Moby(tokenizer=name, cache=str(tmp_path))
    assert again.fingerprint() == data.fingerprint()
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


@pytest.mark.parametrize("order", ["shuffle", "sequential", "windows"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_orders(shards, order, prefetch):
    data = Shards(**shards, order=order, prefetch=prefetch)
    where = {"micro_batch": 2, "seq_len": 16, "seed": 5}
    stream = data.train(**where)
    straight = [stream.next().inputs.flatten().tolist() for _ in range(40)]
    stream.close()
    assert batches(Shards(**shards, order=order).train(**where), 40) == straight
    other = batches(data.train(**(where | {"seed": 6})), 40)
    assert (other == straight) == (order != "windows")  # llm.c's shuffle has its own seed
    own = batches(Shards(**shards, order=order, seed=9).train(**where), 40)
    assert (own == straight) == (order == "sequential")
    first, second = data.train(**where), data.train(**where)
    head = [first.next().inputs.flatten().tolist() for _ in range(17)]
    second.load_state_dict(first.state_dict())
    assert head + batches(second, 23) == straight
    first.close()


def test_validation_starts_over_each_time_and_fits_any_batch(shards):
    data = Shards(**shards)
    where = {"micro_batch": 2, "seq_len": 16}
    assert batches(data.val(**where), 20) == batches(data.val(**where), 20)
    large = {"micro_batch": 16, "seq_len": 32, "world": 4}  # more than the set holds: rows wrap
    assert data.check(**large, vocab_size=None) != []  # the training shards are too small for it
    assert not any("data.val" in line for line in data.check(**large, vocab_size=None))
    ranks = [batches(data.val(**large, rank=rank), 3) for rank in range(4)]
    rows = [
        row
        for batch in range(3)
        for rank in range(4)
        for row in np.reshape(ranks[rank][batch], (16, 32)).tolist()
    ]
    assert rows[:9] == rows[9:18]
    assert len({tuple(row) for row in rows}) == 9  # (300 - 1) // 32


@pytest.mark.parametrize("world", [2, 3, 4])
def test_validation_reads_the_same_tokens_with_any_number_of_ranks(tmp_path, world):
    # two shards, neither a multiple of any world's batches, and one shorter than a batch of three ranks
    for name, count in (("v_0.bin", 7 * 32 + 9), ("v_1.bin", 2 * 32 + 1)):
        write_shard(tmp_path / name, np.arange(count, dtype=np.uint16))
    data = Shards(train=str(tmp_path / "v_*.bin"), val=str(tmp_path / "v_*.bin"))
    where = {"micro_batch": 2, "seq_len": 16}
    rounds = 24 // world  # past the end of the set
    ranks = [batches(data.val(**where, world=world, rank=rank), rounds) for rank in range(world)]
    dealt = [ranks[rank][batch] for batch in range(rounds) for rank in range(world)]
    assert dealt == batches(data.val(**where), rounds * world)


def test_all_problems_of_shards_at_once(shards, tmp_path):
    (tmp_path / "train_2.bin").write_bytes(b"junk")
    write_shard(tmp_path / "train_3.bin", np.full(2000, 400, np.uint16))
    data = Shards(train=shards["train"], val=f"{tmp_path}/nothing_*.bin", vocab_size=300)
    problems = data.check(micro_batch=4, seq_len=200, world=1, vocab_size=257)
    text = "\n".join(problems)
    assert "model's vocabulary is 257" in text
    assert "data.val=" in text
    assert "matches no file" in text
    assert "train_1.bin: 700 tokens, but each shard needs 801" in text
    assert "train_2.bin: 4 bytes" in text
    assert "train_3.bin: token 400 at position 0" in text
    assert len(problems) == 5
    assert all(len(line.splitlines()) == 1 for line in problems)
    with pytest.raises(ValueError, match="train_2"):
        data.train(micro_batch=1, seq_len=8)


def test_bad_token_is_named_when_it_is_read(tmp_path):
    tokens = np.zeros(1000, np.uint16)
    tokens[777] = 60000
    write_shard(tmp_path / "t.bin", tokens)
    stream = Shards(train=f"{tmp_path}/t.bin", val=f"{tmp_path}/t.bin", order="sequential").train(
        micro_batch=1, seq_len=100
    )
    for _ in range(7):
        stream.next()
    with pytest.raises(ValueError, match=r"t\.bin: token 60000 at position 777"):
        stream.next()


def test_too_short_a_validation_set(shards):
    (line,) = Shards(**shards).check(micro_batch=1, seq_len=400, world=1, vocab_size=None)
    assert "data.val" in line
    assert "401 tokens" in line
    (line,) = Shards(**shards, order="windows").check(
        micro_batch=9, seq_len=299 + 1, world=8, vocab_size=None
    )
    assert "data.val" in line


def test_validation_shards_that_are_trained_on_are_told(shards, tmp_path):
    assert Shards(**shards).warnings() == []
    (line,) = Shards(**shards | {"val": shards["train"]}).warnings()
    assert f"data.val={shards['train']!r}: " in line
    assert "2 of its 2 shards are trained on as well" in line
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "v.bin"
    link.symlink_to(sorted(tmp_path.glob("t*.bin"))[0])  # the same file by another name
    (line,) = Shards(**shards | {"val": str(link)}).warnings()
    assert "it is trained on as well" in line


def test_shards_with_a_tokenizer(shards):
    data = Shards(**shards, tokenizer="byte", vocab_size=257)
    assert data.bytes_per_token() == 1.0
    assert Shards(**shards).bytes_per_token() is None
    with pytest.raises(ValueError, match=r"data\.vocab_size=50257"):
        Shards(**shards, tokenizer="gpt2", vocab_size=300)


def test_fingerprint_follows_the_tokens_not_the_folder(shards, tmp_path):
    data = Shards(**shards)
    first = data.fingerprint()
    json.dumps(first)
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in tmp_path.glob("*.bin"):
        (moved / path.name).write_bytes(path.read_bytes())
    other = {"train": f"{moved}/train_*.bin", "val": f"{moved}/val_*.bin"}
    assert Shards(**other).fingerprint() == first
    raw = bytearray((moved / "train_1.bin").read_bytes())
    raw[-1] ^= 1
    (moved / "train_1.bin").write_bytes(raw)
    assert Shards(**other).fingerprint() != first


@pytest.mark.parametrize("order", ["shuffle", "sequential"])
def test_the_short_last_shard_of_a_long_text_stops_no_run(tmp_path, monkeypatch, order):
    monkeypatch.setitem(build.__kwdefaults__, "shard_tokens", 400)  # of 100 million
    (tmp_path / "a.txt").write_text("words of a text, " * 60)  # 918 bytes of it for training: 400, 400, 119
    data = Text(path=f"{tmp_path}/a.txt", tokenizer="byte", cache=f"{tmp_path}/cache", order=order)
    where = {"micro_batch": 4, "seq_len": 32}
    assert data.check(**where, world=1, vocab_size=257) == []
    stream = data.train(**where)
    epochs = {(stream.next(), stream.position.start, stream.position.epoch)[1:] for _ in range(12)}
    assert epochs == {(start, epoch) for start in (0, 128, 256) for epoch in (0, 1)}
    (problem,) = data.check(micro_batch=4, seq_len=100, world=1, vocab_size=257)
    assert "400 tokens for training, but 401 are needed" in problem


def test_text_of_one_file_holds_out_its_end(tmp_path):
    lines = [f"line {i} of this text\n" for i in range(400)]
    (tmp_path / "a.txt").write_text("".join(lines))
    data = Text(path=f"{tmp_path}/a.txt", tokenizer="byte", cache=f"{tmp_path}/cache", order="sequential")
    assert data.check(**SHAPE, vocab_size=257) == []
    start = data.tokenizer.decode(data.val(micro_batch=1, seq_len=64).next().inputs[0].tolist())
    assert start.startswith("<|endoftext|>line 36")
    assert data.bytes_per_token("train") == pytest.approx(1, abs=1e-3)


def test_changed_text_is_never_read_from_an_old_cache(tmp_path):
    def first(**options):
        data = Text(
            **({"path": f"{tmp_path}/a.txt", "tokenizer": "byte", "cache": str(tmp_path / "c")} | options)
        )
        stream = data.train(micro_batch=1, seq_len=32)
        return batches(stream, 1), data.fingerprint()

    (tmp_path / "a.txt").write_text("first words\n\n" * 300)
    one = first()
    (tmp_path / "a.txt").write_text("other words\n\n" * 300)
    assert first() != one
    (tmp_path / "a.txt").write_text("first words\n\n" * 300)
    assert first() == one
    assert first(separator="\n\n") != one
    assert first(tokenizer="gpt2")[1] != one[1]
    assert len(list((tmp_path / "c").iterdir())) == 4


def test_a_byte_order_mark_is_no_text(tmp_path):
    lines = "".join(f"line {i}\n" for i in range(200))
    (tmp_path / "a.txt").write_bytes(lines.encode("utf-8-sig"))
    (tmp_path / "b.jsonl").write_bytes((json.dumps({"text": lines}) + "\n").encode("utf-8-sig"))
    for name in ("a.txt", "b.jsonl"):
        data = Text(
            path=f"{tmp_path}/{name}", tokenizer="byte", cache=str(tmp_path / "c"), order="sequential"
        )
        first = data.train(micro_batch=1, seq_len=32).next().inputs[0].tolist()
        assert data.tokenizer.decode(first[1:]).startswith("line 0\n")


def test_the_name_that_decides_how_a_file_is_read_decides_its_cache_too(tmp_path):
    def first(name):
        (tmp_path / name).write_text(json.dumps({"text": "words and words\n" * 99}) + "\n")
        data = Text(
            path=f"{tmp_path}/{name}", tokenizer="byte", cache=str(tmp_path / "c"), order="sequential"
        )
        return data.tokenizer.decode(data.train(micro_batch=1, seq_len=32).next().inputs[0].tolist()[1:])

    assert first("a.jsonl").startswith("words and")
    assert first("a.txt").startswith('{"text"')


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (None, {}, "matches no file"),
        (b"", {}, "leaves nothing for"),
        (b"tiny", {}, "leaves nothing for"),
        (b"tiny text\n" * 3, {}, "no shard for validation holds"),
        (b"ab\xff" * 300, {}, "not UTF-8"),
        (b"words " * 300, {"separator": "@"}, "leaves nothing for"),
    ],
)
def test_problems_of_a_text_are_single_lines(tmp_path, content, options, words):
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
    data = Text(path=f"{tmp_path}/a.txt", tokenizer="byte", cache=str(tmp_path / "c"), **options)
    problems = data.check(**SHAPE, vocab_size=None)
    assert problems
    assert any(words in line for line in problems)
    assert all("\n" not in line for line in problems)


def test_unwritable_cache_names_the_key(tmp_path):
    (tmp_path / "file").write_text("x")
    (line,) = Moby(cache=str(tmp_path / "file" / "c")).check(**SHAPE, vocab_size=None)
    assert "set data.cache or XDG_CACHE_HOME" in line


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder(None) == Path("/x/runner/data")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder(None) == Path("/home/me/.cache/runner/data")
    assert cache_folder("~/c") == Path("/home/me/c")


def test_several_processes_build_one_cache(tmp_path):
    code = f"from runner.data.corpus import Moby; print(Moby(cache={str(tmp_path)!r}).fingerprint())"
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    found = {process.communicate(timeout=100)[0] for process in running}
    assert len(found) == 1
    assert "digest" in found.pop()
    assert len(list(tmp_path.iterdir())) == 1


def test_damaged_cache_is_rebuilt(tmp_path):
    print_ = Moby(cache=str(tmp_path)).fingerprint()
    folder = next(tmp_path.iterdir())
    (folder / "val_000000.bin").unlink()
    assert Moby(cache=str(tmp_path)).fingerprint() == print_


def test_check_needs_no_torch(tmp_path):
    code = (
        "import sys; from runner.data.corpus import Moby\n"
        f"data = Moby(cache={str(tmp_path)!r})\n"
        "assert data.check(micro_batch=2, seq_len=64, world=1, vocab_size=257) == []\n"
        "assert 'torch' not in sys.modules and 'tiktoken' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_key_is_an_argument_with_its_default(path):
    node = yaml.safe_load(path.read_text())
    module, _, name = node.pop("_target_").rpartition(".")
    source = Path(*module.split(".")).with_suffix(".py")
    tree = ast.parse((Path(__file__).parents[1] / source).read_text())
    (cls,) = [item for item in tree.body if isinstance(item, ast.ClassDef) and item.name == name]
    (init,) = [item for item in cls.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
    defaults = {
        argument.arg: "???" if default is None else ast.literal_eval(default)
        for argument, default in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True)
    }
    assert node == defaults


def test_every_key_is_explained():
    for path in CONF.glob("*.yaml"):
        keys = [
            line for line in path.read_text().splitlines() if line and not line.startswith(("#", "_target_"))
        ]
        assert all("  # " in line for line in keys), path


def test_bits_per_byte_of_a_uniform_guess(tmp_path):
    """ln 257 nats per byte token are a little over 8 bits per byte, because of the end-of-text tokens."""
    ratio = Moby(cache=str(tmp_path)).bytes_per_token("val")
    assert math.log2(257) / ratio == pytest.approx(8.007, abs=1e-3)


def test_a_line_end_is_spelled_as_a_shell_can_pass_it(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line number {n}\n" for n in range(400)))
    spelled = [
        Text(path=f"{tmp_path}/a.txt", tokenizer="byte", cache=str(tmp_path / "c"), separator=text)
        for text in ("\n", "\\n")
    ]
    assert spelled[0].fingerprint() == spelled[1].fingerprint()
    assert spelled[0].check(**SHAPE, vocab_size=None) == []
