"""Loading: every kind of source, the newest intact checkpoint, and runs that start from another's weights."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runner.generate import load_run
from runner.load import initialise, load_model
from runner.model.gpt2 import GPT2
from runner.model.llama import Llama

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"


def run(*overrides, root, name="x"):
    small = ["train.micro_batch=2", "train.seq_len=32", "logger=[llmc]", "run.plot=false", "evaluate=none"]
    command = [sys.executable, "-m", "runner", *small, f"run.root={root}", f"run.name={name}", *overrides]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


GPT2_TINY = ("model.layers=2", "model.width=32", "model.heads=2")
LLAMA_TINY = ("model=llama_tiny", *GPT2_TINY, "model.feed_forward=48")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for name, model in (("g", GPT2_TINY), ("l", LLAMA_TINY)):
        done = run(*model, "train.steps=3", "checkpoint.every=1", "precision=fp32", root=root, name=name)
        assert done.returncode == 0, done.stderr
    return root


def test_newest_and_named_checkpoints_of_a_run(trained):
    newest, first = load_model(trained / "g"), load_model(trained / "g", step=1)
    assert (newest.info.step, first.info.step) == (3, 1)
    assert not torch.equal(newest.model.embed.wte, first.model.embed.wte)
    assert newest.tokenizer is not None
    assert newest.tokenizer.name == "byte"
    direct = load_model(trained / "g" / "model_00000003.bin")
    assert torch.equal(direct.model.embed.wte, newest.model.embed.wte)
    with pytest.raises(ValueError, match="no checkpoint of step 7"):
        load_model(trained / "g", step=7)


def test_llama_runs_load_from_their_manifest(trained):
    loaded = load_model(trained / "l")
    assert isinstance(loaded.model, Llama)
    assert loaded.info.node["feed_forward"] == 48
    assert loaded.model(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, 257)


def test_a_damaged_checkpoint_falls_back_to_an_older_one_and_says_so(trained, tmp_path):
    folder = shutil.copytree(trained / "g", tmp_path / "g")
    path = folder / "model_00000003.bin"
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 1
    path.write_bytes(raw)
    loaded = load_model(folder)
    assert loaded.info.step == 2
    assert "model_00000003.bin: damaged" in loaded.info.notes[0]
    with pytest.raises(ValueError, match="damaged"):
        load_model(folder, step=3)


@pytest.mark.parametrize("name", ["fp32_shuffle_master", "bf16_shuffle_nomaster"])
def test_llmc_run_folders_load_without_a_manifest(name):
    loaded = load_model(GOLDEN / "state" / name)
    assert loaded.info.step == 15
    assert loaded.info.dtype == (torch.bfloat16 if name.startswith("bf16") else torch.float32)


def test_what_holds_no_model_has_a_line(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"nothing")
    (tmp_path / "x.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    for path, message in [
        (tmp_path / "none", "no such file"),
        (tmp_path, "neither a run folder"),
        (tmp_path / "x.bin", "bytes"),
        (tmp_path / "x.safetensors", "does not say which model"),
        (GOLDEN / "tiny" / "nano_val.bin", "magic"),
    ]:
        with pytest.raises(ValueError, match=message) as raised:
            load_model(path)
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="not a run folder"):
        load_model(GOLDEN / "tiny" / "tiny_init.bin", step=3)


def test_a_folder_cannot_make_us_call_what_we_do_not_trust(trained, tmp_path):
    folder = shutil.copytree(trained / "l", tmp_path / "l")
    manifest = folder / "manifest.json"
    text = (
        manifest.read_text()
        .replace("runner.model.llama.Llama", "os.system")
        .replace('"trust": []', '"trust": ["os"]')
    )
    manifest.write_text(text)
    with pytest.raises(ValueError, match="outside the trusted packages"):
        load_model(folder)


def test_generate_reads_runs(trained):
    loaded = load_run(trained / "g", device=torch.device("cpu"))
    assert loaded.step == 3
    assert not loaded.model.training
    with pytest.raises(ValueError, match="no tokenizer is known"):
        load_run(GOLDEN / "tiny" / "nano_init.bin", device=torch.device("cpu"))


def a_model(**changes):
    shape = {"layers": 2, "heads": 4, "width": 32, "max_seq_len": 64, "vocab_size": 257} | changes
    return GPT2(**shape, init_from="x")


def test_initialise_allows_a_shorter_context_and_other_padding(tmp_path):
    source = GOLDEN / "tiny" / "tiny_init.bin"
    theirs = load_model(source).model
    shape = {"layers": theirs.layers, "heads": theirs.heads, "width": theirs.width}
    model = a_model(**shape, vocab_size=theirs.vocab_size, padded_vocab=512, max_seq_len=16)
    initialise(model, str(source))
    assert torch.equal(model.embed.wpe, theirs.embed.wpe[:16])
    assert torch.equal(model.embed.wte[: theirs.vocab_size], theirs.embed.wte[: theirs.vocab_size])
    assert not model.embed.wte[theirs.vocab_size :].any()
    assert torch.equal(model.blocks[1].fcw, theirs.blocks[1].fcw)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 3}, r"has layers 2, the run's model 3; set model\.layers=2"),
        ({"heads": 4}, r"has heads 2, the run's model 4"),
        ({"vocab_size": 300}, "has vocab_size"),
        ({"max_seq_len": 128}, "has max_seq_len 64, the run's model 128"),
    ],
)
def test_initialise_refuses_other_shapes(changes, message):
    source = GOLDEN / "tiny" / "tiny_init.bin"
    theirs = load_model(source).model
    shape = {"layers": 2, "heads": theirs.heads, "width": theirs.width, "vocab_size": theirs.vocab_size}
    with pytest.raises(ValueError, match=message) as raised:
        initialise(a_model(**(shape | changes)), str(source))
    assert str(raised.value).startswith("model.init_from=")


def test_runs_start_from_other_weights_and_resume_without_them(trained, tmp_path):
    source = shutil.copytree(trained / "g", tmp_path / "source")
    arguments = (
        *GPT2_TINY,
        f"model.init_from={source}@2",
        "optimizer.lr=0",
        "checkpoint.every=1",
        "precision=fp32",
    )
    done = run(*arguments, "train.steps=1", root=tmp_path)
    assert done.returncode == 0, done.stderr
    want, got = load_model(source, step=2).model, load_model(tmp_path / "x").model
    assert all(torch.equal(a, b) for a, b in zip(want.parameters(), got.parameters(), strict=True))
    shutil.rmtree(source)
    done = run(*arguments, "train.steps=2", root=tmp_path)
    assert done.returncode == 0, done.stderr
    assert load_model(tmp_path / "x").info.step == 2


def test_a_missing_source_is_one_line_and_leaves_no_folder(tmp_path):
    done = run(*GPT2_TINY, "model.init_from=nowhere.bin", root=tmp_path)
    assert done.returncode == 2
    assert "model.init_from=nowhere.bin: nowhere.bin: no such file or folder" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "x").exists()
