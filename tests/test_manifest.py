"""The manifest: what a run is made of, and what may change when it is resumed."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from runner import manifest, provenance

CONFIG: dict[str, Any] = {
    "run": {"name": "a", "seed": 42, "deterministic": True, "overwrite": False},
    "train": {"steps": 40, "tokens_per_step": 512, "micro_batch": 4, "seq_len": 64},
    "model": {"_target_": "runner.model.gpt2.GPT2", "layers": 4, "width": 128},
    "optimizer": {"_target_": "runner.optimizer.adamw.AdamW", "lr": 3e-4, "betas": [0.9, 0.95]},
    "scheduler": {"_target_": "runner.scheduler.Cosine", "peak_lr": 3e-4, "warmup_steps": 10},
    "data": {"_target_": "runner.data.Shards", "train": "a*.bin", "prefetch": 2},
    "precision": "fp32",
    "clip": {"max_norm": 1.0},
    "outlier": {"max_loss_z": 0.0},
    "checkpoint": {"every": 10},
    "evaluate": {"val": {"every": 10}},
    "logger": {"llmc": {}, "console": {}},
    "meter": {"peak_tflops": None},
}
DATA = {"train": [{"path": "a.bin", "bytes": 100, "sha256": "00"}], "tokens": 38}


def made(config: dict[str, Any] = CONFIG, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"data": DATA, "tokenizer": "byte", "parameters": 1000, "world": 1}
    return manifest.collect(config, **(arguments | changes))


def changed(key: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    *groups, name = key.split(".")
    table = config
    for group in groups:
        table = table[group]
    table[name] = value
    return config


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("train.steps", 80, "train.steps: 40 -> 80"),
        ("scheduler.warmup_steps", 20, "scheduler.warmup_steps: 10 -> 20"),
        ("scheduler._target_", "x.Y", "scheduler._target_: runner.scheduler.Cosine -> x.Y"),
        ("optimizer.lr", 1e-3, "optimizer.lr: 0.0003 -> 0.001"),
        ("clip.max_norm", None, "clip.max_norm: 1.0 -> null"),
        ("outlier.max_loss_z", 3.0, "outlier.max_loss_z: 0.0 -> 3.0"),
        ("checkpoint.every", 5, "checkpoint.every: 10 -> 5"),
        ("evaluate.val.every", 5, "evaluate.val.every: 10 -> 5"),
        ("logger", {"console": {}}, "logger.llmc: {} -> (absent)"),
        ("meter.peak_tflops", 10, "meter.peak_tflops: null -> 10"),
        ("run.name", "b", "run.name: a -> b"),
        ("data.prefetch", 0, "data.prefetch: 2 -> 0"),
        ("data.train", "b*.bin", "data.train: a*.bin -> b*.bin"),
    ],
)
def test_allowed_changes_are_noted(key: str, value: Any, line: str) -> None:
    changes = manifest.compare(made(), made(changed(key, value)))
    assert changes == ((line,), ())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.layers", 6),
        ("model", {}),
        ("model.new", 1),
        ("optimizer._target_", "plugins.optimizer.lion.Lion"),
        ("optimizer.betas", [0.9, 0.999]),
        ("data.order", "windows"),
        ("precision", "bf16"),
        ("precision", {"_target_": "x"}),
        ("run.seed", 43),
        ("train.micro_batch", 8),
        ("train.seq_len", 128),
        ("train.tokens_per_step", 1024),
    ],
)
def test_forbidden_changes_name_the_key(key: str, value: Any) -> None:
    changes = manifest.compare(made(), made(changed(key, value)))
    assert changes.errors
    assert changes.notes == ()
    for line in changes.errors:
        assert line.startswith(key)
        assert "may not change in a resumed run" in line
        assert "\n" not in line


def test_other_contents_are_errors() -> None:
    data = copy.deepcopy(DATA)
    data["tokens"] = 39
    changes = manifest.compare(made(), made(data=data, tokenizer="gpt2", parameters=1001))
    assert [line.split(":")[0] for line in changes.errors] == ["data", "tokenizer", "parameters"]
    assert "tokens 38 -> 39" in changes.errors[0]
    assert "byte -> gpt2" in changes.errors[1]


def test_unchanged_survives_the_file(tmp_path: Path) -> None:
    config = changed("model.shape", (1, 2))  # a tuple becomes a list in the file
    manifest.write(tmp_path, made(config))
    old = manifest.read(tmp_path)
    assert old is not None
    assert manifest.compare(old, made(config)) == ((), ())
    assert os.listdir(tmp_path) == ["manifest.json"]
    assert old["config_hash"] == manifest.config_hash(dict(reversed(config.items())))
    assert old["config_hash"] != made()["config_hash"]


def test_sessions_are_appended(tmp_path: Path) -> None:
    manifest.write(tmp_path, made(command=["python", "-m", "runner"]))
    old = manifest.read(tmp_path)
    assert old is not None
    both = manifest.resumed(old, made(changed("train.steps", 80), world=2, start_step=40))
    assert both["config"]["train"]["steps"] == 80
    assert [s["start_step"] for s in both["sessions"]] == [0, 40]
    assert [s["world"] for s in both["sessions"]] == [1, 2]
    assert both["sessions"][0]["command"] == ["python", "-m", "runner"]


def test_session_says_what_ran() -> None:
    (session,) = made()["sessions"]
    assert {"torch", "numpy", "omegaconf"} <= session["packages"].keys()
    assert session["hardware"]["cpu_count"] == os.cpu_count()
    assert session["started"].endswith("+00:00")
    assert session["command"]
    json.dumps(made())


def test_absent_and_damaged_manifest(tmp_path: Path) -> None:
    assert manifest.read(tmp_path) is None
    for text in ("{", "[]", "{}", "[" * 100_000):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match=r"manifest.json: .*remove it to resume"):
            manifest.read(tmp_path)


def test_git_state_of_a_dirty_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert provenance.git_state(tmp_path) is None
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]

    def git(*arguments: str) -> None:
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "code.py").write_text("x = 1\n")
    git("add", ".")
    git("commit", "-m", "start")
    clean = provenance.git_state(tmp_path)
    assert clean is not None
    assert (len(clean["commit"]), clean["dirty"], clean["diff"]) == (40, False, "")
    (tmp_path / "code.py").write_text("x = 2\n")
    (tmp_path / "new.py").touch()
    dirty = provenance.git_state(tmp_path)
    assert dirty is not None
    assert "+x = 2" in dirty["diff"]
    assert dirty["untracked"] == ["new.py"]
    monkeypatch.setattr(provenance, "_DIFF_BYTES", 10)
    cut = provenance.git_state(tmp_path)
    assert cut is not None
    assert (len(cut["diff"]), cut["diff_cut"]) == (10, True)
    monkeypatch.setenv("PATH", "")
    assert provenance.git_state(tmp_path) is None
