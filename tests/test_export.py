"""Exports compute the same as the run: transformers' own classes, llm.c's layout, and back again."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from runner.data.tokenizer import ByteTokenizer, gpt2
from runner.export import export, main
from runner.hf_tokenizer import tokenizer_files
from runner.load import Info, Loaded, load_model
from runner.model.gpt2 import GPT2
from runner.model.llama import Llama

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "golden" / "tiny"


def randomised(model):
    """Give every parameter values that differ, so that a mixed-up pair of tensors shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + ("ln" in name))
        if isinstance(model, GPT2):
            model.embed.wte[model.vocab_size :] = 0
    return model.eval()


def a_gpt2():
    return randomised(
        GPT2(layers=3, heads=2, width=32, max_seq_len=24, vocab_size=257, init_from="x", kernels="plain")
    )


def a_llama(**options):
    shape = {"layers": 2, "heads": 4, "kv_heads": 2, "width": 32, "feed_forward": 48, "max_seq_len": 24}
    options = {"rope_theta": 5000.0, "norm_eps": 1e-6} | options
    return randomised(Llama(**shape, vocab_size=257, init_from="x", kernels="plain", **options))


def loaded_from(model, dtype=torch.float32):
    kind = {"GPT2": "gpt2.GPT2", "Llama": "llama.Llama"}[type(model).__name__]
    names = ("layers", "heads", "kv_heads", "width", "feed_forward", "rope_theta", "norm_eps", "padded_vocab")
    node = {name: getattr(model, name) for name in names if hasattr(model, name)}
    if isinstance(model, Llama):
        node |= {"tied_head": model.final.headw is None, "qk_norm": model.blocks[0].qnormw is not None}
    info = Info(Path("x"), {"_target_": f"runner.model.{kind}", **node}, dtype, tokenizer="byte")
    return Loaded(model, ByteTokenizer(), info)


MODELS = {
    "gpt2": a_gpt2,
    "llama": a_llama,
    "llama-tied": lambda: a_llama(tied_head=True),
    "llama-qk-norm": lambda: a_llama(qk_norm=True),
}
TOKENS = torch.from_numpy(np.random.RandomState(0).randint(0, 257, (2, 24)))


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_logits_both_ways(name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = MODELS[name]()
    export(loaded_from(model), to="hf", out=tmp_path / "ours")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        want, got = model(TOKENS), theirs.eval()(TOKENS).logits
    assert want.abs().max() > 1
    assert (want - got).abs().max() <= 1e-5 * max(1.0, float(want.abs().max()))
    theirs.save_pretrained(tmp_path / "theirs")
    back = load_model(tmp_path / "theirs").model
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(back.named_parameters())[key]), key
    with torch.no_grad():
        assert (back(TOKENS) - want).abs().max() <= 1e-5 * max(1.0, float(want.abs().max()))


def test_a_transformers_gpt2_of_its_own_runs_here(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=300, n_positions=24, n_embd=32, n_layer=2, n_head=4)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path).model
    assert (ours.vocab_size, ours.padded_vocab) == (300, 384)
    with torch.no_grad():
        difference = (ours(TOKENS) - theirs(TOKENS).logits).abs().max()
    assert difference <= 1e-5


@pytest.mark.parametrize("name", ["byte", "gpt2"])
def test_transformers_reads_text_as_we_do(name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    ours = gpt2() if name == "gpt2" else ByteTokenizer()
    for file, text in tokenizer_files(name, eot=ours.eot, max_seq_len=24).items():
        (tmp_path / file).write_text(text)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert theirs.eos_token_id == ours.eot
    for text in ("Call me Ishmael. Some years ago--", "naïve 漢字 🙂\n\n\t  x+=1;", " leading", "12345 it's"):
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text


def test_llmc_file_is_read_by_an_independent_reader(tmp_path):
    model = a_gpt2()
    path, tokenizer = export(loaded_from(model), to="llmc", out=tmp_path / "m.bin")
    raw = path.read_bytes()
    header = struct.unpack("<256i", raw[:1024])
    assert header[:8] == (20240326, 3, 24, 257, 3, 2, 32, 384)
    assert not any(header[8:])
    body = np.frombuffer(raw, "<f4", offset=1024)
    L, C, V, T = 3, 32, 384, 24
    sizes = [V * C, T * C, L * C, L * C, L * 3 * C * C, L * 3 * C, L * C * C, L * C]
    sizes += [L * C, L * C, L * 4 * C * C, L * 4 * C, L * 4 * C * C, L * C, C, C]
    assert len(body) == sum(sizes)
    parts = np.split(body, np.cumsum(sizes)[:-1])
    names = [
        "wte",
        "wpe",
        "ln1w",
        "ln1b",
        "qkvw",
        "qkvb",
        "attprojw",
        "attprojb",
        "ln2w",
        "ln2b",
        "fcw",
        "fcb",
        "fcprojw",
        "fcprojb",
        "lnfw",
        "lnfb",
    ]
    own = {key: p.detach().numpy() for key, p in model.named_parameters()}
    for key, part in zip(names, parts, strict=True):
        if key[:3] in ("wte", "wpe", "lnf"):
            want = next(v for k, v in own.items() if k.endswith(key))
        else:
            want = np.stack([own[f"blocks.{i}.{key}"] for i in range(L)])
        assert np.array_equal(part, want.reshape(-1)), key
    assert struct.unpack("<4I", tokenizer.read_bytes()[:16]) == (20240328, 2, 257, 256)


@pytest.mark.parametrize("name", ["nano_init", "tiny_init", "tiny_init_bf16"])
def test_llmc_files_survive_a_load_and_an_export_to_the_byte(name, tmp_path):
    source = TINY / f"{name}.bin"
    loaded = load_model(source)
    assert loaded.info.dtype == (torch.bfloat16 if name.endswith("bf16") else torch.float32)
    path = export(loaded, to="llmc", out=tmp_path / "again.bin")[0]
    assert path.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("name", MODELS)
def test_safetensors_stand_alone(name, tmp_path):
    model = MODELS[name]()
    (path,) = export(loaded_from(model), to="safetensors", out=tmp_path / "m.safetensors")
    assert set(load_file(path)) == {key for key, _ in model.named_parameters()}
    again = load_model(path)
    assert again.tokenizer is not None
    assert again.tokenizer.name == "byte"
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(again.model.named_parameters())[key])
    with torch.no_grad():
        assert torch.equal(again.model(TOKENS), load_model(path).model(TOKENS))
    (half,) = export(
        loaded_from(model), to="safetensors", out=tmp_path / "half.safetensors", dtype=torch.bfloat16
    )
    assert {tensor.dtype for tensor in load_file(half).values()} == {torch.bfloat16}


def test_what_a_target_cannot_hold_has_a_line(tmp_path):
    with pytest.raises(ValueError, match="holds a GPT-2, not a Llama"):
        export(loaded_from(a_llama()), to="llmc", out=tmp_path / "x.bin")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="out="):
        export(loaded_from(a_gpt2()), to="hf", out=tmp_path / "file" / "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": "relu"}, "activation_function=relu is not supported"),
        ({"model_type": "mamba"}, "model_type=mamba is not supported"),
        ({"n_layer": 4}, r"tensor blocks\.3\.attprojb is missing"),
        ({"n_embd": 64}, "the model needs"),
    ],
)
def test_foreign_configurations_have_a_line(change, message, tmp_path):
    export(loaded_from(a_gpt2()), to="hf", out=tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def test_an_untied_head_is_refused(tmp_path):
    export(loaded_from(a_gpt2()), to="hf", out=tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ValueError, match="lm_head is not the embedding"):
        load_model(tmp_path)


def test_the_command(tmp_path, capsys):
    assert main(["run=" + str(TINY / "tiny_init.bin"), "to=hf", f"out={tmp_path}/hf"]) == 0
    assert "config.json" in capsys.readouterr().out
    again = main([f"run={tmp_path}/hf", "to=llmc", f"out={tmp_path}/back.bin"])
    assert again == 0
    assert (tmp_path / "back.bin").read_bytes() == (TINY / "tiny_init.bin").read_bytes()
    for arguments in (
        ["run=x"],
        ["to"],
        ["run=none", "to=hf", "out=x"],
        ["run=a", "to=b", "out=c"],
        ["run=a", "to=hf", "out=c", "step=x"],
        ["run=a", "to=hf", "out=c", "dtype=fp16"],
    ):
        assert main(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_the_command_line_starts(tmp_path):
    command = [sys.executable, "-m", "runner.export", "to=safetensors"]
    command += [f"run={TINY}/nano_init.bin", f"out={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "weights.safetensors").exists()
